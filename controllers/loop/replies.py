"""Replies: process each reply of a rank: publish its rows, handle failures, and end the call after
its last reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...dataflow.buffer.leases import Published, Spread, Written
from ...dataflow.buffer.sample_buffer import SampleBuffer
from ...dataflow.buffer.segments import Segment
from ..backends.backend import Backend, Event
from ..graph_run import GraphRuns
from ..group import Call, UnderWay
from ..ranks.tasks import FailureKind, Reply
from ..recovery.elastic import Elastic, LostNodes
from ..recovery.failures import Failures
from ..recovery.full_disk import FullDisk
from ..recovery.saving import Saving
from ..request import CallRequest
from .calls import Calls


class Remedies:
    """Handle ranks that fail or fall silent: drop a checkpoint, pause for a full disk, continue
    without lost nodes, or repeat the work."""

    def __init__(
        self,
        backend: Backend,
        failures: Failures,
        lost_nodes: LostNodes,
        elastic: Elastic,
        saving: Saving,
        disk: FullDisk,
    ) -> None:
        self._backend = backend
        self._failures = failures
        self._lost_nodes = lost_nodes
        self._elastic = elastic
        self._saving = saving
        self._disk = disk

    def hear(self, events: Sequence[Event], under_way: UnderWay) -> list[CallRequest]:
        """Note which ranks replied. Return requests that replace silent or lost ranks, and add
        ranks if the cluster has room.

        Raises:
            DeadlineError: A silent rank cannot be replaced alone, or a group had too few ranks for
                too long.
        """
        for event in events:
            if event.reply.paused:
                self._disk.report_pause(f"{event.call.describe(event.rank)}: {event.reply.paused}")
        return [*self._failures.listen(events), *self._lost_nodes.look(under_way), *self._elastic.look()]

    def take_lost(self) -> bool:
        return self._failures.take_lost()

    def remedy(self, event: Event, under_way: UnderWay, *, void: bool) -> Sequence[CallRequest] | None:
        """Handle a failed rank.

        Args:
            event: A reply with a failure.
            under_way: All running calls.
            void: Whether the rows of the call belong to another lease already.

        Returns:
            Requests that repair the failure. None if the call must raise the error, or came too
            late to matter.
        """
        if self._saving.failed(event):
            return ()
        failure = event.reply.failure
        if void and not (failure and failure.kind is FailureKind.DIED):
            return None
        requests: list[CallRequest] = []
        if (
            failure
            and failure.kind in (FailureKind.DIED, FailureKind.UNREADABLE)
            and (cluster := self._backend.cluster) is not None
            and (lost := cluster.lost_nodes(look=True))
        ):
            without = self._lost_nodes.remedy(lost, under_way)
            if without is None:
                return None
            requests += without
            if event.rank not in event.call.waiting:
                return requests
        remedy = self._failures.remedy(event)
        if remedy is None:
            return None
        if remedy.full_disk:
            self._disk.wait_for_more(remedy.full_disk)
        return [*requests, *remedy.requests]


class Replies:
    """Process replies, and tell calls which of their rows are no longer needed."""

    def __init__(
        self,
        backend: Backend,
        buffer: SampleBuffer,
        graph_runs: GraphRuns,
        calls: Calls,
        remedies: Remedies,
    ) -> None:
        self._backend = backend
        self._buffer = buffer
        self._graph_runs = graph_runs
        self._calls = calls
        self._remedies = remedies

    def take(self, timeout_s: float) -> set[str]:
        """Wait for replies and process them.

        Returns:
            Names of the graphs that got rows, if no other replies came and no parent was finished;
            otherwise an empty set.

        Raises:
            WorkerError, WorkerDied, DeadlineError, UserError: The run cannot continue; the message
                names the worker.
        """
        events = self._backend.wait(timeout_s=timeout_s)
        requests = self._remedies.hear(events, self._calls.under_way)
        if self._remedies.take_lost() or requests:
            self._calls.queue(requests)
            self._calls.end_lost()
            alone = False
        else:
            alone = True
        rows: dict[Call, list[Event]] = {}
        """Replies with rows, by call, to publish the rows of all its ranks together."""
        for event in events:
            call, reply = event.call, event.reply
            alone = alone and _is_rows_alone(reply)
            if event.rank not in call.waiting:  # the rank was lost, or cancelled just as it finished
                continue
            if reply.published is not None and _brings_rows(call, reply):
                if call in rows:
                    rows[call].append(event)
                else:
                    rows[call] = [event]
                continue
            # Keep the order of replies: rows before a failure or the end of a call are published
            # first.
            for other in list(rows) if reply.failure else (call,) if call in rows else ():
                self._publish(other, rows.pop(other))
            self._take(event)
        for call, own in rows.items():
            self._publish(call, own)
        return {call.ledger.name for call in rows if call.ledger} if alone else set()

    def cancel_expired(self) -> None:
        """Cancel generating calls whose leases have expired."""
        for ledger in self._buffer.ledgers.values():
            expired = {lease.token for lease in ledger.expire()}
            for call in list(self._calls.under_way) if expired else ():
                if (
                    call.interruptible
                    and call.ledger is ledger
                    and call.lease
                    and call.lease.token in expired
                ):
                    self._backend.cancel(call)

    def give_up_rows(self) -> None:
        """Tell calls which of their rows are given up because a quorum is complete."""
        for ledger in self._buffer.ledgers.values():
            parents: dict[int, list[int]] = {}
            for token, parent in ledger.leases.take_given_up():
                parents.setdefault(token, []).append(parent)
            for call in [c for c in self._calls.under_way if c.ledger is ledger] if parents else ():
                if call.lease is not None and call.lease.token in parents:
                    self._backend.give_up(call, parents[call.lease.token])
                    call.group.weigh(call, call.ranks)

    def _take(self, event: Event) -> None:
        call, reply = event.call, event.reply
        void = (
            call.ledger is not None
            and call.lease is not None
            and not call.ledger.leases.holds(call.lease)
        )
        if reply.failure is not None:
            requests = self._remedies.remedy(event, self._calls.under_way, void=void)
            if requests is not None:
                self._calls.queue(requests)
                self._calls.end_lost()
                return
        if void:  # too late: its rows and their metrics belong to another lease
            reply = replace(reply, done=reply.is_last, failure=None, metrics={}, published=None)
        call.take(event.rank, reply, self._calls.now)
        if reply.published is not None:
            self._accept(call, [event.rank], reply.published, reply.segment)
        if call.done:
            self._calls.end(call)

    def _publish(self, call: Call, events: Sequence[Event]) -> None:
        """Publish the rows of several replies to one call."""
        lease = call.lease
        if lease is None or call.ledger is None or not call.ledger.leases.holds(lease):
            for event in events:
                self._take(event)
            return
        found: list[Published] = []
        segments: list[Segment] = []
        for event in events:
            reply = event.reply
            call.take(event.rank, reply, self._calls.now)
            assert reply.published is not None and reply.segment is not None
            found.append(reply.published)
            segments.append(reply.segment)
        written = segments[0] if len(found) == 1 else Spread(segments, [len(one.ids) for one in found])
        self._accept(call, [event.rank for event in events], Published.joined(found), written)
        if call.done:
            self._calls.end(call)

    def _accept(self, call: Call, ranks: Sequence[int], published: Published, written: Written) -> None:
        if call.ledger is None or call.lease is None:
            return
        self._buffer.publish(call.ledger, call.lease, published, written)
        if call.by_load and (published.parents is None or published.ends_parents):
            call.group.weigh(call, ranks)
        if published.versions is not None:
            self._graph_runs[call.ledger.name].generates(call.lease, published)


def _brings_rows(call: Call, reply: Reply) -> bool:
    """Whether the rows of a reply can be published together with rows of other ranks."""
    written = reply.segment is not None and reply.failure is None
    return written and call.node is not None and not call.node.operation.takes_groups


def _is_rows_alone(reply: Reply) -> bool:
    """Whether a reply brings only rows, and ends neither the call nor a parent of the rows."""
    published = reply.published
    if (
        published is None
        or published.parents is None
        or reply.done
        or reply.failure is not None
        or reply.paused
    ):
        return False
    return not published.ends_parents
