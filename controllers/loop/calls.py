"""Calls: every call of a run, from the request to its end.

    queued ──> waiting for the devices of a shared pool ──> under way ──last reply──> ended
      ^                                                                                 │
      └──────────────────────────── requests that follow from it ──────────────────────┘

Nothing that follows from a reply is done while replies are taken: it is queued, and made on a later turn of the loop.
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

# Device turns
#
# DeviceTurns: which group has its model on the devices of a pool that several groups share.


@dataclass
class _Pool:
    holder: WorkerGroup | None = None
    """The group whose model is on the devices, or will be when the change is over."""
    changing: bool = False
    waiting: deque[CallRequest] = field(default_factory=deque)


class DeviceTurns:
    """Groups on one pool with GPUs take turns: the holder is offloaded before the next group is onloaded.

        nobody ──request of b──────────────────────> onloading b ──> held by b
        held by a ──request of b──> offloading a ──> onloading b ──> held by b

    A request that needs the devices waits while they change hands. Requests of one pool are made in the order in which they came.
    """

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}

    def ask(self, request: CallRequest) -> list[CallRequest]:
        """Requests that may be made now: this one, if its group has the devices or needs none, or the change that it waits for."""
        place = request.group.place.pool
        if not request.on_device or not place.gpus:
            return [request]
        pool = self._pools.setdefault(place.name, _Pool())
        pool.waiting.append(request)
        return [] if pool.changing else self._next(pool)

    def _next(self, pool: _Pool) -> list[CallRequest]:
        ready: list[CallRequest] = []
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


MAX_REST_S = 0.5
"""Most seconds for which the driver rests."""
MOST_RANKS = 64
"""Ranks of a call that the timeline tells apart: of more, those that answered last."""


class BusyTimes:
    """For how long each group had a call under way. Calls that overlap count once.

    >>> times = BusyTimes()
    >>> times.add("actor", 1.0, 3.0), times.add("actor", 2.0, 4.0)
    (None, None)
    >>> times.take("actor", 0.0, 10.0, begun=[9.0]), times.take("actor", 10.0, 20.0)
    (4.0, 0.0)
    """

    def __init__(self) -> None:
        self._spans: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        """Group -> start and end of each of its calls that has ended since it was asked last."""

    def add(self, group: str, start: float, end: float) -> None:
        """A call of the group has ended."""
        self._spans[group].append((start, end))

    def take(self, group: str, since: float, now: float, begun: Iterable[float] = ()) -> float:
        """Seconds in which the group had a call under way.

        Args:
            since: what was before counts no more.
            begun: when its calls that are still under way began.
        """
        spans = sorted([*self._spans.pop(group, ()), *((start, now) for start in begun)])
        seconds, counted = 0.0, since
        for start, end in spans:
            seconds += max(0.0, end - max(start, counted))
            counted = max(counted, end)
        return seconds


@dataclass(frozen=True)
class CallTimes:
    """When calls begin and end: the run's timeline.

    Args:
        directory: where it is written.
        train: the training graph; a call belongs to the step in which it ends.
        clock: of the run, in seconds.
        started: when the run started, by this clock.
    """

    directory: RunDirectory
    train: TrainingRun
    clock: Callable[[], float]
    started: float
    busy: BusyTimes = field(default_factory=BusyTimes)
    """Of each group, since the last step was closed."""

    def begin(self, call: Call) -> None:
        """Note that a call begins now."""
        call.started = self.clock()

    def end(self, call: Call) -> None:
        """Note a call that ends now in the timeline."""
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
        """When each rank of a call had answered; None where there is only one."""
        if len(call.answered) < 2:
            return None
        ranks = sorted(call.answered, key=call.answered.__getitem__)[-MOST_RANKS:]
        return [
            {"rank": rank, "end_s": call.answered[rank] - self.started, "worker_s": call.seconds[rank]}
            for rank in ranks
        ]


class Calls:
    """The requests that are queued, and the calls that are under way.

    Args:
        groups: the worker groups of the run, by name.
        failures: counts which calls its ranks have answered.
        times: notes when each call begins and ends.
        commit: writes the log, which is ahead of the work on rows.
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
        """A call was made or has ended since that was asked last."""
        self._committed = False
        """The log is on disk as far as the requests that are being made rely on it."""

    def take_idle_shares(self, since: float, now: float) -> dict[str, float]:
        """Share of the time since the last step was closed in which each group had no call under way.

        Args:
            since: when that was, by the run's clock.
            now: by the same.
        """
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
        """By the run's clock."""
        return self._times.clock()

    @property
    def at_work(self) -> UnderWay:
        """Calls under way, except those on ranks that get no rows meanwhile: nobody waits for a process that is not up."""
        groups = self._groups.values()
        return (
            UnderWay(c for g in groups for c in g.at_work)
            if any(g.out for g in groups)
            else self.under_way
        )

    @property
    def rest_s(self) -> float:
        """Seconds for which rows that can wait may gather before they are taken: none where few ranks bring them."""
        return min(MAX_REST_S, gather_s(self.under_way.ranks))

    @property
    def idle(self) -> bool:
        """Whether no call is queued or at work."""
        return not self._queue and not self.at_work

    @property
    def beside_the_graph(self) -> bool:
        """Whether a call that belongs to no node, such as a weight sync, is queued or under way."""
        return bool(self._queue) or self.at_work.beside_the_graph > 0

    def take_changed(self) -> bool:
        """Whether a call was made or has ended since this was asked last."""
        changed, self._changed = self._changed, False
        return changed

    def queue(self, requests: Iterable[CallRequest]) -> None:
        """Have these calls made when the loop comes to them."""
        self._queue.extend(requests)

    def make(self) -> None:
        """Make every call that is queued and needs not wait for devices.

        Raises:
            UserError: a worker has no such method, or refuses the arguments.
        """
        self._committed = False
        while self._queue:
            for request in self._devices.ask(self._queue.popleft()):
                self._make(request)

    def _make(self, request: CallRequest) -> None:
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
        if call.done:  # no rank had anything to do
            self.end(call)

    def end(self, call: Call) -> None:
        """The last reply of a call has come; what follows from it is queued."""
        self._changed = True
        self._committed = False
        call.group.forget(call)
        self.under_way.remove(call)
        self._failures.answered(call)
        self._times.end(call)
        self.queue(self._then.pop(call)(call))

    def end_lost(self) -> None:
        """End calls whose last ranks were lost."""
        for call in [c for c in self.under_way if c.done]:
            self.end(call)


# Run parts
#
# RunParts: what the verbs of a run's loop (admit, dispatch, close) work on.


@dataclass(frozen=True)
class RunParts:
    """The parts of one life of a run. No part holds this record: the verbs do."""

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
