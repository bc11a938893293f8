"""The learning curve of a run, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

INK, FAINT, ACCENT, SECOND = "#1f2430", "#d8dbe2", "#2a6fdb", "#d9622b"


def draw_curve(metrics: Sequence[Mapping[str, float]], curves: Mapping[str, str], path: Path, title: str) -> Path:
    """Draw some metrics over the steps of a run and save the picture.

    Args:
        metrics: one mapping per step, as `Driver.run` returns them; a step may lack a metric.
        curves: metric name -> label.
        path: file to write (its ending says which format).
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
                f"{points[-1][1]:.2f}", points[-1], textcoords="offset points", xytext=(6, 0), color=colour, va="center"
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
