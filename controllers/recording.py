"""Recording: the node that is added to every graph and writes its samples to the run directory, behind the run.

A group is recorded when all else is done with it. A row is filed under its own step: that of the update which trained it, in a graph
without updates the one that it was issued in (of an evaluation: the step that is evaluated). Steps do not wait for their
records. Until these are written, the columns of their rows stay in the buffer, so recording may be MAX_BEHIND steps behind;
then updates wait for it. A checkpoint does not: what was not recorded by then is, when the run goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..dataflow.buffer.rows import Lease
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
from ..dataflow.errors import UserError
from ..dataflow.graph import Graph, Node
from ..dataflow.handle import Handle
from ..dataflow.operation import declaration_of
from ..workers.function import FunctionConfig, FunctionWorker
from ..workers.recorder import RecorderConfig, RecorderWorker
from .graph_run import GraphRun

FUNCTIONS = "functions"
"""The worker group that runs the pure functions of graphs."""
RECORDER = "recorder"
"""The worker group that writes samples."""
RESERVED = {FUNCTIONS: "runs the functions of graphs", RECORDER: "writes samples"}
MAX_BEHIND = 2
"""Steps that recording may be behind training before updates wait for it."""
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

RECORD = f"{RECORDER}.record"
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
    declaration = declaration_of(RecorderWorker.record)
    assert declaration is not None
    # An update on a level below is waited for, too: the recorder is given a group when all else is done with it.
    updates = [n.name for n in graph.nodes if n.operation.updates and n.level in on_path]
    node = Node(
        name=RECORD,
        group=RECORDER,
        operation=replace(declaration, reads=reads).called_with({}),
        function=RecorderWorker.record,
        arguments={},
        reads=reads,
        missing=(),
        writes=(),
        level=level,
        makes_level=None,
        writers={c: writers[c] for c in reads},
        after=tuple(dict.fromkeys([*(w for c in reads if (w := writers[c])), *updates])),
    )
    return replace(graph, nodes=(*graph.nodes, node))


def own_groups(graphs: Sequence[Graph], handles: Mapping[str, Handle], record_every: int) -> dict[str, Handle]:
    """The worker groups that a run has beside those of its graphs.

    Raises:
        UserError: when a group of the graphs has the name of one of them.
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
        tokenizer = next((str(h.config.model) for h in handles.values() if getattr(h.config, "model", None)), None)
        own[RECORDER] = Handle(RecorderWorker, RecorderConfig(tokenizer=tokenizer), RECORDER)
    return own


class RecordingSchedule:
    """When the rows that a run is through with are recorded, and which of them.

    Args:
        every: of how many steps one is recorded; 0: none.
        prompts_per_step: groups that a step trains on.
    """

    def __init__(self, every: int, prompts_per_step: int) -> None:
        self.every = every
        self._prompts_per_step = prompts_per_step

    def is_due(self, flow: GraphRun, node: Node, *, hurry: bool) -> bool:
        """Whether there is a step's worth to record, or an evaluation; or, in a hurry, anything."""
        ready = flow.ledger.ready_groups(node)
        whole = not flow.ledger.groups_at_work if flow.evaluates else ready >= self._prompts_per_step
        return ready > 0 and (whole or hurry)

    def is_full(self, flow: GraphRun) -> bool:
        """Whether recording is too far behind for more rows to come to it."""
        return flow.ledger.groups_behind >= (1 if flow.evaluates else MAX_BEHIND * self._prompts_per_step)

    def steps(self, flow: GraphRun, lease: Lease) -> dict[int, int]:
        """Group -> step, of the groups of a lease that are kept."""
        groups = {row.group.id: row.group for row in lease.rows}
        filed = {id: group.step if flow.updates else group.round for id, group in groups.items()}
        return {id: step for id, step in filed.items() if step is not None and self.every and not step % self.every}
