"""Worker groups that Weft adds: one runs pure functions, one writes samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..dataflow.errors import UserError
from ..dataflow.graph import Graph, Handle, Node
from ..dataflow.metric_names import FUNCTIONS
from ..workers.function import FunctionWorker, RecorderConfig, RecorderWorker

RECORDER = "recorder"
RESERVED = {FUNCTIONS: "runs the functions of graphs", RECORDER: "writes samples"}


def group_of(node: Node) -> str:
    """Return the name of the worker group that a node runs on."""
    return node.group or FUNCTIONS


def own_groups(
    graphs: Sequence[Graph], handles: Mapping[str, Handle], record_every: int
) -> dict[str, Handle]:
    """Return the groups that Weft adds, by name."""
    for name, what in RESERVED.items():
        if name in handles:
            raise UserError(
                f"worker group {name!r} has the name of Weft's group that {what}; choose another name: weft.group(..., name=...)"
            )
    own: dict[str, Handle] = {}
    if any(node.group is None for graph in graphs for node in graph.nodes):
        own[FUNCTIONS] = Handle(FunctionWorker, FunctionWorker.Config(), FUNCTIONS)
    if record_every:
        # The recorder decodes texts, so it needs the tokenizer of any model.
        tokenizer = next(
            (str(h.config.model) for h in handles.values() if getattr(h.config, "model", None)), None
        )
        own[RECORDER] = Handle(RecorderWorker, RecorderConfig(tokenizer=tokenizer), RECORDER)
    return own
