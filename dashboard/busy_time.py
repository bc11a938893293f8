"""When a worker group was busy and when it stood idle, from the times of its calls."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class IdleStretches(NamedTuple):
    """Stretches in which none of some calls went on, in order of time."""

    start_s: np.ndarray
    """[gaps] float64."""
    end_s: np.ndarray
    """[gaps] float64."""
    before: np.ndarray
    """[gaps] int64, place of the call that ended last before each; -1: none did."""
    after: np.ndarray
    """[gaps] int64, place of the call that ended the gap; -1: none did."""


def idle_stretches(starts: np.ndarray, ends: np.ndarray, start_s: float, end_s: float) -> IdleStretches:
    """Stretches between calls within a window. Calls that overlap are one busy stretch.

    >>> starts, ends = np.array([1.0, 2.0, 5.0]), np.array([3.0, 2.5, 6.0])
    >>> [part.tolist() for part in idle_stretches(starts, ends, 0, 7)]
    [[0.0, 3.0, 6.0], [1.0, 5.0, 7.0], [-1, 0, 2], [0, 2, -1]]

    Args:
        starts: [calls] seconds, in order; ends: [calls] seconds.
        start_s, end_s: the window. What calls have beyond it counts for nothing.
    """
    free_from = np.maximum.accumulate(np.concatenate([[start_s], np.minimum(ends, end_s)]))
    free_until = np.concatenate([np.maximum(starts, start_s), [end_s]])
    # The last call to end so late: of equal ends the later call.
    latest = np.concatenate([[-1], np.where(np.minimum(ends, end_s) >= free_from[1:], np.arange(len(ends)), -1)])
    before, after = np.maximum.accumulate(latest), np.append(np.arange(len(starts)), -1)
    found = free_until > free_from
    return IdleStretches(free_from[found], free_until[found], before[found], after[found])


def covered(starts: np.ndarray, ends: np.ndarray, begin: float, width: float, number: int) -> np.ndarray:
    """[number] float64, share of each stretch of a `width` that calls cover; more than 1 where they overlap.

    >>> covered(np.array([0.0, 1.0]), np.array([1.5, 2.0]), 0.0, 1.0, 4).tolist()
    [1.0, 1.5, 0.0, 0.0]

    Args:
        starts: [calls] seconds; ends: [calls] seconds.
        begin: where the first stretch begins.
        width: [seconds] of each.
        number: of stretches.
    """
    edges = begin + width * np.arange(number + 1)
    # Time covered until each edge: of calls that have begun, their length until then.
    s, e = np.sort(starts), np.sort(ends)
    sums_s, sums_e = np.concatenate([[0.0], np.cumsum(s)]), np.concatenate([[0.0], np.cumsum(e)])
    at_s, at_e = np.searchsorted(s, edges), np.searchsorted(e, edges)
    until = edges * at_s - sums_s[at_s] - (edges * at_e - sums_e[at_e])
    return np.diff(until) / width
