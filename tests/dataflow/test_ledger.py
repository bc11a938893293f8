"""The ledger: each rule by itself, and all of them together against a model that works everything out from scratch."""

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.dataflow.config import Config
from weft.dataflow.graph import SOURCE, Graph, Node, Recording, Rows, TableSource
from weft.dataflow.handle import Handle
from weft.dataflow.ledger import Ledger
from weft.dataflow.operation import Operation, Shape
from weft.dataflow.rows import Ids, Lease, LeaseError, Published
from weft.dataflow.segments import Segment
from weft.workers.worker import Worker

PROMPTS = TableSource("prompts", pa.table({"prompt": ["a"]}))


def segment(file: str = "data", num_bytes: int = 10) -> Segment:
    return Segment("node", file, 0, num_bytes, 0)


class Trainer(Worker):
    Config = Config


class Drawing:
    """A graph made node by node."""

    def __init__(self) -> None:
        self.recording = Recording("drawn", PROMPTS)
        self.prompts = Rows(self.recording, SOURCE, {"prompt": ""})

    def add(self, rows: Rows, name: str, shape: Shape = Shape.MAP, **rule: Any) -> Rows:
        rule.setdefault("writes", () if shape is Shape.FILTER or rule.get("updates") else (f"{name}_c",))
        rule.setdefault("whole_groups", shape is Shape.GROUP)
        operation = Operation(name, shape, **rule)
        if operation.updates:  # on a worker group of its own
            return self.recording.add(rows, Handle(Trainer, Config(), f"{name}r"), method, operation, (), {})
        return self.recording.add(rows, None, function, operation, (), {})

    def graph(self) -> Graph:
        return self.recording.finish()


def function(rows: object) -> None: ...
def method(self: object, rows: object) -> None: ...


def grpo() -> Graph:
    draw = Drawing()
    samples = draw.add(draw.prompts, "generate", Shape.EXPAND, reads=("prompt",))
    samples = draw.add(samples, "score", reads=("generate_c",))
    samples = draw.add(samples, "advantages", Shape.GROUP, reads=("score_c",))
    draw.add(samples, "update", reads=("generate_c", "advantages_c"), updates=True)
    return draw.graph()


def dapo() -> Graph:
    draw = Drawing()
    samples = draw.add(draw.prompts, "generate", Shape.EXPAND, reads=("prompt",))
    kept = draw.add(samples, "keep", Shape.FILTER, reads=("generate_c",))
    samples = draw.add(kept, "advantages", Shape.GROUP, reads=("generate_c",))
    draw.add(samples, "update", reads=("advantages_c",), updates=True)
    return draw.graph()


def claim(ledger: Ledger, name: str, **limits: int) -> Lease:
    lease = ledger.claim(node(ledger, name), **limits)
    assert lease is not None
    return lease


def node(ledger: Ledger, name: str) -> Node:
    return next(n for n in ledger.graph.nodes if n.name in (name, f"{name}r.{name}"))


def publish(ledger: Ledger, lease: Lease, ids: Any = None, into: Segment = segment()) -> None:
    ids = lease.ids if ids is None else np.asarray(ids, np.int64)
    ledger.publish(lease, Published(ids, np.ones(len(ids), np.int64)), into)


def expand(
    ledger: Ledger, lease: Lease, number: int, *, first: int = 1000, only: Any = None, versions: Any = None
) -> None:
    parents = np.repeat(lease.ids if only is None else np.asarray(only, np.int64), number)
    ids = first + np.arange(len(parents))
    ledger.publish(lease, Published(ids, np.full(len(ids), 5), versions, parents), segment("children"))


def do(ledger: Ledger, name: str) -> None:
    lease = claim(ledger, name)
    publish(ledger, lease)
    ledger.finish(lease)


def generated(graph: Graph, prompts: int = 2, samples: int = 3) -> Ledger:
    """A ledger after generation: samples 1000, 1001, ... in groups 0, 1, ..."""
    ledger = Ledger(graph)
    ledger.issue(range(prompts), [2] * prompts, round=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, samples)
    ledger.finish(lease)
    return ledger


# Claims and readiness


def test_rows_are_offered_when_what_they_wait_for_is_done():
    ledger = generated(grpo())
    assert ledger.ready(node(ledger, "score")) == 6 and ledger.ready(node(ledger, "advantages")) == 0
    assert ledger.claim(node(ledger, "advantages")) is None
    do(ledger, "score")
    assert ledger.ready_groups(node(ledger, "advantages")) == 2


def test_a_claim_takes_the_oldest_rows_and_no_row_twice():
    ledger = generated(grpo())
    assert claim(ledger, "score", max_rows=2).ids.tolist() == [1000, 1001]
    assert claim(ledger, "score").ids.tolist() == [1002, 1003, 1004, 1005]
    assert ledger.claim(node(ledger, "score")) is None


def test_a_claim_can_be_limited_to_a_number_of_groups():
    ledger = generated(grpo())
    do(ledger, "score")
    lease = claim(ledger, "advantages", max_groups=1)
    assert lease.ids.tolist() == [1000, 1001, 1002] and set(lease.group_ids.tolist()) == {0}
    assert ledger.ready_groups(node(ledger, "advantages")) == 1


def test_a_group_is_not_offered_while_one_of_its_rows_is_missing():
    ledger = generated(grpo())
    lease = claim(ledger, "score")
    publish(ledger, lease, [1000, 1002, 1003, 1004, 1005])
    assert claim(ledger, "advantages").ids.tolist() == [1003, 1004, 1005]
    publish(ledger, lease, [1001])
    assert claim(ledger, "advantages").ids.tolist() == [1000, 1001, 1002]


def test_groups_are_streamed_as_their_parents_finish():
    ledger = Ledger(grpo())
    ledger.issue([0, 1], [2, 2], round=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2, only=[1])
    assert claim(ledger, "score").ids.tolist() == [1000, 1001]
    assert ledger.counts() == {"issued": 4, "waiting": 1, "leased": 3, "done": 0, "dropped": 0}


def test_a_lease_knows_its_rows():
    ledger = Ledger(grpo())
    ledger.issue([7, 3], [2, 4], round=0)
    lease = claim(ledger, "generate")
    assert lease.versions.tolist() == [-1, -1] and lease.parent_ids.tolist() == lease.ids.tolist() == [0, 1]
    expand(ledger, lease, 2, versions=np.array([4, 4, 5, 6]))
    ledger.finish(lease)
    lease = claim(ledger, "score")
    assert lease.num_tokens.tolist() == [7, 7, 9, 9] and lease.versions.tolist() == [4, 4, 5, 6]
    assert lease.parent_ids.tolist() == [0, 0, 1, 1] and lease.group_ids.tolist() == [0, 0, 1, 1]


# Leases


def test_a_released_lease_gives_its_unpublished_rows_back_and_is_void():
    ledger = generated(grpo())
    lease = claim(ledger, "score")
    publish(ledger, lease, [1001])
    ledger.release(lease)
    again = claim(ledger, "score")
    assert again.ids.tolist() == [1000, 1002, 1003, 1004, 1005]
    for late in (ledger.release, ledger.finish, lambda stale: publish(ledger, stale, [1000])):
        with pytest.raises(LeaseError, match="lease 2 of node 'score' was released or finished before"):
            late(lease)


def test_a_released_group_comes_back_whole():
    ledger = generated(grpo())
    do(ledger, "score")
    lease = claim(ledger, "advantages")
    publish(ledger, lease, [1000, 1001])
    ledger.release(lease)
    assert claim(ledger, "advantages").ids.tolist() == list(range(1000, 1006))


def test_only_rows_of_the_lease_can_be_published_and_only_once():
    ledger = generated(grpo())
    lease = claim(ledger, "score", max_rows=2)
    with pytest.raises(LeaseError, match="node 'score' published row 1005, which is not"):
        publish(ledger, lease, [1000, 1005])
    publish(ledger, lease, [1000])  # the refused publication changed nothing
    with pytest.raises(LeaseError, match="published row 1000, which is not"):
        publish(ledger, lease, [1000])
    with pytest.raises(LeaseError, match="published a row twice"):
        publish(ledger, lease, [1001, 1001])


def test_children_need_parents_of_the_lease_and_ids_of_their_own():
    ledger = Ledger(grpo())
    ledger.issue([0, 1], [2, 2], round=0)
    lease = claim(ledger, "generate", max_rows=1)
    with pytest.raises(LeaseError, match="node 'generate' made a row of 1, which is not"):
        expand(ledger, lease, 2, only=[1])
    with pytest.raises(LeaseError, match="published a row twice"):
        expand(ledger, lease, 2, first=1)
    expand(ledger, lease, 2)
    with pytest.raises(LeaseError, match="made a row of 0, which is not"):
        expand(ledger, lease, 2, first=2000)


def test_a_map_must_return_every_row():
    ledger = generated(grpo())
    lease = claim(ledger, "score")
    publish(ledger, lease, [1000])
    with pytest.raises(
        LeaseError, match=r"node 'score' returned no row for 5 of its rows \(sample ids \[1001, 1002, 1003\]\)"
    ):
        ledger.finish(lease)


# Filters and expansions


def test_rows_that_a_filter_leaves_out_are_dropped_and_counted():
    ledger = generated(dapo())
    lease = claim(ledger, "keep")
    publish(ledger, lease, [1000, 1002])
    ledger.finish(lease)
    assert ledger.dropped == {"keep": 4}
    lease = claim(ledger, "advantages")
    assert lease.ids.tolist() == [1000, 1002], "the group is what is left of it"
    publish(ledger, lease)
    ledger.finish(lease)
    do(ledger, "update")
    assert ledger.counts() == {"issued": 8, "waiting": 0, "leased": 0, "done": 4, "dropped": 4}


def test_a_parent_of_which_nothing_was_made_is_done():
    ledger = Ledger(grpo())
    ledger.issue([0, 1], [2, 2], round=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2, only=[1])
    ledger.finish(lease)
    assert ledger.group_ids == [1] and ledger.why(0).startswith("group 0 is not in flight")


def test_settled_and_exhausted_say_whether_more_can_come():
    ledger = Ledger(dapo())
    update, keep = node(ledger, "update"), node(ledger, "keep")
    assert not ledger.settled(update) and ledger.exhausted(update), "nothing was issued"
    ledger.issue([0], [2], round=0)
    assert not ledger.settled(update) and not ledger.exhausted(update)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2)
    ledger.finish(lease)
    assert ledger.settled(keep) and not ledger.settled(update) and not ledger.exhausted(update)
    lease = claim(ledger, "keep", max_rows=1)
    assert not ledger.settled(keep), "a row is under way"
    ledger.finish(lease)
    assert ledger.settled(keep) and not ledger.exhausted(update)
    ledger.finish(claim(ledger, "keep"))
    assert ledger.exhausted(keep) and ledger.exhausted(update) and not ledger.settled(update)


def test_claimed_groups_are_counted_for_the_latest_round():
    ledger = generated(grpo(), prompts=3)
    do(ledger, "score")
    advantages = node(ledger, "advantages")
    lease = claim(ledger, "advantages", max_groups=2)
    assert ledger.claimed_groups(advantages) == 2
    ledger.release(lease)
    assert ledger.claimed_groups(advantages) == 0
    do(ledger, "advantages")
    assert ledger.claimed_groups(advantages) == 3
    ledger.issue([0], [1], round=1)
    assert ledger.claimed_groups(advantages) == 0


# Where columns are


def test_pieces_lead_to_the_ancestor_that_has_the_column():
    draw = Drawing()
    prompts = draw.add(draw.prompts, "difficulty", reads=("prompt",))
    samples = draw.add(prompts, "generate", Shape.EXPAND, reads=("prompt",))
    draw.add(samples, "join", reads=("prompt", "difficulty_c", "generate_c"))
    ledger = Ledger(draw.graph(), source=segment("source"))
    ledger.issue([5, 9], [1, 1], round=0)
    lease = claim(ledger, "generate")
    for parent, first in ((1, 200), (0, 100)):
        parents = np.full(2, parent)
        ledger.publish(lease, Published(first + np.arange(2), np.zeros(2, int), None, parents), segment(f"of {parent}"))
    ledger.finish(lease)
    assert ledger.claim(node(ledger, "join")) is None, "the prompts' difficulty is not known yet"
    do(ledger, "difficulty")
    lease = claim(ledger, "join")
    found = {p.columns: p for p in ledger.pieces(lease.node, lease.rows[1:])}
    assert lease.ids.tolist() == [100, 101, 200, 201]
    assert found[("prompt",)].by_position and found[("prompt",)].keys.tolist() == [5, 9, 9]
    assert found[("difficulty_c",)].keys.tolist() == [0, 1, 1]
    assert found[("generate_c",)].keys.tolist() == [101, 200, 201]
    assert [s.file for s in found[("generate_c",)].segments] == ["of 0", "of 1"]


# Inspection


def test_why_names_what_a_group_waits_for():
    ledger = Ledger(grpo())
    ledger.issue([0], [1], round=0)
    assert ledger.why(0).splitlines() == [
        "generate: 1 of 1 rows to do; ready, not claimed",
        "score: 0 of 0 rows to do; waits for the rest of the group from 'generate'",
        "advantages: 0 of 0 rows to do; waits for the rest of the group from 'generate'",
        "updater.update: 0 of 0 rows to do; waits for the rest of the group from 'generate'",
    ]
    lease = claim(ledger, "generate")
    assert ledger.why(0).startswith("generate: 1 of 1 rows to do; 1 leased")
    expand(ledger, lease, 2)
    ledger.finish(lease)
    lease = claim(ledger, "score")
    publish(ledger, lease, [1000])
    assert ledger.why(0).splitlines() == [
        "score: 1 of 2 rows to do; 1 leased",
        "advantages: 2 of 2 rows to do; waits for score",
        "updater.update: 2 of 2 rows to do; waits for advantages",
    ]


def test_the_table_shows_every_row_in_flight():
    ledger = generated(grpo(), prompts=1, samples=1)
    claim(ledger, "score")
    prompt, sample = ledger.table().to_pylist()
    assert prompt == {
        "sample_id": 0,
        "group_id": 0,
        "parent_id": 0,
        "level": "prompts",
        "round": 0,
        "tokens": 2,
        "version": None,
        "done": ["generate"],
        "leased": [],
        "dropped": [],
    }
    assert (sample["sample_id"], sample["parent_id"], sample["tokens"], sample["leased"]) == (1000, 0, 7, ["score"])


def test_ids_are_shared_by_the_graphs_of_a_run():
    ids = Ids()
    first, second = Ledger(grpo(), ids=ids), Ledger(dapo(), ids=ids)
    first.issue([0, 1], [1, 1], round=0)
    second.issue([0], [1], round=0)
    assert claim(second, "generate").ids.tolist() == [2] and second.group_ids == [2]


def forgotten(ledger: Ledger) -> bool:
    """Nothing of any row is left."""
    left = [ledger._rows, ledger._groups, ledger._leases, *ledger._offers, *ledger._group_offers]
    return not any(left) and not any(ledger._todo) and not any(ledger._ready) and not any(ledger._unfinished_levels)


def test_a_finished_group_leaves_nothing_behind():
    ledger = generated(grpo())
    for name in ("score", "advantages", "update"):
        assert ledger.groups_in_flight == 2
        do(ledger, name)
    assert forgotten(ledger) and ledger.groups_in_flight == 0
    assert ledger.counts() == {"issued": 8, "waiting": 0, "leased": 0, "done": 8, "dropped": 0}


def test_two_hundred_thousand_rows_take_seconds_in_small_claims():
    ledger, took = Ledger(grpo()), {}
    for size in (5_000, 45_000):  # prompts, four samples each: the time of an event must not grow with their number
        started = time.process_time()
        ledger.issue(range(size), [1] * size, round=size)
        children = 10_000_000 * size
        while lease := ledger.claim(node(ledger, "generate"), max_rows=50):
            expand(ledger, lease, 4, first=children)
            children += 200
            ledger.finish(lease)
        for name in ("score", "advantages", "update"):
            while lease := ledger.claim(node(ledger, name), max_rows=100, max_groups=25):
                publish(ledger, lease)
                ledger.finish(lease)
                assert ledger.settled(node(ledger, name)) or ledger.exhausted(node(ledger, name))
        assert forgotten(ledger)
        took[size] = (time.process_time() - started) / size
    assert took[45_000] < 4 * took[5_000], took


# Against a model


@dataclass
class Model:
    """Every answer worked out from the history of all rows, with no state of its own to go wrong."""

    graph: Graph
    level: dict[int, int] = field(default_factory=dict)
    parent: dict[int, int] = field(default_factory=dict)
    group: dict[int, int] = field(default_factory=dict)
    position: dict[int, int] = field(default_factory=dict)
    done: dict[int, set[str]] = field(default_factory=dict)
    leased: dict[int, set[str]] = field(default_factory=dict)
    dropped_by: dict[int, set[str]] = field(default_factory=dict)
    used: Counter[tuple[int, str]] = field(default_factory=Counter)
    values: dict[tuple[int, str], str] = field(default_factory=dict)

    def add(self, id: int, level: int, parent: int, group: int, position: int) -> None:
        self.level[id], self.parent[id], self.group[id], self.position[id] = level, parent, group, position
        self.done[id], self.leased[id], self.dropped_by[id] = set(), set(), set()

    def ancestor(self, id: int, level: int) -> int:
        while self.level[id] != level:
            id = self.parent[id]
        return id

    def upstream(self, name: str) -> set[str]:
        found: set[str] = set()
        for before in self.graph[name].after:
            found |= {before} | self.upstream(before)
        return found

    def line(self, level: int) -> list[int]:
        """This level and those that it was expanded from."""
        return [level] if level == SOURCE else [level, *self.line(self.graph.parent_level(level))]

    def skipped(self, id: int, n: Node) -> bool:
        line = self.line(self.level[id])
        filters = [self.graph[f] for f in self.upstream(n.name) if self.graph[f].operation.shape is Shape.FILTER]
        return any(f.level in line and f.name in self.dropped_by[self.ancestor(id, f.level)] for f in filters)

    def passed(self, id: int, name: str) -> bool:
        before = self.graph[name]
        if before.makes_level in self.line(self.level[id]):
            return True
        return name in self.done[self.ancestor(id, before.level)]

    def rows(self, group: int, level: int) -> list[int]:
        return sorted(i for i in self.group if self.group[i] == group and self.level[i] == level)

    def todo(self, group: int, n: Node) -> list[int]:
        return [i for i in self.rows(group, n.level) if n.name not in self.done[i] and not self.skipped(i, n)]

    def ready(self, group: int, n: Node) -> list[int]:
        """Rows of a group that a claim can get."""
        todo = self.todo(group, n)
        ready = [i for i in todo if n.name not in self.leased[i] and all(self.passed(i, a) for a in n.after)]
        if n.operation.takes_groups and (len(ready) != len(todo) or not self.whole(group, n.level)):
            return []
        return ready

    def whole(self, group: int, level: int) -> bool:
        if level == SOURCE:
            return True
        maker = next(n for n in self.graph.nodes if n.makes_level == level)
        return self.whole(group, maker.level) and not self.todo(group, maker)

    def levels(self) -> list[int]:
        return list(self.graph.levels)

    def finished(self, group: int) -> bool:
        return all(self.whole(group, lv) for lv in self.levels()) and not any(
            self.todo(group, n) for n in self.graph.nodes
        )

    def groups(self) -> list[int]:
        return sorted(set(self.group.values()))


@dataclass
class Play:
    """The ledger and the model, played against each other by chance."""

    ledger: Ledger
    model: Model
    chance: random.Random
    leases: list[Lease] = field(default_factory=list)
    stale: list[Lease] = field(default_factory=list)
    staged: dict[int, list[tuple[list[int], list[int]]]] = field(default_factory=dict)
    """Token -> what was published of a lease that does not count yet."""
    stored: dict[str, dict[int, dict[str, str]]] = field(default_factory=dict)
    """File of a segment -> sample id -> its columns."""

    def issue(self) -> None:
        number = self.chance.randint(1, 3)
        positions = [self.chance.randrange(100) for _ in range(number)]
        before = set(self.ledger._rows)
        known = set(self.model.groups())
        self.ledger.issue(positions, [1] * number, round=0)
        new = sorted(set(self.ledger._rows) - before)
        if not new:  # a graph without nodes
            return
        for id, position in zip(new, positions, strict=True):
            group = self.ledger._rows[id].group.id
            assert group not in known
            self.model.add(id, SOURCE, id, group, position)

    def claim(self) -> None:
        n = self.chance.choice(self.ledger.graph.nodes)
        limit = self.chance.choice([None, 1, 2, 5])
        lease = self.ledger.claim(n, **({"max_groups": limit} if n.operation.takes_groups else {"max_rows": limit}))
        ready = [self.model.ready(g, n) for g in self.model.groups()]
        ready = [r for r in ready if r]
        expected = (
            [i for r in ready[:limit] for i in r] if n.operation.takes_groups else [i for r in ready for i in r][:limit]
        )
        assert (lease.ids.tolist() if lease else []) == expected, n
        if lease is None:
            return
        for id in expected:
            self.model.leased[id].add(n.name)
            assert self.model.used[id, n.name] == 0, "consumed twice"
        self.check_columns(lease)
        self.leases.append(lease)
        self.staged[lease.token] = []

    def check_columns(self, lease: Lease) -> None:
        model, n = self.model, lease.node
        columns: set[str] = set()
        for piece in self.ledger.pieces(n, lease.rows):
            columns |= set(piece.columns)
            store: dict[Any, Any] = {}
            for found in piece.segments:
                store |= self.stored.get(found.file, {})
            for id, key in zip(lease.ids.tolist(), piece.keys.tolist(), strict=True):
                for column in piece.columns:
                    writer = n.writers[column]
                    if not writer:
                        assert piece.by_position and key == model.position[model.ancestor(id, SOURCE)]
                    else:
                        owner = model.ancestor(id, self.ledger.graph.level_of(writer))
                        assert store[key][column] == f"{column} of {owner}"
        assert columns == set(n.reads)

    def publish(self) -> None:
        if not self.leases:
            return
        lease = self.chance.choice(self.leases)
        open_ids = sorted(lease.open)
        chosen = [i for i in open_ids if self.chance.random() < 0.6]
        self.chance.shuffle(chosen)
        if lease.node.makes_level is None:
            self.give(lease, chosen, chosen)
        else:
            children = [p for p in chosen for _ in range(self.chance.randint(1, 3))]
            self.chance.shuffle(children)
            first = self.ledger._ids.take(len(children))
            self.give(lease, list(range(first, first + len(children))), children)

    def give(self, lease: Lease, ids: list[int], held: list[int]) -> None:
        n = lease.node
        parents = None if n.makes_level is None else np.array(held, np.int64)
        into = segment(f"{len(self.stored)}")
        self.stored[into.file] = {id: {c: f"{c} of {id}" for c in n.writes} for id in ids}
        self.ledger.publish(
            lease, Published(np.array(ids, np.int64), np.ones(len(ids), np.int64), None, parents), into
        )
        if n.operation.takes_groups:
            self.staged[lease.token].append((ids, held))
        else:
            self.count(n, ids, held)

    def count(self, n: Node, ids: list[int], held: list[int]) -> None:
        model = self.model
        if n.makes_level is not None:
            for id, parent in zip(ids, held, strict=True):
                model.add(id, n.makes_level, parent, model.group[parent], model.position[parent])
        for id in dict.fromkeys(held):
            self.mark(n, id)

    def mark(self, n: Node, id: int) -> None:
        self.model.done[id].add(n.name)
        self.model.leased[id].discard(n.name)
        self.model.used[id, n.name] += 1

    def finish(self) -> None:
        if not self.leases:
            return
        lease = self.chance.choice(self.leases)
        n = lease.node
        left = sorted(lease.open)
        if left and n.operation.shape in (Shape.MAP, Shape.GROUP):
            with pytest.raises(LeaseError, match="returned no row"):
                self.ledger.finish(lease)
            self.give(lease, left, left)
            left = []
        self.ledger.finish(lease)
        for ids, held in self.staged[lease.token]:
            self.count(n, ids, held)
        for id in left:
            if n.operation.shape is Shape.FILTER:
                self.model.dropped_by[id].add(n.name)
            self.mark(n, id)
        self.close(lease)

    def release(self) -> None:
        if not self.leases:
            return
        lease = self.chance.choice(self.leases)
        self.ledger.release(lease)
        for id in lease.ids.tolist():
            self.model.leased[id].discard(lease.node.name)
        self.close(lease)

    def close(self, lease: Lease) -> None:
        self.leases.remove(lease)
        self.stale.append(lease)

    def use_a_stale_lease(self) -> None:
        if not self.stale:
            return
        lease = self.chance.choice(self.stale)
        publication = Published(
            lease.ids[:1], np.ones(1, np.int64), None, lease.ids[:1] if lease.node.makes_level is not None else None
        )
        for late in (
            self.ledger.finish,
            self.ledger.release,
            lambda x: self.ledger.publish(x, publication, None),
        ):
            with pytest.raises(LeaseError, match="released or finished before"):
                late(lease)

    def check(self) -> None:
        ledger, model = self.ledger, self.model
        flying = [g for g in model.groups() if not model.finished(g)]
        assert ledger.group_ids == flying
        rows = {i for i, g in model.group.items() if g in set(flying)}
        assert set(ledger._rows) == rows
        for n in ledger.graph.nodes:
            ready = [r for g in flying if (r := model.ready(g, n))]
            todo = sum(len(model.todo(g, n)) for g in flying)
            all_here = all(model.whole(g, n.level) for g in flying)
            assert ledger.ready(n) == sum(map(len, ready)), n
            if n.operation.takes_groups:
                assert ledger.ready_groups(n) == len(ready)
            assert ledger.exhausted(n) == (all_here and not todo)
            assert ledger.settled(n) == (all_here and todo > 0 and sum(map(len, ready)) == todo)
        counts = ledger.counts()
        assert counts["issued"] == len(model.level) == sum(v for k, v in counts.items() if k != "issued")
        assert counts["leased"] == sum(1 for i in rows if model.leased[i])
        lost = {
            i for i in model.level if any(n.level == model.level[i] and model.skipped(i, n) for n in ledger.graph.nodes)
        }
        assert counts["done"] == sum(1 for i in model.level if i not in rows and i not in lost)
        for group in flying:
            explained = ledger.why(group)
            waiting = [n.name for n in ledger.graph.nodes if model.todo(group, n) or not model.whole(group, n.level)]
            assert [line.split(":")[0] for line in explained.splitlines()] == waiting


def random_graph(chance: random.Random) -> Graph:
    """Maps, groups, filters, expansions and updates on branches that part and join."""
    draw = Drawing()
    branches = [draw.prompts]
    for number in range(chance.randint(1, 7)):
        rows = chance.choice(branches)
        others = [b for b in branches if b.level == rows.level]
        if chance.random() < 0.3:
            rows = rows | chance.choice(others)
        kinds: list[tuple[Shape, bool, bool]] = [
            (Shape.MAP, False, False),
            (Shape.FILTER, False, False),
            (Shape.FILTER, True, False),
            (Shape.EXPAND, False, False),
            (Shape.EXPAND, True, False),
            (Shape.GROUP, True, False),
            (Shape.MAP, False, True),
        ]
        shape, whole, updates = chance.choice(kinds)
        reads = tuple(chance.sample(rows.columns, chance.randint(0, len(rows.columns))))
        rule: dict[str, Any] = {"reads": reads, "whole_groups": whole, "updates": updates}
        if shape is Shape.FILTER and chance.random() < 0.3:
            rule["writes"] = (f"{'abcdefgh'[number]}_c",)
        made = draw.add(rows, "abcdefgh"[number], shape, **rule)
        if not updates:
            branches.append(made)
    return draw.graph()


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_ledger_agrees_with_a_model_that_has_no_state(seed: int):
    chance = random.Random(seed)
    graph = random_graph(chance)
    play = Play(Ledger(graph, source=segment()), Model(graph), chance)
    moves = [
        play.issue,
        play.claim,
        play.claim,
        play.claim,
        play.publish,
        play.publish,
        play.finish,
        play.release,
        play.use_a_stale_lease,
    ]
    for _ in range(25):
        chance.choice(moves)()
        play.check()
        if len(play.model.level) > 150:
            break
    for _ in range(10_000):  # then let it run dry
        if not play.ledger.groups_in_flight and not play.leases:
            break
        chance.choice([play.claim, play.publish, play.finish])()
    play.check()
    assert forgotten(play.ledger)
    for id in play.model.level:
        for n in graph.nodes:
            if n.level == play.model.level[id]:
                assert play.model.used[id, n.name] == (0 if play.model.skipped(id, n) else 1)
