"""Displays of a run: plain lines for people, JSON lines for programs, or a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TextIO

from ...dataflow.untrusted_text import cut, show, show_json
from .sample import Sample
from .step_line import Ending, EvaluationScore, Step, clock

LONGEST_MESSAGE = 20_000
"""[characters] Longest message to show."""


class Display:
    """Base class of displays; shows nothing. After a method raises OSError, no other is called."""

    interval_s = math.inf
    """[s] Shortest time between two shown steps; the last step is always shown."""

    def say(self, text: str, *, warning: bool = False) -> None:
        """Show a message."""

    def step(self, step: Step) -> None:
        pass

    def evaluated(self, score: EvaluationScore) -> None:
        pass

    def sample(self, sample: Sample) -> None:
        pass

    def ended(self, ending: Ending) -> None:
        pass


class PlainLines(Display):
    """Prints one line per step, for files and pipes."""

    interval_s = 0.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def say(self, text: str, *, warning: bool = False) -> None:
        text = cut(text, LONGEST_MESSAGE)
        show(f"warning: {text}" if warning else text, self._stream)

    def step(self, step: Step) -> None:
        self.say(step.line)

    def evaluated(self, score: EvaluationScore) -> None:
        self.say(score.line)

    def sample(self, sample: Sample) -> None:
        self.say(str(sample))

    def ended(self, ending: Ending) -> None:
        self.say(f"run {ending.run}: {ending.steps} steps, {clock(ending.seconds)}")
        for what, value in ending.lines:
            self.say(f"  {what + ':':17} {value}")


class JsonLines(Display):
    """Prints one JSON object per event, for programs. Its key `event` names the kind of event."""

    interval_s = 0.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def _write(self, event: str, **values: Any) -> None:
        show_json({"event": event, **values}, self._stream)

    def say(self, text: str, *, warning: bool = False) -> None:
        self._write("warning" if warning else "message", text=text)

    def step(self, step: Step) -> None:
        metrics = _numbers(step.metrics)
        self._write("step", step=step.number, of=step.of, left_s=step.left_s, metrics=metrics)

    def evaluated(self, score: EvaluationScore) -> None:
        self._write("evaluation", **_of_score(score))

    def sample(self, sample: Sample) -> None:
        parts = _numbers(sample.parts)
        if sample.reward is not None:
            parts = {**_numbers({"reward": sample.reward}), **parts}
        self._write(
            "sample",
            step=sample.step,
            texts=sample.texts,
            finish_reason=sample.finish_reason,
            rewards=parts,
        )

    def ended(self, ending: Ending) -> None:
        self._write(
            "end",
            run=ending.run,
            steps=ending.steps,
            seconds=ending.seconds,
            best=[_of_score(score) for score in ending.best],
            last=[_of_score(score) for score in ending.last],
            places={what: str(where) for what, where in ending.places.items()},
        )


def _numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    """Replace NaN and infinities by None, since JSON has no such numbers."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _of_score(score: EvaluationScore) -> dict[str, Any]:
    interval = score.interval if score.interval and all(map(math.isfinite, score.interval)) else None
    lost = {"prompts_lost": score.lost, "prompts_asked": score.asked} if score.lost else {}
    return {
        "name": score.evaluation,
        "step": score.step,
        "metric": score.label,
        **_numbers({"value": score.value}),
        "interval": interval,
        "mean_reward": score.mean_reward,
        **lost,
    }
