"""Graphs for the tests of the sample buffer."""

import pyarrow as pa

from weft.dataflow.config import Config
from weft.dataflow.graph import SOURCE, Graph, Handle
from weft.dataflow.operation import Declaration, Quorum, Shape, TrainingBatch
from weft.dataflow.source import TableSource
from weft.dataflow.tracing import _SymbolicRows, _Trace
from weft.workers.worker import Worker

PROMPTS = TableSource("prompts", pa.table({"prompt": ["a"]}))


class Trainer(Worker):
    Config = Config


def function(rows: object) -> None: ...
def method(self: object, rows: object) -> None: ...
def samples_of(rows: object, n: int) -> None: ...
def first_of_each_group(rows: object, n: int, deadline_s: float | None = None) -> None: ...


def train_graph(samples: int = 3, *, scorer: str = "score", quorum: bool = True) -> Graph:
    """A graph that generates, scores, takes the first samples per group, filters, and updates."""
    drawn = _Trace("train", PROMPTS)
    rows = _SymbolicRows(drawn, SOURCE, {"prompt": ""})
    generate = Declaration("generate", Shape.EXPAND, reads=("prompt",), writes=("response",))
    rows = drawn.add_node(rows, None, samples_of, generate, (), {"n": samples})
    rows = drawn.add_node(
        rows, None, function, Declaration(scorer, reads=("response",), writes=("reward",)), (), {}
    )
    if quorum:
        first = Declaration("first", Shape.FILTER, reads=("reward",), takes=Quorum)
        rows = drawn.add_node(rows, None, first_of_each_group, first, (), {"n": 2, "deadline_s": 2.0})
        rows = drawn.add_node(
            rows, None, function, Declaration("keep", Shape.FILTER, reads=("reward",)), (), {}
        )
    advantages = Declaration("advantages", Shape.GROUP, reads=("reward",), writes=("advantage",))
    rows = drawn.add_node(rows, None, function, advantages, (), {})
    update = Declaration("update", reads=("advantage",), takes=TrainingBatch())
    drawn.add_node(rows, Handle(Trainer, Config(), "trainer"), method, update, (), {})
    return drawn.graph()


def eval_graph(
    *,
    votes: bool = False,
    counts: bool = False,
    reads: tuple[str, ...] = ("reward",),
    writes: tuple[str, ...] = ("response",),
) -> Graph:
    """A graph that generates and scores, and may vote, and count votes if there are some."""
    drawn = _Trace("eval", PROMPTS)
    rows = _SymbolicRows(drawn, SOURCE, {"prompt": ""})
    generate = Declaration("generate", Shape.EXPAND, reads=("prompt",), writes=writes)
    rows = drawn.add_node(rows, None, samples_of, generate, (), {"n": 1})
    rows = drawn.add_node(
        rows, None, function, Declaration("score", reads=("response",), writes=("reward",)), (), {}
    )
    if votes:
        vote = Declaration("vote", reads=("response",), writes=("vote",))
        rows = drawn.add_node(rows, None, function, vote, (), {})
    if counts:
        count = Declaration("count", Shape.GROUP, reads=reads, may_read=("vote",))
        drawn.add_node(rows, None, function, count, (), {})
    return drawn.graph()


GRAPHS = {"train": train_graph(), "eval": eval_graph()}
