"""Recording: add a node to every graph that writes its samples to the run directory in the
background.

A group is recorded when all other nodes are done with it. Its rows are stored under the step that
trained on them; without updates, under the step that issued them, and for an evaluation under the
evaluated step.

Steps and checkpoints do not wait for recording. Unwritten rows stay in the buffer, so updates wait
if recording is MAX_BEHIND steps behind. A resumed run records the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...dataflow.buffer.leases import Lease
from ...dataflow.column import (
    ADVANTAGES,
    ANSWER,
    CHOSEN_IDS,
    ENTROPIES,
    FINISH_REASON,
    OLD_LOGPROBS,
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
    VALUES,
    is_of_reward,
)
from ...dataflow.graph import Graph, Node
from ...dataflow.operation import declaration_of
from ...dataflow.runs.samples import sample_file_name
from ...dataflow.source import file_columns
from ...workers.function import RecorderWorker
from ..graph_run import EvaluationRun, GraphRun
from ..group import Call, CallRequest, WorkerGroup
from ..own_groups import RECORDER
from ..run_spec import RunSpec

MAX_BEHIND = 2
"""[steps] How far recording may be behind training before updates wait for it."""
RECORDED = (
    PROMPT,
    PROMPT_IDS,
    ANSWER,
    RESPONSE_IDS,
    RESPONSE_LOGPROBS,
    RESPONSE_VERSIONS,
    RESPONSE_MASK,
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
"""Recorded columns, if they exist, in addition to columns that the reward is computed from."""


def with_recording(graph: Graph) -> Graph:
    """Return the graph with another node, which writes samples to the run directory."""
    own = [column for column in graph.source.columns if column not in file_columns(graph.source)]
    writers: dict[str, str] = dict.fromkeys(own, "")
    level = 0
    for node in graph.nodes:
        writers |= dict.fromkeys(node.writes, node.name)
        if node.makes_level is not None and str(RESPONSE_IDS) in node.writes:
            level = node.makes_level
    on_path = {level}
    while level:
        level = graph.parent_level(level)
        on_path.add(level)
    wanted = dict.fromkeys([*map(str, RECORDED), *(c for c in writers if is_of_reward(c))])
    reads = tuple(c for c in wanted if c in writers and graph.level_of(writers[c]) in on_path)
    if not reads:
        return graph
    declaration = declaration_of(RecorderWorker.record)
    assert declaration is not None
    # Wait for updates on lower levels as well: a group is recorded when everything else is done.
    updates = [n.name for n in graph.nodes if n.operation.updates and n.level in on_path]
    node = Node(
        name=f"{RECORDER}.record",
        group=RECORDER,
        operation=replace(declaration, reads=reads).called_with({}),
        function=RecorderWorker.record,
        arguments={},
        reads=reads,
        missing=(),
        writes=(),
        level=max(on_path),  # the deepest level, where the responses are
        makes_level=None,
        writers={c: writers[c] for c in reads},
        after=tuple(dict.fromkeys([*(w for c in reads if (w := writers[c])), *updates])),
    )
    return replace(graph, nodes=(*graph.nodes, node))


class Recording:
    """Decide which finished rows are recorded, and when.

    Args:
        folder: Folder for samples.
        written: Called after training samples were written, with their step and the files that may
            hold them.
    """

    def __init__(
        self, spec: RunSpec, folder: Path, written: Callable[[int, Sequence[Path]], None]
    ) -> None:
        self._every = spec.record_every
        self._prompts_per_step = spec.schedule.prompts_per_step
        self._folder = folder
        self._deadline_s = spec.buffer.lease_deadline_s
        self._tell = written

    def is_due(self, graph_run: GraphRun, node: Node, *, hurry: bool) -> bool:
        """Whether a step or a complete evaluation is ready to record; in a hurry, anything."""
        ready = graph_run.ledger.readiness.ready_groups(node)
        if isinstance(graph_run, EvaluationRun):
            complete = not graph_run.ledger.live.groups_at_work
        else:
            complete = ready >= self._prompts_per_step
        return ready > 0 and (complete or hurry)

    def is_full(self, graph_run: GraphRun) -> bool:
        limit = 1 if isinstance(graph_run, EvaluationRun) else MAX_BEHIND * self._prompts_per_step
        return graph_run.ledger.live.groups_behind >= limit

    def requests(
        self, graph_runs: Iterable[GraphRun], recorder: WorkerGroup | None, *, hurry: bool
    ) -> list[CallRequest]:
        """Return a call of the idle recorder that writes rows that are due.

        Args:
            recorder: Group that writes; None only finishes the rows.
            hurry: Record less than a step as well.
        """
        for graph_run in graph_runs:
            for node in graph_run.recorders:
                if not self.is_due(graph_run, node, hurry=hurry):
                    continue
                deadline_s = self._deadline_s if recorder else None
                lease = graph_run.ledger.claim(node, holder=RECORDER, deadline_s=deadline_s)
                if lease is None:
                    continue
                steps = self._steps(graph_run, lease)
                if recorder is None or not steps:
                    graph_run.finish_rows(lease)
                    continue
                arguments = {
                    "folder": self._folder,
                    "graph": graph_run.name,
                    "token": lease.token,
                    "steps": steps,
                }
                last = max(steps.values())
                then = partial(self._written, graph_run=graph_run, lease=lease, step=last)
                return [
                    CallRequest(
                        recorder,
                        node.name,
                        arguments,
                        then=then,
                        on_device=True,
                        ledger=graph_run.ledger,
                        lease=lease,
                    )
                ]
        return []

    def _written(self, call: Call, graph_run: GraphRun, lease: Lease, step: int) -> Iterable[CallRequest]:
        if graph_run.ledger.leases.holds(lease):
            graph_run.finish_rows(lease)
            if not isinstance(graph_run, EvaluationRun):
                ranks = range(len(call.group.mesh))
                names = (sample_file_name(graph_run.name, step, lease.token, rank) for rank in ranks)
                self._tell(step, [self._folder / name for name in names])
        return ()

    def _steps(self, graph_run: GraphRun, lease: Lease) -> dict[int, int]:
        """Recorded group -> step that its samples are stored under."""
        filed = {
            group.id: group.trained_in if graph_run.updates else group.issued_in for group in lease.groups
        }
        return {
            id: step
            for id, step in filed.items()
            if step is not None and self._every and not step % self._every
        }
