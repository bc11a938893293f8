"""The state of a ledger as records, and back: what a checkpoint holds, so that a log need not be read from its beginning.

Only what cannot be worked out is saved: rows, their masks and parts, open leases. Readiness follows.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from ..node import SOURCE
from .ledger import Ledger, int64_array
from .log import Record
from .rows import Group, Lease, Part, Published, Row
from .segments import Segment


def save(ledger: Ledger) -> Iterator[Record]:
    """Records that `load` makes the same ledger of: one for itself, one for each group in flight, one for each lease."""
    yield {
        "do": "ledger",
        "graph": ledger.name,
        "source": ledger.source.to_json() if ledger.source else None,
        "prompts": ledger.prompts_issued,
        "issued": ledger._issued,
        "done": ledger._done,
        "dropped": dict(ledger._dropped),
        "stale": dict(ledger.stale),
        "late": ledger.late,
        "cut_short": dict(ledger.cut_short),
        "largest": ledger.largest_group,
        "bytes": ledger.published_bytes,
        "finished_bytes": ledger.finished_bytes,
        "largest_bytes": ledger.largest_group_bytes,
        "finished": ledger.groups_finished,
        "token": ledger._next_token,
        "held": ledger.readiness.held,
    }
    numbers: dict[int, int] = {}
    for group in ledger._groups.values():
        parts: list[Any] = []
        rows: list[Any] = []
        for row in (row for level in group.levels for row in level):
            for part in row.parts.values():
                if id(part) not in numbers:
                    numbers[id(part)] = len(numbers)
                    parts.append([part.segment.to_json(), part.written])
            own = [[ledger._index[name], numbers[id(part)]] for name, part in row.parts.items()]
            masks = [row.done, row.offered, row.leased, row.skipped, row.cancelled]
            parent = row.parent.id if row.parent else row.id
            aside = list((row.first_children or {}).items())
            rows.append([row.id, row.level, parent, row.position, row.tokens, row.version, *masks, own, aside])
        yield {
            "do": "group",
            "graph": ledger.name,
            "id": group.id,
            "round": group.round,
            "tokens": group.tokens,
            "version": group.version,
            "step": group.step,
            "offered": group.offered,
            "closed": group.closed,
            "order": [[i, [r.id for r in order]] for i, order in (group.order or {}).items()],
            "parts": parts,
            "rows": rows,
        }
    for lease in ledger._leases.values():
        yield {
            "do": "lease",
            "graph": ledger.name,
            "token": lease.token,
            "node": lease.node.name,
            "ids": [
                r.id for r in lease.rows if r.id in ledger._rows
            ],  # some were published, and their groups are finished
            "open": list(lease.open),
            "holder": lease.holder,
            "given_up": sorted(lease.given_up),
            "masked": sorted(lease.masked),
            "staged": [[ids, _published(p), s.to_json() if s else None] for ids, p, s in lease.staged],
        }


def load(ledger: Ledger, records: Iterable[Record]) -> None:
    """Make a new ledger what the records say. Leases have no deadline any more: their holders are asked again, or gone."""
    parts: list[Part] = []
    for record in records:
        match record["do"]:
            case "ledger":
                _load_totals(ledger, record)
            case "group":
                parts += [Part(Segment.from_json(s), written, 0) for s, written in record["parts"]]
                _load_group(ledger, record, parts)
            case "lease":
                rows = [ledger._rows[id] for id in record["ids"]]
                lease = Lease(record["token"], ledger.graph[record["node"]], rows, record["holder"])
                lease.masked, lease.given_up = frozenset(record["masked"]), set(record["given_up"])
                lease.open = {id: ledger._rows[id] for id in record["open"]}
                lease.staged = [
                    (ids, Published(*(int64_array(a) for a in p)), Segment.from_json(s) if s else None)
                    for ids, p, s in record["staged"]
                ]
                ledger._begin(lease)
    ledger.num_bytes = sum(p.segment.num_bytes for p in parts)


def _load_totals(ledger: Ledger, record: Record) -> None:
    ledger.source = Segment.from_json(record["source"]) if record["source"] else None
    ledger.prompts_issued = record["prompts"]
    ledger._issued, ledger._done = record["issued"], record["done"]
    ledger._dropped, ledger.stale = Counter(record["dropped"]), Counter(record["stale"])
    ledger.cut_short = Counter(record["cut_short"])
    ledger.late, ledger._next_token = record["late"], record["token"]
    ledger.largest_group, ledger.published_bytes = record["largest"], record["bytes"]
    ledger.finished_bytes, ledger.largest_group_bytes = record["finished_bytes"], record["largest_bytes"]
    ledger.groups_finished = record["finished"]
    ledger.readiness.held = [list(held) for held in record["held"]]


def _load_group(ledger: Ledger, record: Record, parts: list[Part]) -> None:
    nodes = ledger.graph.nodes
    group = Group(record["id"], record["round"], record["tokens"], ledger._wiring.num_levels, len(nodes))
    group.version, group.step = record["version"], record["step"]
    group.offered, group.closed = record["offered"], record["closed"]
    ledger._groups[group.id] = group
    ledger.rounds[group.round] += 1
    for fields in record["rows"]:
        id, level, parent, position, tokens, version, done, offered, leased, skipped, cancelled, own, aside = fields
        above = ledger._rows[parent] if level != SOURCE else None
        row = Row(id, group, above, level, position, tokens, version)
        row.done, row.offered, row.leased, row.skipped, row.cancelled = done, offered, leased, skipped, cancelled
        row.first_children = dict(aside) or None
        for i, number in own:
            row.parts[nodes[i].name] = parts[number]
            parts[number].rows += 1
        if above is not None:
            above.children = above.children or []
            above.children.append(row)
        group.levels[level].append(row)
        ledger._rows[id] = row
    if record["order"]:
        group.order = {i: [ledger._rows[id] for id in order] for i, order in record["order"]}
    _count(ledger, group)
    if group.open == group.behind and all(group.complete):
        ledger._rest(group)
    ledger.readiness.tally(group, 1)
    _offer(ledger, group)


def _count(ledger: Ledger, group: Group) -> None:
    for i, node in enumerate(ledger.graph.nodes):
        bit = 1 << i
        rows = group.levels[node.level]
        group.skipped[i] = sum(1 for r in rows if r.skipped & bit)
        group.expanded[i] = sum(1 for r in rows if r.done & bit) if node.makes_level is not None else 0
        group.ready[i] = sum(1 for r in rows if r.offered & ~r.skipped & bit) if ledger._wiring.takes_groups[i] else 0
        todo = sum(1 for r in rows if not (r.done | r.skipped) & bit)
        group.open += todo
        group.behind += todo * ledger._wiring.behind[i]
        ledger.readiness.todo[i] += todo
        group.claimed |= bit if ledger._wiring.takes_groups[i] and any((r.done | r.leased) & bit for r in rows) else 0
        ledger.readiness.unclaimed[i] += ledger._wiring.takes_groups[i] and not group.claimed & bit
    for level in range(ledger._wiring.num_levels):
        if level == SOURCE:
            group.complete[level] = True
            continue
        i = ledger._wiring.maker[level]
        above = ledger.graph.nodes[i].level
        group.complete[level] = group.complete[above] and group.expanded[i] + group.skipped[i] >= len(
            group.levels[above]
        )
        ledger.readiness.unfinished_levels[level] += not group.complete[level]


def _offer(ledger: Ledger, group: Group) -> None:
    """Put what is ready and not claimed back on the heaps."""
    for i, node in enumerate(ledger.graph.nodes):
        bit = 1 << i
        rows = group.levels[node.level]
        if not ledger._wiring.takes_groups[i]:
            for row in rows:
                if row.offered & ~(row.done | row.leased | row.skipped) & bit:
                    ledger.readiness.offer_row(row, i)
        elif group.offered & bit and group.id not in ledger.readiness.held[i]:
            own = [r for r in rows if r.offered & ~r.skipped & bit]
            if own and not any((r.done | r.leased) & bit for r in own):
                ledger.readiness.offer_group(group, i)
        elif not group.offered & bit and ledger._wiring.quorum[i] and group.ready[i]:
            quorum = node.operation.quorum
            if quorum and quorum.deadline_s is not None:
                heapq.heappush(ledger._deadlines, (ledger._clock() + quorum.deadline_s, i, group.id))


def _published(published: Published) -> list[Any]:
    arrays = (published.ids, published.num_tokens, published.versions, published.parents, published.finished)
    return [None if a is None else a.tolist() for a in arrays]
