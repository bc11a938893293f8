"""Pictures of a run: its learning curve, and its timeline with a lane for each group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..dataflow.errors import UserError
from .timeline import Lane, Timeline, seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Learning curve


INK, FAINT, ACCENT, SECOND = "#1f2430", "#d8dbe2", "#2a6fdb", "#d9622b"


def draw_curve(
    metrics: Sequence[Mapping[str, float]], curves: Mapping[str, str], path: Path, title: str
) -> Path:
    """Draw metrics over the steps of a run, and save the picture.

    Args:
        metrics: one mapping per step, as `Driver.run` returns them; a step may lack a metric.
        curves: metric name -> label.
        path: the file to write; its suffix sets the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    for (name, label), colour in zip(curves.items(), (ACCENT, SECOND, INK, "#3a9d5d"), strict=False):
        points = [(row["step"], row[name]) for row in metrics if name in row]
        sparse = len(points) < len(metrics) / 2
        axes.plot(
            *zip(*points, strict=True),
            label=label,
            color=colour,
            linewidth=2 if sparse else 1,
            alpha=1 if sparse else 0.7,
            marker="o" if sparse else None,
            markersize=4,
        )
        if points:
            axes.annotate(
                f"{points[-1][1]:.2f}",
                points[-1],
                textcoords="offset points",
                xytext=(6, 0),
                color=colour,
                va="center",
            )
    axes.set_title(title, loc="left", color=INK)
    axes.set_xlabel("step (policy version)")
    axes.grid(True, color=FAINT, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.06)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)
    plt.close(figure)
    return path


# Pictures

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
"""Colours of nodes, the node with the most time first."""
OTHER = "#9aa1ad"
"""The colour of all further nodes."""
IDLE = "#f3f4f7"

MAX_BARS = 1500
"""Most calls to draw as bars. With more, bars would be thinner than a pixel, so busy shares are drawn."""
NUM_BINS = 400
"""Bins of a lane with shares."""


def draw_timeline(timeline: Timeline, path: Path, run: str) -> Path:
    """Draw a lane per group, coloured by node, with the ends of steps, and save the picture.

    Up to `MAX_BARS` calls, each bar is a call. Beyond that, its height is the group's busy share.

    Args:
        path: the file to write; its suffix sets the format.
        run: the name of the run, for the title.

    Raises:
        UserError: the file cannot be written, or the format is unknown.
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
        ""
        if as_bars
        else f"; height: share of each {seconds_text(timeline.seconds / NUM_BINS)} that the group was busy"
    )
    axes.set_xlabel(f"seconds since the start of the run{height}", fontsize=9, color=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    _draw_side(side, timeline)
    figure.suptitle(f"{run}, {timeline.title}", x=0.01, ha="left", color=INK, fontsize=12)
    shown = [Patch(color=colours[node], label=node) for node in nodes[: len(COLOURS)]]
    shown += (
        [Patch(color=OTHER, label=f"{len(nodes) - len(COLOURS)} more")]
        if len(nodes) > len(COLOURS)
        else []
    )
    shown += [Patch(facecolor=IDLE, edgecolor=FAINT, label="idle")]
    figure.legend(
        handles=shown,
        loc="outside lower left",
        ncols=min(7, len(shown)),
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
    )
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(f"the picture cannot be written to {path}: {error}") from None
    return path


HEIGHT = 0.62
"""Height of a lane; lanes are 1 apart."""


def _draw_lane(
    axes: Axes, place: int, lane: Lane, nodes: Sequence[str], colours: dict[str, str], *, as_bars: bool
) -> None:
    top = place - HEIGHT / 2
    axes.broken_barh([(lane.start_s, lane.end_s - lane.start_s)], (top, HEIGHT), facecolor=IDLE, zorder=0)
    if as_bars:
        spans: dict[tuple[str, float, float], list[tuple[float, float]]] = {}
        for start, end, now in lane.stretches:  # overlapping calls share the height
            for place_in, node in enumerate(now):
                height = HEIGHT / len(now)
                spans.setdefault((node, top + place_in * height, height), []).append((start, end - start))
        for (node, low, height), of_node in spans.items():
            # The edge keeps calls visible that are shorter than a pixel.
            axes.broken_barh(
                of_node, (low, height), facecolor=colours[node], edgecolor=colours[node], linewidth=0.3
            )
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
        axes.plot(
            [gap.start_s, gap.end_s], [under, under], color=INK, linewidth=1.2, solid_capstyle="butt"
        )
        middle = (gap.start_s + gap.end_s) / 2
        # Near an end of the lane, a centred label would run over it.
        at = (middle - lane.start_s) / (lane.end_s - lane.start_s)
        axes.annotate(
            f"{seconds_text(gap.seconds)} idle",
            (gap.start_s if at < 0.04 else gap.end_s if at > 0.96 else middle, under),
            textcoords="offset points",
            xytext=(0, -2),
            ha="left" if at < 0.04 else "right" if at > 0.96 else "center",
            va="top",
            fontsize=7.5,
            color=INK,
        )


def _draw_steps(axes: Axes, timeline: Timeline) -> None:
    """Draw a line at the end of each step, and as many step numbers along the top as fit."""
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
        if (step % every == 0 or len(ends) == 1) and at >= last_label + (
            0.05 if few else 0.03
        ) * timeline.seconds:
            last_label = at
            _write_above(
                axes, at, f"step {step}" if few else str(step), "center" if every == 1 else "left"
            )


def _write_above(axes: Axes, at: float, text: str, align: Literal["left", "center", "right"]) -> None:
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
            seconds_text(gap.seconds) if gap else "-",
        )
        for text, at in zip(texts, columns.values(), strict=True):
            axes.text(at, place, text, ha="right", va="center", fontsize=9, color=INK)
