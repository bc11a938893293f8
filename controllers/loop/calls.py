"""Calls: manages a run's calls, from request to last reply.

    queued ──> waiting for the devices of a shared pool ──> running ──last reply──> ended
      ^                                                                               │
      └────────────────────── requests that follow from replies ──────────────────────┘

Requests that follow from a reply wait for a later turn of the loop.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from ...dataflow.buffer.leases import Published, Spread, Written
from ...dataflow.buffer.ledger import Ledger
from ...dataflow.buffer.sample_buffer import SampleBuffer
from ...dataflow.buffer.segments import Segment
from ...dataflow.graph import Node
from ...dataflow.runs.directory import RunDirectory
from ..backends.backend import Event
from ..graph_run import GraphRuns
from ..group import Call, CallRequest, Then, UnderWay, WorkerGroup, gather_s
from ..ranks.tasks import Reply
from ..recovery.failures import Failures
from ..recovery.saving import Saving
from ..run_spec import RunHistory, RunSpec
from ..weight_sync import WeightSync
from .migration import Migration
from .throughput import Throughput

# Device turns of groups that share the devices of a pool


@dataclass
class _Pool:
    holder: WorkerGroup | None = None
    """The group whose model is on the devices or being loaded."""
    changing: bool = False
    waiting: deque[CallRequest] = field(default_factory=deque)


class _DeviceTurns:
    """Lets groups on a pool with GPUs take turns: the holder is offloaded before the next group is
    onloaded.

        free      ──request of b──────────────────> onloading b ──> held by b
        held by a ──request of b──> offloading a ──> onloading b ──> held by b

    Requests that need the devices wait for the change, and keep their order.

    Args:
        weights: Knows whether a group that is offloaded may discard its weights.
        partners: Group -> groups on the same pool that work together with it, such as environments
            with a rollout. They have their turn together.
    """

    def __init__(
        self, weights: WeightSync, partners: Mapping[str, Sequence[WorkerGroup]] = MappingProxyType({})
    ) -> None:
        self._weights = weights
        self._partners = partners
        self._pools: dict[str, _Pool] = {}

    def ask(self, request: CallRequest) -> list[CallRequest]:
        """Return the requests to make now: this one if its group holds the devices or needs none,
        otherwise the one that begins to hand them over, if any."""
        place = request.group.place.pool
        if not request.on_device or not place.gpus:
            return [request]
        pool = self._pools.setdefault(place.name, _Pool())
        pool.waiting.append(request)
        return [] if pool.changing else self._next(pool)

    def _next(self, pool: _Pool) -> list[CallRequest]:
        ready: list[CallRequest] = []
        # Serve the holder first, then hand over the devices.
        while pool.waiting and pool.waiting[0].group is pool.holder:
            # `ask` must not queue the request again.
            ready.append(replace(pool.waiting.popleft(), on_device=False))
        if pool.waiting:
            before, pool.holder, pool.changing = pool.holder, pool.waiting[0].group, True
            changes: list[CallRequest] = []
            if before is not None:
                handle, arguments = before.handle, {}
                if handle.worker_class.discards_weights(handle.config) and self._weights.replaces(
                    before, pool.waiting[0]
                ):
                    arguments = {"discard_weights": True}
                changes.append(CallRequest(before, "offload", arguments))
                changes += [CallRequest(one, "offload") for one in self._partners.get(before.name, ())]
            now = [pool.holder, *self._partners.get(pool.holder.name, ())]
            changes += [CallRequest(one, "onload") for one in now]
            ready.append(_one_after_another(changes, lambda call: self._onloaded(pool)))
        return ready

    def _onloaded(self, pool: _Pool) -> list[CallRequest]:
        pool.changing = False
        return self._next(pool)


def _partners(nodes: Iterable[Node], groups: Mapping[str, WorkerGroup]) -> dict[str, list[WorkerGroup]]:
    """Return group -> groups on the same pool that its nodes use."""
    found: dict[str, list[WorkerGroup]] = {}
    for node in nodes:
        for other in [groups[name] for name in node.uses]:
            own = groups.get(node.group or "")
            if own is not None and own.place.pool.name == other.place.pool.name:
                found.setdefault(own.name, [])
                found[own.name] += [other] if other not in found[own.name] else []
    return found


def _one_after_another(requests: Sequence[CallRequest], then: Then) -> CallRequest:
    """Return the first of these requests. Each makes the next one, and the last one does `then`."""
    *earlier, last = requests
    made = replace(last, then=then)
    for request in reversed(earlier):
        made = replace(request, then=lambda call, made=made: [made])
    return made


def busy_s(spans: Iterable[tuple[float, float]], since: float) -> float:
    """Return for how long, after `since`, at least one call was running.

    >>> busy_s([(2.0, 4.0), (1.0, 3.0), (9.0, 10.0)], 0.0)
    4.0
    """
    seconds, counted = 0.0, since
    for start, end in sorted(spans):
        seconds += max(0.0, end - max(start, counted))
        counted = max(counted, end)
    return seconds


MAX_REST_S = 0.5
"""[s] Longest pause between two turns."""
MOST_RANKS = 64
"""[ranks] Maximum number of ranks per call in the timeline, which keeps the slowest."""


class Calls:
    """Queues requests, makes their calls, and handles the replies."""

    def __init__(
        self,
        spec: RunSpec,
        history: RunHistory,
        directory: RunDirectory,
        buffer: SampleBuffer,
        groups: Mapping[str, WorkerGroup],
        graph_runs: GraphRuns,
        failures: Failures,
        saving: Saving,
        weights: WeightSync,
        started: float,
    ) -> None:
        self._backend, self._clock, self._started = spec.backend, spec.backend.clock, started
        self._disk = history.disk
        self._directory = directory
        self._buffer = buffer
        self.groups = groups
        self._graph_runs = graph_runs
        self._failures = failures
        self._saving = saving
        nodes = [node for run in graph_runs for node in run.graph.nodes]
        self._devices = _DeviceTurns(weights, _partners(nodes, groups))
        self._migration = Migration(on=spec.schedule.migrates)
        self._queue: deque[CallRequest] = deque()
        self._then: dict[Call, Then] = {}
        self.under_way = UnderWay()
        self._spans: defaultdict[str, list[tuple[float, float, bool]]] = defaultdict(list)
        """Group -> (start, end, whether it had rows) of calls that ended since `take_busy_s`."""
        self.throughput = Throughput()
        self._changed = True
        self._committed = False
        """Whether the log on disk covers calls that are being made."""

    @property
    def at_work(self) -> UnderWay:
        """Running calls, except those whose ranks are all in `WorkerGroup.out`."""
        groups = self.groups.values()
        if any(g.out for g in groups):
            return UnderWay(c for g in groups for c in g.at_work)
        return self.under_way

    @property
    def rest_s(self) -> float:
        """[s] Pause that gives the driver more rows at once; 0 for few ranks."""
        return min(MAX_REST_S, gather_s(self.under_way.ranks))

    @property
    def idle(self) -> bool:
        return not self._queue and not self.at_work

    @property
    def beside_the_graph(self) -> bool:
        """Whether a call without a node is queued or running."""
        return bool(self._queue) or self.at_work.beside_the_graph > 0

    def take_changed(self) -> bool:
        changed, self._changed = self._changed, False
        return changed

    def take_busy_s(self, since: float, now: float) -> dict[str, tuple[float, float]]:
        """Return group -> seconds with a running call after `since`, and seconds with one on rows."""
        spans, self._spans = self._spans, defaultdict(list)
        for call in self.under_way:
            spans[call.group.name].append((call.started, now, call.node is not None))
        return {
            name: (
                busy_s(((start, end) for start, end, _ in own), since),
                busy_s(((start, end) for start, end, has_rows in own if has_rows), since),
            )
            for name, own in ((name, spans[name]) for name in self.groups)
        }

    # Requests

    def queue(self, requests: Iterable[CallRequest]) -> None:
        self._queue.extend(requests)

    def make_calls(self) -> None:
        """Make queued calls that need not wait for devices."""
        self._committed = False
        while self._queue:
            for request in self._devices.ask(self._queue.popleft()):
                self._make(request)

    def _make(self, request: CallRequest) -> None:
        # The log must be on disk first, so that a resumed run knows of these rows.
        if request.lease is not None and not self._committed:
            self.commit()
            self._committed = True
        self._changed = True
        call = request.make()
        self._failures.called(call)
        call.started = self._clock()
        call.group.watch(call)
        self.under_way.add(call)
        self._then[call] = request.then
        self._migration.begin(call)
        if call.done:  # no rank got any rows
            self._end(call)

    def commit(self) -> None:
        self._disk.write(self._buffer.commit)

    # Replies

    def take_replies(self, timeout_s: float) -> set[str]:
        """Wait for replies, publish their rows and handle failures.

        Returns:
            Names of graphs whose rows arrived; empty if other replies came too, or if a parent has
            all of its rows.

        Raises:
            WorkerError, WorkerDied, DeadlineError, UserError: The run cannot continue. The message
                names the worker.
        """
        events = self._backend.wait(timeout_s=timeout_s)
        requests = self._failures.listen(events, self.under_way)
        alone = not (self._failures.take_lost() or requests)
        if not alone:
            self._queue_repairs(requests)
        rows: dict[Call, list[Event]] = {}
        """Call -> its replies with rows, which are published together."""
        for event in events:
            call, reply = event.call, event.reply
            alone = alone and _is_rows_alone(reply)
            if event.rank not in call.waiting:  # lost, or cancelled just as it finished
                continue
            if reply.published is not None and _brings_rows(call, reply):
                if call in rows:
                    rows[call].append(event)
                else:
                    rows[call] = [event]
                continue
            # First publish rows that came before a failure or the end of a call.
            for other in list(rows) if reply.failure else (call,) if call in rows else ():
                self._publish(other, rows.pop(other))
            self._take(event)
        for call, own in rows.items():
            self._publish(call, own)
        self._move_rows()
        return {call.ledger.name for call in rows if call.ledger} if alone and not self._queue else set()

    def withdraw_rows(self) -> None:
        """Tell calls which rows a quorum no longer needs; cancel generation whose lease expired."""
        for ledger in self._buffer.ledgers.values():
            parents: dict[int, list[int]] = {}
            for token, parent in ledger.leases.take_given_up():
                parents.setdefault(token, []).append(parent)
            for call in self._calls_of(ledger, parents):
                self._backend.give_up(call, parents[call.lease.token])  # pyright: ignore[reportOptionalMemberAccess]
                call.group.weigh(call, call.ranks)
            for call in self._calls_of(ledger, {lease.token for lease in ledger.expire()}):
                if call.interruptible:
                    self._backend.cancel(call)

    def _calls_of(self, ledger: Ledger, leases: Collection[int]) -> list[Call]:
        if not leases:
            return []
        return [c for c in self.under_way if c.ledger is ledger and c.lease and c.lease.token in leases]

    def _queue_repairs(self, requests: Iterable[CallRequest]) -> None:
        """Queue the repairs of a failure, and end calls that lost their last waiting ranks."""
        self.queue(requests)
        for call in [c for c in self.under_way if c.done]:
            self._end(call)

    def _take(self, event: Event) -> None:
        call, reply = event.call, event.reply
        void = call.ledger is not None and call.lease is not None and not call.holds_lease
        if reply.failure is not None:
            if self._saving.failed(event):
                return self._queue_repairs(())
            requests = self._failures.remedy(event, self.under_way, void=void)
            if requests is not None:
                return self._queue_repairs(requests)
        if void:  # too late: its rows and their metrics belong to another lease
            nothing: dict[str, Any] = {"failure": None, "published": None, "handed_over": None}
            reply = replace(reply, done=reply.is_last, metrics={}, **nothing)
        call.take_reply(event.rank, reply, self._clock())
        if reply.published is not None:
            published = self._migration.publishes(call, event.rank, reply.published)
            self._accept(call, [event.rank], published, reply.segment)
        if reply.handed_over is not None:
            assert reply.segment is not None
            self._buffer.store.published(reply.segment)
            self._migration.hands_over(call, event.rank, reply.handed_over, reply.segment)
        if call.done:
            self._end(call)

    def _publish(self, call: Call, events: Sequence[Event]) -> None:
        if not call.holds_lease:
            for event in events:
                self._take(event)
            return
        found: list[Published] = []
        segments: list[Segment] = []
        for event in events:
            reply = event.reply
            call.take_reply(event.rank, reply, self._clock())
            assert reply.published is not None and reply.segment is not None
            found.append(self._migration.publishes(call, event.rank, reply.published))
            segments.append(reply.segment)
        written = segments[0] if len(found) == 1 else Spread(segments, [len(one.ids) for one in found])
        self._accept(call, [event.rank for event in events], Published.joined(found), written)
        if call.done:
            self._end(call)

    def _accept(self, call: Call, ranks: Sequence[int], published: Published, written: Written) -> None:
        if call.ledger is None or call.lease is None:
            return
        self._buffer.publish(call.ledger, call.lease, published, written)
        self.throughput.count_children(call, published)
        if call.by_load and (published.parents is None or published.ends_parents):
            call.group.weigh(call, ranks)
        if published.versions is not None:
            self._graph_runs[call.ledger.name].generates(call.lease, published)

    def _move_rows(self) -> None:
        """Give rows that ranks have handed over to idle ranks, and ask busy ranks for others."""
        for call in self._migration.calls:
            if call.unplaced:
                self._failures.called(call)  # before the call, because idle ranks were silent
                self._migration.place(call)
            self.queue(self._migration.requests(call))
            if call.done:
                self._end(call)

    # The end of a call

    def _end(self, call: Call) -> None:
        self._changed = True
        # The end adds log records that later calls on rows depend on.
        self._committed = False
        call.group.forget(call)
        self.under_way.remove(call)
        self._buffer.store.freed(self._migration.end(call))
        self._failures.answered(call)
        if call.holds_lease:
            self.throughput.count_rows(call)
        self._note_times(call)
        self.queue(self._then.pop(call)(call))

    def _note_times(self, call: Call) -> None:
        """Add a call to the timeline of the current step."""
        now, lease = self._clock(), call.lease
        self._spans[call.group.name].append((call.started, now, call.node is not None))
        by_rank: list[dict[str, float]] | None = None
        if len(call.answered) > 1:
            ranks = sorted(call.answered, key=call.answered.__getitem__)[-MOST_RANKS:]
            by_rank = [
                {"rank": r, "end_s": call.answered[r] - self._started, "worker_s": call.seconds[r]}
                for r in ranks
            ]
        self._directory.add_call(
            step=self._graph_runs.train.step_under_way,
            graph=call.ledger.name if call.ledger else "",
            group=call.group.name,
            node=call.node.name if call.node else call.method,
            start_s=call.started - self._started,
            end_s=now - self._started,
            worker_s=max(call.seconds.values(), default=0.0),
            rows=lease.num_rows if lease else 0,
            tokens=int(lease.num_tokens.sum()) if lease else 0,
            last=call.last,
            by_rank=by_rank,
        )


def _brings_rows(call: Call, reply: Reply) -> bool:
    """Whether the rows of a reply can be published together with other ranks' rows."""
    written = reply.segment is not None and reply.failure is None
    return written and call.node is not None and not call.node.operation.takes_groups


def _is_rows_alone(reply: Reply) -> bool:
    """Whether a reply brings rows and completes neither the call nor a parent's rows."""
    published = reply.published
    if published is None or published.parents is None or reply.done or reply.failure or reply.paused:
        return False
    return not published.ends_parents
