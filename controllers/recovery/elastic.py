"""Elastic groups: their ranks join and leave during a run.

    absent ──room for it──> starting ──process is up──> up (gets rows after the weights)
      ^                        │                        │
      └────────────────────────┴─process or node ends───┘

- The rows of a leaving rank go back to the ledger (`failures.py`). The rank joins again when there
  is room, for example on spot instances.
- The run continues with the ranks that are up. Below `min_ranks`, it waits for more, with a
  deadline.
- Weft retries a failed start after a pause, which doubles each time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from ...dataflow.errors import DeadlineError
from ..backends.backend import Backend
from ..group import WorkerGroup

LOOK_S = 1.0
"""[s] Interval between checks for room in the cluster."""
PAUSE_S = (1.0, 60.0)
"""[s] First and longest pause before the retry of a failed start."""


class Elastic:
    """Chooses absent ranks to start. Ends a run if a group has too few ranks for too long."""

    def __init__(
        self,
        backend: Backend,
        groups: Iterable[WorkerGroup],
        say: Callable[[str], None],
        start_timeout_s: float,
    ) -> None:
        self._backend = backend
        self._say = say
        self._start_timeout_s = start_timeout_s
        self._cluster = backend.cluster
        self._groups = [g for g in groups if g.place.is_elastic] if self._cluster else []
        self._looked = -math.inf
        self._tries: Counter[tuple[str, int]] = Counter()
        """(group, rank) -> number of starts since the rank was last up."""
        self._tried: dict[tuple[str, int], float] = {}
        self._short_since: dict[str, float] = {}
        """Group with too few ranks -> time when this was first seen."""

    @property
    def waits(self) -> bool:
        return any(_is_short(group) for group in self._groups)

    def ranks_to_start(self) -> Iterator[tuple[WorkerGroup, int]]:
        """Yield absent ranks that now fit on the cluster, at most once every LOOK_S. The caller
        must start each before it takes the next. Raises a `DeadlineError` that names the missing
        ranks, if a group has had too few for too long."""
        now = self._backend.clock()
        if self._cluster is None or not self._groups or now - self._looked < LOOK_S:
            return
        self._looked = now
        for group in self._groups:
            # A rank that dies before it gets weights counts as a failed start.
            for rank in set(group.up) - group.lacking:
                self._tries.pop((group.name, rank), None)
            for rank in sorted(self._cluster.vacant(group)) if group.absent else ():
                if self._may_start(group.name, rank, now):
                    yield group, rank
            self._check_number(group, now, self._cluster.wait_s)

    def _may_start(self, group: str, rank: int, now: float) -> bool:
        at, (first_s, longest_s) = (group, rank), PAUSE_S
        pause_s = min(longest_s, first_s * 2 ** (self._tries[at] - 1)) if self._tries[at] else 0.0
        if now - self._tried.get(at, -math.inf) < pause_s:
            return False
        self._tries[at] += 1
        self._tried[at] = now
        return True

    def _check_number(self, group: WorkerGroup, now: float, wait_s: float) -> None:
        if not _is_short(group):
            if self._short_since.pop(group.name, None) is not None:
                self._say(f"{group.name!r} has enough ranks again: {len(group.up)}")
            return
        limit_s = wait_s + (self._start_timeout_s if group.starting else 0.0)
        missing = [
            f"{group.name}[{rank}] ({'no room for it' if rank in group.absent else 'it is starting'})"
            for rank in range(len(group.mesh))
            if rank not in group.up
        ]
        has = f"{len(group.up)} of at least {group.place.min_ranks} ranks"
        if group.name not in self._short_since:
            self._short_since[group.name] = now
            self._say(
                f"{group.name!r} has {has}; waiting for {', '.join(missing)}, {limit_s:.0f} s at most"
            )
        if now - self._short_since[group.name] > limit_s:
            raise DeadlineError(
                f"group {group.name!r} had {has} for {limit_s:.0f} s (Place(min_ranks={group.place.min_ranks})). Waited for: "
                f"{', '.join(missing)}. RayBackend(wait_s=...) waits longer"
            )


def _is_short(group: WorkerGroup) -> bool:
    return len(group.up) < (group.place.min_ranks or 0)
