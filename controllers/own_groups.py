"""Worker groups that a run has beside those of its graphs: one runs pure functions, one writes samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..dataflow.errors import UserError
from ..dataflow.graph import Graph, Handle, Node
from ..dataflow.metric_names import FUNCTIONS
from ..workers.function import FunctionConfig, FunctionWorker, RecorderConfig, RecorderWorker

RECORDER = "recorder"
"""The worker group that writes samples."""
RESERVED = {FUNCTIONS: "runs the functions of graphs", RECORDER: "writes samples"}


def group_of(node: Node) -> str:
    """Name of the worker group that a node runs on."""
    return node.group or FUNCTIONS


def own_groups(
    graphs: Sequence[Graph], handles: Mapping[str, Handle], record_every: int
) -> dict[str, Handle]:
    """Handles of the groups that a run has beside those of its graphs, by name.

    Raises:
        UserError: a group of the graphs has the name of one of them.
    """
    for name, what in RESERVED.items():
        if name in handles:
            raise UserError(
                f"a worker group is called {name!r}, as is the group of each run that {what}; give it another: weft.group(..., name=...)"
            )
    own: dict[str, Handle] = {}
    if any(node.group is None for graph in graphs for node in graph.nodes):
        own[FUNCTIONS] = Handle(FunctionWorker, FunctionConfig(), FUNCTIONS)
    if record_every:
        tokenizer = next(
            (str(h.config.model) for h in handles.values() if getattr(h.config, "model", None)), None
        )
        own[RECORDER] = Handle(RecorderWorker, RecorderConfig(tokenizer=tokenizer), RECORDER)
    return own
