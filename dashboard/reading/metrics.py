"""Metrics of a run as arrays, curves over steps or time, and the cards of the curves page."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from ...dataflow.metric_names import SCORES, entry_named, score_label
from ...dataflow.runs.alerts import Alert
from ...dataflow.runs.files import METRICS
from ...dataflow.runs.follow import FollowedTable

Series: TypeAlias = tuple[np.ndarray, np.ndarray]
"""[points] increasing steps, and their values."""
MOST = 5000
"""Maximum number of metrics to read; a damaged file may have any number."""
MOST_LEFT_OUT = 5000


class MetricLog:
    def __init__(self, run: Path) -> None:
        self._table = FollowedTable(run, METRICS, MOST)
        self._columns: dict[str, tuple[array[float], array[float]]] = {}
        """Maps each metric to its steps and values, in the order of writing."""
        self._series: dict[str, Series] = {}
        """Cache of each metric's sorted series."""
        self._left_out: set[str] = set()
        """Up to MOST_LEFT_OUT names of metrics beyond MOST."""
        self._columns_left_out = 0
        self.damage: str | None = None

    def refresh(self) -> None:
        try:
            news = self._table.news()
            if news.anew:
                self._columns.clear()
                self._left_out.clear()
                self._columns_left_out = 0
                self._series.clear()
            for batch in news.batches:
                self._take(batch)
            if news.table is not None:
                self._take_wide(news.table)
                self._columns_left_out = news.left_out
            self.damage = None
            if left_out := len(self._left_out) + self._columns_left_out:
                least = "at least " if len(self._left_out) == MOST_LEFT_OUT else ""
                more = f"it has {least}{left_out:,} metrics more than the {MOST:,} that are shown"
                self.damage = f"{self._table.path}: {more}"
        except (OSError, ValueError, pa.ArrowException) as error:
            self.damage = f"{self._table.path}: {error}"

    def _take(self, batch: pa.RecordBatch) -> None:
        steps, values = (batch[name].to_numpy(zero_copy_only=False) for name in ("step", "value"))
        coded = batch["name"].dictionary_encode()
        codes = coded.indices.to_numpy(zero_copy_only=False)
        order = np.argsort(codes, kind="stable")
        ends = np.cumsum(np.bincount(codes, minlength=len(coded.dictionary)))
        for own, name in zip(np.split(order, ends[:-1]), coded.dictionary.to_pylist(), strict=False):
            self._add(name, steps[own], values[own])

    def _add(self, name: str, steps: np.ndarray, values: np.ndarray) -> None:
        if name not in self._columns and len(self._columns) >= MOST:
            if len(self._left_out) < MOST_LEFT_OUT:
                self._left_out.add(name)
            return
        held = self._columns.setdefault(name, (array("d"), array("d")))
        held[0].frombytes(np.asarray(steps, np.float64).tobytes())
        held[1].frombytes(np.asarray(values, np.float64).tobytes())
        self._series.pop(name, None)

    def _take_wide(self, table: pa.Table) -> None:
        """Add a table with a row per step and a column per metric."""
        if "step" not in table.column_names:
            return
        steps = table["step"].to_numpy()
        for name in table.column_names:
            column = table[name].combine_chunks()
            if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
                continue
            there = column.is_valid().to_numpy(zero_copy_only=False)
            self._add(name, steps[there], column.to_numpy(zero_copy_only=False)[there])

    @property
    def names(self) -> list[str]:
        """Metrics in the order of their first values."""
        return list(self._columns)

    def series(self, name: str) -> Series:
        """Return the steps and values of a metric, none for an unknown one. The last value of a
        step counts."""
        if name not in self._series:
            held = self._columns.get(name)
            if held is None:
                return np.empty(0), np.empty(0)
            self._series[name] = _sorted(np.array(held[0]), np.array(held[1]))
        return self._series[name]

    @property
    def last(self) -> Mapping[str, float]:
        """Metrics of the last finished step; empty before the first."""
        steps, _ = self.series("step")
        if not len(steps):
            return {}
        last = steps[-1]
        found: dict[str, float] = {}
        for name in self._columns:
            own, values = self.series(name)
            if len(own) and own[-1] == last:
                found[name] = float(values[-1])
        return found


def _sorted(steps: np.ndarray, values: np.ndarray) -> Series:
    """
    >>> [a.tolist() for a in _sorted(np.array([0.0, 2.0, 1.0, 2.0]), np.array([5.0, 6.0, 7.0, 8.0]))]
    [[0.0, 1.0, 2.0], [5.0, 7.0, 8.0]]
    """
    if len(steps) > 1 and not (np.diff(steps) > 0).all():
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
        last = np.append(np.diff(steps) > 0, True)
        steps, values = steps[last], values[last]
    return steps, values


# Curves and marks of events


Axis: TypeAlias = Literal["step", "time_s", "samples"]
MAX_POINTS = 5000


def thinned(x: np.ndarray, y: np.ndarray, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Reduce a curve to about `points` points (4 or more), and keep its peaks. `x` [n] must be
    increasing. Between its ends, a reduced curve has only finite values.

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
    known = np.flatnonzero(~np.isnan(stretches).all(axis=1))  # with a finite value
    low, high = np.nanargmin(stretches[known], axis=1), np.nanargmax(stretches[known], axis=1)
    chosen = np.unique(np.concatenate([[0, number - 1], known * size + low, known * size + high]))
    return x[chosen], y[chosen]


def axis_of(metrics: MetricLog, steps: np.ndarray, axis: Axis) -> np.ndarray:
    """Return the positions of steps on an axis: [points], NaN if unknown. The axis is the step
    number, seconds since the start of the run, or samples trained on so far."""
    if axis == "step":
        return steps
    known, values = metrics.series(axis)
    if axis == "samples":
        values = np.cumsum(values)
    if not len(known):
        return np.full(len(steps), np.nan)
    before = np.clip(np.searchsorted(known, steps, side="right") - 1, 0, len(known) - 1)
    # A step without updates, such as step 0, adds no samples.
    if axis == "samples":
        return np.where(steps < known[0], 0.0, values[before])
    return np.where(known[before] == steps, values[before], np.nan)


def curve(
    metrics: MetricLog,
    name: str,
    axis: Axis = "step",
    points: int = 800,
    window: tuple[float, float] = (-math.inf, math.inf),
) -> tuple[np.ndarray, np.ndarray]:
    """Return a metric over an axis, thinned. `window` has the first and last x; one more point on
    each side is included."""
    steps, values = metrics.series(name)
    x = axis_of(metrics, steps, axis)
    there = np.isfinite(x)
    x, y = x[there], values[there]
    first, stop = np.searchsorted(x, window[0]), np.searchsorted(x, window[1], side="right")
    x, y = x[max(0, first - 1) : stop + 1], y[max(0, first - 1) : stop + 1]
    return thinned(x, y, min(max(points, 4), MAX_POINTS))


def numbers(values: np.ndarray | Sequence[float], digits: int = 7) -> list[float | None]:
    """Round numbers for JSON. NaN and infinities become null.

    >>> numbers([0.1 + 0.2, float("nan"), 12.0, 1e-9 / 3])
    [0.3, None, 12.0, 3.333333e-10]
    """
    return [
        float(f"{value:.{digits}g}") if math.isfinite(value) else None
        for value in np.asarray(values).tolist()
    ]


MOST_ALERTS, MOST_CHARACTERS = 500, 300
"""Maximum number of alerts to mark on a curve, latest first, and of characters of each."""


def marks(
    metrics: MetricLog, evaluations: Sequence[str], alerts: Sequence[Alert], checkpoints: Sequence[int]
) -> list[dict[str, Any]]:
    """Return events by step: evaluations, kept checkpoints, restarts and other alerts."""
    found: list[dict[str, Any]] = [
        {"step": step, "kind": "checkpoint", "text": f"step_{step}"} for step in checkpoints
    ]
    for name in evaluations:
        own = next((metric for metric in metrics.names if metric.startswith(f"{name}/")), "")
        steps = metrics.series(own)[0]
        found += [
            {"step": int(step), "kind": "evaluation", "text": name}
            for step in steps[np.isfinite(steps)].tolist()
        ]
    for alert in alerts[-MOST_ALERTS:]:
        kind = "restart" if alert.name == "restarted" else "alert"
        text = alert.text.partition("\n")[0][:MOST_CHARACTERS]
        found.append({"step": alert.step, "kind": kind, "text": text})
    return sorted(found, key=lambda mark: mark["step"])


# Cards: the most important curves, in reading order


@dataclass(frozen=True)
class _Card:
    id: str
    title: str
    metric: str
    """Regular expressions of metric names without evaluation and group, separated by `|`; the first
    match counts."""
    spread: str = ""
    """Metric of the same group with the standard deviation."""
    beside: str = ""
    """Metric of the same group to show next to the value."""
    scope: Literal["training", "evaluation"] = "training"
    floor: float | None = 0.0
    """Lower end of the scale unless a value is lower; None for the lowest value."""
    form: Literal["number", "share", "bytes", "count", "small"] = "number"
    several: bool = False
    """Whether the card has a line for each group."""


KINDS = (
    _Card("reward", "reward", "reward/mean|mean", spread="std", floor=None),
    _Card("loss", "loss", "loss", floor=None),
    _Card("accuracy", "held-out", "|".join(SCORES), scope="evaluation"),
    _Card("signal", "groups without signal", "groups_without_signal", form="share"),
    _Card("solved", "solve rate of prompts", "solve_rate", form="share"),
    _Card("retired", "retired prompts", "retired", form="count"),
    _Card("entropy", "entropy", "entropy"),
    _Card("kl", "KL from the reference", "kl"),
    _Card("length", "response length", "response_length", form="count"),
    _Card("truncated", "truncated", "truncation_rate", form="share"),
    _Card("gap", "log-probability gap", "mean_logprob_gap", beside="max_logprob_gap", form="small"),
    _Card("ratio", "generator ratio", "mean_generator_ratio", beside="max_generator_ratio", floor=None),
    _Card("clipped", "clip fraction", "clip_fraction", form="share"),
    _Card("staleness", "staleness", "mean_staleness", beside="max_staleness"),
    _Card("grad_norm", "gradient norm", "grad_norm"),
    _Card("throughput", "tokens/s", "tokens_per_s", form="count"),
    _Card("utilisation", "FLOPs utilisation", "flops_utilisation", form="share", several=True),
    _Card("idle", "idle share", "idle_share", form="share", several=True),
    _Card("memory", "memory", "device_bytes|resident_bytes", form="bytes", several=True),
    _Card("pairs", "preference accuracy", "preference_accuracy", form="share"),
)


def cards(names: Sequence[str], evaluations: Sequence[str]) -> list[dict[str, Any]]:
    """Return the cards for these metrics.

    >>> found = cards(["reward/mean", "reward/std", "eval/reward/mean", "actor/idle_share", "rollout/idle_share"], ["eval"])
    >>> [(card["id"], card["names"]) for card in found]
    [('reward', ['reward/mean']), ('accuracy', ['eval/reward/mean']), ('idle', ['actor/idle_share', 'rollout/idle_share'])]
    >>> found[0]["spread"], found[1]["title"]
    ('reward/std', 'held-out mean reward')
    """
    there = set(names)
    held_out = [name for name in names if name.partition("/")[0] in evaluations]
    training = [name for name in names if name not in set(held_out)]
    found: list[dict[str, Any]] = []
    for kind in KINDS:
        shown = _shown(kind, held_out if kind.scope == "evaluation" else training)
        if shown:
            found.append(_card(kind, shown, there))
    has_reward = any(card["id"] == "reward" for card in found)
    return [card for card in found if not (card["id"] == "loss" and has_reward)]


def _shown(kind: _Card, names: Sequence[str]) -> list[str]:
    if kind.scope == "evaluation":  # each evaluation by its first matching pattern
        each = dict.fromkeys(name.partition("/")[0] for name in names)
        found = (_matching(kind, [name for name in names if name.startswith(f"{one}/")]) for one in each)
        return [own[0] for own in found if own]
    own = _matching(kind, names)
    return sorted(own) if kind.several else own[:1]


def _matching(kind: _Card, names: Sequence[str]) -> list[str]:
    """Return the metrics of the first matching pattern of a kind, the group `reward` first."""
    for pattern in kind.metric.split("|"):
        behind = re.compile(rf"(?:[^/]+/)*{pattern}")
        own = [name for name in names if behind.fullmatch(name) and not name.endswith(("_low", "_high"))]
        if kind.scope == "training":  # without parts of a reward, such as reward/format/mean
            own = [name for name in own if name.count("/") <= 1]
        if own:
            return sorted(own, key=lambda name: name != f"reward/{pattern}")
    return []


def _card(kind: _Card, names: list[str], there: set[str]) -> dict[str, Any]:
    group = names[0].rpartition("/")[0]

    def beside(metric: str) -> str | None:
        name = f"{group}/{metric}" if group else metric
        return name if metric and name in there else None

    title, lost = kind.title, list[str]()
    if kind.scope == "evaluation":
        labels = (score_label(name.partition("/")[2]) for name in names)
        title = f"{title} {', '.join(dict.fromkeys(filter(None, labels)))}".rstrip()
        lost = [f"{name.partition('/')[0]}/prompts_lost" for name in names]
    return {
        "id": kind.id,
        "title": title,
        "names": names,
        "spread": beside(kind.spread),
        "beside": beside(kind.beside),
        "lost": [name for name in lost if name in there],
        "bands": {name: [f"{name}_low", f"{name}_high"] for name in names if f"{name}_low" in there},
        "floor": kind.floor,
        "form": kind.form,
        **meaning(names[0]),
    }


def meaning(name: str) -> dict[str, str]:
    """Return the unit, the meaning, and good and bad values of a metric.

    >>> meaning("actor/entropy")["unit"], meaning("my/own")
    ('nats/token', {'unit': '', 'meaning': '', 'good': '', 'bad': ''})
    """
    parts = name.split("/")
    entry = next((e for k in range(len(parts)) if (e := entry_named("/".join(parts[k:])))), None)
    return {field: getattr(entry, field, "") for field in ("unit", "meaning", "good", "bad")}
