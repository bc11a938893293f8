"""Recording: gives every graph a node that writes its samples to the run directory, or a node for each
of its branches that samples.

Weft records a group when all other nodes are done with it, under the step that trained on it. In a
graph without updates, that is the step that issued it; in an evaluation, the evaluated step.

Steps and checkpoints do not wait for recording. Updates wait if recording is MAX_BEHIND steps
behind, because unwritten rows stay in the buffer. A resumed run records the rest.
"""

from __future__ import annotations

from dataclasses import replace

from ...dataflow.buffer.leases import Lease
from ...dataflow.column import (
    ADVANTAGES,
    ANSWER,
    CHOSEN_IDS,
    ENTROPIES,
    EPISODE_ID,
    EPISODE_ROWS,
    EPISODE_TOKENS,
    FINISH_REASON,
    OLD_LOGPROBS,
    POLICY,
    PREFERRED,
    PROMPT,
    PROMPT_IDS,
    REFERENCE_LOGPROBS,
    REJECTED_IDS,
    RESPONSE_IDS,
    RESPONSE_LOGPROBS,
    RESPONSE_MASK,
    RESPONSE_VERSIONS,
    REWARD,
    TURN_ENDS,
    TURN_REWARDS,
    VALUES,
    is_of_reward,
)
from ...dataflow.graph import SOURCE, Graph, Node
from ...dataflow.operation import declaration_of
from ...dataflow.source import file_columns
from ...workers.function import RecorderWorker
from ..graph_run import EvaluationRun, GraphRun
from ..own_groups import RECORDER

MAX_BEHIND = 2
"""[steps] How far recording may be behind training before updates wait for it."""
RECORDED = (
    PROMPT,
    PROMPT_IDS,
    ANSWER,
    RESPONSE_IDS,
    RESPONSE_LOGPROBS,
    RESPONSE_VERSIONS,
    POLICY,
    RESPONSE_MASK,
    EPISODE_ID,
    EPISODE_ROWS,
    EPISODE_TOKENS,
    TURN_ENDS,
    TURN_REWARDS,
    OLD_LOGPROBS,
    ENTROPIES,
    REFERENCE_LOGPROBS,
    VALUES,
    FINISH_REASON,
    REWARD,
    ADVANTAGES,
    CHOSEN_IDS,
    REJECTED_IDS,
    PREFERRED,
)
"""Recorded columns, besides those of the reward."""


def with_recording(graph: Graph) -> Graph:
    sampled = [
        node.makes_level
        for node in graph.nodes
        if node.makes_level is not None and str(RESPONSE_IDS) in node.writes
    ]
    # A dialogue is recorded once, at its last turn.
    above = {level for below in sampled for level in graph.line(below)[1:]}
    levels = [level for level in sampled if level not in above] or [SOURCE]
    made = [node for level in levels if (node := _recorder(graph, level, len(levels) > 1))]
    return replace(graph, nodes=(*graph.nodes, *made)) if made else graph


def _recorder(graph: Graph, level: int, is_one_of_several: bool) -> Node | None:
    """Return a node that records the rows of a level; None if they have no columns to record."""
    on_path = {*graph.line(level)}
    own = [column for column in graph.source.columns if column not in file_columns(graph.source)]
    writers: dict[str, str] = dict.fromkeys(own, "")
    for node in graph.nodes:
        if graph.level_of(node.name) in on_path:
            writers |= dict.fromkeys(node.writes, node.name)
    wanted = dict.fromkeys([*map(str, RECORDED), *(c for c in writers if is_of_reward(c))])
    reads = tuple(c for c in wanted if c in writers)
    if not reads:
        return None
    declaration = declaration_of(RecorderWorker.record)
    assert declaration is not None
    # Wait for updates on lower levels as well.
    updates = [n.name for n in graph.nodes if n.operation.updates and n.level in on_path]
    return Node(
        name=f"{RECORDER}.record_{level}" if is_one_of_several else f"{RECORDER}.record",
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


def is_due(graph_run: GraphRun, node: Node, prompts_per_step: int, *, hurry: bool) -> bool:
    """Whether a step's groups, a whole evaluation or, with `hurry`, any group can be recorded."""
    ready = graph_run.ledger.readiness.ready_groups(node)
    if isinstance(graph_run, EvaluationRun):
        complete = not graph_run.ledger.live.groups_at_work
    else:
        complete = ready >= prompts_per_step
    return ready > 0 and (complete or hurry)


def recorded_steps(graph_run: GraphRun, lease: Lease, every: int) -> dict[int, int]:
    """Return group to record -> step that its samples are stored under.

    Args:
        every: [steps] Record every n-th step; 0 records none.
    """
    filed: dict[int, int] = {}
    for group in lease.groups:
        step = group.trained_in if graph_run.updates else group.issued_in
        if step is not None and every and not step % every:
            filed[group.id] = step
    return filed
