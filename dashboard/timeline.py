"""The timeline of a run: which worker group did what, when, and how long it stood idle between two calls.

A run adds to its timeline every few seconds (`dataflow/runs/tables.py`), so that it may be looked at while it goes on.
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

# Busy time
#
# When a worker group was busy and when it stood idle, from the times of its calls.


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
    latest = np.concatenate(
        [[-1], np.where(np.minimum(ends, end_s) >= free_from[1:], np.arange(len(ends)), -1)]
    )
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


@dataclass(frozen=True)
class TimelineCall:
    """One call of a group, as the driver saw it."""

    step: int
    """The step that was under way when it ended: step 3 makes policy version 3, and the start of the run is step 0."""
    group: str
    node: str
    start_s: float
    """Since the start of the run; so is the end."""
    end_s: float
    worker_s: float
    """What the slowest rank itself took; the rest of the call is the driver's and the transport's."""
    rows: int


@dataclass(frozen=True)
class Gap:
    """A stretch in which a group did nothing."""

    start_s: float
    end_s: float
    before: str
    """Node of the call that ended before it; "start" at the start of the window."""
    after: str
    """Node of the call that ended it; "end" at the end of the window."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Lane:
    """One worker group within a window."""

    group: str
    calls: Sequence[TimelineCall]
    """Those that overlap the window, by their start."""
    start_s: float
    end_s: float

    @cached_property
    def gaps(self) -> list[Gap]:
        """Idle stretches, in order of time. Calls that overlap are one busy stretch."""
        idle = idle_stretches(*self._times, self.start_s, self.end_s)
        stretches = zip(*(part.tolist() for part in idle), strict=True)
        return [
            Gap(start, end, self._node(before, "start"), self._node(after, "end"))
            for start, end, before, after in stretches
        ]

    @cached_property
    def _times(self) -> tuple[np.ndarray, np.ndarray]:
        """Starts and ends of the calls."""
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
        """Share of the window, 0 to 1."""
        return self.idle_s / (self.end_s - self.start_s) if self.end_s > self.start_s else 0.0

    @property
    def longest_gap(self) -> Gap | None:
        return max(self.gaps, key=lambda gap: gap.seconds, default=None)

    @cached_property
    def stretches(self) -> list[tuple[float, float, list[str]]]:
        """Start, end and nodes of each stretch in which the same calls went on, idle ones left out.

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
        moments = [
            (call.start_s, call.end_s, [call.node]) for call in self.calls if call.start_s == call.end_s
        ]
        return [
            (start, end, now) for (start, end), now in zip(pairwise(times), nodes, strict=False) if now
        ] + moments

    def shares(self, nodes: Sequence[str], num_bins: int) -> np.ndarray:
        """[nodes, bins] share of each stretch of the window that the group spent on each node; overlapping calls share it.

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
    """Those that overlap the window, in the order in which they ended."""
    start_s: float
    end_s: float
    ends_of_steps: Sequence[tuple[int, float]]
    """Each step in the window, with the second in which it was closed; the last may be going on."""
    groups: Sequence[str]
    """All groups of the run, in the order in which they were first called."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @cached_property
    def ended(self) -> list[TimelineCall]:
        """The calls that ended within the window; those of its steps."""
        steps = {step for step, _ in self.ends_of_steps}
        return [call for call in self.calls if call.step in steps]

    @cached_property
    def lanes(self) -> list[Lane]:
        """One per group of the run."""
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
        """What it is about, in a line."""
        steps = [step for step, _ in self.ends_of_steps]
        those = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        return f"{those}: {len(self.ended):,} calls in {seconds_text(self.seconds)}"

    @cached_property
    def nodes(self) -> list[str]:
        """The one that took longest first."""
        seconds = dict.fromkeys((call.node for call in self.calls), 0.0)
        for call in self.calls:
            seconds[call.node] += call.end_s - call.start_s
        return sorted(seconds, key=lambda node: -seconds[node])


def load_timeline(run: Path, steps: tuple[int | None, int | None] = (None, None)) -> Timeline:
    """The timeline of a run, or of some steps.

    Args:
        run: its directory.
        steps: first step, and the one before which to stop; None for the ends of the run.

    Raises:
        UserError: no run, no timeline yet, one that cannot be read, or none of these steps.
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
    """Of all calls of a run, what happened from the close of the step before the first to that of the last.

    A step is closed right after its last call has ended. Calls that began earlier or ended later are part of it too.

    Raises:
        UserError: when there is none of these steps.
    """
    columns = {
        name: [getattr(call, name) for call in calls] for name in TimelineCall.__dataclass_fields__
    }
    return _window(pa.table(columns), steps)


def _window(table: pa.Table, steps: tuple[int | None, int | None]) -> Timeline:
    """The same of a table, of which only rows in the window become objects: a long run has millions."""
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
    """Steps as they are given on the command line, with the ends of a Python slice.

    >>> parse_steps("10:20"), parse_steps("10:"), parse_steps(":20"), parse_steps("7")
    ((10, 20), (10, None), (None, 20), (7, 8))

    Raises:
        UserError: for anything else.
    """
    if re.fullmatch(r"\d+", text):
        return int(text), int(text) + 1
    found = re.fullmatch(r"(\d*):(\d*)", text)
    if found is None:
        raise UserError(f"steps are given as 10:20 (10 to 19), 10:, :20 or 10, not {text!r}")
    first, stop = (int(part) if part else None for part in found.groups())
    return first, stop


# As text


@dataclass(frozen=True)
class NodeTimes:
    """What the calls of a node took."""

    group: str
    node: str
    calls: int
    rows: int
    seconds: float
    """Of all calls, also where several went on at once."""
    worker_s: float
    """Of these, inside the workers; the rest went to the driver and the transport."""
    share: float
    """`seconds`, of the time that is shown."""


def node_times(timeline: Timeline) -> list[NodeTimes]:
    """What the calls of each node took, the longest first."""
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
    """What a person wants to know first: how busy each group was, and what took the time."""
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
    """As few digits as tell calls apart.

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
