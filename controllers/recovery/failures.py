"""Failures: what becomes of the work of a rank that fails, falls silent, or whose process ends.

- A group that holds nothing of its own (`replaceable`): unfinished rows go back to the ledger. A process that is gone or silent is
  replaced and receives the present weights. A sample at which that happens for the third time is dropped with its reason; more than
  a share of such samples ends the run.
- A rank of an elastic group is not replaced but leaves its group, and joins it again when there is room for it (`elastic.py`).
- Any other group (an actor, say): the run ends, and the driver starts it again from its last checkpoint.
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
from ..backends.backend import Backend, Event
from ..group import REGISTER, Call, WorkerGroup, publishes_as_it_goes
from ..ranks.tasks import Failure, FailureKind
from ..reports.progress import Progress
from ..request import CallRequest
from ..weight_sync import WeightSync
from .full_disk import FullDisk

# Silence
#
# Silence: what is said of ranks that do not answer: who they are, on which node, with which rows,
# and where their processes stand.


MOST_RANKS = 64
"""Ranks that are asked where they stand."""
MOST_SAMPLES = 4


def who_is_silent(
    backend: Backend, calls: Sequence[Call], rank: int, others: Sequence[int], now: float
) -> str:
    """The calls that a rank does not answer, and where it stands, with the other ranks of its group that are silent.

    Args:
        calls: of one group, on this rank.
        rank: that has been silent for too long.
        others: that are, too.
        now: by the backend's clock.
    """
    group = calls[0].group
    what = "; ".join(_call(backend, call, rank, now) for call in calls)
    stacks = where_they_stand(backend, group, [rank, *(other for other in others if other != rank)])
    return "\n".join(
        part
        for part in (what, stacks, _logs(group, rank) if stacks and backend.has_processes else "")
        if part
    )


def where_they_stand(backend: Backend, group: WorkerGroup, ranks: Sequence[int]) -> str:
    """The stacks of ranks; those that stand at the same place are said together. Empty: that is not known."""
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


MAX_FAILURES = 3
"""Failures at the same sample after which it is dropped, or of the same call beside the graph after which the run ends."""
FEWEST_ROWS = 100
"""Rows that a share of failed samples counts at least: a run does not end because one of its first ten rows fails."""
LOOK_S = 1.0
"""Seconds between two looks at who is silent."""


@dataclass
class FailureCounts:
    """What has failed in a run, over all of its starts."""

    at: Counter[tuple[str, int | None]] = field(default_factory=Counter)
    """Node and sample, or call beside the graph -> failures there."""
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Graph and node -> rows that came through."""
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Graph and node -> rows that were dropped because the node failed at them."""
    replaced: int = 0
    """Processes that were replaced."""
    requeued: int = 0
    """Rows that were requeued because a rank failed."""

    def metrics(self) -> dict[str, float]:
        """Counts that are not 0, as metrics."""
        counts = Counter({"replaced_workers": self.replaced, "requeued_rows": self.requeued})
        for (graph, _), rows in self.dropped.items():
            counts["failed_rows" if graph == TRAIN else f"{graph}/failed_rows"] += rows
        return {name: float(count) for name, count in counts.items() if count}


@dataclass(frozen=True)
class Remedy:
    """The actions that follow from a failure, after its rows were released."""

    requests: Sequence[CallRequest] = ()
    full_disk: str = ""
    """Why the run has to wait for capacity on a disk; empty when it has not."""


class Failures:
    """Counts failures by place, gives rows back, and has processes replaced.

    Args:
        weights: sends the present weights to a process that is new.
        disk: may have paused the run; then nobody was silent.
        counts: what failed so far, also in earlier starts of the run.
        start_timeout_s: how long a process that replaces another may take to be up.
        call_timeout_s: how long a rank that was called may be silent.
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
        """Call that is under way -> rows that went back."""
        self._heard: dict[tuple[str, int], float] = {}
        """Group and rank -> when it replied last, or was called while it had nothing to do."""
        self._all_heard = -math.inf
        """Time at which all ranks were taken to have replied."""
        self._called: dict[tuple[str, int], dict[Call, None]] = {}
        """Group and rank -> its calls that are under way."""
        self._looked = -math.inf
        self._lost = False
        """A rank was taken out since this was asked last."""

    # Silence

    def called(self, call: Call) -> None:
        """A call is given to its ranks. Those that had nothing to do are waited for from here on."""
        now = self._backend.clock()
        for rank in call.ranks:
            others = self._called.setdefault((call.group.name, rank), {})
            if not any(rank in other.waiting for other in others):
                self._heard[call.group.name, rank] = now
            others[call] = None

    def listen(self, events: Sequence[Event]) -> list[CallRequest]:
        """Note who has replied; once a second, replace ranks that have been silent for too long.

        Raises:
            DeadlineError: one of them cannot be replaced by itself.
        """
        now = self._backend.clock()
        for event in events:
            self._heard[event.call.group.name, event.rank] = now
        paused = self._disk.take_paused()  # nobody was asked for anything meanwhile
        if paused or (
            events and not self._backend.has_processes
        ):  # groups take turns: the others had none
            self._all_heard = now
        if now - self._looked < LOOK_S:
            return []
        self._looked = now
        requests: list[CallRequest] = []
        limits: dict[str, float] = {}
        """Group -> seconds for which any of its ranks may be silent."""
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
            if not (self._backend.has_processes and group.handle.worker_class.replaceable):
                what = who_is_silent(self._backend, calls, rank, others, now)
                raise DeadlineError(f"nobody answered for {limit:.0f} s. Waited for: {what}")
            stack = where_they_stand(self._backend, group, [rank])
            requests += self.replace(
                group, rank, f"it did not answer for {limit:.0f} s" + (f"; {stack}" if stack else "")
            )
        return requests

    def _silent_with(self, rank: int, calls: Sequence[Call], now: float) -> list[int]:
        """Ranks that have been silent in the same calls for as long as this one, or nearly so."""
        name = calls[0].group.name
        since = self._heard[name, rank] + LOOK_S
        waiting = sorted({other for call in calls for other in call.waiting})
        return [other for other in waiting if self._heard.get((name, other), now) <= since]

    def _least_limit(self, group: WorkerGroup) -> float:
        """Seconds for which any rank of a group may be silent."""
        own = getattr(group.handle.config, "silence_s", None)
        return self._call_timeout_s if own is None else min(own, self._call_timeout_s)

    def _limit(self, rank: int, calls: Sequence[Call]) -> float:
        """Seconds for which a rank may be silent."""
        group = calls[0].group
        if rank in group.starting:
            return max(self._start_timeout_s, self._call_timeout_s)
        own = getattr(group.handle.config, "silence_s", None)
        return own if own is not None and any(c.node for c in calls) else self._call_timeout_s

    # Failure

    def answered(self, call: Call) -> None:
        """A call is over. A call beside the graph that succeeded clears the failures of earlier ones like it."""
        for rank in call.ranks:
            self._called.get((call.group.name, rank), {}).pop(call, None)
        if call.lease is None and not call.lost:
            self._counts.at.pop((call.describe(), None), None)
        elif call.lease is not None and call.ledger is not None:
            self._counts.seen[call.ledger.name, call.lease.node.name] += (
                call.lease.num_rows - self._returned.pop(call, 0)
            )

    def remedy(self, event: Event) -> Remedy | None:
        """Release the rows of a failed call, and return what else is to be done; None: the run has to end or restart.

        Raises:
            WorkerError (or UserError, when the user can mend it): more samples than may failed MAX_FAILURES times each.
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
            return None  # a graph's own function is a pure one: it would fail again
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
        """A rank is gone, or silent: its rows go back, and another process takes its place, while the other ranks go on. A rank of an
        elastic group leaves it instead.

        Raises:
            WorkerError: it has happened MAX_FAILURES times in the same call beside the graph, or at more samples than may fail.
        """
        began = self._backend.clock()
        interrupted = [call for call in group.calls if rank in call.waiting]
        at = self._backend.sample_at(group, rank)
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
            if rank in call.ranks:  # its successor knows nothing of what it has answered
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
        """Start the process of an absent rank of an elastic group. It gets rows when it is up and has the present weights."""
        group.absent.discard(rank)

        def tell(worker: str, seconds: float) -> None:
            self._progress.joined(worker, seconds, len(group.up), len(group.mesh))

        return self._start(group, rank, tell, self._backend.clock())

    def take_lost(self) -> bool:
        """Whether a rank was taken out of its calls since this was asked last."""
        lost, self._lost = self._lost, False
        return lost

    def _leave(self, group: WorkerGroup, rank: int, why: str, rows: int) -> None:
        was_up = rank in group.up
        self._backend.release(group, rank)
        group.starting.discard(rank)
        group.absent.add(rank)
        worker, up = f"{group.name}[{rank}]", len(group.up)
        if was_up:
            self._progress.left_group(worker, why, rows, up, len(group.mesh))
        else:
            self._progress.say(f"worker {worker} did not come up, and is tried again later; {why}")

    def _start(
        self, group: WorkerGroup, rank: int, tell: Callable[..., None], began: float
    ) -> list[CallRequest]:
        """Have the process of a rank started; `tell` is told its name and the seconds that it took, once it is up."""
        self._backend.replace(group, rank)
        group.starting.add(rank)
        then = partial(self._registered, rank=rank, tell=tell, began=began)
        return [CallRequest(group, REGISTER, ranks=(rank,), then=then)]

    def _registered(
        self, call: Call, rank: int, tell: Callable[..., None], began: float
    ) -> list[CallRequest]:
        if rank in call.lost:  # it ended before it was up, and was replaced in turn
            return []
        group = call.group
        group.starting.discard(rank)
        if call.results != [group.mesh[rank]]:
            raise WorkerError(
                f"{call.describe(rank)}: it stands at {call.results}, not at {group.mesh[rank]}"
            )
        tell(f"{group.name}[{rank}]", seconds=self._backend.clock() - began)
        return self._weights.resend(group, rank)

    def give_back(self, call: Call, rank: int, why: str) -> int:
        """Release what a rank has not finished; returns the number of rows. Rows of other ranks of the call stay theirs, where they
        can be published without this rank's."""
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
        """Count a failure; returns the samples that failed MAX_FAILURES times.

        Raises:
            WorkerError: it is a call beside the graph that failed MAX_FAILURES times.
        """
        if call.lease is None and (call.lost or call.group.place.is_elastic):
            return []  # the call was counted with another rank, or the group does without as long as it has enough others
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
        """Drop samples at which a node failed MAX_FAILURES times each, as long as they are few.

        Raises:
            WorkerError (or UserError, when the user can mend it): there are more of them than the group's `max_failed` allows.
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
        seen = self._counts.seen[key] + failed  # those that were dropped have not come through
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
