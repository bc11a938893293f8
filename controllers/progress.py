"""Progress: what a person sees in the terminal while a run goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..dataflow.graph import Graph
from ..dataflow.source import Source
from .placement import Place


class Progress:
    """One line that is rewritten on a terminal; elsewhere a line for each step."""

    interval_s = 0.2
    """Shortest time between two lines on a terminal."""

    def __init__(self, steps: int, run_dir: Path, *, enabled: bool = True) -> None:
        self._steps = steps
        self._run_dir = run_dir
        self._enabled = enabled
        self._terminal = sys.stdout.isatty()
        self._began = time.monotonic()
        self._shown = 0.0
        self._evaluated = ""
        self._open_line = False
        self._row: Mapping[str, float] = {}
        self._last: tuple[float, str] | None = None
        """Step and evaluation that were shown last."""

    def starting(self, groups: Iterable[str], backend: str) -> None:
        self.say(f"run {self._run_dir.name}: starting {', '.join(groups)} with {backend}; files in {self._run_dir}")

    def left_out(self, sources: Iterable[Source]) -> None:
        for source in sources:
            if number := getattr(source, "dropped", 0):
                self.say(
                    f"{number} of {number + len(source.table)} prompts of {source.name!r} are left out: they are too long"
                )

    def resumed(self, checkpoint: Path, step: int, damage: Iterable[str]) -> None:
        for what in damage:
            self.say(f"damaged: {what}")
        self.say(f"goes on after step {step}, from {checkpoint}")

    def warn(self, what: str) -> None:
        self.say(f"warning: {what}")

    def given_up(self, evaluation: str, step: int) -> None:
        self.say(f"the evaluation {evaluation!r} of step {step} was under way, and is given up")

    def replaced(self, worker: str, why: str, rows: int, seconds: float) -> None:
        self.say(f"worker {worker} was replaced after {seconds:.1f} s, {rows} rows are requeued; {why}")

    def dropped(self, what: str, others: Sequence[int], why: str) -> None:
        more = f", and {len(others)} more" if others else ""
        self.say(f"{what}{more}; dropped: {why}")

    def repeated(self, who: str, why: str, samples: Sequence[int]) -> None:
        at = f" at sample {', '.join(map(str, samples[:4]))}" if samples else ""
        self.say(f"{who} failed{at}; its rows are requeued: {why}")

    def paused(self, why: str) -> None:
        self.say(f"paused, for want of room on the disk: {why}; the run goes on when there is some")

    def died(self, why: str) -> None:
        self.say(f"{why}\nall groups are started again")

    def left(self, checkpoints: Path) -> None:
        self.say(f"ended early, and saved in {checkpoints}; resume='latest' goes on from there")

    def started(self, graphs: Mapping[str, Graph], groups: Mapping[str, Any], placement: Mapping[str, Place]) -> None:
        fewer = [f"{n} {placement[n].ranks}" for n, group in groups.items() if placement[n].ranks > len(group.mesh)]
        if fewer:
            self.say(f"the backend gives each group one rank, the placement asks for more: {', '.join(fewer)}")
        sizes = ", ".join(f"{name} x{len(group.mesh)}" for name, group in groups.items())
        self.say(f"{', '.join(g.name for g in graphs.values())} on {sizes}")
        self._began = time.monotonic()

    def stepped(self, row: Mapping[str, float]) -> None:
        self._row = row
        if int(row["step"]) and (not self._terminal or time.monotonic() - self._shown > self.interval_s):
            self._show()

    def evaluated(self, name: str, step: int, row: Mapping[str, float]) -> None:
        value = next((v for k, v in row.items() if k.endswith("reward/mean")), None)
        if value is None:
            value = next(iter(row.values()), float("nan"))
        self._evaluated = f"{name} {value:.3f}"
        if not step:
            self.say(f"before the first step: {self._evaluated}")

    def ended(self) -> None:
        """Show where the run stands, unless that was what was shown last."""
        if self._row and int(self._row["step"]) and self._last != (self._row["step"], self._evaluated):
            self._show()
        self._end_line()

    def _show(self) -> None:
        self._shown, self._last = time.monotonic(), (self._row["step"], self._evaluated)
        step = int(self._row["step"])
        left = (self._shown - self._began) / step * (self._steps - step)
        parts = [f"step {step}/{self._steps}"]
        parts += [f"{label} {self._row[key]:{form}}" for key, label, form in _SHOWN if key in self._row]
        parts += [self._evaluated] if self._evaluated else []
        parts.append(f"{_clock(left)} left")
        self._line("  ".join(parts))

    def _line(self, text: str) -> None:
        if not self._enabled:
            return
        if self._terminal:
            print(f"\r\x1b[2K{text}", end="", flush=True)
            self._open_line = True
        else:
            print(text, flush=True)

    def say(self, text: str) -> None:
        if self._enabled:
            self._end_line()
            print(text, flush=True)

    def _end_line(self) -> None:
        if self._open_line:
            print(flush=True)
            self._open_line = False


_SHOWN = (
    ("reward/mean", "reward", ".3f"),
    ("actor/loss", "loss", ".4f"),
    ("tokens_per_s", "tokens/s", ",.0f"),
    ("step_s", "s/step", ".2f"),
    ("actor/mean_logprob_gap", "gap", ".1e"),
)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
