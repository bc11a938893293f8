"""`weft runs`, `watch`, `stop` and `diff`: list, watch, stop and compare runs."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from ..dataflow.errors import RunError, UserError
from ..dataflow.runs.files import CHECKPOINTS, METRICS, PARQUET, SAMPLES, is_run
from ..dataflow.untrusted_text import beginning, show
from .command_line import RUNS, Answer, Json, RunName, Switch, find_run, run_names

if TYPE_CHECKING:
    from ..controllers.reports.displays import Display
    from ..dataflow.runs.facts import RunFacts


def runs(folder: Annotated[Positional[Path], arg(metavar="FOLDER")] = RUNS) -> Answer:
    """List the runs of a folder, or one run, with status, step, time, reward, loss, and last
    warning or error.

    Args:
        folder: The folder of all runs, or the directory of one.
    """
    from ..dataflow.runs.facts import facts_of

    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: name the folder of your runs (default: {RUNS}/)")
    paths = [folder] if is_run(folder) else [folder / name for name in run_names(folder)]
    found = [facts_of(path) for path in paths if is_run(path)]
    notes = [f"damaged: {what}" for facts in found for what in facts.damage]
    if not found:
        return Answer({"runs": []}, f"no runs in {folder}", notes)
    import pyarrow as pa

    from ..controllers.reports.step_line import clock
    from ..dataflow.runs.tables import render_table

    rows = [
        {
            "run": facts.path.name,
            "status": facts.status,
            "step": f"{facts.step}/{facts.steps}" if facts.steps is not None else str(facts.step),
            "time": clock(facts.last.get("time_s", 0.0)),
            "reward": facts.reward,
            "loss": facts.loss,
            "trouble": facts.trouble or None,
        }
        for facts in found
    ]
    shown = render_table(pa.Table.from_pylist(rows), limit=len(rows), width=80)
    return Answer({"runs": [facts.for_programs for facts in found]}, shown, notes)


# `weft stop`


def stop(run: RunName, *, timeout: float = 600) -> Answer:
    """Stop a run on any machine, with exit code 0. A run with checkpoints writes one first; a run
    without checkpoints finishes the current step first.

    Args:
        timeout: Seconds to wait for the run to end; 0 to return at once.
    """
    from ..dataflow.runs.facts import facts_of
    from ..dataflow.runs.lock import Life, life_of
    from ..dataflow.runs.requests import request_stop

    def answer(facts: RunFacts, said: str, *, asked: bool, ended: bool) -> Answer:
        return Answer({"asked": asked, "ended": ended, **facts.for_programs}, f"{path} {said}")

    path = find_run(run)
    facts = facts_of(path)
    holder = facts.holder
    if facts.life is not Life.ALIVE or holder is None:
        return answer(facts, f"is not running: {_state(facts)}", asked=False, ended=True)
    try:
        request_stop(path, holder.epoch)
    except OSError as error:
        raise RunError(f"{path} cannot be asked to end: {error}") from None
    if not timeout:
        return answer(facts, "was asked to end", asked=True, ended=False)
    show(f"{path} is asked to end, held by {holder} ...")
    deadline = time.monotonic() + timeout
    # Another holder is a driver that has resumed the run after the first one ended.
    while life_of(path) == (Life.ALIVE, holder):
        if time.monotonic() > deadline:
            raise RunError(
                f"{path} did not end within {timeout:g} s: its driver is {holder}. It checks for the request each second, "
                "except during its start and during an evaluation that training waits for; --timeout SECONDS waits longer"
            )
        time.sleep(0.5)
    facts = facts_of(path)
    return answer(facts, f"has ended: {_state(facts)}", asked=True, ended=True)


def _state(facts: RunFacts) -> str:
    of = f" of {facts.steps}" if facts.steps is not None else ""
    said = f"{facts.status}, after step {facts.step}{of}"
    if facts.status in ("killed", "stopped", "failed") and any(
        (facts.path / CHECKPOINTS).glob("step_*")
    ):
        said += "; resume='latest' continues from its last checkpoint"
    return said


# `weft watch`

LOOK_S = 1.0
"""[s] Time between two updates of a watched run."""


def watch(run: RunName, *, last: int = 20, once: Switch = False, json: Json = False) -> Answer:
    """Show steps, evaluations, warnings and the end of a run, live or afterwards. A terminal gets
    columns and colours, other outputs plain lines. With --json, print the current state without
    waiting. Ctrl-C does not affect the run.

    Args:
        last: Number of past steps to show first.
        once: Show the current state, and do not wait for more.
    """
    from ..controllers.reports.progress import display_for
    from ..dataflow.runs.facts import facts_of

    path = find_run(run)
    if not json:
        shown = _WatchedRun(path, display_for("auto"), last)
        shown.show_news()
        while not once and shown.goes_on:
            time.sleep(LOOK_S)
            shown.show_news()
        shown.show_end()
    facts = facts_of(path)
    alerts = [asdict(alert) for alert in facts.alerts[max(0, len(facts.alerts) - last) :]]
    found = {**facts.for_programs, "metrics": dict(facts.last), "alerts": alerts}
    return Answer(found, notes=[f"damaged: {what}" for what in facts.damage])


@dataclass
class _WatchedRun:
    """A run on a display. Each update reads only new data."""

    run: Path
    display: Display
    last: int
    """Number of past steps to show first."""
    _rows: dict[float, dict[str, float]] = field(default_factory=dict[float, dict[str, float]])
    _shown: float = -1.0
    _scored: set[tuple[str, float]] = field(default_factory=set[tuple[str, float]])
    """Evaluations that the display has shown: (name, step)."""
    _alerts: int = 0

    def __post_init__(self) -> None:
        from ..dataflow.runs.facts import facts_of
        from ..dataflow.runs.follow import FollowedTable

        self._facts = facts_of(self.run)
        self._metrics = FollowedTable(self.run, METRICS)
        held = f", held by {self._facts.holder}" if self.goes_on else ""
        self.display.say(
            f"run {self.run.name}: {self._facts.status}, step {self._facts.step}{held}; files in {self.run}"
        )

    @property
    def goes_on(self) -> bool:
        from ..dataflow.runs.lock import Life, life_of

        return life_of(self.run)[0] is Life.ALIVE

    def show_news(self) -> None:
        """Show new data. A step appears when the next one begins or the run ends, because its
        metrics are complete only then."""
        self._show_alerts()
        self._take_metrics()
        steps = sorted(step for step in self._rows if step > max(self._shown, 0.0))
        if self.goes_on:
            # More metrics may still come for the last step.
            steps = steps[:-1]
        for step in steps[max(0, len(steps) - self.last) :] if self._shown < 0 else steps:
            self._show_step(step)
        self._shown = max([self._shown, 0.0, *steps])

    def show_end(self) -> None:
        """Show the run's summary if it has ended."""
        from ..controllers.reports.step_line import ending_of

        if self.goes_on:
            return
        self.show_news()
        rows = [self._rows[step] for step in sorted(self._rows)]
        seconds = rows[-1].get("time_s", 0.0) if rows else 0.0
        inside = {"checkpoints": CHECKPOINTS, "metrics": f"{METRICS}{PARQUET}", "samples": SAMPLES}
        places = {"run": self.run, **{what: self.run / name for what, name in inside.items()}}
        there = {what: path for what, path in places.items() if path.exists()}
        self.display.ended(ending_of(self.run.name, rows, self._evaluations, seconds, there))

    def _show_step(self, step: float) -> None:
        from ..controllers.reports.step_line import Step, score_of

        row = self._rows[step]
        for name in self._evaluations:
            score = score_of(name, int(step), row)
            if score is not None and (name, step) not in self._scored:
                self._scored.add((name, step))
                self.display.evaluated(score)
        of = self._facts.steps or int(step)
        self.display.step(Step(int(step), of, row, self._left_s(step, of) if self.goes_on else None))

    def _left_s(self, step: float, of: int) -> float | None:
        took = [row["step_s"] for row in list(self._rows.values())[-20:] if "step_s" in row]
        return statistics.median(took) * (of - step) if took else None

    def _show_alerts(self) -> None:
        from ..dataflow.runs.alerts import read_alerts

        alerts = read_alerts(self.run)
        for alert in alerts[self._alerts or max(0, len(alerts) - self.last) :]:
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
        from ..controllers.reports.tracker_threads import new_values

        for step, metrics in new_values(self._metrics, {}):
            self._rows.setdefault(step, {"step": step}).update(metrics)


# `weft diff`

OtherRun = Annotated[Positional[str], arg(metavar="RUN_B", help="The run to compare it with.")]


def diff(
    run_a: Annotated[
        Positional[str], arg(metavar="RUN_A", help="A run's directory, or its name under runs/.")
    ],
    run_b: OtherRun,
) -> Answer:
    """Show how two runs differ: settings, package versions, data, metrics, and the first different
    sample, token by token."""
    from ..dashboard.reading.comparison import (
        compare_configs,
        compare_metrics,
        first_difference,
        metrics_of,
    )
    from ..dataflow.runs.facts import facts_of

    a, b = find_run(run_a), find_run(run_b)
    facts = facts_of(a), facts_of(b)
    notes = [f"damaged: {what}" for one in facts for what in one.damage]
    settings, versions, data = compare_configs(facts[0].config, facts[1].config)
    measured = metrics_of(a, notes), metrics_of(b, notes)
    step, metrics = compare_metrics(*measured)
    sample = first_difference(a, b, notes)
    common = len(set(measured[0]) & set(measured[1]))
    found = {
        "settings": settings,
        "versions": versions,
        "data": data,
        "metrics": {"steps": common, "first_step": step, "values": metrics},
        "sample": asdict(sample) if sample else None,
    }
    return Answer(found, "\n".join(_differences(found, str(sample or ""))), notes)


def _differences(found: Mapping[str, Any], sample: str) -> Iterator[str]:
    from ..dashboard.reading.comparison import MISSING

    def text(value: Any) -> str:
        return beginning(value if value is MISSING else json.dumps(value, default=str), 100)

    for part in ("settings", "versions", "data"):
        pairs = found[part]
        yield f"{part}: {len(pairs)} differ" if pairs else f"{part}: the same"
        for key, (a, b) in pairs.items():
            yield f"  {key}: {text(a)} | {text(b)}"
    metrics, most = found["metrics"], 12
    if not metrics["steps"]:
        yield "metrics: not compared, because the runs have no readable step in common"
    elif metrics["first_step"] is None:
        yield "metrics: the same"
    else:
        values = list(metrics["values"].items())
        yield f"metrics: {len(values)} differ at step {metrics['first_step']}, and none before it"
        for name, (a, b) in values[:most]:
            yield f"  {name}: {a:.9g} | {b:.9g}"
        if len(values) > most:
            yield f"  ... {len(values) - most} more"
    yield f"samples: {sample or 'the same, as far as both have recorded them'}"
