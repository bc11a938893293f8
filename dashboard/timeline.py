"""The timeline of a run: which worker group did what, when, and how long it stood idle between two calls.

A run adds to its timeline every few seconds (`dataflow/buffer/run_tables.py`), so that it may be looked at while it goes on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa

from ..dataflow.buffer import run_tables
from ..dataflow.buffer.text_table import render_table
from ..dataflow.errors import UserError, nearest
from .curve import FAINT, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (
    "#2a6fdb",
    "#d9622b",
    "#3a9d5d",
    "#8a5cc7",
    "#d6a419",
    "#1f9aa8",
    "#c2477f",
    "#7a6a53",
    "#6b8e23",
)
"""Of nodes, the one that took longest first."""
OTHER = "#9aa1ad"
"""The colour of all nodes beyond those."""
IDLE = "#f3f4f7"

MAX_BARS = 1500
"""With more calls than this in one picture a bar would be thinner than a pixel: shares of time are drawn instead."""
NUM_BINS = 400
"""Of a lane with shares."""


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
        found, free_since, before = [], self.start_s, "start"
        for call in self.calls:
            if call.start_s > free_since:
                found.append(Gap(free_since, call.start_s, before, call.node))
            if call.end_s >= free_since:
                free_since, before = call.end_s, call.node
        if free_since < self.end_s:
            found.append(Gap(free_since, self.end_s, before, "end"))
        return found

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
        moments = [(call.start_s, call.end_s, [call.node]) for call in self.calls if call.start_s == call.end_s]
        return [(start, end, now) for (start, end), now in zip(pairwise(times), nodes, strict=False) if now] + moments

    def shares(self, nodes: Sequence[str], num_bins: int) -> np.ndarray:
        """[nodes, bins] share of each stretch of the window that the group spent on each node; overlapping calls share it.

        >>> calls = [TimelineCall(0, "g", "n", 0.0, 1.5, 0.0, 0), TimelineCall(0, "g", "m", 1.0, 2.0, 0.0, 0)]
        >>> Lane("g", calls, 0, 4).shares(["n", "m"], 4).tolist()
        [[1.0, 0.333..., 0.0, 0.0], [0.0, 0.666..., 0.0, 0.0]]
        """
        shares = np.zeros((len(nodes), num_bins))
        width = (self.end_s - self.start_s) / num_bins
        edges = self.start_s + width * np.arange(num_bins + 1)
        for call in self.calls:
            first = max(0, int((call.start_s - self.start_s) / width) - 1)
            last = min(num_bins, int((call.end_s - self.start_s) / width) + 2)
            overlap = np.minimum(call.end_s, edges[first + 1 : last + 1]) - np.maximum(call.start_s, edges[first:last])
            shares[nodes.index(call.node), first:last] += overlap.clip(min=0) / width
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
        return f"{those}: {len(self.ended):,} calls in {_seconds(self.seconds)}"

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
            raise UserError(f"{run} has no timeline: nothing was called yet, or it is not the directory of a run")
        return _window(table.select(list(TimelineCall.__dataclass_fields__)), steps)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise UserError(f"the timeline of {run} cannot be read: {error}") from None


def window(calls: Sequence[TimelineCall], steps: tuple[int | None, int | None] = (None, None)) -> Timeline:
    """Of all calls of a run, what happened from the close of the step before the first to that of the last.

    A step is closed right after its last call has ended. Calls that began earlier or ended later are part of it too.

    Raises:
        UserError: when there is none of these steps.
    """
    columns = {name: [getattr(call, name) for call in calls] for name in TimelineCall.__dataclass_fields__}
    return _window(pa.table(columns), steps)


def _window(table: pa.Table, steps: tuple[int | None, int | None]) -> Timeline:
    """The same of a table, of which only rows in the window become objects: a long run has millions."""
    step, start_s, end_s = (np.asarray(table[name], float) for name in ("step", "start_s", "end_s"))
    known, of = np.unique(step, return_inverse=True)
    ends = np.zeros(len(known))
    np.maximum.at(ends, of, end_s)
    first, stop = steps
    chosen = (known >= (-np.inf if first is None else first)) & (known < (np.inf if stop is None else stop))
    if not chosen.any():
        has = f"it has steps {known[0]:.0f} to {known[-1]:.0f}" if len(known) else "it has none yet"
        asked = f"{'' if first is None else first}:{'' if stop is None else stop}"
        raise UserError(f"the run's timeline has no step in {asked}; {has}")
    start = ends[known < known[chosen][0]].max(initial=0.0)
    end = ends[chosen][-1]
    within = ((end_s > start) & (start_s < end)) | chosen[of]
    began = table.select(["group", "start_s"]).group_by("group", use_threads=False).aggregate([("start_s", "min")])
    rows = table.filter(pa.array(within))
    return Timeline(
        [TimelineCall(*row) for row in zip(*(column.to_pylist() for column in rows.columns), strict=True)],
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
            "longest gap": _seconds(gap.seconds).rjust(11) if (gap := lane.longest_gap) else "-".rjust(11),
            "between": f"{gap.before} and {gap.after}, at {_seconds(gap.start_s)}" if gap else "",
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
            "mean call": _seconds(node.seconds / node.calls).rjust(9),
            "share %": f"{100 * node.share:.1f}".rjust(7),
        }
        for node in node_times(timeline)
    ]
    tables = [render_table(pa.Table.from_pylist(rows), limit=1000, width=100) for rows in (groups, nodes) if rows]
    return "\n\n".join([timeline.title, *tables])


def _seconds(value: float) -> str:
    """As few digits as tell calls apart.

    >>> [_seconds(value) for value in (0.0, 0.00042, 0.0315, 2.5, 314.2, 7512.0)]
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


# As a picture


def draw_timeline(timeline: Timeline, path: Path, run: str) -> Path:
    """Draw a lane per group, coloured by node, with the ends of steps, and save the picture.

    Up to `MAX_BARS` calls a bar is a call. Beyond that a lane is filled, at each moment, as high as the group was busy around it.

    Args:
        path: file to write (its ending says which format).
        run: name of the run, for the title.

    Raises:
        UserError: when the file cannot be written, or no such format is known.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes, nodes = timeline.lanes, timeline.nodes
    colours = {node: COLOURS[k] if k < len(COLOURS) else OTHER for k, node in enumerate(nodes)}
    figure = Figure(figsize=(14, 1.9 + 0.75 * max(2, len(lanes))), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes, side = figure.subplots(1, 2, width_ratios=(5, 1.5), sharey=True)
    as_bars = len(timeline.calls) <= MAX_BARS
    for place, lane in enumerate(lanes):
        _draw_lane(axes, place, lane, nodes, colours, as_bars=as_bars)
    _draw_steps(axes, timeline)
    axes.set_xlim(timeline.start_s, max(timeline.end_s, timeline.start_s + 1e-6))
    axes.set_ylim(len(lanes) - 0.45, -0.55)
    axes.set_yticks(range(len(lanes)), [lane.group for lane in lanes], color=INK)
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)
    height = (
        "" if as_bars else f"; height: share of each {_seconds(timeline.seconds / NUM_BINS)} that the group was busy"
    )
    axes.set_xlabel(f"seconds since the start of the run{height}", fontsize=9, color=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    _draw_side(side, timeline)
    figure.suptitle(f"{run}, {timeline.title}", x=0.01, ha="left", color=INK, fontsize=12)
    shown = [Patch(color=colours[node], label=node) for node in nodes[: len(COLOURS)]]
    shown += [Patch(color=OTHER, label=f"{len(nodes) - len(COLOURS)} more")] if len(nodes) > len(COLOURS) else []
    shown += [Patch(facecolor=IDLE, edgecolor=FAINT, label="idle")]
    figure.legend(
        handles=shown, loc="outside lower left", ncols=min(7, len(shown)), frameon=False, fontsize=8.5, labelcolor=INK
    )
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(f"the picture cannot be written to {path}: {error}") from None
    return path


HEIGHT = 0.62
"""Of a lane; lanes are 1 apart."""


def _draw_lane(
    axes: Axes, place: int, lane: Lane, nodes: Sequence[str], colours: dict[str, str], *, as_bars: bool
) -> None:
    top = place - HEIGHT / 2
    axes.broken_barh([(lane.start_s, lane.end_s - lane.start_s)], (top, HEIGHT), facecolor=IDLE, zorder=0)
    if as_bars:
        spans: dict[tuple[str, float, float], list[tuple[float, float]]] = {}
        for start, end, now in lane.stretches:  # calls that overlap share the height
            for place_in, node in enumerate(now):
                height = HEIGHT / len(now)
                spans.setdefault((node, top + place_in * height, height), []).append((start, end - start))
        for (node, low, height), of_node in spans.items():
            # The edge keeps a call visible that is shorter than a pixel.
            axes.broken_barh(of_node, (low, height), facecolor=colours[node], edgecolor=colours[node], linewidth=0.3)
    else:
        shares = lane.shares(nodes, NUM_BINS)
        edges = np.linspace(lane.start_s, lane.end_s, NUM_BINS + 1)
        floor = np.full(NUM_BINS, place + HEIGHT / 2)
        for node, share in zip(nodes, shares, strict=True):
            if share.any():
                axes.stairs(floor - HEIGHT * share, edges, baseline=floor, fill=True, color=colours[node])
                floor = floor - HEIGHT * share
    gap = lane.longest_gap
    if gap is not None and gap.seconds > 0.02 * (lane.end_s - lane.start_s):
        under = place + HEIGHT / 2 + 0.07
        axes.plot([gap.start_s, gap.end_s], [under, under], color=INK, linewidth=1.2, solid_capstyle="butt")
        middle = (gap.start_s + gap.end_s) / 2
        at = (middle - lane.start_s) / (lane.end_s - lane.start_s)  # near an end of the lane it would run over it
        axes.annotate(
            f"{_seconds(gap.seconds)} idle",
            (gap.start_s if at < 0.04 else gap.end_s if at > 0.96 else middle, under),
            textcoords="offset points",
            xytext=(0, -2),
            ha="left" if at < 0.04 else "right" if at > 0.96 else "center",
            va="top",
            fontsize=7.5,
            color=INK,
        )


def _draw_steps(axes: Axes, timeline: Timeline) -> None:
    """A line at the end of each step, and their numbers along the top, as many as there is room for."""
    ends = timeline.ends_of_steps
    every = next(k for k in _round_numbers() if len(ends) / k <= 30)
    few = len(ends) <= 12
    last_line = last_label = -float("inf")
    starts = [timeline.start_s, *(end for _, end in ends)]
    for (step, end), start in zip(ends, starts, strict=False):
        between = end < timeline.end_s and (step + 1) % every == 0
        if between and end > last_line + 0.004 * timeline.seconds:
            last_line = end
            axes.axvline(end, color=INK, linewidth=0.6, alpha=0.55, linestyle=(0, (3, 2)))
        at = (start + end) / 2 if every == 1 else start
        if (step % every == 0 or len(ends) == 1) and at >= last_label + (0.05 if few else 0.03) * timeline.seconds:
            last_label = at
            _write_above(axes, at, f"step {step}" if few else str(step), "center" if every == 1 else "left")


def _write_above(axes: Axes, at: float, text: str, align: Literal["left", "center", "right"]) -> None:
    """A small word above the lanes."""
    axes.annotate(
        text,
        (at, -0.55),
        textcoords="offset points",
        xytext=(0, 3),
        ha=align,
        va="bottom",
        fontsize=7.5,
        color=INK,
        annotation_clip=False,
    )


def _round_numbers() -> Iterable[int]:
    ten = 1
    while True:
        yield from (ten, 2 * ten, 5 * ten)
        ten *= 10


def _draw_side(axes: Axes, timeline: Timeline) -> None:
    """The table beside the lanes."""
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    columns = {"calls": 0.2, "busy": 0.42, "idle": 0.64, "longest gap": 1.0}
    for name, at in columns.items():
        _write_above(axes, at, name, "right")
    for place, lane in enumerate(timeline.lanes):
        gap = lane.longest_gap
        texts = (
            f"{timeline.num_calls[lane.group]:,}",
            f"{100 * (1 - lane.idle):.0f} %",
            f"{100 * lane.idle:.0f} %",
            _seconds(gap.seconds) if gap else "-",
        )
        for text, at in zip(texts, columns.values(), strict=True):
            axes.text(at, place, text, ha="right", va="center", fontsize=9, color=INK)
