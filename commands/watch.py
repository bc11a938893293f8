"""`weft watch`: follow a run from another terminal, or replay a finished one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..dataflow.runs.files import CHECKPOINTS, METRICS, PARQUET, SAMPLES, STREAM
from .command import Answer, Command, RunName, Switch, find_run

if TYPE_CHECKING:
    from ..controllers.reports.displays import Display

LOOK_S = 1.0
"""[s] Time between two looks at a running run."""


@dataclass(frozen=True, kw_only=True)
class Watch(Command):
    """Show steps, evaluations, warnings and the end of a run, live or afterwards. A terminal gets
    columns and colours, other outputs plain lines. With --json, print the current state without
    waiting. Ctrl-C does not affect the run.
    """

    run: RunName
    last: int = 20
    """Number of past steps to show first."""
    once: Switch = False
    """Show the current state, and do not wait for more."""

    def answer(self) -> Answer:
        from ..controllers.reports.displays import display_for
        from ..dataflow.runs.facts import facts_of

        run = find_run(self.run)
        if not self.json:
            view = View(run, display_for("auto"), self.last)
            view.show()
            while not self.once and view.goes_on:
                time.sleep(LOOK_S)
                view.show()
            view.end()
        facts = facts_of(run)
        found = {
            "metrics": dict(facts.last),
            "alerts": [asdict(alert) for alert in facts.alerts[max(0, len(facts.alerts) - self.last) :]],
        }
        return Answer(
            {**facts.for_programs, **found}, notes=[f"damaged: {what}" for what in facts.damage]
        )


@dataclass
class View:
    """Shows a run on a display. Each look reads only new data."""

    run: Path
    display: Display
    last: int
    """Number of past steps to show first."""
    _rows: dict[float, dict[str, float]] = field(default_factory=dict[float, dict[str, float]])
    """Step -> its metrics."""
    _shown: float = -1.0
    """The last shown step."""
    _scored: set[tuple[str, float]] = field(default_factory=set[tuple[str, float]])
    """Shown evaluations, with their steps."""
    _alerts: int = 0
    """Number of alerts shown or skipped."""

    def __post_init__(self) -> None:
        from ..dataflow.runs.facts import facts_of
        from ..dataflow.runs.follow import StreamTail

        self._facts = facts_of(self.run)
        self._stream = StreamTail(self.run / f"{METRICS}{STREAM}")
        held = f", held by {self._facts.holder}" if self.goes_on else ""
        self.display.say(
            f"run {self.run.name}: {self._facts.status}, step {self._facts.step}{held}; files in {self.run}"
        )

    @property
    def goes_on(self) -> bool:
        """Whether more data may come."""
        from ..dataflow.runs.lock import Life, life_of

        return life_of(self.run)[0] is Life.ALIVE

    def show(self) -> None:
        """Show new data. A step is shown once the next one begins or the run ends, with all metrics."""
        self._show_alerts()
        self._take_metrics()
        steps = sorted(step for step in self._rows if step > max(self._shown, 0.0))
        if self.goes_on:
            # More metrics may still come for the last step.
            steps = steps[:-1]
        for step in steps[max(0, len(steps) - self.last) :] if self._shown < 0 else steps:
            self._show_step(step)
        self._shown = max([self._shown, 0.0, *steps])

    def end(self) -> None:
        """Show the summary of the run, if it has ended."""
        from ..controllers.reports.records import ending_of

        if self.goes_on:
            return
        self.show()
        rows = [self._rows[step] for step in sorted(self._rows)]
        seconds = rows[-1].get("time_s", 0.0) if rows else 0.0
        inside = {"checkpoints": CHECKPOINTS, "metrics": f"{METRICS}{PARQUET}", "samples": SAMPLES}
        places = {"run": self.run, **{what: self.run / name for what, name in inside.items()}}
        there = {what: path for what, path in places.items() if path.exists()}
        self.display.ended(ending_of(self.run.name, rows, self._evaluations, seconds, there))

    def _show_step(self, step: float) -> None:
        from ..controllers.reports.records import Step, score_of

        row = self._rows[step]
        for name in self._evaluations:
            score = score_of(name, int(step), row)
            if score is not None and (name, step) not in self._scored:
                self._scored.add((name, step))
                self.display.evaluated(score)
        of = self._facts.steps or int(step)
        self.display.step(Step(int(step), of, row, self._left_s(step, of) if self.goes_on else None))

    def _left_s(self, step: float, of: int) -> float | None:
        """Return the estimated seconds to the end, at the pace of the last steps."""
        took = [row["step_s"] for row in list(self._rows.values())[-20:] if "step_s" in row]
        return statistics.median(took) * (of - step) if took else None

    def _show_alerts(self) -> None:
        from ..dataflow.runs.alerts import read_alerts

        alerts = read_alerts(self.run)
        for alert in (
            alerts[max(0, len(alerts) - self.last) :] if not self._alerts else alerts[self._alerts :]
        ):
            when = "" if alert.text.startswith(("step ", "steps ")) else f"step {alert.step}"
            said = " at ".join(part for part in ("ended" * alert.ends, when) if part)
            self.display.say(f"{said}: {alert.text}" if said else alert.text, warning=True)
        self._alerts = len(alerts)

    @property
    def _evaluations(self) -> Sequence[str]:
        from ..dataflow.graph import TRAIN

        graphs = self._facts.config.get("graphs")
        return [name for name in graphs if name != TRAIN] if isinstance(graphs, Mapping) else []

    def _take_metrics(self) -> None:
        """Read new metrics from the stream, or from the Parquet file that replaces it at the end."""
        from ..dataflow.runs.tables import VALUES

        for batch in self._stream.new_batches():
            for step, name, value in zip(*(batch[c].to_pylist() for c in VALUES.names), strict=True):
                self._rows.setdefault(step, {"step": step})[name] = value
        if not self.goes_on:
            self._rows |= {row["step"]: row for row in _whole(self.run)}


def _whole(run: Path) -> list[dict[str, float]]:
    """Return the metrics of every step, or nothing if they cannot be read."""
    import pyarrow as pa

    from ..dataflow.runs.tables import present, read_metrics

    try:
        table = read_metrics(run)
    except (OSError, pa.ArrowException):
        return []
    if table is None or "step" not in table.column_names:
        return []
    return [present(row) for row in table.to_pylist() if row["step"] is not None]
