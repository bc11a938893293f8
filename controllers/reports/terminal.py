"""Show a run in a terminal. The only module that uses `rich`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from ...dataflow.untrusted_text import cut, encodable, readable
from .displays import LONGEST_MESSAGE, Display
from .sample import Sample
from .step_line import Ending, EvaluationScore, Step, clock

ROWS_A_HEADER = 20
WIDEST_FRAME = 100
APART = 2
STYLES = {"reward": "bold", "no signal": "yellow", "truncated": "yellow"}
"""Label of a column -> its style."""
NONE = "0%"
"""Value that is never coloured."""
LABEL, WARNING, FRAME = "dim", "yellow", "cyan"


class Terminal(Display):
    """Shows steps as table rows, samples in frames, and the end as lines. Respects `NO_COLOR`.

    The model's text is never markup. If the columns do not fit, a step is one line with labelled
    numbers.
    """

    interval_s = 0.2

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, markup=False, emoji=False, highlight=False)
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._widths: dict[str, int] = {}
        self._rows = 0
        """Steps since the last header; 0 prints it again."""

    def say(self, text: str, *, warning: bool = False) -> None:
        text = readable(cut(text, LONGEST_MESSAGE))
        styled = self._text(f"warning: {text}" if warning else text, WARNING if warning else "")
        self._console.print(styled, soft_wrap=True)

    def step(self, step: Step) -> None:
        numbers = {
            "step": f"{step.number}/{step.of}".rjust(len(f"{step.of}/{step.of}")),
            **step.numbers,
            "left": "" if step.left_s is None else clock(step.left_s),
        }
        widths = {n: max(len(n), len(text), self._widths.get(n, 0)) for n, text in numbers.items()}
        room = (self._console.width - sum(widths.values())) // (len(widths) - 1)
        if room < 1:
            self._console.print(self._text(step.line))
            return
        if not self._rows or widths != self._widths:
            self._widths, self._rows = widths, 0
            names = {name: name for name in widths}
            self._columns(names, dict.fromkeys(widths, LABEL), min(room, APART))
        self._columns(numbers, STYLES, min(room, APART))
        self._rows = (self._rows + 1) % ROWS_A_HEADER

    def _columns(self, texts: Mapping[str, str], styles: Mapping[str, str], apart: int) -> None:
        line = Text(no_wrap=True)
        for name, text in texts.items():
            style = styles.get(name, "") if text != NONE else ""
            line.append_text(self._text(text.rjust(self._widths[name]), style))
            line.append(" " * apart)
        line.rstrip()
        self._console.print(line, soft_wrap=True)

    def evaluated(self, score: EvaluationScore) -> None:
        self._console.print(self._text(score.line, "bold green"), soft_wrap=True)

    def sample(self, sample: Sample) -> None:
        shown: list[RenderableType] = []
        for name, text in sample.shown.items():
            shown += [self._text(name, LABEL), self._text(text)]
        shown += [self._text(sample.verdict, "bold")] if sample.verdict else []
        self._rows = 0
        width = min(WIDEST_FRAME, self._console.width)
        title = self._text(f"a sample of step {sample.step}"[: width - 6])
        framed = Panel(Group(*shown), title=title, title_align="left", border_style=FRAME, width=width)
        self._console.print(framed)

    def ended(self, ending: Ending) -> None:
        self._rows = 0
        title = f"run {ending.run}: {ending.steps} steps, {clock(ending.seconds)}"
        self._console.print(self._text(title, "bold"), soft_wrap=True)
        for what, value in ending.lines:  # no frame, so that paths can be copied
            line = self._text(f"  {what:16} ", LABEL).append_text(self._text(value))
            self._console.print(line, soft_wrap=True)

    def _text(self, text: str, style: str = "") -> Text:
        return Text(encodable(readable(text), self._encoding), style=style)
