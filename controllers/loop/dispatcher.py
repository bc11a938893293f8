"""Dispatcher: gives idle worker groups the rows that are ready for their nodes.

- A busy group starts only interruptible calls: generation that overlaps training, or that samples
  with other policies.
- A group starts nothing while another group on its pool is busy.
- Before an update claims groups, the dispatcher sets aside those that are too old. The other groups
  then show whether the batch is complete.
- An update waits for evaluations of the weights that it would change, and for recording that has
  fallen behind.
- If generation overlaps training, evaluation rows go first, because they are few. Otherwise they go
  last, on groups that training leaves idle.
- Single rows wait briefly for others, so that calls have more rows (`_Gathering`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from ...dataflow.buffer.sample_buffer import SampleBuffer
from ...dataflow.buffer.staleness import Staleness
from ...dataflow.column import RESPONSE_VERSIONS
from ...dataflow.errors import StalenessError
from ...dataflow.graph import Node
from ...dataflow.metric_names import written_name
from ...dataflow.metrics import merge
from ...dataflow.operation import Shape
from ...dataflow.runs.samples import sample_file_name
from ..graph_run import EvaluationRun, GraphRun, GraphRuns
from ..group import MANY_RANKS, Call, CallRequest, UnderWay, WorkerGroup, gather_s, publishes_as_it_goes
from ..own_groups import RECORDER, group_of
from ..run_spec import RunHistory, RunSpec
from ..schedule import Share, share_of_evaluation
from ..weight_sync import WeightSync
from .calls import Calls
from .recording import MAX_BEHIND, is_due, recorded_steps

# Gathering: batching delay of rows that arrive one by one


MAX_WAIT_S = 0.25
"""[s] Maximum batching delay for few ranks; `gather_s` may be longer."""
MAX_ROWS = 32
"""[rows] With this many ready rows per replica, a call starts at once."""
CLOCK_S = 1e-6
"""[s] Ignore shorter waits, because a simulated clock may have rounding errors."""


class _Gathering:
    """Decides how long ready rows wait for more rows before their node is called.

    - Only rows for map and filter nodes wait, until their group is complete, because later nodes
      may need complete groups. With MANY_RANKS or more at work, complete groups wait as well.
    - The delay is at most MAX_WAIT_S, or `gather_s` for many ranks, including the time while the
      worker group is busy.
    - Rows that a quorum may need do not wait.
    - Rows do not wait if no call of the graph is running, because no more would come.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[tuple[str, str], float] = {}
        """(graph, node) -> end of the delay of its ready rows."""

    @property
    def next_end_s(self) -> float | None:
        """End of the next delay on the run's clock, or None."""
        now = self._clock()
        return min((until for until in self._until.values() if until - now > CLOCK_S), default=None)

    def look(self, graph_run: GraphRun, node: Node, under_way: UnderWay) -> None:
        """Start the delay of a node that cannot start now; clear it if no rows are ready."""
        if not gathers(node):
            return
        if graph_run.ledger.readiness.ready(node):
            self._until.setdefault((graph_run.name, node.name), self._clock() + _wait_s(under_way))
        else:
            self._until.pop((graph_run.name, node.name), None)

    def holds(self, graph_run: GraphRun, node: Node, replicas: int, under_way: UnderWay) -> bool:
        """Whether the ready rows of a node should wait for more."""
        if not gathers(node):
            return False
        key, ledger, now = (graph_run.name, node.name), graph_run.ledger, self._clock()
        left_s = self._until.setdefault(key, now + _wait_s(under_way)) - now
        if (
            left_s <= CLOCK_S
            or ledger.readiness.ready(node) >= MAX_ROWS * replicas
            or ledger.live.is_awaited(node)
        ):
            return False
        if not any(call.ledger is ledger for call in under_way):
            return False
        return under_way.ranks >= MANY_RANKS or ledger.live.lacks_siblings(node)

    def forget(self, graph_run: GraphRun, node: Node) -> None:
        self._until.pop((graph_run.name, node.name), None)


def _wait_s(under_way: UnderWay) -> float:
    return max(MAX_WAIT_S, gather_s(under_way.ranks))


def gathers(node: Node) -> bool:
    return not node.operation.takes_groups and node.operation.shape in (Shape.MAP, Shape.FILTER)


# Dispatcher


class Dispatcher:
    """Claims rows for nodes and requests the calls."""

    def __init__(
        self,
        spec: RunSpec,
        history: RunHistory,
        buffer: SampleBuffer,
        graph_runs: GraphRuns,
        weights: WeightSync,
        calls: Calls,
        samples: Path,
    ) -> None:
        self._schedule, self._record_every = spec.schedule, spec.record_every
        self._progress = history.progress
        self._samples = samples
        self._buffer = buffer
        self._graph_runs, self._train = graph_runs, graph_runs.train
        self._evaluations = graph_runs.evaluations.values()
        self._groups = calls.groups
        self._weights = weights
        self._calls = calls
        self._gathering = _Gathering(spec.backend.clock)
        self._seen = self._ready_rows()
        """Graph -> ready rows of each node after the last dispatch."""
        self._pools: dict[str, list[WorkerGroup]] = {}
        for group in self._groups.values():
            self._pools.setdefault(group.place.pool.name, []).append(group)

    @property
    def next_due_s(self) -> float | None:
        """[s] End of the next delay, when a node can start, on the run's clock, or None."""
        return self._gathering.next_end_s

    @property
    def possible(self) -> bool:
        each, hurry = self._schedule.prompts_per_step, self._train.over
        for run in self._graph_runs:
            if any(self._share(run, node, self._groups[group_of(node)]) for node in run.nodes):
                return True
            if any(is_due(run, node, each, hurry=hurry) for node in run.recorders):
                return True
        return False

    def dispatch(self) -> None:
        """Start every node that can start now.

        Raises:
            StalenessError: Rows of an on-policy schedule are too old.
        """
        self.record(hurry=self._train.over)
        train, under_way = self._train, self._calls.under_way
        first = self._schedule.overlaps
        for graph_run in (*self._evaluations, train) if first else (train, *self._evaluations):
            for node in graph_run.nodes:
                group = self._groups[group_of(node)]
                if graph_run is train and node.operation.updates and not train.over:
                    self._set_too_old_aside(node, group)
                share = self._share(graph_run, node, group)
                if share is None:
                    self._gathering.look(graph_run, node, under_way)
                elif not self._gathering.holds(graph_run, node, len(group.replicas), under_way):
                    self._gathering.forget(graph_run, node)
                    self._start(graph_run, node, group, share)
                    # Now, so that the next node finds this group busy.
                    self._calls.make_calls()
        self._seen = self._ready_rows()

    def _ready_rows(self) -> dict[str, list[int]]:
        return {run.name: list(run.ledger.readiness.num_rows) for run in self._graph_runs}

    def can_wait(self, graph_run: GraphRun) -> bool:
        """Whether no node can start with rows that became ready since the last dispatch."""
        seen, under_way = self._seen[graph_run.name], self._calls.under_way
        for i, rows in enumerate(graph_run.ledger.readiness.num_rows):
            if rows == seen[i]:
                continue
            node = graph_run.graph.nodes[i]
            if not gathers(node):
                return False
            group = self._groups[group_of(node)]
            if self._share(graph_run, node, group) is None:
                self._gathering.look(graph_run, node, under_way)
            elif not self._gathering.holds(graph_run, node, len(group.replicas), under_way):
                return False
        return True

    def record(self, *, hurry: bool) -> None:
        """Let an idle recorder write finished rows; with `hurry`, also less than a step's."""
        recorder, each = self._groups.get(RECORDER), self._schedule.prompts_per_step
        idle = recorder is None or not (recorder.busy or self._pool_is_taken(recorder))
        for graph_run in self._graph_runs if idle else ():
            for node in graph_run.recorders:
                if is_due(graph_run, node, each, hurry=hurry) and self._record(
                    graph_run, node, recorder
                ):
                    return self._calls.make_calls()
        self._calls.make_calls()

    def _record(self, graph_run: GraphRun, node: Node, recorder: WorkerGroup | None) -> bool:
        """Claim rows and request a call that writes them. Return False if none need writing."""
        ledger = graph_run.ledger
        deadline_s = self._buffer.config.lease_deadline_s if recorder else None
        lease = ledger.claim(node, holder=RECORDER, deadline_s=deadline_s)
        if lease is None:
            return False
        steps = recorded_steps(graph_run, lease, self._record_every)
        if recorder is None or not steps:
            graph_run.finish_rows(lease)
            return False

        def written(call: Call) -> Iterable[CallRequest]:
            if ledger.leases.holds(lease):
                graph_run.finish_rows(lease)
                if graph_run is self._train:
                    step, ranks = max(steps.values()), range(len(recorder.mesh))
                    names = (sample_file_name(graph_run.name, step, lease.token, r) for r in ranks)
                    self._progress.recorded(step, [self._samples / name for name in names])
            return ()

        where = {"folder": self._samples, "graph": graph_run.name, "token": lease.token, "steps": steps}
        request = CallRequest(
            recorder, node.name, where, then=written, on_device=True, ledger=ledger, lease=lease
        )
        self._calls.queue([request])
        return True

    def _joins(self, node: Node) -> bool:
        """Whether several calls of a node may run at the same time."""
        return node.operation.interruptible and self._schedule.overlaps

    def _joins_others(self, graph_run: GraphRun, node: Node, group: WorkerGroup) -> bool:
        """Whether a call of a node may join the calls of other policies on its group."""
        if not (node.operation.interruptible and node.policy):
            return False
        return all(c.ledger is graph_run.ledger and c.node and c.node.policy for c in group.at_work)

    def _share(self, graph_run: GraphRun, node: Node, group: WorkerGroup) -> Share | None:
        if not graph_run.ledger.readiness.ready(node):
            return None
        joins = self._joins(node) or self._joins_others(graph_run, node, group)
        if not group.is_free(to_join=joins):
            return None
        # The new weights wait for the evaluation, so the evaluation must not wait for them.
        waits_for_it = isinstance(graph_run, EvaluationRun) and not self._schedule.overlaps
        if self._weights.holds_back(group) and not waits_for_it:
            return None
        # Without replicas, all ranks are starting or have no weights yet.
        if self._pool_is_taken(group) or not group.replicas:
            return None
        if isinstance(graph_run, EvaluationRun):
            return share_of_evaluation(graph_run, node, overlaps=self._schedule.overlaps)
        train = self._train
        if train.over:  # rows that were trained on are still observed
            return Share() if train.observes(node) else None
        most_behind = MAX_BEHIND * self._schedule.prompts_per_step
        is_behind = train.ledger.live.groups_behind >= most_behind
        if node.operation.updates and (is_behind or self._is_evaluated(group)):
            return None
        share = self._schedule.share(train, node, group.version, len(group.replicas))
        # Earlier parts only accumulate gradients; the last one changes the weights.
        if share is not None and share.last and node.operation.updates and self._weights.is_read(group):
            return None
        return share

    def _pool_is_taken(self, group: WorkerGroup) -> bool:
        return any(other.busy for other in self._pools[group.place.pool.name] if other is not group)

    def _is_evaluated(self, group: WorkerGroup) -> bool:
        """Whether an update of the group would change evaluated weights. The followers' weights do
        not change, so evaluations on followers do not count."""
        return any(e.pending and group.name in e.graph.handles for e in self._evaluations)

    def _start(self, graph_run: GraphRun, node: Node, group: WorkerGroup, share: Share) -> None:
        """Claim rows and request a call, on the least loaded replicas if calls may overlap."""
        updates = node.operation.updates
        lease = graph_run.ledger.claim(
            node,
            max_rows=share.max_rows,
            max_groups=share.max_groups,
            holder=group.name,
            # A started update cannot be undone, so the call's timeout ends the run instead.
            deadline_s=None if updates else self._buffer.config.lease_deadline_s,
            staleness=self._staleness(node, group) if graph_run is self._train else None,
            version=group.version_of(node.policy) if self._ages_from_the_start(node) else None,
        )
        if lease is None:
            return
        graph_run.forecast(lease)
        arguments: dict[str, Any] = {}
        last = share.last
        if updates:
            # A claim may find fewer groups than it may take.
            last &= share.max_groups in (None, lease.num_groups)
            self._train.taken[node.name] += lease.num_groups
            group.updating = last
            if node.operation.accumulates:
                arguments["last"] = last
        request = CallRequest(
            group,
            node.name,
            arguments,
            then=partial(self._ended, graph_run=graph_run),
            on_device=True,
            ledger=graph_run.ledger,
            lease=lease,
            by_load=group.least_loaded(lease.num_rows) if self._joins(node) else None,
            last=last,
        )
        self._calls.queue([request])

    def _ages_from_the_start(self, node: Node) -> bool:
        """Whether the rows that a node generates have the version at its claim, if not a newer one.
        Otherwise, their version is unknown until they are published."""
        return str(RESPONSE_VERSIONS) in node.writes and self._schedule.version_of == "oldest_token"

    def _staleness(self, node: Node, group: WorkerGroup) -> Staleness | None:
        """Return the staleness limit for rows that an update claims, or None."""
        if not node.operation.updates or not self._weights.followers(group.name):
            return None  # versions in the rows count updates of another group
        bound, fate = self._schedule.max_staleness, self._buffer.config.on_stale
        if bound and fate == "wait":
            fate = "requeue"  # a row never gets younger, so "wait" would never end
        return Staleness(group.version, bound, fate if bound else "wait")

    def _set_too_old_aside(self, node: Node, group: WorkerGroup) -> None:
        staleness, ledger = self._staleness(node, group), self._train.ledger
        if staleness is None:
            return
        number = ledger.set_too_old_aside(node, staleness)
        if number and staleness.bound and self._buffer.config.on_stale == "wait":
            self._progress.say(
                f"{number} groups are too old for {node.name!r} (version {group.version}, max_staleness={staleness.bound}): "
                "their prompts are issued again"
            )
        if not staleness.bound and ledger.readiness.too_old(node):
            raise StalenessError(
                f"{group.name!r} is at version {group.version}, but rows ready for its update were generated by "
                f"version {ledger.live.oldest_too_old(node)}; the schedule allows a staleness of 0. "
                f"Was a weight update skipped? Followers: {self._weights.followers(group.name)}"
            )

    def _ended(self, call: Call, graph_run: GraphRun) -> Iterable[CallRequest]:
        node, lease, group = call.node, call.lease, call.group
        assert node is not None and lease is not None
        completes = node.operation.updates and call.last
        held = graph_run.ledger.leases.holds(lease)
        # Without the lease, metrics count only if published rows do; other rows are measured again.
        if held or publishes_as_it_goes(node):
            measured = merge(call.metrics)
            graph_run.add_metrics(
                lease, {written_name(group.name, name): metric for name, metric in measured.items()}
            )
        if completes:
            group.updating = False
        if not held:
            return ()  # the rows belong to another lease
        graph_run.finish_rows(lease)
        if not completes:
            return ()
        group.version += 1
        self._buffer.note(f"version/{group.name}", group.version)
        return self._weights.publish(group.name)
