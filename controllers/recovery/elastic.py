"""Elastic groups: their ranks join and leave while a run goes on.

    absent ──room for it──> starting ──its process is up──> up (after the weights that it lacks, it gets rows)
      ^                        │                            │
      └────────────────────────┴──its process or node ends──┘

- What a rank held when it left goes back to the ledger (`failures.py`), and it joins again when there is room: spot instances come and go.
- The run goes on with the ranks that are up. With fewer than `min_ranks` of them it waits for more, with a deadline.
- A rank that did not come up is tried again after a pause, which doubles.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

from ...dataflow.errors import DeadlineError
from ..backends.backend import Backend
from ..group import WorkerGroup
from ..request import CallRequest
from .failures import Failures

LOOK_S = 1.0
"""Seconds between two looks for room."""
PAUSE_S = (1.0, 60.0)
"""Seconds before a rank is started again that did not come up: the first time, and at most."""


class Elastic:
    """Has absent ranks of elastic groups join, and ends a run that has had too few of them for too long.

    Args:
        backend: knows where there is room.
        groups: the worker groups of the run, by name.
        failures: starts the ranks.
        say: tells the user what is waited for.
        start_timeout_s: how long a process may take to be up, once there is room for it.
    """

    def __init__(
        self,
        backend: Backend,
        groups: Mapping[str, WorkerGroup],
        failures: Failures,
        say: Callable[[str], None],
        start_timeout_s: float,
    ) -> None:
        self._backend = backend
        self._failures = failures
        self._say = say
        self._start_timeout_s = start_timeout_s
        self._groups = [group for group in groups.values() if group.place.is_elastic]
        self._looked = -math.inf
        self._tries: Counter[tuple[str, int]] = Counter()
        """Group and rank -> how often it was started since it was up last."""
        self._tried: dict[tuple[str, int], float] = {}
        """The same -> when it was started last."""
        self._short_since: dict[str, float] = {}
        """Group with fewer ranks than it needs -> since when."""

    @property
    def waits(self) -> bool:
        """Whether a group has fewer ranks than it needs, so that a run in which nothing can move is not stalled."""
        return any(_is_short(group) for group in self._groups)

    def look(self) -> list[CallRequest]:
        """Once a second, start absent ranks for which there is room.

        Raises:
            DeadlineError: a group has had too few ranks for too long; the message names those that are missing.
        """
        now = self._backend.clock()
        if not self._groups or now - self._looked < LOOK_S:
            return []
        self._looked = now
        requests: list[CallRequest] = []
        for group in self._groups:
            for rank in set(group.up) - group.lacking:
                self._tries.pop((group.name, rank), None)
            for rank in sorted(self._backend.vacant(group)) if group.absent else ():
                requests += self._join(group, rank, now)
            self._check_number(group, now)
        return requests

    def _join(self, group: WorkerGroup, rank: int, now: float) -> list[CallRequest]:
        at = group.name, rank
        first_s, longest_s = PAUSE_S
        pause_s = min(longest_s, first_s * 2 ** (self._tries[at] - 1)) if self._tries[at] else 0.0
        if now - self._tried.get(at, -math.inf) < pause_s:
            return []
        self._tries[at] += 1
        self._tried[at] = now
        return self._failures.join(group, rank)

    def _check_number(self, group: WorkerGroup, now: float) -> None:
        if not _is_short(group):
            if self._short_since.pop(group.name, None) is not None:
                self._say(f"{group.name!r} has the ranks that it needs again: {len(group.up)}")
            return
        limit_s = self._backend.wait_s + (self._start_timeout_s if group.starting else 0.0)
        missing = [
            f"{group.name}[{rank}] ({'no room for it' if rank in group.absent else 'it is starting'})"
            for rank in range(len(group.mesh))
            if rank not in group.up
        ]
        has = f"{len(group.up)} of at least {group.place.min_ranks} ranks"
        if group.name not in self._short_since:
            self._short_since[group.name] = now
            self._say(f"{group.name!r} has {has}; waiting for {', '.join(missing)}, {limit_s:.0f} s at most")
        if now - self._short_since[group.name] > limit_s:
            raise DeadlineError(
                f"group {group.name!r} had {has} for {limit_s:.0f} s (Place(min_ranks={group.place.min_ranks})). Waited for: "
                f"{', '.join(missing)}. RayBackend(wait_s=...) waits longer"
            )


def _is_short(group: WorkerGroup) -> bool:
    return len(group.up) < (group.place.min_ranks or 0)
