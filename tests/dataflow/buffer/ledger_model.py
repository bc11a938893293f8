"""A model of the ledger that works every answer out from the history of all rows, and random graphs to try both on."""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ledgers import Drawing

from weft.dataflow.buffer.rows import Staleness
from weft.dataflow.graph import Graph
from weft.dataflow.node import SOURCE, Node
from weft.dataflow.operation import Shape
from weft.dataflow.takes import GROUPS, ROWS, Quorum, Takes, TrainingBatch


@dataclass
class Model:
    """Every answer worked out from the history of all rows, with no state of its own to go wrong."""

    graph: Graph
    level: dict[int, int] = field(default_factory=dict)
    parent: dict[int, int] = field(default_factory=dict)
    group: dict[int, int] = field(default_factory=dict)
    position: dict[int, int] = field(default_factory=dict)
    version: dict[int, int | None] = field(default_factory=dict)
    members: dict[int, list[int]] = field(default_factory=dict)
    round: dict[int, int] = field(default_factory=dict)
    """Of each group."""
    done: dict[int, set[str]] = field(default_factory=dict)
    leased: dict[int, set[str]] = field(default_factory=dict)
    dropped_by: dict[int, set[str]] = field(default_factory=dict)
    """Filters that have seen the row and left it out."""
    kept_from: dict[int, set[str]] = field(default_factory=dict)
    """Nodes that never get to see the row: it was too late for their quorum, or too old."""
    arrived: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    """Group and node with a quorum -> its rows in the order in which they became ready."""
    since: dict[tuple[int, str], float] = field(default_factory=dict)
    chosen: dict[tuple[int, str], set[int]] = field(default_factory=dict)
    short: set[tuple[int, str]] = field(default_factory=set)
    held: set[tuple[int, str]] = field(default_factory=set)
    claimed: set[tuple[int, str]] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    past: set[int] = field(default_factory=set)
    """Groups that were found finished: they stay it."""
    dropped: Counter[str] = field(default_factory=Counter)
    stale: Counter[str] = field(default_factory=Counter)
    used: Counter[tuple[int, str]] = field(default_factory=Counter)
    cut_short: Counter[str] = field(default_factory=Counter)
    late: int = 0

    def __post_init__(self) -> None:
        self.nodes = list(self.graph.nodes)
        self.node = {n.name: n for n in self.nodes}
        self.quorums = [n for n in self.nodes if n.operation.quorum]
        self.lines = {lv: self.line(lv) for lv in self.graph.levels}
        self.above = {n.name: self.upstream(n.name) for n in self.nodes}
        self.filters = {
            n.name: [self.node[f] for f in self.above[n.name] if self.node[f].operation.shape is Shape.FILTER]
            for n in self.nodes
        }
        self.keepers = {  # without those that made the row: it is there
            n.name: [
                k for f in (n.name, *self.above[n.name]) if (k := self.node[f]).makes_level not in self.lines[n.level]
            ]
            for n in self.nodes
        }
        self.masters = {n.name: [q for q in self.quorums if self.serves(n, q)] for n in self.nodes}
        self.maker = {n.makes_level: n for n in self.nodes if n.makes_level is not None}
        self.makes_for = {q.name: self.maker.get(q.level) for q in self.quorums}
        for q in self.quorums:
            maker = self.makes_for[q.name]
            users = [m for m in self.nodes if maker is not None and maker.name in m.after]
            alone = all(m is q or q.name in self.above[m.name] or self.serves(m, q) for m in users)
            if maker is not None and (maker.operation.takes_groups or not alone):
                self.makes_for[q.name] = None

    # What follows from the graph

    def line(self, level: int) -> list[int]:
        """This level and those that it was expanded from."""
        return [level] if level == SOURCE else [level, *self.line(self.graph.parent_level(level))]

    def upstream(self, name: str) -> set[str]:
        found: set[str] = set()
        for before in self.node[name].after:
            found |= {before} | self.upstream(before)
        return found

    def serves(self, n: Node, q: Node) -> bool:
        """Whatever comes after n is the quorum q, or comes after that, or serves it in its turn."""
        users = [m for m in self.nodes if n.name in m.after]
        alike = n.level == q.level and n.makes_level is None and not n.operation.takes_groups
        return bool(alike and users) and all(
            m is q or q.name in self.upstream(m.name) or self.serves(m, q) for m in users
        )

    # What follows from the history

    def add(
        self, id: int, level: int, parent: int, group: int, position: int, version: int | None, round: int, now: float
    ) -> None:
        self.level[id], self.parent[id], self.group[id], self.position[id] = level, parent, group, position
        self.version[id], self.round[group] = version, round
        self.members.setdefault(group, []).append(id)
        self.done[id], self.leased[id], self.dropped_by[id], self.kept_from[id] = set(), set(), set(), set()
        for q in self.quorums:
            if q.level == level and (group, q.name) in self.chosen:
                self.kept_from[id].add(q.name)
                self.dropped[f"late at {q.name}"] += 1
        self.see_arrivals(group, now)

    def mark(self, n: Node, id: int, now: float) -> None:
        self.done[id].add(n.name)
        self.leased[id].discard(n.name)
        self.used[id, n.name] += 1
        self.see_arrivals(self.group[id], now)

    def see_arrivals(self, group: int, now: float) -> None:
        for q in self.quorums:
            if (group, q.name) in self.chosen:
                continue
            known = self.arrived.setdefault((group, q.name), [])
            new = [i for i in self.members[group] if self.level[i] == q.level and i not in known]
            new = [i for i in new if not self.skipped(i, q) and all(self.passed(i, a) for a in q.after)]
            if new and not known:
                self.since[group, q.name] = now
            known += sorted(new, key=self.path)

    def path(self, id: int) -> list[int]:
        """Where the row stands in the tree of its group."""
        order = self.members[self.group[id]].index(id)
        return [order] if self.level[id] == SOURCE else [*self.path(self.parent[id]), order]

    def ancestor(self, id: int, level: int) -> int:
        while self.level[id] != level:
            id = self.parent[id]
        return id

    def skipped(self, id: int, n: Node) -> bool:
        line = self.lines[self.level[id]]
        for f in self.filters[n.name]:
            if f.level in line and f.name in self.dropped_by[self.ancestor(id, f.level)]:
                return True
        for k in self.keepers[n.name]:
            if k.level in line and k.name in self.kept_from[self.ancestor(id, k.level)]:
                return True
        for q in self.masters[n.name]:
            cancelled = q.name in self.kept_from[id]
            if cancelled and n.name not in self.done[id] and n.name not in self.leased[id]:
                return True
        return False

    def passed(self, id: int, name: str) -> bool:
        before = self.node[name]
        if before.makes_level in self.lines[self.level[id]]:
            return True
        return name in self.done[self.ancestor(id, before.level)]

    def rows(self, group: int, level: int) -> list[int]:
        return sorted(i for i in self.members[group] if self.level[i] == level)

    def todo(self, group: int, n: Node) -> list[int]:
        if group in self.lost:
            return []
        return [i for i in self.rows(group, n.level) if n.name not in self.done[i] and not self.skipped(i, n)]

    def ready(self, group: int, n: Node) -> list[int]:
        """Rows of a group that a claim can get."""
        if (group, n.name) in self.held:
            return []
        todo = self.todo(group, n)
        if n.operation.quorum and (group, n.name) in self.chosen:
            return [] if any(n.name in self.leased[i] for i in todo) else todo
        ready = [i for i in todo if n.name not in self.leased[i] and all(self.passed(i, a) for a in n.after)]
        whole = len(ready) == len(todo) and self.whole(group, n.level)
        if n.operation.quorum:
            arrived, number = self.arrived.get((group, n.name), []), n.operation.quorum.n
            assert sorted(arrived) == ready or group in self.lost
            enough = len(arrived) >= number or whole or (group, n.name) in self.short
            return sorted(arrived[:number]) if ready and enough else []
        return ready if whole or not n.operation.takes_groups else []

    def whole(self, group: int, level: int) -> bool:
        if level == SOURCE or group in self.lost:
            return True
        return self.whole(group, self.maker[level].level) and not self.todo(group, self.maker[level])

    def finished(self, group: int) -> bool:
        if group in self.past:
            return True
        whole = all(self.whole(group, lv) for lv in self.graph.levels)
        if whole and not any(self.todo(group, n) for n in self.nodes):
            self.past.add(group)
        return group in self.past

    def flying(self) -> list[int]:
        return [g for g in self.members if g not in self.past and not self.finished(g)]

    def too_old(self, ids: list[int], bound: Staleness) -> list[int]:
        made = [(i, v) for i in ids if (v := self.version[i]) is not None]
        return [i for i, version in made if bound.version - version > bound.bound]


def random_graph(chance: random.Random) -> Graph:
    """Maps, groups, filters, quorums, expansions and updates on branches that part and join."""
    draw = Drawing()
    branches = [draw.prompts]
    if chance.random() < 0.2:  # rows come late for a quorum, and some of them are under way to it
        turns = draw.add(draw.add(draw.prompts, "dialogues", Shape.EXPAND), "turns", Shape.EXPAND)
        scored = draw.add(turns, "score", reads=("turns_c",))
        draw.add(scored, "first", Shape.FILTER, reads=("score_c",), takes=Quorum(chance.randint(1, 3), 1.0))
        branches = [turns, scored]
    for number in range(chance.randint(1, 7)):
        rows = chance.choice(branches)
        others = [b for b in branches if b.level == rows.level]
        if chance.random() < 0.3:
            rows = rows | chance.choice(others)
        kinds: list[tuple[Shape, Takes]] = [
            (Shape.MAP, ROWS),
            (Shape.FILTER, ROWS),
            (Shape.FILTER, GROUPS),
            (Shape.FILTER, Quorum(chance.randint(1, 4), chance.choice([None, 1.0, 5.0]))),
            (Shape.EXPAND, ROWS),
            (Shape.EXPAND, GROUPS),
            (Shape.GROUP, GROUPS),
            (Shape.MAP, TrainingBatch()),
        ]
        shape, takes = chance.choice(kinds)
        reads = tuple(chance.sample(rows.columns, chance.randint(0, len(rows.columns))))
        rule: dict[str, Any] = {"reads": reads, "takes": takes}
        if shape is Shape.FILTER and chance.random() < 0.3:
            rule["writes"] = (f"{'abcdefgh'[number]}_c",)
        made = draw.add(rows, "abcdefgh"[number], shape, **rule)
        if not isinstance(takes, TrainingBatch):
            branches.append(made)
    return draw.graph()
