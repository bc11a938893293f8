"""Hand-made and random graphs, and operations on their ledgers, for tests of the ledger."""

import random
from typing import Any

import numpy as np
import pyarrow as pa

from weft.dataflow.buffer.leases import Lease, Published, Written
from weft.dataflow.buffer.ledger import Ledger
from weft.dataflow.buffer.live_rows import Readiness
from weft.dataflow.buffer.rows import GroupState
from weft.dataflow.buffer.segments import Segment
from weft.dataflow.config import Config
from weft.dataflow.graph import SOURCE, Graph, Handle, Node
from weft.dataflow.operation import GROUPS, Declaration, Quorum, Shape, TrainingBatch
from weft.dataflow.source import TableSource
from weft.dataflow.tracing import _SymbolicRows, _Trace
from weft.workers.worker import Worker

PROMPTS = TableSource("prompts", pa.table({"prompt": ["a"]}))


def segment(file: str = "data", num_bytes: int = 10) -> Segment:
    return Segment("node", file, 0, num_bytes, 0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Trainer(Worker):
    Config = Config


class Drawing:
    """Builds a graph node by node."""

    def __init__(self, name: str = "drawn") -> None:
        self.recording = _Trace(name, PROMPTS)
        self.prompts = _SymbolicRows(self.recording, SOURCE, {"prompt": ""})

    def add(
        self, rows: _SymbolicRows, name: str, shape: Shape = Shape.MAP, **rule: Any
    ) -> _SymbolicRows:
        updates = isinstance(rule.get("takes"), TrainingBatch)
        rule.setdefault("writes", () if shape is Shape.FILTER or updates else (f"{name}_c",))
        declaration = Declaration(name, shape, **rule)
        if updates:  # updating nodes have a separate worker group
            return self.recording.add_node(
                rows, Handle(Trainer, Config(), f"{name}r"), method, declaration, (), {}
            )
        return self.recording.add_node(rows, None, function, declaration, (), {})

    def graph(self) -> Graph:
        return self.recording.graph()


def function(rows: object) -> None: ...
def first_of_each_group(rows: object, n: int, deadline_s: float | None = None) -> None: ...
def method(self: object, rows: object) -> None: ...


def grpo() -> Graph:
    draw = Drawing()
    samples = draw.add(draw.prompts, "generate", Shape.EXPAND, reads=("prompt",))
    samples = draw.add(samples, "score", reads=("generate_c",))
    samples = draw.add(samples, "advantages", Shape.GROUP, reads=("score_c",))
    draw.add(samples, "update", reads=("generate_c", "advantages_c"), takes=TrainingBatch())
    return draw.graph()


def dapo(*, quorum: int = 0) -> Graph:
    """A graph that generates, scores, filters, and updates, with a quorum of samples per group."""
    draw = Drawing()
    samples = draw.add(draw.prompts, "generate", Shape.EXPAND, reads=("prompt",))
    samples = draw.add(samples, "score", reads=("generate_c",))
    if quorum:
        samples = draw.add(samples, "first", Shape.FILTER, reads=("score_c",), takes=Quorum(quorum, 5.0))
    samples = draw.add(samples, "keep", Shape.FILTER, reads=("score_c",))
    samples = draw.add(samples, "advantages", Shape.GROUP, reads=("score_c",))
    draw.add(samples, "update", reads=("advantages_c",), takes=TrainingBatch())
    return draw.graph()


def random_graph(chance: random.Random, name: str = "drawn") -> Graph:
    """A random graph of maps, groups, filters, quorums, expansions and updates on several
    branches."""
    draw = Drawing(name)
    branches = [draw.prompts]
    if chance.random() < 0.2:  # let rows arrive late for a quorum, or be in progress when it closes
        turns = draw.add(draw.add(draw.prompts, "dialogues", Shape.EXPAND), "turns", Shape.EXPAND)
        scored = draw.add(turns, "score", reads=("turns_c",))
        draw.add(
            scored, "first", Shape.FILTER, reads=("score_c",), takes=Quorum(chance.randint(1, 3), 1.0)
        )
        branches = [turns, scored]
    elif chance.random() < 0.6:
        branches.append(draw.add(draw.prompts, "samples", Shape.EXPAND))
    kinds: list[dict[str, Any]] = [
        {"shape": Shape.MAP},
        {"shape": Shape.FILTER},
        {"shape": Shape.FILTER, "takes": GROUPS},
        {"shape": Shape.FILTER, "takes": Quorum(chance.randint(1, 4), chance.choice([None, 1.0, 5.0]))},
        {"shape": Shape.EXPAND},
        {"shape": Shape.EXPAND, "takes": GROUPS},
        {"shape": Shape.GROUP},
        {"shape": Shape.MAP, "takes": TrainingBatch()},
    ]
    for number in range(chance.randint(1, 7)):
        rows = chance.choice(branches)
        if chance.random() < 0.3:
            rows = rows | chance.choice([b for b in branches if b.level == rows.level])
        kind, letter = chance.choice(kinds), "abcdefgh"[number]
        rule: dict[str, Any] = {}
        if kind["shape"] is Shape.FILTER and chance.random() < 0.3:
            rule["writes"] = (f"{letter}_c",)
        reads = tuple(chance.sample(rows.columns, chance.randint(0, len(rows.columns))))
        made = draw.add(rows, letter, reads=reads, **kind, **rule)
        if not isinstance(kind.get("takes"), TrainingBatch):
            branches.append(made)
    return draw.graph()


def claim(ledger: Ledger, name: str, **limits: Any) -> Lease:
    lease = ledger.claim(node(ledger, name), **limits)
    assert lease is not None
    return lease


def node(ledger: Ledger, name: str) -> Node:
    return next(n for n in ledger.graph.nodes if n.name in (name, f"{name}r.{name}"))


def publish(ledger: Ledger, lease: Lease, ids: Any = None, into: Written = segment()) -> None:
    ids = lease.ids if ids is None else np.asarray(ids, np.int64)
    ledger.publish(lease, Published(ids, np.ones(len(ids), np.int64)), into)


def expand(
    ledger: Ledger,
    lease: Lease,
    number: int,
    *,
    first: int = 1000,
    only: Any = None,
    versions: Any = None,
    finished: Any = None,
) -> None:
    parents = np.repeat(lease.ids if only is None else np.asarray(only, np.int64), number)
    ids = first + np.arange(len(parents))
    finished = np.unique(parents) if finished is None else np.array(finished, np.int64)
    made = Published(ids, np.full(len(ids), 5), versions, parents, finished)
    ledger.publish(lease, made, segment("children"))


def do(ledger: Ledger, name: str) -> None:
    lease = claim(ledger, name)
    publish(ledger, lease)
    ledger.finish(lease)


def generated(graph: Graph, prompts: int = 2, samples: int = 3) -> Ledger:
    """A ledger after generation: samples 1000, 1001, ... in groups 0, 1, ..."""
    ledger = Ledger(graph)
    ledger.issue(range(prompts), [2] * prompts, step=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, samples)
    ledger.finish(lease)
    return ledger


def first_two(deadline_s: float | None = None, *, dialogues: bool = False) -> Graph:
    draw = Drawing()
    samples = draw.add(draw.prompts, "dialogues", Shape.EXPAND) if dialogues else draw.prompts
    samples = draw.add(samples, "generate", Shape.EXPAND, reads=("prompt",))
    if dialogues:
        draw.add(samples, "look", reads=("generate_c",))
    samples = draw.add(samples, "score", reads=("generate_c",))
    draw.add(samples, "first", Shape.FILTER, reads=("score_c",), takes=Quorum(2, deadline_s))
    return draw.graph()


def aged(versions: list[int]) -> Ledger:
    """A ledger with one group per version, each with one row ready for its update."""
    ledger = Ledger(grpo())
    ledger.issue(range(len(versions)), [1] * len(versions), step=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 1, versions=np.array(versions))
    ledger.finish(lease)
    do(ledger, "score")
    do(ledger, "advantages")
    return ledger


def forgotten(ledger: Ledger) -> bool:
    """Check that the ledger holds nothing of any row."""
    nothing = Readiness(ledger.live.wiring)
    return not (ledger.live.rows or ledger.live.groups or ledger.leases) and vars(
        ledger.readiness
    ) == vars(nothing)


def readiness_state(ledger: Ledger, readiness: Readiness) -> dict[str, Any]:
    """Return everything observable about ready rows; obsolete queue entries do not count."""
    state = {name: value for name, value in vars(readiness).items() if not name.endswith("_queues")}
    del state["_wiring"]
    groups = ledger.live.groups
    state["queued rows"] = [
        sorted(
            id
            for id in queue
            if id in groups and groups[id].levels[ledger.graph.nodes[i].level].ready(i)
        )
        for i, queue in enumerate(readiness.in_row_queues)
    ]
    state["queued groups"] = [
        sorted(
            {
                entry
                for entry in queue
                if entry[1] in groups and groups[entry[1]].state(i) is GroupState.READY
            }
        )
        for i, queue in enumerate(readiness.group_queues)
    ]
    return state
