"""Failure handling: requeue, replace, or restart when a rank fails or stops responding.

- Stateless groups (`replaceable`): unfinished rows go back to the ledger. A dead or silent process
  is replaced, and receives the current weights. A sample that fails for the third time is dropped
  with its reason. The run ends if more than a given share of samples is dropped.
- Ranks of elastic groups are not replaced: they leave the group, and join it again when there is
  room (`elastic.py`).
- Other groups, such as actors: the driver restarts the run from its last checkpoint.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ...dataflow.errors import DeadlineError, UserError, WorkerError
from ...dataflow.graph import TRAIN
from ...workers.worker import MAX_FAILED
from ..backends.backend import Backend, Cluster, Event
from ..group import REGISTER, Call, WorkerGroup, publishes_as_it_goes
from ..ranks.tasks import Failure, FailureKind
from ..reports.progress import Progress
from ..request import CallRequest
from ..weight_sync import WeightSync
from .full_disk import FullDisk

# Error messages for unresponsive ranks: rank, node, rows, and stacks of their processes.


MOST_RANKS = 64
"""Most ranks to get stacks from."""
MOST_SAMPLES = 4


def who_is_silent(
    backend: Backend, calls: Sequence[Call], rank: int, others: Sequence[int], now: float
) -> str:
    """Describe the calls that a rank does not answer, with the stacks of silent ranks of its group.

    Args:
        calls: calls of one group on this rank.
        rank: the rank that has been silent for too long.
        others: other silent ranks.
        now: the time on the backend's clock [s].
    """
    group = calls[0].group
    what = "; ".join(_call(backend, call, rank, now) for call in calls)
    stacks = where_they_stand(backend, group, [rank, *(other for other in others if other != rank)])
    return "\n".join(
        part
        for part in (what, stacks, _logs(group, rank) if stacks and backend.cluster is not None else "")
        if part
    )


def where_they_stand(backend: Backend, group: WorkerGroup, ranks: Sequence[int]) -> str:
    """Return the stacks of ranks, with equal ones shown once; empty if they are unknown."""
    found = backend.stacks(group, ranks[:MOST_RANKS])
    at: dict[str, list[int]] = {}
    for rank in ranks[:MOST_RANKS]:
        if rank in found:
            at.setdefault(found[rank], []).append(rank)
    return "\n".join(
        f"{', '.join(f'{group.name}[{r}]' for r in same)}: {text}" for text, same in at.items()
    )


def _call(backend: Backend, call: Call, rank: int, now: float) -> str:
    held = sorted(call.held_by(rank))
    more = f" and {len(held) - MOST_SAMPLES} more" if len(held) > MOST_SAMPLES else ""
    samples = f", samples {', '.join(map(str, held[:MOST_SAMPLES]))}{more}" if held else ""
    node = backend.node_of(call.group, rank)
    return f"{call.describe(rank)}, on {node!r}{samples} (called {now - call.started:.0f} s ago)"


def _logs(group: WorkerGroup, rank: int) -> str:
    return f"(all threads are at the end of logs/{group.name}_{rank}.log)"


# Failures

MAX_FAILURES = 3
"""Failures of a sample before it is dropped, or of a call outside the graph before the run ends."""
FEWEST_ROWS = 100
"""Count at least this many rows for the share of failures, so that early failures do not end a run."""
LOOK_S = 1.0
"""[s] Time between two checks for silent ranks."""


@dataclass
class FailureCounts:
    """Failures of a run, over all of its starts."""

    at: Counter[tuple[str, int | None]] = field(default_factory=Counter)
    """(node, sample), or call outside the graph -> failures."""
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(graph, node) -> rows that succeeded."""
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(graph, node) -> rows that were dropped because the node failed on them."""
    replaced: int = 0
    """Processes that were replaced."""
    requeued: int = 0
    """Rows that were requeued because a rank failed."""

    def metrics(self) -> dict[str, float]:
        """Return the nonzero counts as metrics."""
        counts = Counter({"replaced_workers": self.replaced, "requeued_rows": self.requeued})
        for (graph, _), rows in self.dropped.items():
            counts["failed_rows" if graph == TRAIN else f"{graph}/failed_rows"] += rows
        return {name: float(count) for name, count in counts.items() if count}


@dataclass(frozen=True)
class Remedy:
    """Actions after a failure, once its rows are released."""

    requests: Sequence[CallRequest] = ()
    full_disk: str = ""
    """Error of a full disk that the run has to wait for, or empty."""


class Failures:
    """Counts failures, releases rows, and replaces processes.

    Args:
        weights: sends the current weights to a new process.
        disk: knows whether the run was paused. Silence during a pause is not a failure.
        counts: failures so far, including earlier starts of the run.
        start_timeout_s: longest start of a replacement process [s].
        call_timeout_s: longest silence of a rank during a call [s].
    """

    def __init__(
        self,
        backend: Backend,
        weights: WeightSync,
        progress: Progress,
        disk: FullDisk,
        counts: FailureCounts,
        start_timeout_s: float,
        call_timeout_s: float,
    ) -> None:
        self._backend = backend
        self._weights = weights
        self._progress = progress
        self._disk = disk
        self._counts = counts
        self._start_timeout_s = start_timeout_s
        self._call_timeout_s = call_timeout_s
        self._returned: Counter[Call] = Counter()
        """Running call -> rows that were requeued."""
        self._heard: dict[tuple[str, int], float] = {}
        """(group, rank) -> time of its last reply, or of a call while it was idle."""
        self._all_heard = -math.inf
        """Time when all ranks were last assumed to have replied."""
        self._called: dict[tuple[str, int], dict[Call, None]] = {}
        """(group, rank) -> its running calls."""
        self._looked = -math.inf
        self._lost = False
        """Whether a rank was removed since the last query."""

    # Silence

    def called(self, call: Call) -> None:
        """Record a call. The silence of its idle ranks is counted from now."""
        now = self._backend.clock()
        for rank in call.ranks:
            others = self._called.setdefault((call.group.name, rank), {})
            if not any(rank in other.waiting for other in others):
                self._heard[call.group.name, rank] = now
            others[call] = None

    def listen(self, events: Sequence[Event]) -> list[CallRequest]:
        """Record replies and, once a second, replace ranks that have been silent for too long.

        Raises:
            DeadlineError: a silent rank cannot be replaced on its own.
        """
        now = self._backend.clock()
        for event in events:
            self._heard[event.call.group.name, event.rank] = now
        paused = self._disk.take_paused()  # no rank was called during a pause
        # Without processes, groups take turns, so other ranks had no chance to reply.
        if paused or (events and self._backend.cluster is None):
            self._all_heard = now
        if now - self._looked < LOOK_S:
            return []
        self._looked = now
        requests: list[CallRequest] = []
        limits: dict[str, float] = {}
        """Group -> shortest limit on the silence of any of its ranks [s]."""
        for (name, rank), own in list(self._called.items()):
            if not own or (self._backend.hanging and name not in self._backend.hanging):
                continue
            if name not in limits:
                limits[name] = self._least_limit(next(iter(own)).group)
            silent_s = now - max(self._heard[name, rank], self._all_heard)
            if silent_s <= limits[name]:
                continue
            calls = [call for call in own if rank in call.waiting]
            if not calls or silent_s <= (limit := self._limit(rank, calls)):
                continue
            group, others = calls[0].group, self._silent_with(rank, calls, now)
            if not (self._backend.cluster is not None and group.handle.worker_class.replaceable):
                what = who_is_silent(self._backend, calls, rank, others, now)
                raise DeadlineError(f"no answer for {limit:.0f} s. Waited for: {what}")
            stack = where_they_stand(self._backend, group, [rank])
            requests += self.replace(
                group, rank, f"it did not answer for {limit:.0f} s" + (f"; {stack}" if stack else "")
            )
        return requests

    def _silent_with(self, rank: int, calls: Sequence[Call], now: float) -> list[int]:
        """Return the ranks that have been silent in the same calls for about as long as this one."""
        name = calls[0].group.name
        since = self._heard[name, rank] + LOOK_S
        waiting = sorted({other for call in calls for other in call.waiting})
        return [other for other in waiting if self._heard.get((name, other), now) <= since]

    def _least_limit(self, group: WorkerGroup) -> float:
        """Return the shortest limit on the silence of any rank of a group [s]."""
        own = getattr(group.handle.config, "silence_s", None)
        return self._call_timeout_s if own is None else min(own, self._call_timeout_s)

    def _limit(self, rank: int, calls: Sequence[Call]) -> float:
        group = calls[0].group
        if rank in group.starting:
            return max(self._start_timeout_s, self._call_timeout_s)
        own = getattr(group.handle.config, "silence_s", None)
        return own if own is not None and any(c.node for c in calls) else self._call_timeout_s

    # Failure

    def answered(self, call: Call) -> None:
        """Record a finished call. A success outside the graph clears earlier failures of that call."""
        for rank in call.ranks:
            self._called.get((call.group.name, rank), {}).pop(call, None)
        if call.lease is None and not call.lost:
            self._counts.at.pop((call.describe(), None), None)
        elif call.lease is not None and call.ledger is not None:
            self._counts.seen[call.ledger.name, call.lease.node.name] += (
                call.lease.num_rows - self._returned.pop(call, 0)
            )

    def remedy(self, event: Event) -> Remedy | None:
        """Release the rows of a failed call. Return further actions, or None to end or restart.

        Raises:
            WorkerError (or UserError, for an error that the user can fix): too many samples failed
                MAX_FAILURES times each.
        """
        call, failure = event.call, event.reply.failure
        assert failure is not None
        kind = failure.kind
        if not call.group.handle.worker_class.replaceable:
            return None
        if kind is FailureKind.USER_ERROR and not failure.sample_ids:
            return None
        if kind is FailureKind.DIED or (call.method == REGISTER and call.group.place.is_elastic):
            return Remedy(self.replace(call.group, event.rank, failure.message))
        who = call.describe(event.rank)
        if call.lease is not None and kind is FailureKind.DISK_FULL:
            self.give_back(call, event.rank, f"{who} found the disk full")
            return Remedy(full_disk=failure.message)
        if call.node is None or call.node.group is None or call.lease is None:
            return None  # a graph's own function is pure, so it would fail again
        said = f"{failure.message}\n{failure.traceback}".rstrip()
        held = call.held_by(event.rank)
        blamed = held.intersection(failure.sample_ids)
        hopeless = self._count(call, event.rank, blamed or held, "failed", said)
        self.give_back(call, event.rank, f"{who} failed")
        if held - {*hopeless}:
            self._progress.repeated(who, failure.message, sorted(blamed - {*hopeless}))
        self._do_without(call, hopeless, f"{who} failed", replace(failure, message=said))
        return Remedy()

    def replace(self, group: WorkerGroup, rank: int, why: str) -> list[CallRequest]:
        """Release the rows of a dead or silent rank, and start another process, or let it leave.

        Ranks of elastic groups leave. Other ranks continue.

        Raises:
            WorkerError: the same call outside the graph, or too many samples, failed MAX_FAILURES
                times.
        """
        began = self._backend.clock()
        interrupted = [call for call in group.calls if rank in call.waiting]
        at = self._cluster.sample_at(group, rank)
        hopeless: dict[Call, list[int]] = {}
        for call in interrupted:
            held = call.held_by(rank)
            blamed = {at} if at is not None and at in held else held
            hopeless[call] = self._count(call, rank, blamed, "was lost", why)
        rows = sum(
            self.give_back(call, rank, f"the process of {group.name}[{rank}] ended")
            for call in interrupted
        )
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
            requests = self._start(
                group, rank, partial(self._progress.replaced, why=why, rows=rows), began
            )
        for call, samples in hopeless.items():
            self._do_without(call, samples, f"{call.describe(rank)} was lost", Failure(why))
        return requests

    def join(self, group: WorkerGroup, rank: int) -> list[CallRequest]:
        """Start an absent rank of an elastic group. It gets rows once it has the current weights."""
        group.absent.discard(rank)

        def tell(worker: str, seconds: float) -> None:
            self._progress.joined(worker, seconds, len(group.up), len(group.mesh))

        return self._start(group, rank, tell, self._backend.clock())

    def take_lost(self) -> bool:
        """Return whether a rank was removed from its calls since the last query."""
        lost, self._lost = self._lost, False
        return lost

    @property
    def _cluster(self) -> Cluster:
        cluster = self._backend.cluster
        assert cluster is not None  # elsewhere no rank dies, hangs alone, or is absent
        return cluster

    def _leave(self, group: WorkerGroup, rank: int, why: str, rows: int) -> None:
        was_up = rank in group.up
        self._cluster.release(group, rank)
        group.starting.discard(rank)
        group.absent.add(rank)
        worker, up = f"{group.name}[{rank}]", len(group.up)
        if was_up:
            self._progress.left_group(worker, why, rows, up, len(group.mesh))
        else:
            self._progress.say(f"worker {worker} did not start, and is retried later; {why}")

    def _start(
        self, group: WorkerGroup, rank: int, tell: Callable[..., None], began: float
    ) -> list[CallRequest]:
        """Start the process of a rank. Once it is up, call `tell` with its name and the seconds taken."""
        self._cluster.replace(group, rank)
        group.starting.add(rank)
        then = partial(self._registered, rank=rank, tell=tell, began=began)
        return [CallRequest(group, REGISTER, ranks=(rank,), then=then)]

    def _registered(
        self, call: Call, rank: int, tell: Callable[..., None], began: float
    ) -> list[CallRequest]:
        if rank in call.lost:  # it ended during its start, and was replaced again
            return []
        group = call.group
        group.starting.discard(rank)
        if call.results != [group.mesh[rank]]:
            raise WorkerError(
                f"{call.describe(rank)}: it has the coordinates {call.results}, not {group.mesh[rank]}"
            )
        tell(f"{group.name}[{rank}]", seconds=self._backend.clock() - began)
        return self._weights.resend(group, rank)

    def give_back(self, call: Call, rank: int, why: str) -> int:
        """Release a rank's unfinished rows, and return their number.

        Other ranks of the call keep their rows, if these can be published separately.
        """
        own = call.held_by(rank)
        call.lose(rank)
        if call.ledger is None or call.lease is None or not call.ledger.leases.holds(call.lease):
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
        """Count a failure. Return the samples that failed MAX_FAILURES times.

        Raises:
            WorkerError: a call outside the graph failed MAX_FAILURES times.
        """
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

    def _do_without(self, call: Call, samples: Sequence[int], what: str, failure: Failure) -> None:
        """Drop samples that made a node fail MAX_FAILURES times each, as long as they are few.

        Raises:
            WorkerError (or UserError, for an error that the user can fix): there are more of them
            than
                `max_failed` of the group allows.
        """
        if not samples or call.ledger is None or call.lease is None:
            return
        node, ledger = call.lease.node, call.ledger
        key, share = (ledger.name, node.name), getattr(call.group.handle.config, "max_failed", MAX_FAILED)
        positions = {row.id: row.position for row in call.lease.rows}
        said = {samples[0]: f"; {failure.sample}"} if failure.sample else {}
        source = ledger.graph.source.name
        named = (
            f"sample {id} (row {positions[id]} of source {source!r}{said.get(id, '')})"
            for id in samples[:4]
        )
        at = ", ".join(named)
        failed = self._counts.dropped[key] + len(samples)
        seen = self._counts.seen[key] + failed  # `seen` counts only rows that succeeded
        if node.operation.quorum or failed > share * max(seen, FEWEST_ROWS):
            raise (UserError if failure.kind is FailureKind.USER_ERROR else WorkerError)(
                f"{what} {MAX_FAILURES} times at {at}. So did {failed} of {seen} rows so far, which is more than max_failed={share} "
                f"allows. {failure.message}"
            )
        ledger.drop(node, samples, f"{what}: {failure.message.splitlines()[0]}")
        self._counts.dropped[key] = failed
        self._progress.dropped(
            f"{what} {MAX_FAILURES} times at {at}", samples[4:], failure.message.splitlines()[0]
        )
