"""Failures: what becomes of the work of a rank that fails, falls silent, or whose process ends.

it holds nothing of its own (`replaceable`)   its rows go back; a process that is gone or silent is replaced, and gets the
                                              present weights; a sample at which that happens for the third time is dropped,
                                              with its reason, and more than a share of such samples ends the run
it is one of an actor's, say                  all groups are started again from the last checkpoint (the driver does that)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from ...dataflow.errors import DeadlineError, UserError, WorkerError
from ...workers.worker import MAX_FAILED
from ..backends.backend import START_TIMEOUT_S, Backend, Event
from ..group import Call, WorkerGroup, publishes_as_it_goes
from ..progress import Progress
from ..tasks import Failure

MAX_FAILURES = 3
"""Failures at the same sample after which it is dropped, or of the same call beside the graph after which the run ends."""
FEWEST_ROWS = 100
"""A share of failed samples is of so many at least: a run does not end because one of its first ten fails."""
LOOK_S = 1.0
"""Seconds between two looks at who is silent."""


class Hands(Protocol):
    """What the driver does for it."""

    def watch(self, call: Call, then: Callable[[Call], None]) -> None: ...
    def complete(self, call: Call) -> None: ...
    def give_weights(self, group: WorkerGroup, rank: int) -> None: ...
    def wait_for_room(self, why: str) -> None: ...


class Failures:
    """Counts failures by place, gives rows back, and has processes replaced."""

    def __init__(self, backend: Backend, hands: Hands, progress: Progress, call_timeout_s: float) -> None:
        self._backend = backend
        self._hands = hands
        self._progress = progress
        self._call_timeout_s = call_timeout_s
        self._counted: Counter[tuple[str, int | None]] = Counter()
        """Node and sample, or call beside the graph -> failures there."""
        self._seen: Counter[tuple[str, str]] = Counter()
        """Graph and node -> rows that came through."""
        self._returned: Counter[Call] = Counter()
        """Call that is under way -> rows that went back."""
        self._dropped: Counter[tuple[str, str]] = Counter()
        """Graph and node -> rows that were dropped because the node failed at them."""
        self._heard: dict[tuple[str, int], float] = {}
        """Group and rank -> when it said something last, or was asked something while it had nothing to do."""
        self._all_heard = -math.inf
        """When all of them were taken to have said something."""
        self._asked: dict[tuple[str, int], dict[Call, None]] = {}
        """Group and rank -> calls that it was given and that are under way."""
        self._looked = -math.inf
        self.replaced = self.repeated = 0
        """Processes that were replaced, and rows that were requeued because somebody failed."""

    def metrics(self) -> dict[str, float]:
        """Those that are not 0."""
        counts = Counter({"replaced_workers": self.replaced, "repeated_rows": self.repeated})
        for (graph, _), rows in self._dropped.items():
            counts["failed_rows" if graph == "train" else f"{graph}/failed_rows"] += rows
        return {name: float(count) for name, count in counts.items() if count}

    # Silence

    def asked(self, call: Call) -> None:
        """A call is given to its ranks: from here on those are waited for who had nothing to do."""
        now = self._backend.clock()
        for rank in call.ranks:
            others = self._asked.setdefault((call.group.name, rank), {})
            if not any(rank in other.waiting for other in others):
                self._heard[call.group.name, rank] = now
            others[call] = None

    def forgive(self) -> None:
        """The time until now is nobody's: the run was paused."""
        self._all_heard = self._backend.clock()

    def start_again(self) -> None:
        """All processes are new."""
        self._heard.clear()
        self._asked.clear()
        self._returned.clear()

    def listen(self, events: Sequence[Event], under_way: Iterable[Call]) -> None:
        """Note who has said something; once a second, replace ranks that have been silent for too long.

        Raises:
            DeadlineError: one of them cannot be replaced by itself.
        """
        now = self._backend.clock()
        for event in events:
            self._heard[event.call.group.name, event.rank] = now
        if events and not self._backend.has_processes:  # they take turns: who said nothing had none
            self._all_heard = now
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        silent: dict[tuple[str, int], list[Call]] = {}
        for call in under_way:
            for rank in call.waiting:
                silent.setdefault((call.group.name, rank), []).append(call)
        for (name, rank), calls in silent.items():
            limit, group = self._limit(name, rank, calls), calls[0].group
            if now - max(self._heard[name, rank], self._all_heard) <= limit:
                continue
            what = "; ".join(f"{c.describe(rank)} (called {now - c.started:.0f} s ago)" for c in calls)
            if not (self._backend.has_processes and group.handle.worker_class.replaceable):
                raise DeadlineError(f"nobody answered for {limit:.0f} s. Waited for: {what}")
            self.replace(group, rank, f"it did not answer for {limit:.0f} s")

    def _limit(self, name: str, rank: int, calls: Sequence[Call]) -> float:
        """Seconds for which a rank may be silent."""
        if rank in calls[0].group.starting:
            return max(START_TIMEOUT_S, self._call_timeout_s)
        own = getattr(calls[0].group.handle.config, "silence_s", None)
        return own if own is not None and any(c.node for c in calls) else self._call_timeout_s

    # Failure

    def answered(self, call: Call) -> None:
        """A call is over: what failed beside the graph before has nothing to do with what fails later."""
        for rank in call.ranks:
            self._asked.get((call.group.name, rank), {}).pop(call, None)
        if call.lease is None and not call.lost:
            self._counted.pop((call.describe(), None), None)
        elif call.lease is not None and call.ledger is not None:
            self._seen[call.ledger.name, call.lease.node.name] += len(call.lease.rows) - self._returned.pop(call, 0)

    def take(self, event: Event) -> bool:
        """See to a reply that says that its call failed; False: nothing can be done but to end the run, or to start it again.

        Raises:
            WorkerError (or UserError, when the user can mend it): more samples than may failed MAX_FAILURES times each.
        """
        call, failure = event.call, event.reply.failure
        assert failure is not None
        if not call.group.handle.worker_class.replaceable or (failure.user_error and not failure.sample_ids):
            return False
        if (failure.died or failure.unreadable) and self._backend.has_lost_node():
            return False
        if failure.died:
            self.replace(call.group, event.rank, failure.message)
            return True
        if call.lease is not None and failure.disk_full:
            self._give_back(call, event.rank, f"{call.describe(event.rank)} found no room on the disk")
            if call.done:
                self._hands.complete(call)
            self._hands.wait_for_room(failure.message)
            return True
        if call.node is None or call.node.group is None or call.lease is None:
            return False  # a graph's own function is a pure one: it would fail again
        said = f"{failure.message}\n{failure.traceback}".rstrip()
        held = call.held_by(event.rank)
        blamed = held.intersection(failure.sample_ids)
        hopeless = self._count(call, event.rank, blamed or held, "failed", said)
        self._give_back(call, event.rank, f"{call.describe(event.rank)} failed")
        if held - {*hopeless}:
            self._progress.repeated(call.describe(event.rank), failure.message, sorted(blamed - {*hopeless}))
        self._do_without(call, hopeless, f"{call.describe(event.rank)} failed", replace(failure, message=said))
        if call.done:
            self._hands.complete(call)
        return True

    def replace(self, group: WorkerGroup, rank: int, why: str) -> None:
        """A rank is gone, or silent: its rows go back, and another process takes its place, and gets the present weights. The other
        ranks go on meanwhile.

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
        rows = sum(self._give_back(call, rank, f"the process of {group.name}[{rank}] ended") for call in interrupted)
        for call in group.calls:
            if rank in call.ranks:  # what it has answered, its successor knows nothing of
                call.lose(rank)
        self._backend.replace(group, rank)
        self.replaced += 1
        group.starting.add(rank)
        group.lacking.discard(rank)
        self._hands.watch(group.register(rank), lambda call: self._is_up(call, rank, why, rows, began))
        for call, samples in hopeless.items():
            self._do_without(call, samples, f"{call.describe(rank)} was lost", Failure(why, "", user_error=False))
        for call in interrupted:
            if call.done:
                self._hands.complete(call)

    def _is_up(self, call: Call, rank: int, why: str, rows: int, began: float) -> None:
        if rank in call.lost:  # it ended before it was up; yet another takes its place
            return
        group = call.group
        group.starting.discard(rank)
        if call.results != [group.mesh[rank]]:
            raise WorkerError(
                f"{call.describe(rank)}: it stands at {call.results}, not at {group.mesh[rank]} as before"
            )
        self._progress.replaced(f"{group.name}[{rank}]", why, rows, self._backend.clock() - began)
        self._hands.give_weights(group, rank)

    def _give_back(self, call: Call, rank: int, why: str) -> int:
        """Release what a rank has not finished; returns the rows. Nothing more is to come from it. What other ranks of the call
        are at stays theirs, where they can publish it without this one."""
        own = call.held_by(rank)
        call.lose(rank)
        if call.ledger is None or call.lease is None or not call.ledger.holds(call.lease):
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
        self.repeated += rows
        return rows

    def _count(self, call: Call, rank: int, samples: Iterable[int], what: str, why: str) -> list[int]:
        """Note a failure; returns the samples at which it was not the first, nor the second.

        Raises:
            WorkerError: it is a call beside the graph that failed MAX_FAILURES times.
        """
        who = call.describe()
        places = [(who, id) for id in sorted(samples)] if call.lease is not None else [(who, None)]
        self._counted.update(places)
        repeated = [place for place in places if self._counted[place] >= MAX_FAILURES]
        if repeated and call.lease is None:
            raise WorkerError(f"{call.describe(rank)} {what} {MAX_FAILURES} times. {why}")
        for place in repeated:
            del self._counted[place]
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
        named = (f"sample {id} (row {positions[id]} of source {source!r}{said.get(id, '')})" for id in samples[:4])
        at = ", ".join(named)
        failed = self._dropped[key] + len(samples)
        seen = self._seen[key] + failed  # those that were dropped have not come through
        if node.operation.quorum or failed > share * max(seen, FEWEST_ROWS):
            kind = UserError if failure.user_error else WorkerError
            raise kind(
                f"{what} {MAX_FAILURES} times at {at}. So did {failed} of {seen} rows so far, which is more than max_failed={share} "
                "allows. To replay it under a debugger: the same run with backend=weft.Local() (and resume='latest', if it makes "
                f"checkpoints). {failure.message}"
            )
        ledger.drop(node, samples, f"{what}: {failure.message.splitlines()[0]}")
        self._dropped[key] = failed
        self._progress.dropped(f"{what} {MAX_FAILURES} times at {at}", samples[4:], failure.message.splitlines()[0])
