"""Failure handling: requeue, replace, or restart when a rank fails, hangs or loses its node.

- Stateless groups (`replaceable`): unfinished rows go back to the ledger. The driver replaces a
  dead or silent process, which receives the current weights. It drops a sample that fails for the
  third time. The run ends if more than the share `max_failed` of samples is dropped.
- Ranks of elastic groups leave their group instead, and join again when there is room
  (`elastic.py`).
- Lost nodes: the driver replaces their ranks on other nodes. It issues groups again if their rows
  were only on lost nodes.
- Other groups, such as actors: the driver restarts the run from its last checkpoint, at most
  `MAX_RESTARTS` times (`controllers/driver.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...dataflow.buffer.sample_buffer import SampleBuffer
from ...dataflow.errors import DeadlineError, UserError, WorkerError
from ...dataflow.graph import TRAIN
from ...workers.worker import MAX_FAILED
from ..backends.backend import Backend, Cluster, Event
from ..group import REGISTER, Call, CallRequest, WorkerGroup, publishes_as_it_goes
from ..ranks.tasks import Failure, FailureKind
from ..reports.progress import Progress
from ..weight_sync import WeightSync
from .elastic import Elastic
from .full_disk import FullDisk

# Error messages for unresponsive ranks: rank, node, rows, and stacks of their processes


MOST_RANKS = 64
"""Maximum number of ranks to get stack traces from."""
MOST_SAMPLES = 4


def _who_is_silent(
    backend: Backend, calls: Sequence[Call], rank: int, others: Sequence[int], now: float
) -> str:
    group = calls[0].group
    lines: list[str] = []
    for call in calls:
        held = sorted(call.held_by(rank))
        more = f" and {len(held) - MOST_SAMPLES} more" if len(held) > MOST_SAMPLES else ""
        samples = f", samples {', '.join(map(str, held[:MOST_SAMPLES]))}{more}" if held else ""
        node = backend.node_of(group, rank)
        lines.append(
            f"{call.describe(rank)}, on {node!r}{samples} (called {now - call.started:.0f} s ago)"
        )
    parts = ["; ".join(lines)]
    if stacks := _stacks(backend, group, [rank, *(other for other in others if other != rank)]):
        parts.append(stacks)
        if backend.cluster is not None:
            parts.append(f"(all threads are at the end of logs/{group.name}_{rank}.log)")
    return "\n".join(parts)


def _stacks(backend: Backend, group: WorkerGroup, ranks: Sequence[int]) -> str:
    """Return the stack traces of ranks, equal ones listed once; empty if unknown."""
    found = backend.stacks(group, ranks[:MOST_RANKS])
    at: dict[str, list[int]] = {}
    for rank in ranks[:MOST_RANKS]:
        if rank in found:
            at.setdefault(found[rank], []).append(rank)
    return "\n".join(
        f"{', '.join(f'{group.name}[{r}]' for r in same)}: {text}" for text, same in at.items()
    )


# Failures

MAX_FAILURES = 3
"""Failures after which a sample is dropped, or a call without rows ends the run."""
FEWEST_ROWS = 100
"""[rows] Lower bound on the denominator of the share of failed rows, so that a few early failures
do not end a run."""
LOOK_S = 1.0
"""[s] Interval between checks for silent ranks."""


@dataclass
class FailureCounts:
    """Counts of a run's failures, over all of its starts."""

    at: Counter[tuple[str, int | None]] = field(default_factory=Counter)
    """(node, sample id), or (call without rows, None) -> number of failures."""
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(graph, node) -> number of rows that succeeded."""
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(graph, node) -> number of rows dropped because the node failed on them."""
    replaced: int = 0
    requeued: int = 0

    def metrics(self) -> dict[str, float]:
        counts = Counter({"replaced_workers": self.replaced, "requeued_rows": self.requeued})
        for (graph, _), rows in self.dropped.items():
            counts["failed_rows" if graph == TRAIN else f"{graph}/failed_rows"] += rows
        return {name: float(count) for name, count in counts.items() if count}


class Failures:
    def __init__(
        self,
        backend: Backend,
        buffer: SampleBuffer,
        groups: Mapping[str, WorkerGroup],
        weights: WeightSync,
        progress: Progress,
        disk: FullDisk,
        counts: FailureCounts,
        start_timeout_s: float,
        call_timeout_s: float,
    ) -> None:
        self._backend = backend
        self._buffer = buffer
        self._groups = groups
        self._weights = weights
        self._progress = progress
        self._disk = disk
        self._counts = counts
        self._elastic = Elastic(backend, groups.values(), progress.say, start_timeout_s)
        self._start_timeout_s = start_timeout_s
        self._call_timeout_s = call_timeout_s
        self._returned: Counter[Call] = Counter()
        """Running call -> number of its requeued rows."""
        self._heard: dict[tuple[str, int], float] = {}
        """(group, rank) -> time of its last reply, or of a call while it was idle."""
        self._all_heard = -math.inf
        """Time when all ranks were last assumed to have replied."""
        self._called: dict[tuple[str, int], dict[Call, None]] = {}
        self._looked = -math.inf
        self._lost = False
        self._lost_nodes: set[str] = set()
        """Lost nodes that were handled without a failed call."""
        self._said: set[str] = set()

    @property
    def waits_for_ranks(self) -> bool:
        """Whether an elastic group waits for more ranks, so that the run is not stalled."""
        return self._elastic.waits

    def take_lost(self) -> bool:
        """Return whether a rank was lost since the last call."""
        lost, self._lost = self._lost, False
        return lost

    # Calls and replies

    def called(self, call: Call) -> None:
        """Record a call. For idle ranks, the time without a reply starts now."""
        now = self._backend.clock()
        for rank in call.ranks:
            others = self._called.setdefault((call.group.name, rank), {})
            if not any(rank in other.waiting for other in others):
                self._heard[call.group.name, rank] = now
            others[call] = None

    def answered(self, call: Call) -> None:
        """Record a finished call. A successful call without rows clears its earlier failures."""
        for rank in call.ranks:
            self._called.get((call.group.name, rank), {}).pop(call, None)
        if call.lease is None and not call.lost:
            self._counts.at.pop((call.describe(), None), None)
        elif call.lease is not None and call.ledger is not None:
            self._counts.seen[call.ledger.name, call.lease.node.name] += (
                call.lease.num_rows - self._returned.pop(call, 0)
            )

    def listen(self, events: Sequence[Event], under_way: Iterable[Call]) -> list[CallRequest]:
        """Record replies. Return requests that replace silent or lost ranks, or start absent ones.
        Raises DeadlineError if a silent rank cannot be replaced, or a group had too few ranks for
        too long."""
        now = self._backend.clock()
        for event in events:
            self._heard[event.call.group.name, event.rank] = now
            if event.reply.paused:
                self._disk.report_pause(f"{event.call.describe(event.rank)}: {event.reply.paused}")
        paused = self._disk.take_paused()  # the driver called no rank during a pause
        # Without processes, groups take turns, so other ranks could not reply.
        if paused or (events and self._backend.cluster is None):
            self._all_heard = now
        requests: list[CallRequest] = []
        if now - self._looked >= LOOK_S:
            self._looked = now
            requests += self._replace_silent(now)
        cluster = self._backend.cluster
        lost = cluster.lost_nodes(look=False) if cluster is not None else ()
        if not self._lost_nodes.issuperset(lost):
            self._lost_nodes.update(lost)
            # If the run must restart, the call that finds its rank gone restarts it.
            requests += self._do_without_nodes(lost, under_way) or []
        for group, rank in self._elastic.ranks_to_start():
            requests += self._join(group, rank)
        return requests

    # Silence

    def _replace_silent(self, now: float) -> list[CallRequest]:
        requests: list[CallRequest] = []
        limits: dict[str, float] = {}
        """[s] Group -> shortest limit on the silence of its ranks."""
        for (name, rank), own in list(self._called.items()):
            if not own or (self._backend.hanging and name not in self._backend.hanging):
                continue
            if name not in limits:
                silence_s = getattr(next(iter(own)).group.handle.config, "silence_s", None)
                limits[name] = min(self._call_timeout_s, silence_s or self._call_timeout_s)
            silent_s = now - max(self._heard[name, rank], self._all_heard)
            if silent_s <= limits[name]:
                continue
            calls = [call for call in own if rank in call.waiting]
            if not calls or silent_s <= (limit := self._limit(rank, calls)):
                continue
            group = calls[0].group
            if not (self._backend.cluster is not None and group.handle.worker_class.replaceable):
                others = self._silent_with(rank, calls, now)
                what = _who_is_silent(self._backend, calls, rank, others, now)
                raise DeadlineError(f"no answer for {limit:.0f} s. Waited for: {what}")
            stack = _stacks(self._backend, group, [rank])
            requests += self._replace(
                group, rank, f"it did not answer for {limit:.0f} s" + (f"; {stack}" if stack else "")
            )
        return requests

    def _silent_with(self, rank: int, calls: Sequence[Call], now: float) -> list[int]:
        """Return the ranks, including `rank`, that these calls wait for and that have been silent
        for about as long as `rank`, or longer."""
        name = calls[0].group.name
        since = self._heard[name, rank] + LOOK_S
        waiting = sorted({other for call in calls for other in call.waiting})
        return [other for other in waiting if self._heard.get((name, other), now) <= since]

    def _limit(self, rank: int, calls: Sequence[Call]) -> float:
        group = calls[0].group
        if rank in group.starting:
            return max(self._start_timeout_s, self._call_timeout_s)
        own = getattr(group.handle.config, "silence_s", None)
        return own if own is not None and any(c.node for c in calls) else self._call_timeout_s

    # Failure

    def remedy(
        self, event: Event, under_way: Iterable[Call], *, void: bool
    ) -> Sequence[CallRequest] | None:
        """Release the rows of a failed call, unless they already belong to another lease (`void`).

        Returns:
            Requests that repair the failure. None if the call must raise the error, or the reply
            came too late to matter.

        Raises:
            WorkerError (or UserError, for an error that the user can fix): Too many samples failed
                MAX_FAILURES times each.
        """
        call, failure = event.call, event.reply.failure
        assert failure is not None
        if void and failure.kind is not FailureKind.DIED:
            return None
        requests: list[CallRequest] = []
        is_gone = failure.kind in (FailureKind.DIED, FailureKind.UNREADABLE)
        cluster = self._backend.cluster if is_gone else None
        if cluster is not None and (lost := cluster.lost_nodes(look=True)):
            without = self._do_without_nodes(lost, under_way)
            if without is None:
                return None
            requests += without
            if event.rank not in call.waiting:
                return requests
        repairs = self._repair(event, failure)
        return None if repairs is None else [*requests, *repairs]

    def _repair(self, event: Event, failure: Failure) -> Sequence[CallRequest] | None:
        call, kind = event.call, failure.kind
        if not call.group.handle.worker_class.replaceable:
            return None
        # An error that no sample caused would recur with other rows.
        if kind is FailureKind.USER_ERROR and not failure.sample_ids:
            return None
        if kind is FailureKind.DIED or (call.method == REGISTER and call.group.place.is_elastic):
            return self._replace(call.group, event.rank, failure.message)
        who = call.describe(event.rank)
        if call.lease is not None and kind is FailureKind.DISK_FULL:
            self._give_back(call, event.rank, f"{who} found the disk full")
            self._disk.wait_for_more(failure.message)
            return ()
        if call.node is None or call.node.group is None or call.lease is None:
            return None  # a graph's own function is pure, so it would fail again
        said = f"{failure.message}\n{failure.traceback}".rstrip()
        held = call.held_by(event.rank)
        blamed = held.intersection(failure.sample_ids)
        hopeless = self._count(call, event.rank, blamed or held, "failed", said)
        self._give_back(call, event.rank, f"{who} failed")
        if held - {*hopeless}:
            again = sorted(blamed - {*hopeless})[:MOST_SAMPLES]
            at = f" at sample {', '.join(map(str, again))}" if again else ""
            self._progress.say(f"{who} failed{at}; its rows are requeued: {failure.message}")
        self._drop_rows(call, hopeless, f"{who} failed", replace(failure, message=said))
        return ()

    def _give_back(self, call: Call, rank: int, why: str) -> int:
        """Release a rank's unfinished rows, and return their number. Other ranks of the call keep
        their rows, if these can be published separately."""
        own = call.held_by(rank)
        call.lose(rank)
        if call.ledger is None or call.lease is None or not call.holds_lease:
            return 0
        shared = any(own.intersection(call.shares.get(other, ())) for other in call.waiting)
        if publishes_as_it_goes(call.lease.node) and not shared:
            rows = len(own)
            call.ledger.release(call.lease, why, ids=own)
        else:
            rows = len(call.lease.open)
            call.ledger.release(call.lease, why)
            if call.interruptible:
                self._backend.cancel(call)
        self._returned[call] += rows
        self._counts.requeued += rows
        return rows

    def _count(self, call: Call, rank: int, samples: Iterable[int], what: str, why: str) -> list[int]:
        """Count a failure. Return the ids of samples that have failed MAX_FAILURES times."""
        if call.lease is None and (call.lost or call.group.place.is_elastic):
            # counted with another rank already, or left to the deadline of the elastic group
            return []
        who, at = call.describe(), self._counts.at
        places = [(who, id) for id in sorted(samples)] if call.lease is not None else [(who, None)]
        at.update(places)
        repeated = [place for place in places if at[place] >= MAX_FAILURES]
        if repeated and call.lease is None:
            raise WorkerError(f"{call.describe(rank)} {what} {MAX_FAILURES} times. {why}")
        for place in repeated:
            del at[place]
        return [id for _, id in repeated if id is not None]

    def _drop_rows(self, call: Call, samples: Sequence[int], what: str, failure: Failure) -> None:
        if not samples or call.ledger is None or call.lease is None:
            return
        node, ledger = call.lease.node, call.ledger
        key, share = (
            (ledger.name, node.name),
            getattr(call.group.handle.config, "max_failed", MAX_FAILED),
        )
        positions = {row.id: row.position for row in call.lease.rows}
        said = {samples[0]: f"; {failure.sample}"} if failure.sample else {}
        source = ledger.graph.source.name
        at = ", ".join(
            f"sample {id} (row {positions[id]} of source {source!r}{said.get(id, '')})"
            for id in samples[:MOST_SAMPLES]
        )
        failed = self._counts.dropped[key] + len(samples)
        seen = self._counts.seen[key] + failed  # `seen` counts only rows that succeeded
        if node.operation.quorum or failed > share * max(seen, FEWEST_ROWS):
            raise (UserError if failure.kind is FailureKind.USER_ERROR else WorkerError)(
                f"{what} {MAX_FAILURES} times at {at}. So did {failed} of {seen} rows so far, which is more than max_failed={share} "
                f"allows. {failure.message}"
            )
        reason = failure.message.splitlines()[0]
        ledger.drop(node, samples, f"{what}: {reason}")
        self._counts.dropped[key] = failed
        others = len(samples) - MOST_SAMPLES
        more = f", and {others} more" if others > 0 else ""
        text = f"{what} {MAX_FAILURES} times at {at}{more}; dropped: {reason}"
        self._progress.alert("dropped", text, warning=False)

    # Processes

    def _replace(self, group: WorkerGroup, rank: int, why: str) -> list[CallRequest]:
        """Release the rows of a dead or silent rank. Replace it, or let it leave its group."""
        began = self._backend.clock()
        interrupted = [call for call in group.calls if rank in call.waiting]
        at = self._cluster.sample_at(group, rank)
        hopeless: dict[Call, list[int]] = {}
        for call in interrupted:
            held = call.held_by(rank)
            # The recorded sample probably ended the process. Without a record, it may be any row.
            blamed = {at} if at is not None and at in held else held
            hopeless[call] = self._count(call, rank, blamed, "was lost", why)
        ended = f"the process of {group.name}[{rank}] ended"
        rows = sum(self._give_back(call, rank, ended) for call in interrupted)
        for call in group.calls:
            if rank in call.ranks:  # the new process does not know earlier replies
                call.lose(rank)
        self._lost = True
        group.lacking.discard(rank)
        requests: list[CallRequest] = []
        if group.place.is_elastic:
            self._leave(group, rank, why, rows)
        else:
            self._counts.replaced += 1

            def tell(seconds: float) -> None:
                text = f"worker {group.name}[{rank}] was replaced after {seconds:.1f} s, {rows} rows are requeued; {why}"
                self._progress.alert("replaced", text, warning=False)

            requests = self._start(group, rank, tell, began)
        for call, samples in hopeless.items():
            self._drop_rows(call, samples, f"{call.describe(rank)} was lost", Failure(why))
        return requests

    @property
    def _cluster(self) -> Cluster:
        cluster = self._backend.cluster
        assert cluster is not None  # elsewhere, no rank dies, hangs alone, or is absent
        return cluster

    def _leave(self, group: WorkerGroup, rank: int, why: str, rows: int) -> None:
        was_up = rank in group.up
        self._cluster.release(group, rank)
        group.starting.discard(rank)
        group.absent.add(rank)
        worker = f"{group.name}[{rank}]"
        if was_up:
            there = f"{len(group.up)} of {len(group.mesh)} ranks are up"
            text = f"worker {worker} left, {rows} rows are requeued; {there}; {why}"
            self._progress.alert("left", text, warning=False)
        else:
            self._progress.say(f"worker {worker} did not start, and is retried later; {why}")

    def _join(self, group: WorkerGroup, rank: int) -> list[CallRequest]:
        group.absent.discard(rank)

        def tell(seconds: float) -> None:
            there = f"{len(group.up)} of {len(group.mesh)} ranks are up"
            self._progress.say(f"worker {group.name}[{rank}] joined after {seconds:.1f} s; {there}")

        return self._start(group, rank, tell, self._backend.clock())

    def _start(
        self, group: WorkerGroup, rank: int, tell: Callable[[float], None], began: float
    ) -> list[CallRequest]:
        """Start a rank's process. Once it is up, call `tell` with the seconds since `began`."""
        self._cluster.replace(group, rank)
        group.starting.add(rank)

        def registered(call: Call) -> list[CallRequest]:
            if rank in call.lost:  # it ended during its start, and was replaced again
                return []
            group.starting.discard(rank)
            if call.results != [group.mesh[rank]]:
                raise WorkerError(
                    f"{call.describe(rank)}: it has the coordinates {call.results}, not {group.mesh[rank]}"
                )
            tell(self._backend.clock() - began)
            return self._weights.resend(group, rank)

        return [CallRequest(group, REGISTER, ranks=(rank,), then=registered)]

    # Lost nodes

    def _do_without_nodes(
        self, lost: Collection[str], under_way: Iterable[Call]
    ) -> list[CallRequest] | None:
        """Continue without lost nodes. Call this again to drop rows that are published there later.
        Return None if a rank cannot be replaced, so that the run must restart from a checkpoint."""
        gone = [
            (group, rank, node)
            for group in self._groups.values()
            for rank in group.up
            if (node := self._backend.node_of(group, rank)) in lost
        ]
        if not all(group.handle.worker_class.replaceable for group, *_ in gone):
            return None
        requests: list[CallRequest] = []
        for group, rank, node in gone:
            requests += self._replace(group, rank, f"node {node} is gone")
        nodes = [node for node in self._backend.nodes if node not in lost]
        self._end_unreadable(nodes, list(under_way))
        again = self._buffer.drop_unreachable(nodes)
        for node in sorted(set(lost) - self._said):
            self._said.add(node)
            ranks = sum(at == node for *_, at in gone)
            text = f"node {node} is gone, with {ranks} ranks; the run continues with the others"
            self._progress.alert("node_lost", text, warning=False)
        if again:
            self._progress.say(f"{len(again)} groups with rows on lost nodes are issued again")
        return requests

    def _end_unreadable(self, nodes: Collection[str], calls: Iterable[Call]) -> None:
        """End every call on unreadable rows, except updates."""
        unreachable = self._buffer.unreachable(nodes)
        for call in calls:
            if call.ledger is None or call.lease is None or call.lease.node.operation.updates:
                continue
            groups = unreachable.get(call.ledger.name, {})
            if any(group.id in groups for group in call.lease.groups):
                for rank in sorted(call.waiting):
                    self._give_back(call, rank, "some of its rows were on a node that is gone")
