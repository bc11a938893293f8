"""The state of a ledger as records, and back: what a checkpoint holds, so that a log need not be read from its beginning.

Saved are only facts: rows, their masks and parts, open leases. The counts of a group (`count`) and what is ready (`Readiness.of`) follow.
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
from .rows import Group, Part, Row
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
            "ids": [row.id for row in lease.rows if row.id in live.rows],  # the groups of the others are finished
            "open": list(lease.open),
            "holder": lease.holder,
            "given_up": sorted(lease.given_up),
            "masked": sorted(lease.masked),
            "staged": [[ids, published.to_lists(), s.to_json() if s else None] for ids, published, s in lease.staged],
        }


def _group_record(ledger: Ledger, group: Group, numbers: dict[Part, int]) -> Record:
    """
    Args:
        numbers: of the parts that were saved before; a group brings those that it is the first to need.
    """
    parts: list[Any] = []
    rows: list[Any] = []
    for row in (row for level in group.levels for row in level):
        for part in row.parts:
            if part is not None and part not in numbers:
                numbers[part] = len(numbers)
                parts.append([part.segment.to_json(), part.written])
        own = [[i, numbers[part]] for i, part in enumerate(row.parts) if part is not None]
        masks = [row.done, row.offered, row.leased, row.skipped, row.cancelled]
        parent = row.parent.id if row.parent else row.id
        aside = list((row.first_children or {}).items())
        rows.append([row.id, row.level, parent, row.position, row.tokens, row.version, *masks, own, aside])
    return {
        "do": "group",
        "graph": ledger.name,
        "id": group.id,
        "issued_in": group.issued_in,
        "trained_in": group.trained_in,
        "tokens": group.tokens,
        "version": group.version,
        "offered": group.offered,
        "held": group.held,
        "closed": group.closed,
        "order": [[i, [r.id for r in order]] for i, order in (group.order or {}).items()],
        "parts": parts,
        "rows": rows,
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
                rows = [live.rows[id] for id in record["ids"]]
                lease = Lease(record["token"], ledger.graph[record["node"]], rows, record["holder"])
                lease.masked, lease.given_up = frozenset(record["masked"]), set(record["given_up"])
                lease.open = {id: live.rows[id] for id in record["open"]}
                lease.staged = [
                    (ids, Published.of_lists(*lists), Segment.from_json(s) if s else None)
                    for ids, lists, s in record["staged"]
                ]
                ledger.leases.begin(lease)
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


def _load_group(ledger: Ledger, record: Record, parts: list[Part]) -> None:
    live, nodes = ledger.live, ledger.graph.nodes
    position, tokens = record["rows"][0][3], record["tokens"]
    group = Group(record["id"], position, record["issued_in"], tokens, live.wiring.num_levels, len(nodes))
    group.version, group.trained_in = record["version"], record["trained_in"]
    group.offered, group.held, group.closed = record["offered"], record["held"], record["closed"]
    for fields in record["rows"]:
        id, level, parent, _, tokens, version, done, offered, leased, skipped, cancelled, own, aside = fields
        above = live.rows[parent] if level != SOURCE else None
        row = Row(id, group, above, level, tokens, version)
        row.done, row.offered, row.leased, row.skipped, row.cancelled = done, offered, leased, skipped, cancelled
        row.first_children = dict(aside) or None
        for i, number in own:
            row.put(parts[number], i, len(nodes))
            parts[number].rows += 1
        if above is not None:
            above.children = above.children or []
            above.children.append(row)
        group.levels[level].append(row)
        live.rows[id] = row
    if record["order"]:
        group.order = {i: [live.rows[id] for id in order] for i, order in record["order"]}
    count(live.wiring, group)
    live.restore(group)


def count(wiring: Wiring, group: Group) -> None:
    """Work the counts of a group out from the states of its rows, as they stand after every event."""
    group.open = group.behind = group.claimed = 0
    for i, node in enumerate(wiring.graph.nodes):
        bit = 1 << i
        rows = group.levels[node.level]
        group.skipped[i] = len([1 for r in rows if r.skipped & bit])
        group.expanded[i] = len([1 for r in rows if r.done & bit]) if node.makes_level is not None else 0
        todo = len([1 for r in rows if not (r.done | r.skipped) & bit])
        group.open += todo
        group.behind += todo * wiring.behind[i]
        if wiring.takes_groups[i]:
            group.ready[i] = len([1 for r in rows if r.offered & ~r.skipped & bit])
            group.claimed |= bit if [1 for r in rows if (r.done | r.leased) & bit] else 0
    for level in range(wiring.num_levels):  # a level is above those that are made of it
        if level == SOURCE:
            group.complete[level] = True
            continue
        i = wiring.maker[level]
        above = wiring.level[i]
        through = group.expanded[i] + group.skipped[i]
        group.complete[level] = group.complete[above] and through >= len(group.levels[above])
    group.rested = group.open == group.behind and all(group.complete)
