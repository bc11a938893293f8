"""A graph's levels, and its outline in the log, from which a ledger works without the graph's
code."""

import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from weft.dataflow.errors import GraphError, UserError
from weft.dataflow.graph import SOURCE, Graph
from weft.dataflow.operation import GROUPS, Declaration, Quorum, Shape
from weft.dataflow.source import TableSource
from weft.dataflow.tracing import _SymbolicRows, _Trace


def function(rows: object, n: int = 1) -> None: ...


def two_expansions() -> Graph:
    """A graph that expands prompts to samples, and samples to turns."""
    drawn = _Trace("train", TableSource("prompts", pa.table({"prompt": ["a"]})))
    rows = _SymbolicRows(drawn, SOURCE, {"prompt": ""})
    for declaration in (
        Declaration("clean", reads=("prompt",), writes=("cleaned",)),
        Declaration(
            "generate", Shape.EXPAND, reads=("cleaned",), may_read=("prompt",), writes=("response",)
        ),
        Declaration("score", reads=("response",), writes=("reward",)),
        Declaration("first", Shape.FILTER, reads=("reward",), takes=Quorum(2, 1.5)),
        Declaration("advantages", Shape.GROUP, reads=("reward",), writes=("advantage",), takes=GROUPS),
        Declaration("turns", Shape.EXPAND, reads=("response",), writes=("turn",)),
    ):
        rows = drawn.add_node(rows, None, function, declaration, (), {})
    return drawn.graph()


def test_columns_belong_to_the_level_of_their_rows():
    graph = two_expansions()
    assert {name: graph.level_of(name) for name in ("", "clean", "generate", "score", "turns")} == {
        "": 0,
        "clean": 0,
        "generate": 1,
        "score": 1,
        "turns": 2,
    }
    assert (graph.parent_level(1), graph.parent_level(2)) == (0, 1)


def test_a_graph_read_from_its_outline_is_the_graph_without_its_code():
    graph = two_expansions()
    read = Graph.from_outline(json.loads(json.dumps(graph.outline())))
    assert (read.name, read.source.name, read.source.columns) == ("train", "prompts", ())
    assert read.outline() == graph.outline()
    for node, original in zip(read.nodes, graph.nodes, strict=True):
        assert node == replace(original, function=node.function, arguments={}), "tuples are tuples again"
    with pytest.raises(UserError, match="has no code to run"):
        read.nodes[0].function(None)


@pytest.mark.parametrize("n", [0, -1, 1.5])
def test_a_quorum_is_at_least_one_row(n: Any):
    def with_quorum(n: Any) -> Graph:
        quorum = replace(graph["first"].operation, takes=Quorum(n))
        return replace(
            graph,
            nodes=tuple(replace(m, operation=quorum) if m.name == "first" else m for m in graph.nodes),
        )

    graph = two_expansions()
    with pytest.raises(GraphError, match=f"node 'first' takes the first n={n} rows of a group"):
        with_quorum(n).validate()
    assert with_quorum(1).validate()["first"].operation.takes == Quorum(1)
