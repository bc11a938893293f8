"""Progress: decides which parts of a run to show, when, and where."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from ...dataflow.errors import UserError, nearest
from ...dataflow.graph import Graph
from ...dataflow.runs.alerts import Alerts
from ...dataflow.runs.files import is_full
from ...dataflow.source import Source
from ...dataflow.untrusted_text import redacted
from ..placement import Place
from ..signals import redirect_to_null
from .displays import Display, JsonLines, PlainLines
from .sample import Sample, read_sample
from .step_line import Ending, Step, score_of

Form: TypeAlias = Literal["auto", "rich", "plain", "json", "none"]
"""Form of the display. "auto" is "rich" on a terminal, otherwise "plain"."""


def is_closed() -> bool:
    """Whether standard output is closed, by `>&-` or a script."""
    return sys.stdout is None or sys.stdout.closed  # pyright: ignore[reportUnnecessaryComparison]


def display_for(form: Form | bool) -> Display:
    """Return a display on standard output.

    Args:
        form: True means "auto", False means "none".

    Raises:
        UserError: The form is unknown.

    >>> display_for("plian")
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: progress='plian'; did you mean 'plain'? It is one of auto, rich, plain, json, none
    """
    if isinstance(form, bool):
        form = "auto" if form else "none"
    forms = get_args(Form)
    if form not in forms:
        known = f"It is one of {', '.join(forms)}"
        raise UserError(f"progress={form!r}{nearest(form, forms)}? {known}".replace("??", "?"))
    if is_closed():
        form = "none"
    if form == "auto":
        form = "rich" if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else "plain"
    if form == "rich":
        from .terminal import Terminal

        return Terminal(sys.stdout)
    if form == "none":
        return Display()
    return PlainLines(sys.stdout) if form == "plain" else JsonLines(sys.stdout)


class Progress:
    """Sends the events of a run to a display.

    Args:
        steps: Total steps of the run.
        display: When its terminal or pipe closes, nothing more is shown.
        show_every: [steps] Interval between shown samples; 0 shows none.
    """

    def __init__(self, steps: int, run_dir: Path, display: Display, *, show_every: int = 10) -> None:
        self._steps = steps
        self._run_dir = run_dir
        self._display = display
        self.alerts = Alerts(run_dir)
        self._show_every = show_every
        self._began = time.monotonic()
        self._paced_from: tuple[int, float] | None = None
        """(first step since the start, its time). The pace excludes this slow step."""
        self._shown_at = 0.0
        self._step: Step | None = None
        self._waits = False
        """Whether the last step still has to be shown."""
        self._sampled = 0
        self._sample: Sample | None = None
        """A sample to show after its step."""
        self._recorded: tuple[int, Sequence[Path]] | None = None
        """(latest step with recorded samples, their possible paths)."""

    @property
    def shows(self) -> bool:
        return type(self._display) is not Display

    def data(self, sources: Iterable[Source], *, in_full: bool) -> None:
        """Show how Weft read each source or, unless `in_full`, how many rows it left out."""
        for source in {id(source): source for source in sources}.values():
            understood = getattr(source, "understood", None)
            if in_full and understood is not None:
                self.say(f"data {source.name!r}: {understood}")
            elif number := getattr(source, "dropped", 0):
                why = "; ".join(understood.dropped) if understood else "they are too long"
                self.say(
                    f"{number} of {number + len(source.table)} prompts of {source.name!r} are left out: {why}"
                )

    def resumed(self, checkpoint: Path, step: int, damage: Iterable[str]) -> None:
        for what in damage:
            self.say(f"damaged: {what}")
        self.alerts.step = step
        self.say(f"goes on after step {step}, from {checkpoint}")

    def alert(self, name: str, text: str, *, ends: bool = False, warning: bool = True) -> None:
        """Add an alert, and show it unless it ends the run with an error."""
        self.alerts.report(name, text, ends=ends)
        if not ends:
            self._show(lambda: self._display.say(redacted(text), warning=warning))

    def say(self, text: str) -> None:
        self._show(lambda: self._display.say(redacted(text)))

    def started(
        self, graphs: Mapping[str, Graph], groups: Mapping[str, Any], placement: Mapping[str, Place]
    ) -> None:
        wanted = {name: placement[name].ranks for name in groups}
        fewer = [f"{n} {wanted[n]}" for n, group in groups.items() if wanted[n] > len(group.mesh)]
        if fewer:
            self.say(
                f"the backend gives each group one rank, the placement asks for more: {', '.join(fewer)}"
            )
        sizes = ", ".join(
            f"{name} x{len(group.up)}" + f" (of {len(group.mesh)})" * bool(group.absent)
            for name, group in groups.items()
        )
        self.say(f"{', '.join(g.name for g in graphs.values())} on {sizes}")
        self._began = time.monotonic()
        self._paced_from = None

    def stepped(self, row: Mapping[str, float]) -> None:
        """Record a finished step; 0 is the start of the run."""
        step, now = int(row["step"]), time.monotonic()
        self.alerts.step = step
        if not step:
            return
        # The slow first step counts only until there is a second one.
        if self._paced_from is None:
            self._paced_from, pace_s = (step, now), now - self._began
        else:
            pace_s = (now - self._paced_from[1]) / (step - self._paced_from[0])
        self._step, self._waits = Step(step, self._steps, row, pace_s * (self._steps - step)), True
        if self._sample or now - self._shown_at >= self._display.interval_s:
            self._show_step()
            self._show_sample()

    def evaluated(self, name: str, step: int, row: Mapping[str, float]) -> None:
        score = score_of(name, step, row)
        if score is not None:
            self._show(lambda: self._display.evaluated(score))

    def recorded(self, step: int, paths: Sequence[Path]) -> None:
        """Note that samples of a step were written, in the first of the paths that exists."""
        self._recorded = step, paths
        if self.shows and step > self._sampled and self._show_every and step % self._show_every == 0:
            self._sample = read_sample(paths, step)
            self._sampled = step if self._sample else self._sampled
            if self._step is not None and self._step.number >= step:
                self._show_sample()

    @property
    def latest_sample(self) -> Sample | None:
        """One of the latest recorded samples, if readable."""
        return read_sample(self._recorded[1], self._recorded[0]) if self._recorded else None

    def ended(self, ending: Callable[[float], Ending]) -> None:
        """Show the summary that `ending` makes, given the seconds since the last start."""
        if self._waits:
            self._show_step()
        if self.shows:
            last = ending(time.monotonic() - self._began)
            self._show(lambda: self._display.ended(last))

    def _show_step(self) -> None:
        if (step := self._step) is not None:
            self._shown_at, self._waits = time.monotonic(), False
            self._show(lambda: self._display.step(step))

    def _show_sample(self) -> None:
        sample, self._sample = self._sample, None
        if sample is not None:
            self._show(lambda: self._display.sample(sample))

    def _show(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (OSError, ValueError) as error:
            # A closed stream raises ValueError; any other ValueError is a bug.
            if isinstance(error, ValueError) and not is_closed():
                raise
            # The disk behind the output is full. There may be space for later output.
            if is_full(error):
                return
            # The terminal, or the reader of the pipe, is gone.
            self._display = Display()
            with suppress(OSError, ValueError):
                redirect_to_null([sys.stdout.fileno()])
