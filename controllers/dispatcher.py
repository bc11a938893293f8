"""Dispatcher: gives idle worker groups the rows that are ready for their nodes.

- A group begins nothing while it is at something else, unless both give way to each other (generation that overlaps training).
- A group begins nothing while another one on its pool is busy.
- An update waits for evaluations of the weights that it would change, and for recording that is too far behind.
- Evaluations come first: they have few rows, which must not stand at the end of a queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..dataflow.buffer.rows import Lease, Staleness
from ..dataflow.buffer.sample_buffer import SampleBuffer
from ..dataflow.column import RESPONSE_VERSIONS
from ..dataflow.errors import StalenessError
from ..dataflow.node import Node
from ..dataflow.operation import Shape
from .calls import Calls
from .graph_run import EvaluationRun, GraphRun, GraphRuns
from .group import Call, WorkerGroup, publishes_as_it_goes
from .own_groups import RECORDER, group_of
from .recording import Recording
from .request import NodeRequest, Request
from .schedule import OnePass, Share, Training
from .weight_sync import WeightSync


class Dispatcher:
    """Claims rows for nodes and requests the calls."""

    def __init__(
        self,
        schedule: Training,
        buffer: SampleBuffer,
        groups: Mapping[str, WorkerGroup],
        graph_runs: GraphRuns,
        weights: WeightSync,
        recording: Recording,
        calls: Calls,
    ) -> None:
        self._schedule = schedule
        self._one_pass = OnePass(overlaps=schedule.overlaps)
        self._buffer = buffer
        self._groups = groups
        self._graph_runs = graph_runs
        self._train = graph_runs.train
        self._weights = weights
        self._recording = recording
        self._calls = calls
        self._pools: dict[str, list[WorkerGroup]] = {}
        for group in groups.values():
            self._pools.setdefault(group.place.pool.name, []).append(group)

    @property
    def possible(self) -> bool:
        """Whether a node could begin something now."""
        if any(self._share(run, n, self._groups[group_of(n)]) for run in self._graph_runs for n in run.nodes):
            return True
        hurry = self._train.over
        return any(self._recording.is_due(run, n, hurry=hurry) for run in self._graph_runs for n in run.recorders)

    def dispatch(self) -> None:
        """Begin whatever can begin now.

        Raises:
            StalenessError: rows of an on-policy schedule are too old.
        """
        self.record(hurry=self._train.over)
        for graph_run in (*self._graph_runs.evaluations.values(), self._train):
            for node in graph_run.nodes:
                group = self._groups[group_of(node)]
                share = self._share(graph_run, node, group)
                if share is None:
                    continue
                if self._joins(node):
                    self._start_by_load(graph_run, node, group, share)
                else:
                    self._start(graph_run, node, group, share)

    def record(self, *, hurry: bool) -> None:
        """Have the recorder write what is over, if it has nothing else to do; in a hurry, less than a step, too."""
        recorder = self._groups.get(RECORDER)
        idle = recorder is None or not (recorder.busy or self._pool_is_taken(recorder))
        self._calls.queue(self._recording.requests(self._graph_runs, recorder, idle=idle, hurry=hurry))
        self._calls.submit()

    def _joins(self, node: Node) -> bool:
        """Whether calls of a node go on beside each other."""
        return node.operation.interruptible and self._schedule.overlaps

    def _share(self, graph_run: GraphRun, node: Node, group: WorkerGroup) -> Share | None:
        """What a node may begin with now; None: nothing."""
        if not group.is_free(to_join=self._joins(node)) or self._weights.holds_back(group):
            return None
        if self._pool_is_taken(group) or not group.replicas:
            return None
        if isinstance(graph_run, EvaluationRun):
            return self._one_pass.share(graph_run, node)
        if self._train.over:  # what was trained on is still observed
            return Share() if self._train.observes(node) and self._train.ledger.ready(node) else None
        if node.operation.updates and (self._is_evaluated(group) or self._recording.is_full(self._train)):
            return None
        return self._schedule.share(self._train, node, group.version)

    def _pool_is_taken(self, group: WorkerGroup) -> bool:
        """Whether another group on the same pool is busy: they take turns."""
        return any(other.busy for other in self._pools[group.place.pool.name] if other is not group)

    def _is_evaluated(self, group: WorkerGroup) -> bool:
        """Whether an update of this group would change weights that are evaluated. Where generation overlaps training, only
        evaluations that call the group itself are in the way."""
        pending = [e for e in self._graph_runs.evaluations.values() if e.pending]
        return any(not self._schedule.overlaps or group.name in e.graph.handles for e in pending)

    def _start_by_load(self, graph_run: GraphRun, node: Node, group: WorkerGroup, share: Share) -> None:
        """Give rows that are ready to the replicas that have least left to do."""
        rows = graph_run.ledger.ready(node) if share.max_rows is None else share.max_rows
        for replica, number in group.least_loaded(rows).items():
            self._start(graph_run, node, group, replace(share, max_rows=number), replica=replica)

    def _start(
        self, graph_run: GraphRun, node: Node, group: WorkerGroup, share: Share, *, replica: int | None = None
    ) -> None:
        updates = node.operation.updates
        lease = graph_run.ledger.claim(
            node,
            max_rows=share.max_rows,
            max_groups=share.max_groups,
            holder=group.name,
            # An update that was begun cannot be taken back: its group's own deadline ends the run.
            deadline_s=None if updates else self._buffer.config.lease_deadline_s,
            staleness=self._staleness(node, group) if graph_run is self._train else None,
            version=group.version if str(RESPONSE_VERSIONS) in node.writes else None,
        )
        if updates and graph_run is self._train:
            self._refuse_stale(node, group)
        if lease is None:
            return
        arguments: dict[str, Any] = {}
        if updates:
            self._train.taken[node.name] += lease.num_groups
            group.updating = share.last
            if node.operation.accumulates:
                arguments["last"] = share.last
        then = partial(self._ended, graph_run=graph_run)
        request = NodeRequest(
            group,
            node.name,
            arguments,
            None,
            then,
            ledger=graph_run.ledger,
            lease=lease,
            replica=replica,
            last=share.last,
        )
        self._calls.queue([request])
        self._calls.submit()

    def _staleness(self, node: Node, group: WorkerGroup) -> Staleness | None:
        """The bound of the schedule on every row that an update claims."""
        if not node.operation.updates or not self._weights.followers(group.name):
            return None  # the versions in the rows, if any, count some other group's updates
        bound = self._schedule.max_staleness
        return Staleness(group.version, bound, self._buffer.config.on_stale if bound else "wait")

    def _refuse_stale(self, node: Node, group: WorkerGroup) -> None:
        """Rows of an on-policy schedule that are too old end the run: they would wait for ever."""
        if self._schedule.max_staleness == 0 and self._train.ledger.held(node):
            raise StalenessError(
                f"{group.name!r} is at version {group.version}, but rows ready for its update were generated by "
                f"version {self._train.ledger.oldest_held(node)}; the schedule allows a staleness of 0. "
                f"Was a weight update skipped? Followers: {self._weights.followers(group.name)}"
            )

    def _ended(self, call: Call, graph_run: GraphRun) -> Iterable[Request]:
        """Finish the rows of a node's call; an update whose batch is complete publishes its weights."""
        node, lease, group = call.node, call.lease, call.group
        assert node is not None and lease is not None
        updates = node.operation.updates
        held = graph_run.ledger.holds(lease)
        # A call that lost its rows keeps what it had published, and so its metrics. Otherwise all of it is done, and measured, again.
        if held or publishes_as_it_goes(node):
            graph_run.take(lease, {f"{group.name}/{name}": metric for name, metric in call.merged_metrics().items()})
        if updates and call.last:
            group.updating = False
        if not held:
            return ()  # its deadline passed, or it was given up: its other rows are somebody else's
        self._finish(graph_run, node, lease)
        if not (updates and call.last):
            return ()
        group.version += 1
        self._buffer.note(f"version/{group.name}", group.version)
        return self._weights.publish(group.name)

    def _finish(self, graph_run: GraphRun, node: Node, lease: Lease) -> None:
        if not node.writes and node.operation.shape in (Shape.MAP, Shape.GROUP):
            graph_run.publish_nothing(lease)
        if not node.operation.updates:
            graph_run.ledger.finish(lease)
            return
        self._train.trains(lease)  # before its rows, once they are finished, are forgotten
        graph_run.ledger.finish(lease, step=self._train.step_under_way)
