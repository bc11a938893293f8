"""The state of a ledger as records, and back: what a checkpoint holds, so that a log need not be read from its beginning.

Saved are only facts: rows, their masks and parts, open leases. The counts of a group (`count`) and what is ready (`Readiness.of`) follow.
A group's rows are saved as the ledger holds them, a list for each column, so that nothing is done row by row when they are loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from ..node import SOURCE
from .leases import Lease, Published
from .ledger import Ledger
from .log import Record
from .readiness import Readiness
from .rows import Group, LevelRows, Part
from .segments import Segment
from .wiring import Wiring


def save(ledger: Ledger) -> Iterator[Record]:
    """Records that `load` makes the same ledger of: one for itself, one for each group in flight, one for each lease."""
    live, parts = ledger.live, ledger.parts
    yield {
        "do": "ledger",
        "graph": ledger.name,
        "source": ledger.source.to_json() if ledger.source else None,
        "prompts": ledger.prompts_issued,
        "issued": live.issued,
        "done": live.done,
        "dropped": dict(live.dropped),
        "stale": dict(ledger.claims.stale),
        "largest": live.largest_group,
        "bytes": parts.published_bytes,
        "finished_bytes": parts.finished_bytes,
        "largest_bytes": parts.largest_group_bytes,
        "token": ledger.leases.next_token,
    }
    numbers: dict[Part, int] = {}
    for group in live.groups.values():
        yield _group_record(ledger, group, numbers)
    for lease in ledger.leases:
        yield {
            "do": "lease",
            "graph": ledger.name,
            "token": lease.token,
            "node": lease.node.name,
            "held": [
                [g.id, f"{mask:x}"] for g, _, mask, _ in lease.taken if g.id in live.groups
            ],  # others are finished
            "open": list(lease.open),
            "holder": lease.holder,
            "given_up": sorted(lease.given_up),
            "masked": sorted(lease.masked),
            "staged": [[ids, published.lists, s.to_json() if s else None] for ids, published, s in lease.staged],
        }


def _group_record(ledger: Ledger, group: Group, numbers: dict[Part, int]) -> Record:
    """
    Args:
        numbers: of the parts that were saved before; a group brings those that it is the first to need.
    """
    parts: list[Any] = []
    for rows in group.levels:
        for _, column in sorted(rows.parts.items()):
            for part in dict.fromkeys(column):
                if part is not None and part not in numbers:
                    numbers[part] = len(numbers)
                    parts.append([part.segment.to_json(), part.written])
    return {
        "do": "group",
        "graph": ledger.name,
        "id": group.id,
        "position": group.position,
        "issued_in": group.issued_in,
        "trained_in": group.trained_in,
        "tokens": group.tokens,
        "version": group.version,
        "offered": group.offered,
        "held": group.too_old,
        "closed": group.closed,
        "order": [[i, places] for i, places in (group.order or {}).items()],
        "parts": parts,
        "levels": [
            _level_record(rows, on_level, numbers)
            for rows, on_level in zip(group.levels, ledger.live.wiring.on_level, strict=True)
        ],
    }


def _level_record(rows: LevelRows, nodes: Iterable[int], numbers: dict[Part, int]) -> Record:
    """The rows of a level: `states` has for each node the masks of those that are done, offered, leased, skipped and cancelled."""
    masks = ((i, (rows.done, rows.offered, rows.leased, rows.skipped, rows.cancelled)) for i in nodes)
    return {
        "ids": rows.ids,
        "parents": rows.parents,
        "tokens": rows.tokens,
        "versions": rows.versions,
        "states": [[i, *(f"{mask[i]:x}" for mask in of)] for i, of in masks],
        "parts": [
            [i, *(None if part is None else numbers[part] for part in column)]
            for i, column in sorted(rows.parts.items())
        ],
        "aside": [[*place, first] for place, first in sorted((rows.aside or {}).items())],
    }


def load(ledger: Ledger, records: Iterable[Record]) -> None:
    """Restore a new ledger from the records. Leases lose their deadlines: their holders are called again, or are gone."""
    live, parts = ledger.live, list[Part]()
    for record in records:
        match record["do"]:
            case "ledger":
                _load_totals(ledger, record)
            case "group":
                parts += [Part(Segment.from_json(s), written, 0) for s, written in record["parts"]]
                _load_group(ledger, record, parts)
            case "lease":
                _load_lease(ledger, record)
    for part in parts:
        ledger.parts.put(part)
    live.readiness = Readiness.of(live.wiring, live.groups.values())


def _load_totals(ledger: Ledger, record: Record) -> None:
    live, parts = ledger.live, ledger.parts
    ledger.source = Segment.from_json(record["source"]) if record["source"] else None
    ledger.prompts_issued = record["prompts"]
    live.issued, live.done = record["issued"], record["done"]
    live.dropped, ledger.claims.stale = Counter(record["dropped"]), Counter(record["stale"])
    live.largest_group, parts.published_bytes = record["largest"], record["bytes"]
    parts.finished_bytes, parts.largest_group_bytes = record["finished_bytes"], record["largest_bytes"]
    ledger.leases.next_token = record["token"]


def _load_lease(ledger: Ledger, record: Record) -> None:
    node, groups = ledger.graph[record["node"]], ledger.live.groups
    held = [(groups[id], int(mask, 16)) for id, mask in record["held"]]
    lease = Lease.of(record["token"], node, held, holder=record["holder"])
    lease.masked, lease.given_up = frozenset(record["masked"]), set(record["given_up"])
    lease.open = dict.fromkeys(record["open"])
    lease.staged = [
        (ids, Published.of_lists(*lists), Segment.from_json(s) if s else None) for ids, lists, s in record["staged"]
    ]
    ledger.leases.begin(lease)


def _load_group(ledger: Ledger, record: Record, parts: list[Part]) -> None:
    live, number = ledger.live, len(ledger.graph.nodes)
    ids = record["id"], record["position"], record["issued_in"]
    group = Group(*ids, record["tokens"], live.wiring.above, number)
    group.version, group.trained_in = record["version"], record["trained_in"]
    group.offered, group.too_old, group.closed = record["offered"], record["held"], record["closed"]
    for rows, saved in zip(group.levels, record["levels"], strict=True):
        rows.ids, rows.parents, rows.tokens, rows.versions = (
            saved[name] for name in ("ids", "parents", "tokens", "versions")
        )
        for i, *masks in saved["states"]:
            of = (rows.done, rows.offered, rows.leased, rows.skipped, rows.cancelled)
            for mask, value in zip(of, masks, strict=True):
                mask[i] = int(value, 16)
        for i, *lie_in in saved["parts"]:
            rows.parts[i] = [None if k is None else parts[k] for k in lie_in]
            for k in lie_in:
                if k is not None:
                    parts[k].in_flight += 1
        rows.aside = {(place, level): first for place, level, first in saved["aside"]} or None
        live.group_of.update(dict.fromkeys(rows.ids, group))
    group.order = dict(record["order"]) or None
    count(live.wiring, group)
    live.restore(group)


def count(wiring: Wiring, group: Group) -> None:
    """Work the counts of a group out from the states of its rows, as they stand after every event."""
    group.open = group.behind = group.claimed = 0
    for i, node in enumerate(wiring.graph.nodes):
        rows = group.levels[node.level]
        todo = rows.awaiting(i).bit_count()
        group.open += todo
        group.behind += todo * wiring.behind[i]
        if wiring.takes_groups[i] and rows.done[i] | rows.leased[i]:
            group.claimed |= 1 << i
    for level in range(wiring.num_levels):  # a level is above those that are made of it
        above = wiring.above[level]
        group.complete[level] = level == SOURCE or (
            group.complete[above] and not group.levels[above].awaiting(wiring.maker[level])
        )
    group.rested = group.open == group.behind and all(group.complete)
