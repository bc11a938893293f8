"""Pictures of a run: its learning curve, and its timeline with a lane for each group."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..dataflow.errors import UserError
from .timeline import Lane, Timeline, seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


INK, FAINT, ACCENT, SECOND = "#1f2430", "#d8dbe2", "#2a6fdb", "#d9622b"


def draw_curve(
    metrics: Sequence[Mapping[str, float]], curves: Mapping[str, str], path: Path, title: str
) -> Path:
    """Draw metrics over the steps of a run, and save the picture.

    Args:
        metrics: one mapping per step, as `Driver.run` returns them; a step may lack a metric.
        curves: maps metric names to labels.
    """
    import matplotlib

    # Training machines have no display.
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    for (name, label), colour in zip(curves.items(), (ACCENT, SECOND, INK, "#3a9d5d"), strict=False):
        points = [(row["step"], row[name]) for row in metrics if name in row]
        sparse = len(points) < len(metrics) / 2
        look: Any = {"marker": "o", "linewidth": 2} if sparse else {"alpha": 0.7, "linewidth": 1}
        axes.plot(*zip(*points, strict=True), label=label, color=colour, markersize=4, **look)
        if points:
            last = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(f"{points[-1][1]:.2f}", points[-1], color=colour, **last)
    axes.set_title(title, loc="left", color=INK)
    axes.set_xlabel("step (policy version)")
    axes.grid(True, color=FAINT, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.06)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)
    plt.close(figure)
    return path


# Timelines

COLOURS = (
    "#2a6fdb", "#d9622b", "#3a9d5d", "#8a5cc7", "#d6a419", "#1f9aa8", "#c2477f", "#7a6a53", "#6b8e23",
)  # fmt: skip
"""Colours of nodes, by descending time."""
OTHER = "#9aa1ad"
IDLE = "#f3f4f7"

MAX_BARS = 1500
"""Maximum number of calls to draw as bars. With more calls, bars would be thinner than a pixel."""
NUM_BINS = 400


def draw_timeline(timeline: Timeline, path: Path, run: str) -> Path:
    """Draw a lane for each group, coloured by node, and mark the ends of steps. The path's suffix
    selects the picture's format. Raises UserError if the file cannot be written or the format is
    unknown.

    Bars are calls or, with more than `MAX_BARS` calls, the group's busy share over time.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes, nodes = timeline.lanes, timeline.node_order
    names = timeline.log.words("node")
    colours = {node: COLOURS[k] if k < len(COLOURS) else OTHER for k, node in enumerate(nodes)}
    figure = Figure(figsize=(14, 1.9 + 0.75 * max(2, len(lanes))), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes, side = figure.subplots(1, 2, width_ratios=(5, 1.5), sharey=True)
    as_bars = len(timeline.rows) <= MAX_BARS
    for place, lane in enumerate(lanes):
        _draw_lane(axes, place, lane, nodes, colours, as_bars=as_bars)
    _draw_steps(axes, timeline)
    # matplotlib warns if the limits are equal.
    axes.set_xlim(timeline.start_s, max(timeline.end_s, timeline.start_s + 1e-6))
    axes.set_ylim(len(lanes) - 0.45, -0.55)
    axes.set_yticks(range(len(lanes)), [lane.name for lane in lanes], color=INK)
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)
    label = "seconds since the start of the run"
    if not as_bars:
        bin_text = seconds_text(timeline.seconds / NUM_BINS)
        label += f"; height: share of each {bin_text} that the group was busy"
    axes.set_xlabel(label, fontsize=9, color=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    _draw_side(side, timeline)
    figure.suptitle(f"{run}, {timeline.title}", x=0.01, ha="left", color=INK, fontsize=12)
    shown = [Patch(color=colours[node], label=names[node]) for node in nodes[: len(COLOURS)]]
    if len(nodes) > len(COLOURS):
        shown.append(Patch(color=OTHER, label=f"{len(nodes) - len(COLOURS)} more"))
    shown.append(Patch(facecolor=IDLE, edgecolor=FAINT, label="idle"))
    place: Any = {"loc": "outside lower left", "ncols": min(7, len(shown))}
    figure.legend(handles=shown, frameon=False, fontsize=8.5, labelcolor=INK, **place)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(f"the picture cannot be written to {path}: {error}") from None
    return path


HEIGHT = 0.62
"""Height of a lane; the distance of lanes is 1."""


def _draw_lane(
    axes: Axes,
    place: int,
    lane: Lane,
    nodes: Sequence[int],
    colours: Mapping[int, str],
    *,
    as_bars: bool,
) -> None:
    top, foot = place - HEIGHT / 2, place + HEIGHT / 2
    begin, seconds = lane.timeline.start_s, lane.timeline.seconds
    axes.broken_barh([(begin, seconds)], (top, HEIGHT), facecolor=IDLE, zorder=0)
    if as_bars:
        spans: dict[tuple[int, float, float], list[tuple[float, float]]] = {}
        for start, end, now in lane.stretches:  # overlapping calls share the height
            height = HEIGHT / len(now)
            for k, node in enumerate(now):
                spans.setdefault((node, top + k * height, height), []).append((start, end - start))
        for (node, low, height), of_node in spans.items():
            # The edge keeps calls visible that are shorter than a pixel.
            look = {"facecolor": colours[node], "edgecolor": colours[node], "linewidth": 0.3}
            axes.broken_barh(of_node, (low, height), **look)
    else:
        edges = np.linspace(begin, begin + seconds, NUM_BINS + 1)
        floor = np.full(NUM_BINS, foot)
        for node, share in zip(nodes, lane.shares(nodes, NUM_BINS), strict=True):
            if share.any():
                axes.stairs(
                    floor - HEIGHT * share, edges, baseline=floor, fill=True, color=colours[node]
                )
                floor = floor - HEIGHT * share
    for gap in lane.gaps(1, 0.02 * seconds):
        under = foot + 0.07
        ends = [gap.start_s, gap.end_s]
        axes.plot(ends, [under, under], color=INK, linewidth=1.2, solid_capstyle="butt")
        middle = sum(ends) / 2
        # A centred label would run over the end of the lane.
        at = (middle - begin) / seconds if seconds else 0.5
        x, align = (
            (ends[0], "left") if at < 0.04 else (ends[1], "right") if at > 0.96 else (middle, "center")
        )
        _write(axes, (x, under), f"{seconds_text(gap.seconds)} idle", align, below=True)


def _draw_steps(axes: Axes, timeline: Timeline) -> None:
    """Draw a line at the end of each step, and step numbers along the top, as space allows."""
    ends = timeline.steps
    round_numbers = (digit * 10**zeros for zeros in itertools.count() for digit in (1, 2, 5))
    every = next(number for number in round_numbers if len(ends) / number <= 30)
    few = len(ends) <= 12
    distance = (0.05 if few else 0.03) * timeline.seconds
    last_line = last_label = -float("inf")
    starts = [timeline.start_s, *(end for _, end in ends)]
    for (step, end), start in zip(ends, starts, strict=False):
        between = end < timeline.end_s and (step + 1) % every == 0
        if between and end > last_line + 0.004 * timeline.seconds:
            last_line = end
            axes.axvline(end, color=INK, linewidth=0.6, alpha=0.55, linestyle=(0, (3, 2)))
        at, align = ((start + end) / 2, "center") if every == 1 else (start, "left")
        if (step % every == 0 or len(ends) == 1) and at >= last_label + distance:
            last_label = at
            _write(axes, (at, -0.55), f"step {step}" if few else str(step), align)


def _write(
    axes: Axes,
    at: tuple[float, float],
    text: str,
    align: Literal["left", "center", "right"],
    *,
    below: bool = False,
) -> None:
    axes.annotate(
        text, at, textcoords="offset points", xytext=(0, -2 if below else 3), ha=align,
        va="top" if below else "bottom", fontsize=7.5, color=INK, annotation_clip=False,
    )  # fmt: skip


def _draw_side(axes: Axes, timeline: Timeline) -> None:
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    columns = {"calls": 0.2, "busy": 0.42, "idle": 0.64, "longest gap": 1.0}
    for name, at in columns.items():
        _write(axes, (at, -0.55), name, "right")
    for place, lane in enumerate(timeline.lanes):
        gap = next(iter(lane.gaps(1)), None)
        shares = f"{100 * (1 - lane.idle_share):.0f} %", f"{100 * lane.idle_share:.0f} %"
        texts = f"{timeline.num_calls(lane.name):,}", *shares, seconds_text(gap.seconds) if gap else "-"
        for text, at in zip(texts, columns.values(), strict=True):
            axes.text(at, place, text, ha="right", va="center", fontsize=9, color=INK)
