"""The timeline of a run: when each worker group was busy, and its idle gaps.

A run appends to its timeline every few seconds (`dataflow/runs/tables.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ..dataflow.errors import UserError, nearest
from ..dataflow.runs import tables as run_tables
from ..dataflow.runs.tables import render_table

# Busy and idle time of a worker group, from the times of its calls.


class IdleStretches(NamedTuple):
    """Idle stretches between calls, in order of time."""

    start_s: np.ndarray
    """[gaps] float64."""
    end_s: np.ndarray
    """[gaps] float64."""
    before: np.ndarray
    """[gaps] int64 index of the last call that ended before the gap, or -1."""
    after: np.ndarray
    """[gaps] int64 index of the call that ended the gap, or -1."""


def idle_stretches(starts: np.ndarray, ends: np.ndarray, start_s: float, end_s: float) -> IdleStretches:
    """Return the idle stretches between calls in a window. Overlapping calls are one busy stretch.

    >>> starts, ends = np.array([1.0, 2.0, 5.0]), np.array([3.0, 2.5, 6.0])
    >>> [part.tolist() for part in idle_stretches(starts, ends, 0, 7)]
    [[0.0, 3.0, 6.0], [1.0, 5.0, 7.0], [-1, 0, 2], [0, 2, -1]]

    Args:
        starts, ends: [calls] seconds, sorted by start.
        start_s, end_s: the window. Parts of calls outside it are ignored.
    """
    free_from = np.maximum.accumulate(np.concatenate([[start_s], np.minimum(ends, end_s)]))
    free_until = np.concatenate([np.maximum(starts, start_s), [end_s]])
    # The call that ended last so far; of equal ends the later call.
    latest = np.concatenate(
        [[-1], np.where(np.minimum(ends, end_s) >= free_from[1:], np.arange(len(ends)), -1)]
    )
    before, after = np.maximum.accumulate(latest), np.append(np.arange(len(starts)), -1)
    found = free_until > free_from
    return IdleStretches(free_from[found], free_until[found], before[found], after[found])


def covered(starts: np.ndarray, ends: np.ndarray, begin: float, width: float, number: int) -> np.ndarray:
    """Return the share of each bin that calls cover: [number] float64, above 1 where calls overlap.

    >>> covered(np.array([0.0, 1.0]), np.array([1.5, 2.0]), 0.0, 1.0, 4).tolist()
    [1.0, 1.5, 0.0, 0.0]

    Args:
        starts, ends: [calls] seconds.
        begin: start of the first bin.
        width: [seconds] of a bin.
    """
    edges = begin + width * np.arange(number + 1)
    # Time covered until each edge: the summed lengths, until then, of the calls that have begun.
    s, e = np.sort(starts), np.sort(ends)
    sums_s, sums_e = np.concatenate([[0.0], np.cumsum(s)]), np.concatenate([[0.0], np.cumsum(e)])
    at_s, at_e = np.searchsorted(s, edges), np.searchsorted(e, edges)
    until = edges * at_s - sums_s[at_s] - (edges * at_e - sums_e[at_e])
    return np.diff(until) / width


# Timeline


@dataclass(frozen=True)
class TimelineCall:
    """One call of a group, as seen by the driver."""

    step: int
    """The step during which it ended. Step 3 makes policy version 3; step 0 is the start of the run."""
    group: str
    node: str
    start_s: float
    """[s] Since the start of the run, as is the end."""
    end_s: float
    worker_s: float
    """[s] Time inside the slowest rank. The rest of the call is spent in the driver and the transport."""
    rows: int


@dataclass(frozen=True)
class Gap:
    """An idle stretch of a group."""

    start_s: float
    end_s: float
    before: str
    """Node of the call before the gap, or "start" at the start of the window."""
    after: str
    """Node of the call after the gap, or "end" at the end of the window."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Lane:
    """One worker group within a window."""

    group: str
    calls: Sequence[TimelineCall]
    """Calls that overlap the window, sorted by start."""
    start_s: float
    end_s: float

    @cached_property
    def gaps(self) -> list[Gap]:
        """Idle stretches, in order of time. Overlapping calls form one busy stretch."""
        idle = idle_stretches(*self._times, self.start_s, self.end_s)
        stretches = zip(*(part.tolist() for part in idle), strict=True)
        return [
            Gap(start, end, self._node(before, "start"), self._node(after, "end"))
            for start, end, before, after in stretches
        ]

    @cached_property
    def _times(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array([call.start_s for call in self.calls]), np.array(
            [call.end_s for call in self.calls]
        )

    def _node(self, place: int, otherwise: str) -> str:
        return self.calls[place].node if place >= 0 else otherwise

    @property
    def idle_s(self) -> float:
        return sum(gap.seconds for gap in self.gaps)

    @property
    def idle(self) -> float:
        """Idle share of the window, 0 to 1."""
        return self.idle_s / (self.end_s - self.start_s) if self.end_s > self.start_s else 0.0

    @property
    def longest_gap(self) -> Gap | None:
        return max(self.gaps, key=lambda gap: gap.seconds, default=None)

    @cached_property
    def stretches(self) -> list[tuple[float, float, list[str]]]:
        """(start, end, nodes) of each stretch with a constant set of calls, without idle ones.

        >>> calls = [TimelineCall(0, "g", "long", 0, 3, 0.0, 0), TimelineCall(0, "g", "inner", 1, 2, 0.0, 0)]
        >>> Lane("g", calls, 0, 4).stretches
        [(0, 1, ['long']), (1, 2, ['long', 'inner']), (2, 3, ['long'])]
        """
        times = sorted({time for call in self.calls for time in (call.start_s, call.end_s)})
        at = {time: place for place, time in enumerate(times)}
        nodes: list[list[str]] = [[] for _ in times]
        for call in self.calls:
            for place in range(at[call.start_s], at[call.end_s]):
                nodes[place].append(call.node)
        # Calls that took no time are not in any stretch.
        moments = [
            (call.start_s, call.end_s, [call.node]) for call in self.calls if call.start_s == call.end_s
        ]
        return [
            (start, end, now) for (start, end), now in zip(pairwise(times), nodes, strict=False) if now
        ] + moments

    def shares(self, nodes: Sequence[str], num_bins: int) -> np.ndarray:
        """Return the share of each bin that the group spent on each node: [nodes, bins].

        Overlapping calls share a bin.

        >>> calls = [TimelineCall(0, "g", "n", 0.0, 1.5, 0.0, 0), TimelineCall(0, "g", "m", 1.0, 2.0, 0.0, 0)]
        >>> Lane("g", calls, 0, 4).shares(["n", "m"], 4).tolist()
        [[1.0, 0.333..., 0.0, 0.0], [0.0, 0.666..., 0.0, 0.0]]
        """
        width, of = (self.end_s - self.start_s) / num_bins, np.array([call.node for call in self.calls])
        starts, ends = self._times
        shares = np.zeros((len(nodes), num_bins))
        for place, node in enumerate(nodes):
            if (own := of == node).any():
                shares[place] = covered(starts[own], ends[own], self.start_s, width, num_bins).clip(min=0)
        return shares / np.maximum(1.0, shares.sum(axis=0))


@dataclass(frozen=True)
class Timeline:
    """The calls of a run, or of some of its steps."""

    calls: Sequence[TimelineCall]
    """Calls that overlap the window, in the order of their ends."""
    start_s: float
    end_s: float
    ends_of_steps: Sequence[tuple[int, float]]
    """Each step in the window, with the second when it closed; the last one may still be open."""
    groups: Sequence[str]
    """All groups of the run, in the order of their first calls."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @cached_property
    def ended(self) -> list[TimelineCall]:
        """Calls that belong to the steps of the window."""
        steps = {step for step, _ in self.ends_of_steps}
        return [call for call in self.calls if call.step in steps]

    @cached_property
    def lanes(self) -> list[Lane]:
        """One lane per group of the run."""
        calls: dict[str, list[TimelineCall]] = {group: [] for group in self.groups}
        for call in sorted(self.calls, key=lambda call: call.start_s):
            calls[call.group].append(call)
        return [Lane(group, own, self.start_s, self.end_s) for group, own in calls.items()]

    @cached_property
    def num_calls(self) -> Counter[str]:
        """Calls that ended within the window, by group."""
        return Counter(call.group for call in self.ended)

    @property
    def title(self) -> str:
        """A one-line summary."""
        steps = [step for step, _ in self.ends_of_steps]
        those = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        return f"{those}: {len(self.ended):,} calls in {seconds_text(self.seconds)}"

    @cached_property
    def nodes(self) -> list[str]:
        """Nodes, the one with the most time first."""
        seconds = dict.fromkeys((call.node for call in self.calls), 0.0)
        for call in self.calls:
            seconds[call.node] += call.end_s - call.start_s
        return sorted(seconds, key=lambda node: -seconds[node])


def load_timeline(run: Path, steps: tuple[int | None, int | None] = (None, None)) -> Timeline:
    """Load the timeline of a run, or of some steps.

    Args:
        steps: first step, and the step to stop before; None for either end of the run.

    Raises:
        UserError: the run, its timeline or these steps do not exist, or the timeline is unreadable.
    """
    if not run.is_dir():
        others = [p.name for p in run.parent.iterdir() if p.is_dir()] if run.parent.is_dir() else []
        raise UserError(f"there is no run {run}{nearest(run.name, others)}")
    try:
        table = run_tables.read_timeline(run)
        if table is None:
            raise UserError(
                f"{run} has no timeline: nothing was called yet, or it is not the directory of a run"
            )
        return _window(table.select(list(TimelineCall.__dataclass_fields__)), steps)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise UserError(f"the timeline of {run} cannot be read: {error}") from None


def window(
    calls: Sequence[TimelineCall], steps: tuple[int | None, int | None] = (None, None)
) -> Timeline:
    """Return the timeline of some steps, from all calls of a run.

    The window begins when the step before the first one closes. A step closes when its last call
    has ended. Calls that began earlier or end later are included.

    Raises:
        UserError: the run has none of these steps.
    """
    columns = {
        name: [getattr(call, name) for call in calls] for name in TimelineCall.__dataclass_fields__
    }
    return _window(pa.table(columns), steps)


def _window(table: pa.Table, steps: tuple[int | None, int | None]) -> Timeline:
    """As `window`, for a table. Only rows in the window become objects, since long runs have millions."""
    step, start_s, end_s = (np.asarray(table[name], float) for name in ("step", "start_s", "end_s"))
    known, of = np.unique(step, return_inverse=True)
    ends = np.zeros(len(known))
    np.maximum.at(ends, of, end_s)
    first, stop = steps
    chosen = (known >= (-np.inf if first is None else first)) & (
        known < (np.inf if stop is None else stop)
    )
    if not chosen.any():
        has = f"it has steps {known[0]:.0f} to {known[-1]:.0f}" if len(known) else "it has none yet"
        asked = f"{'' if first is None else first}:{'' if stop is None else stop}"
        raise UserError(f"the run's timeline has no step in {asked}; {has}")
    start = ends[known < known[chosen][0]].max(initial=0.0)
    end = ends[chosen][-1]
    within = ((end_s > start) & (start_s < end)) | chosen[of]
    began = (
        table.select(["group", "start_s"])
        .group_by("group", use_threads=False)
        .aggregate([("start_s", "min")])
    )
    rows = table.filter(pa.array(within))
    return Timeline(
        [
            TimelineCall(*row)
            for row in zip(*(column.to_pylist() for column in rows.columns), strict=True)
        ],
        float(start),
        float(end),
        list(zip(known[chosen].astype(int).tolist(), ends[chosen].tolist(), strict=True)),
        tuple(began.sort_by("start_s_min")["group"].to_pylist()),
    )


def parse_steps(text: str) -> tuple[int | None, int | None]:
    """Parse steps from the command line: a number, or a range like a Python slice.

    >>> parse_steps("10:20"), parse_steps("10:"), parse_steps(":20"), parse_steps("7")
    ((10, 20), (10, None), (None, 20), (7, 8))

    Raises:
        UserError: the text has another form.
    """
    if re.fullmatch(r"\d+", text):
        return int(text), int(text) + 1
    found = re.fullmatch(r"(\d*):(\d*)", text)
    if found is None:
        raise UserError(f"steps are given as 10:20 (10 to 19), 10:, :20 or 10, not {text!r}")
    first, stop = (int(part) if part else None for part in found.groups())
    return first, stop


# The timeline as text


@dataclass(frozen=True)
class NodeTimes:
    """Time of a node's calls."""

    group: str
    node: str
    calls: int
    rows: int
    seconds: float
    """[s] All calls together, even if they overlapped."""
    worker_s: float
    """[s] Time inside the workers. The rest is spent in the driver and the transport."""
    share: float
    """`seconds` as a share of the window."""


def node_times(timeline: Timeline) -> list[NodeTimes]:
    """Return the time of each node's calls, longest first."""
    by_node: dict[tuple[str, str], list[TimelineCall]] = {}
    for call in timeline.ended:
        by_node.setdefault((call.group, call.node), []).append(call)
    found: list[NodeTimes] = []
    for (group, node), own in by_node.items():
        seconds, worker_s = sum(c.end_s - c.start_s for c in own), sum(c.worker_s for c in own)
        share = seconds / timeline.seconds if timeline.seconds else 0.0
        found.append(NodeTimes(group, node, len(own), sum(c.rows for c in own), seconds, worker_s, share))
    return sorted(found, key=lambda one: -one.seconds)


def summary(timeline: Timeline) -> str:
    """Summarize the timeline: how busy each group was, and which nodes took the time."""
    groups = [
        {
            "group": lane.group,
            "calls": timeline.num_calls[lane.group],
            "busy %": f"{100 * (1 - lane.idle):.1f}".rjust(6),
            "idle %": f"{100 * lane.idle:.1f}".rjust(6),
            "longest gap": seconds_text(gap.seconds).rjust(11)
            if (gap := lane.longest_gap)
            else "-".rjust(11),
            "between": f"{gap.before} and {gap.after}, at {seconds_text(gap.start_s)}" if gap else "",
        }
        for lane in timeline.lanes
    ]
    nodes = [
        {
            "group": node.group,
            "node": node.node,
            "calls": node.calls,
            "rows": node.rows,
            "seconds": f"{node.seconds:.2f}".rjust(8),
            "in worker": f"{node.worker_s:.2f}".rjust(9),
            "mean call": seconds_text(node.seconds / node.calls).rjust(9),
            "share %": f"{100 * node.share:.1f}".rjust(7),
        }
        for node in node_times(timeline)
    ]
    tables = [
        render_table(pa.Table.from_pylist(rows), limit=1000, width=100)
        for rows in (groups, nodes)
        if rows
    ]
    return "\n\n".join([timeline.title, *tables])


def seconds_text(value: float) -> str:
    """Format seconds with only as many digits as are useful.

    >>> [seconds_text(value) for value in (0.0, 0.00042, 0.0315, 2.5, 314.2, 7512.0)]
    ['0 s', '0.4 ms', '32 ms', '2.50 s', '314 s', '2 h 05 min']
    """
    if not value:
        return "0 s"
    if value >= 3600:
        return f"{value // 3600:.0f} h {value % 3600 // 60:02.0f} min"
    if value >= 100:
        return f"{value:.0f} s"
    if value >= 0.1:
        return f"{value:.2f} s"
    return f"{1000 * value:.0f} ms" if value >= 0.01 else f"{1000 * value:.1f} ms"
