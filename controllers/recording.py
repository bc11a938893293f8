"""Recording: the node that is added to every graph and writes its samples to the run directory."""

from __future__ import annotations

from dataclasses import replace

from ..dataflow.column import (
    ADVANTAGES,
    ANSWER,
    CHOSEN_IDS,
    FINISH_REASON,
    PREFERRED,
    PROMPT,
    PROMPT_IDS,
    REJECTED_IDS,
    RESPONSE_IDS,
    RESPONSE_LOGPROBS,
    RESPONSE_VERSIONS,
    REWARD,
)
from ..dataflow.graph import Graph, Node
from ..dataflow.operation import operation_of
from ..workers.function import FunctionWorker

FUNCTIONS = "weft.functions"
"""The worker group that runs pure functions."""
RECORDED = (
    PROMPT,
    PROMPT_IDS,
    ANSWER,
    RESPONSE_IDS,
    RESPONSE_LOGPROBS,
    RESPONSE_VERSIONS,
    FINISH_REASON,
    REWARD,
    ADVANTAGES,
    CHOSEN_IDS,
    REJECTED_IDS,
    PREFERRED,
)
"""Columns of a sample that go to the run directory, where they exist."""

RECORD = "weft.record"
"""The node that writes samples."""


def with_recording(graph: Graph) -> Graph:
    """The graph with one node more, which writes samples to the run directory."""
    writers: dict[str, str] = dict.fromkeys(graph.source.columns, "")
    level = 0
    for node in graph.nodes:
        writers |= dict.fromkeys(node.writes, node.name)
        if node.makes_level is not None and str(RESPONSE_IDS) in node.writes:
            level = node.makes_level
    on_path = {level}
    while level:
        level = graph.parent_level(level)
        on_path.add(level)
    level = max(on_path)
    reads = tuple(str(c) for c in RECORDED if str(c) in writers and graph.level_of(writers[str(c)]) in on_path)
    if not reads:
        return graph
    operation = operation_of(FunctionWorker.record)
    assert operation is not None
    node = Node(
        name=RECORD,
        group=FUNCTIONS,
        operation=replace(operation, reads=reads, whole_groups=True),
        function=FunctionWorker.record,
        arguments={},
        reads=reads,
        missing=(),
        writes=(),
        level=level,
        makes_level=None,
        writers={c: writers[c] for c in reads},
        after=tuple(dict.fromkeys(w for c in reads if (w := writers[c]))),
    )
    return replace(graph, nodes=(*graph.nodes, node))
