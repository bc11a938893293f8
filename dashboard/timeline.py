"""The timeline of a run: what each worker group and rank did, and when it was idle.

`CallLog` reads the calls of a run, and follows a running one. A `Timeline` has the calls in a
window of time, and a `Lane` for each group or rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ..dataflow.errors import UserError, nearest
from ..dataflow.runs.files import TIMELINE, replacing
from ..dataflow.runs.follow import FollowedTable
from ..dataflow.runs.tables import BY_RANK, CALLS, render_table

compute: Any = pyarrow.compute  # its functions are created on import, so type checkers do not see them
NUMBERS = ("step", "start_s", "end_s", "worker_s", "rows", "tokens")
WORDS = ("graph", "group", "node")
RANKS: dict[str, Any] = {"call": np.int64, "rank": np.int32, "end_s": np.float64, "worker_s": np.float32}
"""Columns with one row per rank of each call on several ranks: the call's index, the rank, the time
of its reply [s], and its seconds in the worker."""


class CallLog:
    """The calls of a run as arrays, ordered by their end; there may be none yet."""

    def __init__(self, run: Path) -> None:
        self._table = FollowedTable(run, TIMELINE)
        self._parts: list[dict[str, np.ndarray]] = []
        self._rank_parts: list[dict[str, np.ndarray]] = []
        self._length = 0
        self._words: dict[str, dict[str, int]] = {name: {} for name in WORDS}
        """Maps each column to a mapping of its words to numbers."""
        self.damage: str | None = None

    @classmethod
    def of_rows(cls, rows: Iterable[Mapping[str, Any]]) -> CallLog:
        """Return a log of calls, given as rows of `CALLS`."""
        log = cls(Path())
        log._append(pa.Table.from_pylist([dict(row) for row in rows], CALLS))
        return log

    @property
    def path(self) -> Path:
        return self._table.path

    def refresh(self) -> None:
        try:
            news = self._table.news()
            if news.anew:
                self._parts, self._rank_parts, self._length = [], [], 0
            for batch in news.batches:
                self._append(pa.Table.from_batches([batch]))
            if news.table is not None:
                self._append(news.table)
            self.damage = None
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            self.damage = f"{self.path}: {error}"

    def _append(self, table: pa.Table) -> None:
        part = {name: table[name].to_numpy() for name in NUMBERS}
        for name in WORDS:
            coded = compute.fill_null(table[name], "").combine_chunks().dictionary_encode()
            known = self._words[name]
            numbers = [known.setdefault(word, len(known)) for word in coded.dictionary.to_pylist()]
            part[name] = np.array(numbers, np.int32)[coded.indices.to_numpy(zero_copy_only=False)]
        if BY_RANK in table.column_names:
            column = table[BY_RANK].combine_chunks()
            if len(inner := column.flatten()):
                number = compute.fill_null(compute.list_value_length(column), 0).to_numpy()
                of_rank = {
                    name: np.asarray(inner.field(name), RANKS[name]) for name in RANKS if name != "call"
                }
                calls = np.repeat(self._length + np.arange(len(column)), number)
                self._rank_parts.append({"call": calls, **of_rank})
        self._parts.append(part)
        self._length += len(table)

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """Columns, [calls] each. `graph`, `group` and `node` are indexes into `words`."""
        types: dict[str, Any] = {**dict.fromkeys(NUMBERS, np.float64), **dict.fromkeys(WORDS, np.int32)}
        self._parts = _joined(self._parts, types)
        return self._parts[0]

    @property
    def ranks(self) -> dict[str, np.ndarray]:
        """Columns of `RANKS`, in the order of the calls."""
        self._rank_parts = _joined(self._rank_parts, RANKS)
        return self._rank_parts[0]

    def words(self, column: str) -> list[str]:
        """Return the words of `graph`, `group` or `node` by number."""
        return list(self._words[column])

    @property
    def steps(self) -> list[tuple[int, float]]:
        """(step, end of its last call [s]) of each step."""
        steps, ends = self.columns["step"].astype(np.int64), self.columns["end_s"]
        last = np.zeros(int(steps.max(initial=0)) + 1)
        np.maximum.at(last, np.maximum(steps, 0), ends)
        return [(step, float(last[step])) for step in np.unique(steps).tolist() if step >= 0]

    def of_steps(self, first: float, last: float) -> Timeline | None:
        """Return the timeline of the steps `first` to `last`, inclusive; None if the run has none.

        The timeline begins when the step before the first one closes. A step closes when its last
        call ends.
        """
        steps = self.steps
        own = [(step, end) for step, end in steps if first <= step <= last]
        if not own:
            return None
        start = max((end for step, end in steps if step < own[0][0]), default=0.0)
        return Timeline(self, start, max(end for _, end in own), own)

    def totals(self, by: str, rows: Any = slice(None)) -> dict[tuple[str, str], dict[str, Any]]:
        """Map (word of the column `by`, node) to the totals of its calls: number, rows, seconds,
        and seconds in the slowest rank. The driver and the transport take the other seconds."""
        c = {name: column[rows] for name, column in self.columns.items()}
        words, nodes = self.words(by), self.words("node")
        keys, of = np.unique(c[by].astype(np.int64) * len(nodes) + c["node"], return_inverse=True)
        seconds, worker_s, num_rows = (
            np.bincount(of, values, len(keys)).tolist()
            for values in (c["end_s"] - c["start_s"], c["worker_s"], c["rows"])
        )
        return {
            (words[key // len(nodes)], nodes[key % len(nodes)]): {
                "calls": calls,
                "rows": int(num_rows[place]),
                "seconds": seconds[place],
                "worker_s": worker_s[place],
            }
            for place, (key, calls) in enumerate(
                zip(keys.tolist(), np.bincount(of).tolist(), strict=True)
            )
        }


def _joined(parts: list[dict[str, np.ndarray]], types: Mapping[str, Any]) -> list[dict[str, np.ndarray]]:
    if len(parts) == 1:
        return parts
    empty = {name: np.empty(0, kind) for name, kind in types.items()}
    return [{name: np.concatenate([part[name] for part in parts or [empty]]) for name in types}]


# Windows


class _Idle(NamedTuple):
    """Idle times between calls, in order."""

    start_s: np.ndarray
    """[gaps] float64; `end_s` has the same shape."""
    end_s: np.ndarray
    before: np.ndarray
    """[gaps] int64 index of the last call that ended before the gap, or -1."""
    after: np.ndarray
    """[gaps] int64 index of the call that ended the gap, or -1."""


def idle_stretches(starts: np.ndarray, ends: np.ndarray, start_s: float, end_s: float) -> _Idle:
    """Return the idle times between calls in a window. `starts` and `ends` are [calls] seconds,
    sorted by start; calls may overlap or exceed the window.

    >>> starts, ends = np.array([1.0, 2.0, 5.0]), np.array([3.0, 2.5, 6.0])
    >>> [part.tolist() for part in idle_stretches(starts, ends, 0, 7)]
    [[0.0, 3.0, 6.0], [1.0, 5.0, 7.0], [-1, 0, 2], [0, 2, -1]]
    """
    free_from = np.maximum.accumulate(np.concatenate([[start_s], np.minimum(ends, end_s)]))
    free_until = np.concatenate([np.maximum(starts, start_s), [end_s]])
    # The call that has ended last so far; for equal ends, the later one.
    latest = np.concatenate(
        [[-1], np.where(np.minimum(ends, end_s) >= free_from[1:], np.arange(len(ends)), -1)]
    )
    before, after = np.maximum.accumulate(latest), np.append(np.arange(len(starts)), -1)
    found = free_until > free_from
    return _Idle(free_from[found], free_until[found], before[found], after[found])


def covered(starts: np.ndarray, ends: np.ndarray, begin: float, width: float, number: int) -> np.ndarray:
    """Return the share of each bin that calls cover: [number] float64, above 1 where calls overlap.
    `starts` and `ends` are [calls] seconds. Bins begin at `begin`, and are `width` seconds wide.

    >>> covered(np.array([0.0, 1.0]), np.array([1.5, 2.0]), 0.0, 1.0, 4).tolist()
    [1.0, 1.5, 0.0, 0.0]
    """
    edges = begin + width * np.arange(number + 1)
    # Time covered until each edge: for each call that has begun, the time until its end or the
    # edge.
    s, e = np.sort(starts), np.sort(ends)
    sums_s, sums_e = np.concatenate([[0.0], np.cumsum(s)]), np.concatenate([[0.0], np.cumsum(e)])
    at_s, at_e = np.searchsorted(s, edges), np.searchsorted(e, edges)
    until = edges * at_s - sums_s[at_s] - (edges * at_e - sums_e[at_e])
    return np.diff(until) / width


class Gap(NamedTuple):
    start_s: float
    end_s: float
    before: int
    """Index in the lane of the call before the gap; -1 at the start of the window."""
    after: int
    """Index in the lane of the call after the gap; -1 at the end of the window."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, eq=False)
class Lane:
    """Calls in a window, of a worker group, a rank or one kind, sorted by start."""

    name: str
    timeline: Timeline
    calls: np.ndarray
    """[bars] int64 index of each bar's call in the log."""
    start_s: np.ndarray
    """[bars] float64; `end_s` has the same shape."""
    end_s: np.ndarray
    worker_s: np.ndarray
    """[bars] seconds in the worker."""

    @cached_property
    def nodes(self) -> np.ndarray:
        """[bars] number of each bar's node."""
        return self.timeline.log.columns["node"][self.calls]

    def node_at(self, place: int) -> str:
        return self.timeline.log.words("node")[int(self.nodes[place])]

    @cached_property
    def _idle(self) -> _Idle:
        return idle_stretches(self.start_s, self.end_s, self.timeline.start_s, self.timeline.end_s)

    @property
    def idle_s(self) -> float:
        return float((self._idle.end_s - self._idle.start_s).sum())

    @property
    def idle_share(self) -> float:
        """Idle share of the window, 0 to 1."""
        return self.idle_s / self.timeline.seconds if self.timeline.seconds else 0.0

    def gaps(self, most: int | None = None, shortest_s: float = 0.0) -> list[Gap]:
        """Return the `most` longest idle times of at least `shortest_s` seconds, in order."""
        lengths = self._idle.end_s - self._idle.start_s
        told = np.flatnonzero(lengths >= shortest_s)
        told = np.sort(told[np.argsort(-lengths[told], kind="stable")[:most]])
        return [Gap(*gap) for gap in zip(*(part[told].tolist() for part in self._idle), strict=True)]

    @cached_property
    def stretches(self) -> list[tuple[float, float, list[int]]]:
        """(start, end, nodes) of each period with a constant set of running calls, without idle
        times.

        >>> calls = [{"node": n, "start_s": s, "end_s": e} for n, s, e in (("long", 0, 3), ("inner", 1, 2))]
        >>> Timeline(CallLog.of_rows(calls), 0, 4).lanes[0].stretches
        [(0.0, 1.0, [0]), (1.0, 2.0, [0, 1]), (2.0, 3.0, [0])]
        """
        bars = list(zip(self.start_s.tolist(), self.end_s.tolist(), self.nodes.tolist(), strict=True))
        times = sorted({time for start, end, _ in bars for time in (start, end)})
        at = {time: place for place, time in enumerate(times)}
        nodes: list[list[int]] = [[] for _ in times]
        for start, end, node in bars:
            for place in range(at[start], at[end]):
                nodes[place].append(node)
        # Calls that took no time are in no period.
        moments = [(start, end, [node]) for start, end, node in bars if start == end]
        busy = zip(pairwise(times), nodes, strict=False)
        return [(start, end, now) for (start, end), now in busy if now] + moments

    def shares(self, nodes: Sequence[int], num_bins: int) -> np.ndarray:
        """Return each node's share of each bin: [nodes, bins]. Overlapping calls share a bin.

        >>> calls = [{"node": n, "start_s": s, "end_s": e} for n, s, e in (("n", 0.0, 1.5), ("m", 1.0, 2.0))]
        >>> Timeline(CallLog.of_rows(calls), 0, 4).lanes[0].shares([0, 1], 4).tolist()
        [[1.0, 0.333..., 0.0, 0.0], [0.0, 0.666..., 0.0, 0.0]]
        """
        start, width = self.timeline.start_s, max(self.timeline.seconds, 1e-9) / num_bins
        shares = np.zeros((len(nodes), num_bins))
        for place, node in enumerate(nodes):
            own = self.nodes == node
            # Rounding may give slightly negative differences.
            shares[place] = covered(self.start_s[own], self.end_s[own], start, width, num_bins).clip(
                min=0
            )
        return shares / np.maximum(1.0, shares.sum(axis=0))


@dataclass(frozen=True, eq=False)
class Timeline:
    """The calls of a run in a window of time.

    A call belongs to the step in which it ended. Step 3 makes policy version 3; step 0 is the start
    of the run. Times are seconds since the start of the run.
    """

    log: CallLog
    start_s: float
    end_s: float
    steps: Sequence[tuple[int, float]] = ()
    """(step, time when it closed [s]) of each step of the window; the last step may still be
    open."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @cached_property
    def rows(self) -> np.ndarray:
        """Indexes of the calls that overlap the window, sorted by start."""
        starts, ends = self.log.columns["start_s"], self.log.columns["end_s"]
        inside = (ends > self.start_s) & (starts < self.end_s)
        # A call that took no time overlaps nothing.
        moments = (starts == ends) & (starts >= self.start_s) & (ends <= self.end_s)
        rows = np.flatnonzero(inside | moments)
        return rows[np.argsort(starts[rows], kind="stable")]

    def lane(self, name: str, rows: np.ndarray) -> Lane:
        c = self.log.columns
        return Lane(name, self, rows, c["start_s"][rows], c["end_s"][rows], c["worker_s"][rows])

    def group_lane(self, group: str) -> Lane:
        number = self.log.words("group").index(group)
        return self.lane(group, self.rows[self.log.columns["group"][self.rows] == number])

    def rank_lanes(self, group: str, ranks: Iterable[int]) -> Iterator[Lane]:
        """Yield a lane for each rank, with its time in each call on several ranks."""
        c, of, number = self.log.columns, self.log.ranks, self.log.words("group").index(group)
        starts = of["end_s"] - of["worker_s"]
        inside = np.flatnonzero((of["end_s"] > self.start_s) & (starts < self.end_s))
        inside = inside[c["group"][of["call"][inside]] == number]
        for rank in ranks:
            own = inside[of["rank"][inside] == rank]
            own = own[np.argsort(starts[own], kind="stable")]
            calls = of["call"][own]
            begun = np.maximum(starts[own], c["start_s"][calls])
            yield Lane(f"{group}[{rank}]", self, calls, begun, of["end_s"][own], of["worker_s"][own])

    @cached_property
    def lanes(self) -> list[Lane]:
        """Lanes of the groups, in the order of their first calls."""
        groups = self.log.words("group")
        first = np.full(len(groups), np.inf)
        np.minimum.at(first, self.log.columns["group"], self.log.columns["start_s"])
        return [self.group_lane(groups[number]) for number in np.argsort(first, kind="stable").tolist()]

    @cached_property
    def ended(self) -> np.ndarray:
        """Indexes of the calls of the window's steps."""
        return np.flatnonzero(np.isin(self.log.columns["step"], [step for step, _ in self.steps]))

    @cached_property
    def node_order(self) -> list[int]:
        """Numbers of the nodes by total time, longest first."""
        c = self.log.columns
        nodes, took = c["node"][self.rows], (c["end_s"] - c["start_s"])[self.rows]
        seconds = np.bincount(nodes, took, len(self.log.words("node")))
        return [node for node in np.argsort(-seconds, kind="stable").tolist() if node in nodes]

    @property
    def title(self) -> str:
        first, last = self.steps[0][0], self.steps[-1][0]
        those = f"step {first}" if first == last else f"steps {first} to {last}"
        return f"{those}: {len(self.ended):,} calls in {seconds_text(self.seconds)}"

    def num_calls(self, group: str) -> int:
        """Return how many calls of a group ended in the window's steps."""
        number = self.log.words("group").index(group)
        return int((self.log.columns["group"][self.ended] == number).sum())


def load_timeline(run: Path, steps: str = ":") -> Timeline:
    """Load the timeline of a run.

    Args:
        steps: a number, or a range like a Python slice, such as 10:20, 10: or :20.

    Raises:
        UserError: the run, its timeline or these steps do not exist or are unreadable.
    """
    if not run.is_dir():
        others = [p.name for p in run.parent.iterdir() if p.is_dir()] if run.parent.is_dir() else []
        raise UserError(f"there is no run {run}{nearest(run.name, others)}")
    log = CallLog(run)
    log.refresh()
    if log.damage is not None:
        raise UserError(f"the timeline of {run} cannot be read: {log.damage}")
    if not log.path.is_file():
        raise UserError(
            f"{run} has no timeline: nothing was called yet, or it is not the directory of a run"
        )
    return select_steps(log, steps)


def select_steps(log: CallLog, text: str = ":") -> Timeline:
    """Return the timeline of these steps (see `load_timeline`). Raises UserError if the text is
    malformed, or the run has none of the steps."""
    found = re.fullmatch(r"(\d*)(:?)(\d*)", text)
    if found is None or not text:
        raise UserError(f"steps are given as 10:20 (10 to 19), 10:, :20 or 10, not {text!r}")
    first = int(found[1] or 0)
    last = (int(found[3]) - 1 if found[3] else np.inf) if found[2] else first
    timeline = log.of_steps(first, last)
    if timeline is None:
        known = [step for step, _ in log.steps]
        has = f"it has steps {known[0]} to {known[-1]}" if known else "it has none yet"
        raise UserError(f"the run's timeline has no step in {text}; {has}")
    return timeline


# The timeline as text


def node_times(timeline: Timeline) -> list[dict[str, Any]]:
    """Return each node's calls, rows, seconds and share of the window, longest first.

    `worker_s` is the time in the slowest rank; the driver and the transport take the rest.
    Overlapping calls count in full.
    """
    totals = timeline.log.totals("group", timeline.ended)
    found = [
        {"group": group, "node": node, **own, "share": own["seconds"] / (timeline.seconds or 1.0)}
        for (group, node), own in totals.items()
    ]
    return sorted(found, key=lambda one: -one["seconds"])


def summary(timeline: Timeline) -> str:
    groups: list[dict[str, Any]] = []
    for lane in timeline.lanes:
        row = {
            "group": lane.name,
            "calls": timeline.num_calls(lane.name),
            "busy %": f"{100 * (1 - lane.idle_share):.1f}".rjust(6),
            "idle %": f"{100 * lane.idle_share:.1f}".rjust(6),
            "longest gap": "-".rjust(11),
            "between": "",
        }
        for gap in lane.gaps(1):
            before = lane.node_at(gap.before) if gap.before >= 0 else "start"
            after = lane.node_at(gap.after) if gap.after >= 0 else "end"
            row["longest gap"] = seconds_text(gap.seconds).rjust(11)
            row["between"] = f"{before} and {after}, at {seconds_text(gap.start_s)}"
        groups.append(row)
    nodes = [
        {
            **{name: node[name] for name in ("group", "node", "calls", "rows")},
            "seconds": f"{node['seconds']:.2f}".rjust(8),
            "in worker": f"{node['worker_s']:.2f}".rjust(9),
            "mean call": seconds_text(node["seconds"] / node["calls"]).rjust(9),
            "share %": f"{100 * node['share']:.1f}".rjust(7),
        }
        for node in node_times(timeline)
    ]
    tables = [pa.Table.from_pylist(rows) for rows in (groups, nodes) if rows]
    return "\n\n".join(
        [timeline.title, *(render_table(table, limit=1000, width=100) for table in tables)]
    )


def seconds_text(value: float) -> str:
    """Format seconds with two or three digits.

    >>> [seconds_text(value) for value in (0.0, 0.00042, 0.0315, 2.5, 314.2, 7512.0)]
    ['0 s', '0.4 ms', '32 ms', '2.50 s', '314 s', '2 h 05 min']
    """
    if not value:
        return "0 s"
    if value >= 3600:
        return f"{value // 3600:.0f} h {value % 3600 // 60:02.0f} min"
    if value >= 0.1:
        return f"{value:.0f} s" if value >= 100 else f"{value:.2f} s"
    return f"{1000 * value:.0f} ms" if value >= 0.01 else f"{1000 * value:.1f} ms"


# The timeline as a trace


def write_trace(timeline: Timeline, path: Path) -> Path:
    """Write the window as Chrome trace events, for https://ui.perfetto.dev or chrome://tracing.
    Raises UserError if the file cannot be written.

    Each group is a process in the trace, with a track for its calls and one for each rank. Calls
    that overlap without nesting get additional tracks. Ends of steps are instant events.
    """
    log = timeline.log
    events = [
        {"name": f"step {step}", "ph": "i", "s": "g", "ts": _us(end), "pid": 0, "tid": 0}
        for step, end in timeline.steps
    ]
    for pid, group in enumerate(timeline.lanes, 1):
        of_group = log.columns["group"][log.ranks["call"]] == log.words("group").index(group.name)
        ranks = np.unique(log.ranks["rank"][of_group]).tolist()
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": group.name}})
        tracks = [
            (lane.name, track)
            for lane in (group, *timeline.rank_lanes(group.name, ranks))
            for track in _nested(lane)
        ]
        for tid, (name, slices) in enumerate(tracks):
            events.append(
                {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
            )
            events += ({**one, "ph": "X", "pid": pid, "tid": tid} for one in slices)
    try:
        with replacing(path) as partial:
            partial.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    except OSError as error:
        raise UserError(f"the trace cannot be written to {path}: {error}") from None
    return path


def _nested(lane: Lane) -> list[list[dict[str, Any]]]:
    """Distribute the slices of a lane over tracks, in which slices nest or do not overlap, because
    viewers stack the slices of a track by time."""
    c, names = lane.timeline.log.columns, lane.timeline.log.words("node")
    tracks: list[list[dict[str, Any]]] = []
    open_until: list[list[float]] = []
    """Per track, the ends of the open slices, innermost last."""
    # Of calls that start together, the longest comes first: the others nest in it.
    for place in np.lexsort((-lane.end_s, lane.start_s)).tolist():
        start, end, call = float(lane.start_s[place]), float(lane.end_s[place]), lane.calls[place]
        for ends in open_until:
            while ends and ends[-1] <= start:
                ends.pop()
        fits = (k for k, ends in enumerate(open_until) if not ends or end <= ends[-1])
        track = next(fits, len(tracks))
        if track == len(tracks):
            tracks.append([])
            open_until.append([])
        open_until[track].append(end)
        args = {
            "step": int(c["step"][call]),
            "rows": int(c["rows"][call]),
            "worker_s": round(float(lane.worker_s[place]), 6),
        }
        name = names[int(lane.nodes[place])]
        tracks[track].append(
            {"name": name, "ts": _us(start), "dur": round(_us(end) - _us(start), 3), "args": args}
        )
    return tracks


def _us(seconds: float) -> float:
    """Return microseconds, the unit of traces, rounded to nanoseconds."""
    return round(1e6 * seconds, 3)
