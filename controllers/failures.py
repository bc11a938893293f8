"""Failures: what becomes of the work of a rank that fails, falls silent, or whose process ends.

it holds nothing of its own (`replaceable`)   its rows go back; a process that is gone or silent is replaced, and gets the
                                              present weights; the third time at the same sample ends the run, naming it
it is one of an actor's, say                  all groups are started again from the last checkpoint (the driver does that)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from ..dataflow.errors import DeadlineError, WorkerError
from .backend import START_TIMEOUT_S, Backend, Event
from .group import Call, WorkerGroup
from .progress import Progress

MAX_FAILURES = 3
"""Failures at the same place after which the run is given up."""


LOOK_S = 1.0
"""Seconds between two looks at who is silent."""


class Hands(Protocol):
    """What the driver does for it."""

    def watch(self, call: Call, then: Callable[[Call], None]) -> None: ...
    def complete(self, call: Call) -> None: ...
    def give_weights_again(self, group: WorkerGroup) -> None: ...
    def wait_for_room(self, why: str) -> None: ...


class Failures:
    """Counts failures by place, gives rows back, and has processes replaced."""

    def __init__(self, backend: Backend, hands: Hands, progress: Progress, call_timeout_s: float) -> None:
        self._backend = backend
        self._hands = hands
        self._progress = progress
        self._call_timeout_s = call_timeout_s
        self._counted: Counter[str] = Counter()
        """Place -> failures there."""
        self._starting: set[tuple[str, int]] = set()
        """Group and rank of processes that are not up yet."""
        self._heard: dict[tuple[str, int], float] = {}
        """Group and rank -> when it said something last, or was asked something while it had nothing to do."""
        self._looked = -math.inf
        self.replaced = self.repeated = 0
        """Processes that were replaced, and rows that were asked again because somebody failed."""

    def metrics(self) -> dict[str, float]:
        """Those that are not 0."""
        counts = {"replaced_workers": float(self.replaced), "repeated_rows": float(self.repeated)}
        return {name: count for name, count in counts.items() if count}

    # Silence

    def asked(self, call: Call) -> None:
        """A call is given to its ranks: from here on those are waited for who had nothing to do."""
        for rank in call.ranks:
            if not any(rank in other.waiting for other in call.group.calls):
                self._heard[call.group.name, rank] = self._backend.clock()

    def forgive(self) -> None:
        """The time until now is nobody's: the run was paused."""
        self._heard = dict.fromkeys(self._heard, self._backend.clock())

    def start_again(self) -> None:
        """All processes are new."""
        self._starting.clear()
        self._heard.clear()

    def listen(self, events: Sequence[Event], under_way: Iterable[Call]) -> None:
        """Note who has said something; once a second, replace ranks that have been silent for too long.

        Raises:
            DeadlineError: one of them cannot be replaced by itself.
        """
        now = self._backend.clock()
        for event in events:
            self._heard[event.call.group.name, event.rank] = now
        if events and not self._backend.has_processes:  # they take turns: who said nothing had none
            self._heard = dict.fromkeys(self._heard, now)
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        silent: dict[tuple[str, int], list[Call]] = {}
        for call in under_way:
            for rank in call.waiting:
                silent.setdefault((call.group.name, rank), []).append(call)
        for (name, rank), calls in silent.items():
            limit, group = self._limit(name, rank, calls), calls[0].group
            if now - self._heard[name, rank] <= limit:
                continue
            what = "; ".join(f"{c.describe(rank)} (called {now - c.started:.0f} s ago)" for c in calls)
            if not (self._backend.has_processes and group.handle.worker_class.replaceable):
                raise DeadlineError(f"nobody answered for {limit:.0f} s. Waited for: {what}")
            self.replace(group, rank, f"it did not answer for {limit:.0f} s")

    def _limit(self, name: str, rank: int, calls: Sequence[Call]) -> float:
        """Seconds for which a rank may be silent."""
        if (name, rank) in self._starting:
            return max(START_TIMEOUT_S, self._call_timeout_s)
        own = getattr(calls[0].group.handle.config, "silence_s", None)
        return own if own is not None and any(c.node for c in calls) else self._call_timeout_s

    # Failure

    def answered(self, call: Call) -> None:
        """A call is over: what failed beside the graph before has nothing to do with what fails later."""
        if call.lease is None and not call.lost:
            self._counted.pop(_beside(call), None)

    def take(self, event: Event) -> bool:
        """See to a reply that says that its call failed; False: nothing can be done but to end the run, or to start it again.

        Raises:
            WorkerError: it has happened MAX_FAILURES times at the same sample (or in the same call beside the graph).
        """
        call, failure = event.call, event.reply.failure
        assert failure is not None
        if not call.group.handle.worker_class.replaceable or failure.user_error:
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
        said = f"{failure.message}\n{failure.traceback.rstrip()}"
        held = call.held_by(event.rank)
        blamed = held.intersection(failure.sample_ids)
        self._count(call, event.rank, blamed or held, "failed", said)
        self._give_back(call, event.rank, f"{call.describe(event.rank)} failed")
        self._progress.repeated(call.describe(event.rank), failure.message, sorted(blamed))
        if call.done:
            self._hands.complete(call)
        return True

    def replace(self, group: WorkerGroup, rank: int, why: str) -> None:
        """A rank is gone, or silent: its rows go back, and another process takes its place, and gets the present weights.

        Raises:
            WorkerError: it has happened MAX_FAILURES times at the same sample (or in the same call beside the graph).
        """
        began = self._backend.clock()
        interrupted = [call for call in group.calls if rank in call.waiting]
        at = self._backend.sample_at(group, rank)
        for call in interrupted:
            held = call.held_by(rank)
            self._count(call, rank, {at} if at is not None and at in held else held, "was lost", why)
        rows = sum(self._give_back(call, rank, f"the process of {group.name}[{rank}] ended") for call in interrupted)
        for call in group.calls:
            if rank in call.ranks:  # what it has answered, its successor knows nothing of
                call.lose(rank)
        self._backend.replace(group, rank)
        self.replaced += 1
        self._starting.add((group.name, rank))
        self._hands.watch(group.register(rank), lambda call: self._is_up(call, rank, why, rows, began))
        for call in interrupted:
            if call.done:
                self._hands.complete(call)
        self._hands.give_weights_again(group)

    def _is_up(self, call: Call, rank: int, why: str, rows: int, began: float) -> None:
        if rank in call.lost:  # it ended before it was up; yet another takes its place
            return
        group = call.group
        self._starting.discard((group.name, rank))
        if call.results != [group.mesh[rank]]:
            raise WorkerError(
                f"{call.describe(rank)}: it stands at {call.results}, not at {group.mesh[rank]} as before"
            )
        self._progress.replaced(f"{group.name}[{rank}]", why, rows, self._backend.clock() - began)

    def _give_back(self, call: Call, rank: int, why: str) -> int:
        """Release what a call has not finished; returns the rows. Nothing more is to come from the rank."""
        call.lose(rank)
        if call.ledger is None or call.lease is None or not call.ledger.holds(call.lease):
            return 0
        rows = len(call.lease.open)
        call.ledger.release(call.lease, why)
        if call.gives_way:
            self._backend.cancel(call)
        self.repeated += rows
        return rows

    def _count(self, call: Call, rank: int, samples: Iterable[int], what: str, why: str) -> None:
        places: Mapping[str, str] = {_beside(call): ""}
        if call.lease is not None and call.ledger is not None:
            source = call.ledger.graph.source.name
            positions = {row.id: row.position for row in call.lease.rows}
            places = {
                f"node {call.lease.node.name!r}, sample {id}": f"row {positions[id]} of source {source!r}"
                for id in samples
            }
        self._counted.update(places.keys())
        if repeated := [place for place in places if self._counted[place] >= MAX_FAILURES]:
            at = "; ".join(f"{place} ({places[place]})" if places[place] else place for place in repeated[:4])
            raise WorkerError(
                f"{call.describe(rank)} {what} {MAX_FAILURES} times at {at}. To replay it under a debugger: "
                f"the same run with backend=weft.Local() (and resume='latest', if it makes checkpoints). {why}"
            )


def _beside(call: Call) -> str:
    """The place of a call beside the graph."""
    return f"call {call.group.name}.{call.method}"
