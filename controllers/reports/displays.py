"""Displays of a run in the terminal, as plain lines, or as JSON lines."""

from __future__ import annotations

import math
import os
import sys
from typing import Literal, Protocol, TypeAlias, get_args

from ...dataflow.errors import UserError, nearest
from .lines import JsonLines, PlainLines
from .columns import Ending, EvaluationScore, Step
from .sample import Sample

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
