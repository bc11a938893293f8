"""Small graphs, and verbs for ledgers of them; what the tests of the ledger begin with."""

from typing import Any

import numpy as np
import pyarrow as pa

from weft.dataflow.buffer.ledger import Ledger
from weft.dataflow.buffer.rows import Lease, Published
from weft.dataflow.buffer.segments import Segment
from weft.dataflow.config import Config
from weft.dataflow.graph import Graph
from weft.dataflow.handle import Handle
from weft.dataflow.node import SOURCE, Node
from weft.dataflow.operation import Declaration, Shape
from weft.dataflow.source import TableSource
from weft.dataflow.takes import Quorum, TrainingBatch
from weft.dataflow.tracing import SymbolicRows, Trace
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
    """A graph made node by node."""

    def __init__(self) -> None:
        self.recording = Trace("drawn", PROMPTS)
        self.prompts = SymbolicRows(self.recording, SOURCE, {"prompt": ""})

    def add(self, rows: SymbolicRows, name: str, shape: Shape = Shape.MAP, **rule: Any) -> SymbolicRows:
        updates = isinstance(rule.get("takes"), TrainingBatch)
        rule.setdefault("writes", () if shape is Shape.FILTER or updates else (f"{name}_c",))
        declaration = Declaration(name, shape, **rule)
        if updates:  # on a worker group of its own
            return self.recording.add(rows, Handle(Trainer, Config(), f"{name}r"), method, declaration, (), {})
        return self.recording.add(rows, None, function, declaration, (), {})

    def graph(self) -> Graph:
        return self.recording.finish()


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


def dapo() -> Graph:
    draw = Drawing()
    samples = draw.add(draw.prompts, "generate", Shape.EXPAND, reads=("prompt",))
    kept = draw.add(samples, "keep", Shape.FILTER, reads=("generate_c",))
    samples = draw.add(kept, "advantages", Shape.GROUP, reads=("generate_c",))
    draw.add(samples, "update", reads=("advantages_c",), takes=TrainingBatch())
    return draw.graph()


def claim(ledger: Ledger, name: str, **limits: Any) -> Lease:
    lease = ledger.claim(node(ledger, name), **limits)
    assert lease is not None
    return lease


def node(ledger: Ledger, name: str) -> Node:
    return next(n for n in ledger.graph.nodes if n.name in (name, f"{name}r.{name}"))


def publish(ledger: Ledger, lease: Lease, ids: Any = None, into: Segment = segment()) -> None:
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
    ledger.issue(range(prompts), [2] * prompts, round=0)
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
    """A ledger with a group of one row, ready for its update, of each of these versions."""
    ledger = Ledger(grpo())
    ledger.issue(range(len(versions)), [1] * len(versions), round=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 1, versions=np.array(versions))
    ledger.finish(lease)
    do(ledger, "score")
    do(ledger, "advantages")
    return ledger


def forgotten(ledger: Ledger) -> bool:
    """Nothing of any row is left."""
    return not (ledger._rows or ledger._groups or ledger._leases) and ledger.readiness.is_empty()
