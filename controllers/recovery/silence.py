"""Silence: what is said of ranks that do not answer: who they are, on which node, with which rows, and where their processes stand."""

from __future__ import annotations

from collections.abc import Sequence

from ..backends.backend import Backend
from ..group import Call, WorkerGroup

MOST_RANKS = 64
"""Ranks that are asked where they stand."""
MOST_SAMPLES = 4


def who_is_silent(backend: Backend, calls: Sequence[Call], rank: int, others: Sequence[int], now: float) -> str:
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
        part for part in (what, stacks, _logs(group, rank) if stacks and backend.has_processes else "") if part
    )


def where_they_stand(backend: Backend, group: WorkerGroup, ranks: Sequence[int]) -> str:
    """The stacks of ranks; those that stand at the same place are said together. Empty: that is not known."""
    found = backend.stacks(group, ranks[:MOST_RANKS])
    at: dict[str, list[int]] = {}
    for rank in ranks[:MOST_RANKS]:
        if rank in found:
            at.setdefault(found[rank], []).append(rank)
    return "\n".join(f"{', '.join(f'{group.name}[{r}]' for r in same)}: {text}" for text, same in at.items())


def _call(backend: Backend, call: Call, rank: int, now: float) -> str:
    held = sorted(call.held_by(rank))
    more = f" and {len(held) - MOST_SAMPLES} more" if len(held) > MOST_SAMPLES else ""
    samples = f", samples {', '.join(map(str, held[:MOST_SAMPLES]))}{more}" if held else ""
    node = backend.node_of(call.group, rank)
    return f"{call.describe(rank)}, on {node!r}{samples} (called {now - call.started:.0f} s ago)"


def _logs(group: WorkerGroup, rank: int) -> str:
    return f"(all threads are at the end of logs/{group.name}_{rank}.log)"
