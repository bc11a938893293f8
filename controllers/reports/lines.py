"""Show a run as plain lines for people, or as JSON lines for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TextIO

from ...dataflow.untrusted_text import cut, show, show_json
from .columns import Ending, EvaluationScore, Step, clock
from .sample import Sample

LONGEST_MESSAGE = 20_000
"""Most characters of a message to show."""


class PlainLines:
    """One line per step, for files and pipes."""

    interval_s = 0.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def say(self, text: str, *, warning: bool = False) -> None:
        text = cut(text, LONGEST_MESSAGE)
        show(f"warning: {text}" if warning else text, self._stream)

    def step(self, step: Step) -> None:
        self.say(line_of(step))

    def evaluated(self, score: EvaluationScore) -> None:
        self.say(line_of_score(score))

    def sample(self, sample: Sample) -> None:
        self.say(str(sample))

    def ended(self, ending: Ending) -> None:
        self.say(f"run {ending.run}: {ending.steps} steps, {clock(ending.seconds)}")
        for what, value in ending.lines:
            self.say(f"  {what + ':':17} {value}")


class JsonLines:
    """One JSON object per event, for programs. `event` names its kind; a step has all metrics."""

    interval_s = 0.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def _write(self, event: str, **values: Any) -> None:
        show_json({"event": event, **values}, self._stream)

    def say(self, text: str, *, warning: bool = False) -> None:
        self._write("warning" if warning else "message", text=text)

    def step(self, step: Step) -> None:
        self._write(
            "step", step=step.number, of=step.of, left_s=step.left_s, metrics=_numbers(step.metrics)
        )

    def evaluated(self, score: EvaluationScore) -> None:
        self._write("evaluation", **_of_score(score))

    def sample(self, sample: Sample) -> None:
        parts = _numbers(sample.parts)
        if sample.reward is not None:
            parts = {"reward": sample.reward if math.isfinite(sample.reward) else None, **parts}
        self._write(
            "sample",
            step=sample.step,
            texts=sample.texts,
            finish_reason=sample.finish_reason,
            rewards=parts,
        )

    def ended(self, ending: Ending) -> None:
        best, last = (
            [_of_score(score) for score in ending.best],
            [_of_score(score) for score in ending.last],
        )
        places = {what: str(where) for what, where in ending.places.items()}
        self._write(
            "end",
            run=ending.run,
            steps=ending.steps,
            seconds=ending.seconds,
            best=best,
            last=last,
            places=places,
        )


def encoding_of(stream: TextIO) -> str:
    """Return the encoding of a stream."""
    return getattr(stream, "encoding", None) or "utf-8"


def line_of(step: Step) -> str:
    """
    >>> line_of(Step(3, 9, {"reward/mean": 0.5, "tokens_per_s": 1234.0}, left_s=61))
    'step 3/9  reward 0.500  tokens/s 1,234  1:01 left'
    """
    figures = [f"{figure.label} {figure.text}" for figure in step.figures]
    left = [] if step.left_s is None else [f"{clock(step.left_s)} left"]
    return "  ".join([f"step {step.number}/{step.of}", *figures, *left])


def line_of_score(score: EvaluationScore) -> str:
    """
    >>> line_of_score(EvaluationScore("eval", 0, 0.25, label="pass@1"))
    'eval before the first step: pass@1 0.250'
    """
    return f"{score.evaluation} {f'of step {score.step}' if score.step else 'before the first step'}: {score.text}"


def _numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    """Replace numbers that are not finite by None, since JSON has none."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _of_score(score: EvaluationScore) -> dict[str, Any]:
    value = score.value if math.isfinite(score.value) else None
    interval = score.interval if score.interval and all(map(math.isfinite, score.interval)) else None
    lost = {"prompts_lost": score.lost, "prompts_asked": score.asked} if score.lost else {}
    measured = {
        "metric": score.label,
        "value": value,
        "interval": interval,
        "mean_reward": score.mean_reward,
    }
    return {"name": score.evaluation, "step": score.step, **measured, **lost}
