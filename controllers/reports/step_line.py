"""What a progress display (`displays.py`) shows: a step's metrics, an evaluation's score, and the
summary at the end of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ...algorithms.evaluation import interval
from ...dataflow.metric_names import SCORES, metric_of, score_label


class _Column(NamedTuple):
    label: str
    metric: str
    """Metric, without the group."""
    form: str
    spread: str = ""
    """Metric with the standard deviation, in the same group."""
    instead_of: str = ""
    """Show this column only if the step lacks the column with this label."""


_COLUMNS = (
    _Column("reward", "mean", ".3f", spread="std"),
    _Column("loss", "loss", ".4f", instead_of="reward"),
    _Column("preference accuracy", "preference_accuracy", ".0%"),
    _Column("no signal", "groups_without_signal", ".0%"),
    _Column("retired", "curriculum/retired", ",.0f"),
    _Column("length", "response_length", ",.1f"),
    _Column("truncated", "truncation_rate", ".0%"),
    _Column("entropy", "entropy", ".2f"),
    _Column("gap", "mean_logprob_gap", ".0e"),
    _Column("tokens/s", "tokens_per_s", ",.0f"),
)
"""Columns of a step, in display order. Unmeasured ones are left out."""


@dataclass(frozen=True)
class Step:
    number: int
    of: int
    metrics: Mapping[str, float]
    left_s: float | None = None
    """Estimated seconds to the last step, at the pace so far."""

    @property
    def numbers(self) -> dict[str, str]:
        """Label -> formatted value of each measured column.

        >>> Step(1, 9, {"reward/mean": 0.5, "reward/std": 0.25, "rollout/truncation_rate": 1.0}).numbers
        {'reward': '0.500 ±0.250', 'truncated': '100%'}
        """
        found: dict[str, str] = {}
        for column in _COLUMNS:
            name = metric_of(self.metrics, column.metric)
            if name is None or column.instead_of in found:
                continue
            text = format(self.metrics[name], column.form)
            spread = self.metrics.get(f"{name.removesuffix(column.metric)}{column.spread}", math.nan)
            if column.spread and math.isfinite(spread):
                text += f" ±{spread:{column.form}}"
            found[column.label] = text
        return found

    @property
    def line(self) -> str:
        """
        >>> Step(3, 9, {"reward/mean": 0.5, "tokens_per_s": 1234.0}, left_s=61).line
        'step 3/9  reward 0.500  tokens/s 1,234  1:01 left'
        """
        numbers = [f"{label} {text}" for label, text in self.numbers.items()]
        left = [] if self.left_s is None else [f"{clock(self.left_s)} left"]
        return "  ".join([f"step {self.number}/{self.of}", *numbers, *left])


@dataclass(frozen=True)
class EvaluationScore:
    """The result of one evaluation at a step."""

    evaluation: str
    step: int
    value: float
    interval: tuple[float, float] | None = None
    """95 % interval, if the spread of the value is known."""
    label: str = ""
    mean_reward: float | None = None
    """Mean reward, if it differs from the value."""
    lost: int = 0
    """Number of prompts without a scored response, which the value excludes."""
    asked: int = 0
    """Number of all prompts, if some are lost."""
    larger_is_better: bool = True

    @property
    def text(self) -> str:
        """
        >>> EvaluationScore("eval", 10, 0.5, (0.4, 0.6), "pass@1").text
        'pass@1 0.500 (95 %: 0.400 to 0.600)'
        >>> EvaluationScore("eval", 10, 1.0, label="pass@1", mean_reward=1.1, lost=8, asked=16).text
        'pass@1 1.000, mean reward 1.100; 8 of 16 prompts: the others have no scored response'
        """
        between = f" (95 %: {self.interval[0]:.3f} to {self.interval[1]:.3f})" if self.interval else ""
        mean = f", mean reward {self.mean_reward:.3f}" if self.mean_reward is not None else ""
        lost = f"; {self.asked - self.lost} of {self.asked} prompts: the others have no scored response"
        return f"{self.label} {self.value:.3f}{between}{mean}{lost * bool(self.lost)}".strip()

    @property
    def line(self) -> str:
        """
        >>> EvaluationScore("eval", 0, 0.25, label="pass@1").line
        'eval before the first step: pass@1 0.250'
        """
        when = f"of step {self.step}" if self.step else "before the first step"
        return f"{self.evaluation} {when}: {self.text}"


def score_of(evaluation: str, step: int, metrics: Mapping[str, float]) -> EvaluationScore | None:
    """Return the score of an evaluation from its metrics `EVALUATION/...`; None without any.

    The score is a metric in `SCORES`, or else the first metric, for which larger may not be better.
    """
    start = f"{evaluation}/"
    own = {n.removeprefix(start): value for n, value in metrics.items() if n.startswith(start)}
    lost, asked = (int(own.pop(name, 0.0)) for name in ("prompts_lost", "prompts_asked"))
    name = next((n for pattern in SCORES for n in own if re.fullmatch(pattern, n)), None)
    label = next(iter(own), None) if name is None else score_label(name)
    if label is None:  # nothing was measured, or every prompt was lost
        return EvaluationScore(evaluation, step, math.nan, lost=lost, asked=asked) if lost else None
    if name is None:
        unknown = EvaluationScore(evaluation, step, own[label], label=label, lost=lost, asked=asked)
        return replace(unknown, larger_is_better=False)
    reward = next((v for n, v in own.items() if re.fullmatch(r"avg@\d+", n)), None)
    differs = reward is not None and not math.isclose(reward, own[name], abs_tol=1e-6)
    mean_reward = reward if differs and not math.isnan(own[name]) else None
    between = _interval_of(name, own)
    return EvaluationScore(evaluation, step, own[name], between, label, mean_reward, lost, asked)


def _interval_of(name: str, metrics: Mapping[str, float]) -> tuple[float, float] | None:
    """Return the measured interval or, for mean rewards, one from their standard deviation."""
    if f"{name}_low" in metrics and f"{name}_high" in metrics:
        return metrics[f"{name}_low"], metrics[f"{name}_high"]
    of = name.removesuffix("mean")
    std, number = metrics.get(f"{of}std"), metrics.get(f"{of}scored")
    known = std is not None and number is not None and math.isfinite(metrics[name])
    return interval(metrics[name], std, number) if known else None  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Ending:
    """The end of a run: evaluations and paths of results."""

    run: str
    steps: int
    seconds: float
    best: tuple[EvaluationScore, ...]
    """Best score of each evaluation whose larger values are better."""
    last: tuple[EvaluationScore, ...]
    places: Mapping[str, Path]
    """Result, such as samples -> its path."""
    best_checkpoint: str = ""
    """Path and value of the checkpoint for `CheckpointConfig.best`, shown with the places."""

    @property
    def lines(self) -> list[tuple[str, str]]:
        several = len({score.evaluation for score in self.last}) > 1
        named = [("best", score) for score in self.best] + [("last", score) for score in self.last]
        lines = [
            (f"{word} {s.evaluation if several else 'evaluation'}", f"{s.text} at step {s.step}")
            for word, s in named
        ]
        lines += [(what, str(where)) for what, where in self.places.items()]
        return lines + [("best checkpoint", self.best_checkpoint)] * bool(self.best_checkpoint)


def ending_of(
    run: str,
    rows: Iterable[Mapping[str, float]],
    evaluations: Iterable[str],
    seconds: float,
    places: Mapping[str, Path],
) -> Ending:
    rows = list(rows)
    scores = ([score_of(name, int(row["step"]), row) for row in rows] for name in evaluations)
    known = [found for of in scores if (found := [score for score in of if score is not None])]
    best = (max(of, key=_rank) for of in known if of[0].larger_is_better)
    steps = max((int(row["step"]) for row in rows), default=0)
    return Ending(run, steps, seconds, tuple(best), tuple(of[-1] for of in known), places)


def _rank(score: EvaluationScore) -> tuple[bool, float, float]:
    """Sort key: prefer scores without lost prompts, then larger values and mean rewards."""
    value = -math.inf if math.isnan(score.value) else score.value
    return not score.lost, value, score.value if score.mean_reward is None else score.mean_reward


def clock(seconds: float) -> str:
    """
    >>> clock(75), clock(3725)
    ('1:15', '1:02:05')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
