"""Gather time: seconds for which rows wait for others, so that a reply or a call has more than one."""

from __future__ import annotations

MANY_RANKS = 64
"""Number of ranks at work from which on rows wait for others: on their ranks (`ranks/gathered.py`), on the driver (`loop/gathering.py`),
and for the driver, which rests between two turns (`loop/calls.py`). So many ranks bring more rows at once."""
RANK_S = 4e-3
"""Seconds for each rank at work for which rows may wait."""
MAX_S = 2.0
"""Most seconds for which they may."""


def gather_s(ranks: int) -> float:
    """Seconds for which rows may wait for others where so many ranks are at work: none where they are few.

    >>> gather_s(8), gather_s(100), gather_s(5000)
    (0.0, 0.4, 2.0)
    """
    return min(MAX_S, ranks * RANK_S) if ranks >= MANY_RANKS else 0.0
