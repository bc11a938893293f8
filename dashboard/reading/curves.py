"""Curves: metrics over steps, time or samples, thinned to what a screen can show, and marks of what happened."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from ...dataflow.graph import TRAIN
from .metrics import MetricLog

Axis: TypeAlias = Literal["step", "time_s", "samples"]
MAX_POINTS = 5000
"""Of one curve."""


def thinned(x: np.ndarray, y: np.ndarray, points: int) -> tuple[np.ndarray, np.ndarray]:
    """At most about so many points of a curve: of each stretch its lowest and its highest, so that no peak is lost.

    Args:
        x: [n] which only grows.
        y: [n]; values that are not finite are left out where others are beside them.
        points: at least 4.

    >>> x = np.arange(1000.0)
    >>> y = np.where(x == 500, 9.0, 0.0)
    >>> thin_x, thin_y = thinned(x, y, 20)
    >>> len(thin_x) <= 22, float(thin_y.max()), float(thin_x[0]), float(thin_x[-1])
    (True, 9.0, 0.0, 999.0)
    """
    number = len(x)
    if number <= points:
        return x, y
    size = -(-number // max(2, points // 2))
    rows = -(-number // size)
    padded = np.full(rows * size, np.nan)
    padded[:number] = np.where(np.isfinite(y), y, np.nan)
    stretches = padded.reshape(rows, size)
    none = np.isnan(stretches).all(axis=1)
    low = np.where(np.isnan(stretches), np.inf, stretches).argmin(axis=1)
    high = np.where(np.isnan(stretches), -np.inf, stretches).argmax(axis=1)
    starts = np.arange(rows) * size
    chosen = np.unique(np.concatenate([[0, number - 1], starts[~none] + low[~none], starts[~none] + high[~none]]))
    return x[chosen], y[chosen]


def axis_of(metrics: MetricLog, steps: np.ndarray, axis: Axis) -> np.ndarray:
    """Where steps lie on an axis.

    Args:
        metrics: of the run.
        steps: [points].
        axis: the number of the step, seconds since the start of the run, or samples that were trained on until then.

    Returns:
        [points]; nan for a step of which that is not known.
    """
    if axis == "step":
        return steps
    known, values = metrics.series(axis)
    if axis == "samples":
        values = np.cumsum(values)
    if not len(known):
        return np.full(len(steps), np.nan)
    at = np.searchsorted(known, steps)
    found = at < len(known)
    exact = np.zeros(len(steps), bool)
    exact[found] = known[at[found]] == steps[found]
    before = np.clip(np.searchsorted(known, steps, side="right") - 1, 0, len(known) - 1)
    if axis == "samples":  # a step without updates, such as step 0, has trained on as many as the one before it
        return np.where(steps < known[0], 0.0, values[before])
    return np.where(exact, values[np.minimum(at, len(known) - 1)], np.nan)


def curve(
    metrics: MetricLog, name: str, axis: Axis = "step", points: int = 800, window: tuple[float, float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """A metric over an axis, thinned.

    Args:
        metrics: of the run.
        name: of the metric.
        axis: what x is.
        points: about how many are returned at most.
        window: first and last x that are shown; one point more is kept at either side.
    """
    steps, values = metrics.series(name)
    x = axis_of(metrics, steps, axis)
    there = np.isfinite(x)
    x, y = x[there], values[there]
    if window is not None and len(x):
        first, stop = np.searchsorted(x, window[0]), np.searchsorted(x, window[1], side="right")
        x, y = x[max(0, first - 1) : stop + 1], y[max(0, first - 1) : stop + 1]
    return thinned(x, y, min(max(points, 4), MAX_POINTS))


def numbers(values: np.ndarray | Sequence[float], digits: int = 7) -> list[float | None]:
    """Numbers as JSON has them: null for one that is not finite, and no more digits than a person or a screen can use.

    >>> numbers([0.1 + 0.2, float("nan"), 12.0, 1e-9 / 3])
    [0.3, None, 12.0, 3.333333e-10]
    """
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in np.asarray(values).tolist()]


MOST_ALERTS, MOST_CHARACTERS = 500, 300
"""Alerts that are marked on a curve, the latest, and characters of each."""


def marks(
    metrics: MetricLog, config: Mapping[str, Any], alerts: Sequence[Any], checkpoints: Sequence[int]
) -> list[dict[str, Any]]:
    """What happened at which step: evaluations, checkpoints that are kept, restarts and other alerts, in order of steps."""
    found: list[dict[str, Any]] = [{"step": step, "kind": "checkpoint", "text": f"step_{step}"} for step in checkpoints]
    graphs = config.get("graphs")
    for name in graphs if isinstance(graphs, Mapping) else ():
        own = next((metric for metric in metrics.names if metric.startswith(f"{name}/")), None)
        if name != TRAIN and own is not None:
            steps, _ = metrics.series(own)
            found += [
                {"step": int(step), "kind": "evaluation", "text": str(name)}
                for step in steps.tolist()
                if math.isfinite(step)
            ]
    for alert in alerts[-MOST_ALERTS:]:
        kind = "restart" if alert.name == "restarted" else "alert"
        found.append(
            {
                "step": alert.step,
                "kind": kind,
                "name": alert.name,
                "text": alert.text.partition("\n")[0][:MOST_CHARACTERS],
            }
        )
    return sorted(found, key=lambda mark: mark["step"])
