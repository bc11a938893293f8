"""Replay: a ledger does again what the records of a log say, by the verbs that noted them."""

from __future__ import annotations

from .events import Claim, Drop, Event, Finish, Issue, Lose, Offer, Publish, Release, SetSource, from_record
from .leases import Published, Spread
from .ledger import Ledger
from .log import Record
from .segments import Segment


def replay(ledger: Ledger, record: Record) -> None:
    """Do again what a record says; nothing is logged.

    Raises:
        ValueError: when this ledger is not where it was when the record was written.
    """
    log, ledger.log = ledger.log, None
    try:
        _apply(ledger, from_record(record))
    finally:
        ledger.log = log


def _apply(ledger: Ledger, event: Event) -> None:
    match event:
        case Issue():
            if (event.first, event.group) != (ledger.ids.next_id, ledger.ids.next_group):
                raise ValueError(f"rows were issued from id {event.first}, but {ledger.ids.next_id} is next")
            ledger.issue(event.positions, event.tokens, step=event.step)
        case SetSource():
            ledger.set_source(Segment.from_json(event.segment))
        case Claim():
            ledger.claim_again(event)
        case Publish():
            arrays = (event.ids, event.tokens, event.versions, event.parents, event.finished)
            written = Segment.from_json(event.segment) if event.segment else None
            if event.segments is not None:
                written = Spread.from_json(event.segments)
            ledger.publish(ledger.leases[event.lease], Published.of_lists(*arrays), written)
        case Finish():
            ledger.finish(ledger.leases[event.lease], step=event.step)
        case Release():
            ledger.release(ledger.leases[event.lease], event.why, ids=event.ids)
        case Drop():
            ledger.drop(ledger.graph[event.node], event.ids, event.why)
        case Lose():
            ledger.lose(event.group, event.why, issue_again=event.again)
        case Offer():
            ledger.offer(ledger.graph[event.node], ledger.live.groups[event.group])
