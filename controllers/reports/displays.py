"""Displays of a run in the terminal, as plain lines, or as JSON lines."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from typing import Any, Literal, Protocol, TextIO, TypeAlias, get_args

from ...dataflow.errors import UserError, nearest
from ...dataflow.untrusted_text import cut, show, show_json
from .records import Ending, EvaluationScore, Step, clock
from .sample import Sample

# Plain lines for people, and JSON lines for programs.


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


Form: TypeAlias = Literal["auto", "rich", "plain", "json", "none"]
"""Form of the display; auto is rich on a terminal and plain otherwise."""


class Display(Protocol):
    """Shows a run. After an OSError, no further method is called."""

    interval_s: float
    """[s] Shortest time between two shown steps; the last step is always shown."""

    def say(self, text: str, *, warning: bool = False) -> None:
        """Show a message."""
        ...

    def step(self, step: Step) -> None: ...
    def evaluated(self, score: EvaluationScore) -> None: ...
    def sample(self, sample: Sample) -> None: ...
    def ended(self, ending: Ending) -> None: ...


class Nothing:
    """A display that shows nothing."""

    interval_s = math.inf

    def say(self, text: str, *, warning: bool = False) -> None:
        pass

    def step(self, step: Step) -> None:
        pass

    def evaluated(self, score: EvaluationScore) -> None:
        pass

    def sample(self, sample: Sample) -> None:
        pass

    def ended(self, ending: Ending) -> None:
        pass


def is_closed() -> bool:
    """Return whether standard output is closed, by `>&-` or by a script, so writing would fail."""
    return sys.stdout is None or sys.stdout.closed  # pyright: ignore[reportUnnecessaryComparison]


def display_for(form: Form | bool) -> Display:
    """Return a display on standard output.

    Args:
        form: the form; True means auto, False means none.

    Raises:
        UserError: the form is unknown.

    >>> display_for("plian")
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: progress='plian'; did you mean 'plain'? It is one of auto, rich, plain, json, none
    """
    if isinstance(form, bool):
        form = "auto" if form else "none"
    if form in get_args(Form) and is_closed():
        form = "none"
    if form not in get_args(Form):
        raise UserError(
            f"progress={form!r}{nearest(form, get_args(Form))}? It is one of {', '.join(get_args(Form))}".replace(
                "??", "?"
            )
        )
    if form == "auto":
        form = "rich" if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else "plain"
    if form == "rich":
        from .terminal import Terminal

        return Terminal(sys.stdout)
    return {"plain": PlainLines, "json": JsonLines}[form](sys.stdout) if form != "none" else Nothing()
