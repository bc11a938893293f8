"""Calls: every call of a run, from the request to its last reply.

    queued ──> waiting for the devices of a shared pool ──> under way ──last reply──> ended
      ^                                                                                 │
      └──────────────────────────── requests that follow from it ──────────────────────┘

Nothing that follows from a reply is done while replies are taken: it is queued, and submitted on a later turn of the loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..dataflow.buffer.sample_buffer import SampleBuffer
from .backends.backend import Backend, Event
from .device_turns import DeviceTurns
from .graph_run import GraphRuns
from .group import Call, UnderWay, WorkerGroup
from .recovery.checkpoints import Checkpoints
from .recovery.failures import Failures
from .recovery.full_disk import FullDisk
from .request import NodeRequest, Request, Then
from .run_directory import RunDirectory


class Calls:
    """Submits requests, takes replies, and notes each call that has ended in the timeline.

    Args:
        started: when the run started, by the backend's clock.
    """

    def __init__(
        self,
        backend: Backend,
        buffer: SampleBuffer,
        groups: Mapping[str, WorkerGroup],
        graph_runs: GraphRuns,
        failures: Failures,
        checkpoints: Checkpoints,
        disk: FullDisk,
        directory: RunDirectory,
        started: float,
    ) -> None:
        self._backend = backend
        self._buffer = buffer
        self._groups = groups
        self._graph_runs = graph_runs
        self._failures = failures
        self._checkpoints = checkpoints
        self._disk = disk
        self._directory = directory
        self._started = started
        self._devices = DeviceTurns()
        self._queue: deque[Request] = deque()
        self._then: dict[Call, Then] = {}
        self.under_way = UnderWay()

    @property
    def at_work(self) -> UnderWay:
        """Calls under way, except those on ranks that get no rows meanwhile: nobody waits for a process that is not up."""
        groups = self._groups.values()
        return UnderWay(c for g in groups for c in g.at_work) if any(g.out for g in groups) else self.under_way

    @property
    def idle(self) -> bool:
        """Whether no call is queued or at work."""
        return not self._queue and not self.at_work

    @property
    def beside_the_graph(self) -> bool:
        """Whether a call is to be made, or is under way, that belongs to no node: weights are on their way, say."""
        return bool(self._queue) or self.at_work.beside_the_graph > 0

    # Requests

    def queue(self, requests: Iterable[Request]) -> None:
        """Have these calls made when the loop comes to them."""
        self._queue.extend(requests)

    def submit(self) -> None:
        """Make every call that is queued and needs not wait for devices.

        Raises:
            UserError: a worker has no such method, or refuses the arguments.
        """
        while self._queue:
            for request in self._devices.ask(self._queue.popleft()):
                if isinstance(request, NodeRequest):
                    self._disk.write(self._buffer.commit)  # the log is ahead of the work
                call = request.call()
                self._failures.called(call)
                call.started = self._backend.clock()
                call.group.watch(call)
                self.under_way.add(call)
                self._then[call] = request.then
                if call.done:  # no rank had anything to do
                    self._end(call)

    # Replies

    def take_replies(self, timeout_s: float) -> None:
        """Wait for replies and take them.

        Raises:
            WorkerError, WorkerDied, DeadlineError, UserError: the run cannot go on; the message names the worker.
        """
        events = self._backend.wait(timeout_s=timeout_s)
        if replaced := self._failures.listen(events, self.under_way):
            self.queue(replaced)
            self._end_calls_without_ranks()
        for event in events:
            self._take(event)

    def cancel_expired(self) -> None:
        """End generating calls whose leases have expired."""
        for ledger in self._buffer.ledgers.values():
            expired = {lease.token for lease in ledger.expire()}
            for call in list(self.under_way) if expired else ():
                if call.interruptible and call.ledger is ledger and call.lease and call.lease.token in expired:
                    self._backend.cancel(call)

    def give_up_rows(self) -> None:
        """Tell calls which of their rows a quorum does without."""
        for ledger in self._buffer.ledgers.values():
            parents: dict[int, list[int]] = {}
            for token, parent in ledger.take_given_up():
                parents.setdefault(token, []).append(parent)
            for call in [c for c in self.under_way if c.ledger is ledger] if parents else ():
                if call.lease is not None and call.lease.token in parents:
                    self._backend.give_up(call, parents[call.lease.token])
                    call.group.weigh(call)

    def _take(self, event: Event) -> None:
        call, failure = event.call, event.reply.failure
        if event.rank not in call.waiting:
            return  # it was lost, or was cancelled just as it ended
        void = call.ledger is not None and call.lease is not None and not call.ledger.holds(call.lease)
        if failure is not None and self._see_to(event, void=void):
            self._end_calls_without_ranks()
            return
        if event.reply.paused:
            self._disk.say(f"{call.describe(event.rank)}: {event.reply.paused}")
        if void:  # too late: its rows are somebody else's, and so is what was measured on them
            done = event.reply.done or failure is not None
            event = replace(event, reply=replace(event.reply, done=done, failure=None, metrics={}, published=None))
        call.take(event.rank, event.reply)
        published = event.reply.published
        if published is not None and call.ledger is not None and call.lease is not None:
            self._buffer.publish(call.ledger, call.lease, published, event.reply.segment)
            call.group.weigh(call)
            if published.versions is not None:
                self._graph_runs[call.ledger.name].generates(call.lease, published)
        if call.done:
            self._end(call)

    def _see_to(self, event: Event, *, void: bool) -> bool:
        """See to a rank that failed; False: its call raises what it failed with, or is too late to matter."""
        if self._checkpoints.failed(event):
            return True
        failure = event.reply.failure
        if void and not (failure and failure.died):
            return False
        remedy = self._failures.remedy(event)
        if remedy is None:
            return False
        self.queue(remedy.requests)
        if remedy.full_disk:
            self._disk.wait_for_more(remedy.full_disk)
        return True

    def _end_calls_without_ranks(self) -> None:
        """End calls whose last ranks were lost."""
        for call in [c for c in self.under_way if c.done]:
            self._end(call)

    def _end(self, call: Call) -> None:
        call.group.forget(call)
        self.under_way.remove(call)
        self._failures.answered(call)
        self._note(call)
        self.queue(self._then.pop(call)(call))

    def _note(self, call: Call) -> None:
        self._directory.add_call(
            step=self._graph_runs.train.step_under_way,
            graph=call.ledger.name if call.ledger else "",
            group=call.group.name,
            node=call.node.name if call.node else call.method,
            start_s=call.started - self._started,
            end_s=self._backend.clock() - self._started,
            worker_s=max(call.seconds.values(), default=0.0),
            rows=len(call.lease.rows) if call.lease else 0,
            tokens=int(call.lease.num_tokens.sum()) if call.lease else 0,
            last=call.last,
        )
