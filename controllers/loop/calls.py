"""Calls: every call of a run, from request to end.

    queued ──> waiting for the devices of a shared pool ──> running ──last reply──> ended
      ^                                                                               │
      └───────────────────────────── requests that follow from it ────────────────────┘

Requests that follow from a reply are queued, and made on a later turn of the loop.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ...dataflow.buffer.sample_buffer import SampleBuffer
from ...dataflow.runs.directory import RunDirectory
from ..graph_run import GraphRuns, TrainingRun
from ..group import Call, UnderWay, WorkerGroup, gather_s
from ..recovery.failures import Failures
from ..request import CallRequest, NodeRequest, Then
from ..schedule import EvaluationRules, Training
from ..weight_sync import WeightSync
from .recording import Recording

# Device turns of groups that share the devices of a pool


@dataclass
class _Pool:
    holder: WorkerGroup | None = None
    """The group whose model is on the devices, or is being loaded."""
    changing: bool = False
    waiting: deque[CallRequest] = field(default_factory=deque)


class DeviceTurns:
    """Groups on one pool with GPUs take turns: the holder is offloaded before the next group is
    onloaded.

        free      ──request of b──────────────────> onloading b ──> held by b
        held by a ──request of b──> offloading a ──> onloading b ──> held by b

    Requests that need the devices wait for the change. Requests for one pool keep their order.
    """

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}

    def ask(self, request: CallRequest) -> list[CallRequest]:
        """Return the requests to make now: this one if its group holds the devices or needs none,
        or the offload that it waits for."""
        place = request.group.place.pool
        if not request.on_device or not place.gpus:
            return [request]
        pool = self._pools.setdefault(place.name, _Pool())
        pool.waiting.append(request)
        return [] if pool.changing else self._next(pool)

    def _next(self, pool: _Pool) -> list[CallRequest]:
        ready: list[CallRequest] = []
        # Serve the holder first; then hand the devices to the next group in the queue.
        while pool.waiting and pool.waiting[0].group is pool.holder:
            ready.append(replace(pool.waiting.popleft(), on_device=False))
        if pool.waiting:
            before, pool.holder, pool.changing = pool.holder, pool.waiting[0].group, True
            onload = CallRequest(pool.holder, "onload", then=lambda call: self._onloaded(pool, call))
            ready.append(CallRequest(before, "offload", then=lambda call: [onload]) if before else onload)
        return ready

    def _onloaded(self, pool: _Pool, call: Call) -> Iterable[CallRequest]:
        pool.changing = False
        return self._next(pool)


# Calls

MAX_REST_S = 0.5
"""[s] Longest rest of the driver between two turns."""
MOST_RANKS = 64
"""[ranks] Number of ranks per call in the timeline; for larger calls, the slowest ones."""


class BusyTimes:
    """Time that each group had a running call. Overlapping calls count once.

    >>> times = BusyTimes()
    >>> times.add("actor", 1.0, 3.0), times.add("actor", 2.0, 4.0)
    (None, None)
    >>> times.take("actor", 0.0, 10.0, begun=[9.0]), times.take("actor", 10.0, 20.0)
    (4.0, 0.0)
    """

    def __init__(self) -> None:
        self._spans: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        """Group -> start and end of its ended calls since the last `take`."""

    def add(self, group: str, start: float, end: float) -> None:
        self._spans[group].append((start, end))

    def take(self, group: str, since: float, now: float, begun: Iterable[float] = ()) -> float:
        """Return and reset the seconds that the group had a running call.

        Args:
            since: Earliest time that counts.
            begun: Start times of calls that are still running.
        """
        # Merge overlapping spans from left to right.
        spans = sorted([*self._spans.pop(group, ()), *((start, now) for start in begun)])
        seconds, counted = 0.0, since
        for start, end in spans:
            seconds += max(0.0, end - max(start, counted))
            counted = max(counted, end)
        return seconds


@dataclass(frozen=True)
class CallTimes:
    """The run's timeline: start and end of each call.

    Args:
        directory: Directory of the run.
        train: Training graph; a call belongs to the step that is current when it ends.
        clock: [s] Clock of the run.
        started: Start of the run on this clock.
    """

    directory: RunDirectory
    train: TrainingRun
    clock: Callable[[], float]
    started: float
    busy: BusyTimes = field(default_factory=BusyTimes)

    def begin(self, call: Call) -> None:
        call.started = self.clock()

    def end(self, call: Call) -> None:
        now = self.clock()
        self.busy.add(call.group.name, call.started, now)
        self.directory.add_call(
            step=self.train.step_under_way,
            graph=call.ledger.name if call.ledger else "",
            group=call.group.name,
            node=call.node.name if call.node else call.method,
            start_s=call.started - self.started,
            end_s=now - self.started,
            worker_s=max(call.seconds.values(), default=0.0),
            rows=call.lease.num_rows if call.lease else 0,
            tokens=int(call.lease.num_tokens.sum()) if call.lease else 0,
            last=call.last,
            by_rank=self._by_rank(call),
        )

    def _by_rank(self, call: Call) -> list[dict[str, float]] | None:
        if len(call.answered) < 2:
            return None
        ranks = sorted(call.answered, key=call.answered.__getitem__)[-MOST_RANKS:]
        return [
            {"rank": rank, "end_s": call.answered[rank] - self.started, "worker_s": call.seconds[rank]}
            for rank in ranks
        ]


class Calls:
    """Queued requests and running calls.

    Args:
        groups: Worker groups, by name.
        failures: Counts the calls that ranks have answered.
        times: Records when calls start and end.
        commit: Writes the log, which must be on disk before work on rows starts.
    """

    def __init__(
        self,
        groups: Mapping[str, WorkerGroup],
        failures: Failures,
        times: CallTimes,
        commit: Callable[[], None],
    ) -> None:
        self._groups = groups
        self._failures = failures
        self._times = times
        self._commit = commit
        self._devices = DeviceTurns()
        self._queue: deque[CallRequest] = deque()
        self._then: dict[Call, Then] = {}
        self.under_way = UnderWay()
        self._changed = True
        """A call was made or ended since the last `take_changed`."""
        self._committed = False
        """The log on disk covers the requests that are being made."""

    def take_idle_shares(self, since: float, now: float) -> dict[str, float]:
        """Share of the time since the last step during which each group had no running call."""
        begun: defaultdict[str, list[float]] = defaultdict(list)
        for call in self.under_way:
            begun[call.group.name].append(call.started)
        busy_s = {name: self._times.busy.take(name, since, now, begun[name]) for name in self._groups}
        return (
            {name: max(0.0, 1 - seconds / (now - since)) for name, seconds in busy_s.items()}
            if now > since
            else {}
        )

    @property
    def now(self) -> float:
        return self._times.clock()

    @property
    def at_work(self) -> UnderWay:
        """Running calls, except calls on ranks that get no rows, such as starting processes."""
        groups = self._groups.values()
        return (
            UnderWay(c for g in groups for c in g.at_work)
            if any(g.out for g in groups)
            else self.under_way
        )

    @property
    def rest_s(self) -> float:
        """[s] How long the driver may rest so that more rows arrive; 0 for few ranks."""
        return min(MAX_REST_S, gather_s(self.under_way.ranks))

    @property
    def idle(self) -> bool:
        return not self._queue and not self.at_work

    @property
    def beside_the_graph(self) -> bool:
        """Whether a call without a node, such as a weight transfer, is queued or running."""
        return bool(self._queue) or self.at_work.beside_the_graph > 0

    def take_changed(self) -> bool:
        """Whether a call was made or ended since the last call of this method."""
        changed, self._changed = self._changed, False
        return changed

    def queue(self, requests: Iterable[CallRequest]) -> None:
        self._queue.extend(requests)

    def make(self) -> None:
        """Make every queued call that need not wait for devices.

        Raises:
            UserError: A worker does not have the method, or rejects the arguments.
        """
        self._committed = False
        while self._queue:
            for request in self._devices.ask(self._queue.popleft()):
                self._make(request)

    def _make(self, request: CallRequest) -> None:
        # The log must be on disk before ranks work on rows, so that a resumed run knows of them.
        if isinstance(request, NodeRequest) and not self._committed:
            self._commit()
            self._committed = True
        self._changed = True
        call = request.call()
        self._failures.called(call)
        self._times.begin(call)
        call.group.watch(call)
        self.under_way.add(call)
        self._then[call] = request.then
        if call.done:  # no rank got any rows
            self.end(call)

    def end(self, call: Call) -> None:
        """End a call after its last reply, and queue the requests that follow."""
        self._changed = True
        self._committed = False
        call.group.forget(call)
        self.under_way.remove(call)
        self._failures.answered(call)
        self._times.end(call)
        self.queue(self._then.pop(call)(call))

    def end_lost(self) -> None:
        """End calls that lost their last waiting ranks."""
        for call in [c for c in self.under_way if c.done]:
            self.end(call)


# Parts that the steps of the loop (admit, dispatch, close) work on


@dataclass(frozen=True)
class RunParts:
    """The parts of a run. Only the steps of the loop hold this record; the parts do not."""

    schedule: Training
    buffer: SampleBuffer
    groups: Mapping[str, WorkerGroup]
    graph_runs: GraphRuns
    weights: WeightSync
    recording: Recording
    calls: Calls
    evaluation_rules: EvaluationRules

    @property
    def train(self) -> TrainingRun:
        """The training graph of the run."""
        return self.graph_runs.train
