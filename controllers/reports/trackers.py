"""Tracker: the protocol of metric sinks, and the built-in trackers."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ...dataflow.config import flattened
from ...dataflow.errors import UserError, nearest

MOST_SAMPLES = 100
"""Maximum number of samples per step for a tracker."""
PROMETHEUS = "prometheus"
"""The Ray cluster's Prometheus endpoint, to which the driver itself reports."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is opened for."""

    name: str
    folder: Path
    """`runs/NAME`. A tracker makes a folder for its files there."""
    config: Mapping[str, Any]
    """The run's `config.json`, without secrets."""
    id: str = ""
    """Id that `Tracker.open` returned in an earlier start of the run, or empty."""
    after: int | None = None
    """Step after which the run resumes, or None for a new run."""
    logged: int = 0
    """Number of calls of `Tracker.log` in earlier starts."""


class Tracker(Protocol):
    """Takes the metrics of one run, on its own thread. An exception ends only the tracker.

    A tracker may also have `log_samples(step, rows)`. Each row has the texts `prompt`, `response`,
    `answer` and `verdict`, and the number `reward`. A call counts as one of `log`.
    """

    overwrites: ClassVar[bool] = False
    """Whether a resumed run sends the steps after its checkpoint again, as replacements."""

    def open(self, run: TrackedRun) -> str:
        """Begin or continue a run. Return the `id` for its next start."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics of a step. It may come again with other metrics, such as an evaluation's."""
        ...

    def flush(self) -> None:
        """Store everything logged so far, to survive the end of this process."""

    def close(self, *, failed: bool) -> None:
        """End the tracking: the run is over."""
        ...


def check_trackers(names: Sequence[str] | Mapping[str, int], *, has_endpoint: bool) -> None:
    """Check that each tracker is known and its package is installed, without importing it.

    Raises:
        UserError: A tracker is unknown, or its package is missing. The message has the nearest name
            or the package to install.

    >>> check_trackers(["tensorbord"], has_endpoint=False)
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: trackers: there is no 'tensorbord'; did you mean 'tensorboard'? ...
    """
    if isinstance(names, str):
        raise UserError(
            f"trackers={names!r} is text, but must be a sequence of names: trackers=({names!r},)"
        )
    for name, samples in names.items() if isinstance(names, Mapping) else ():
        if type(samples) is not int or not 0 <= samples <= MOST_SAMPLES:
            raise UserError(
                f"trackers: {name!r} gets 0 to {MOST_SAMPLES} samples of a step, not {samples!r}"
            )
    known = [*NAMED, PROMETHEUS]
    for name in names:
        if not isinstance(name, str) or (name not in known and not re.fullmatch(r"[\w.]+:\w+", name)):
            there = f"They are {', '.join(known)}, or 'module:Class' of your own"
            close = nearest(str(name), known)
            raise UserError(f"trackers: there is no {name!r}{close}? {there}".replace("??", "?"))
        if name == PROMETHEUS and not has_endpoint:
            raise UserError(
                f"trackers: {name!r} is the endpoint of a Ray cluster, so it needs backend=RayBackend()"
            )
        _, package = NAMED.get(name, (None, ""))
        if package and importlib.util.find_spec(package) is None:
            raise UserError(
                f"trackers: {name!r} needs the package {package}, which is not installed: pip install 'weft[{name}]'"
            )
    if twice := [name for name in dict.fromkeys(names) if list(names).count(name) > 1]:
        raise UserError(f"trackers: {twice[0]!r} is named twice")


def new_tracker(name: str) -> Tracker:
    """Make a tracker from its name or `module:Class`."""
    if name in NAMED:
        return NAMED[name][0]()
    module, _, tracker = name.partition(":")
    return getattr(importlib.import_module(module), tracker)()


def _plain(name: str) -> str:
    """Replace characters of a name that some trackers reject.

    >>> _plain("eval/pass@8"), _plain("reward/my own")
    ('eval/pass_at_8', 'reward/my_own')
    """
    return re.sub(r"[^\w./-]", "_", name.replace("@", "_at_"))


FOLDER = "tensorboard"
WEFT = "weft"


class _TensorboardTracker(Tracker):
    """Writes event files in `tensorboard/` of the run with `tensorboardX`, without TensorFlow or
    torch.

    After a resume, new steps replace earlier ones: TensorBoard ignores other files from the new
    file's `purge_step` on.
    """

    overwrites = True

    def open(self, run: TrackedRun) -> str:
        self._writer: Any = _new_writer(
            run.folder / FOLDER, None if run.after is None else run.after + 1
        )
        if not run.id:
            self._writer.add_text("config", f"```json\n{json.dumps(run.config, indent=2)}\n```", 0)
        return FOLDER

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(_plain(name), value, step)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        # An indented code block, because the texts are not Markdown.
        parts = (f"{name}: {value}" for row in rows for name, value in (*row.items(), ("", "")))
        block = textwrap.indent("\n".join(parts), "    ", lambda line: True)
        self._writer.add_text("samples", block, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()


def _new_writer(folder: Path, purge_step: int | None) -> Any:
    """Make a writer of event files. Hides torch, which tensorboardX would needlessly import."""
    had = "torch" in sys.modules
    if not had:
        # This makes `import torch` fail.
        sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    try:
        from tensorboardX import SummaryWriter

        # File names have a resolution of seconds; without a suffix, files could replace each other.
        return SummaryWriter(str(folder), purge_step=purge_step, filename_suffix=f".{time.time_ns()}")
    finally:
        if not had:
            del sys.modules["torch"]


class _WandbTracker(Tracker):
    """Weights & Biases: a run in the project `WANDB_PROJECT`, or `weft`; a resumed run keeps its
    id.

    W&B drops values for steps before its latest one, such as those of evaluations. Its step
    therefore counts calls, and the training step is a metric, the x-axis of all curves. Logged
    values cannot be replaced, so Weft does not send steps again.
    """

    def open(self, run: TrackedRun) -> str:
        import wandb  # pyright: ignore[reportMissingImports]

        self._logged = run.logged
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", WEFT),
            name=run.name,
            id=run.id or None,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            settings=wandb.Settings(console="off", save_code=False),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return self._run.id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics}, step=self._logged)
        self._logged += 1

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        table = wandb.Table(columns=["step", *rows[0]], data=[[step, *row.values()] for row in rows])
        self._run.log({"step": step, "samples": table}, step=self._logged)
        self._logged += 1

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _MlflowTracker(Tracker):
    """MLflow: a run in the experiment `MLFLOW_EXPERIMENT_NAME`, or `weft`, at
    `MLFLOW_TRACKING_URI`.

    A resumed run keeps its id. MLflow keeps all values of a step, so Weft does not send steps
    again.
    """

    def open(self, run: TrackedRun) -> str:
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._client: Any = MlflowClient()
        self._id: str = run.id
        if self._id:
            self._client.update_run(self._id, status="RUNNING")
            return self._id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", WEFT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
        # Every version of MLflow accepts values of 500 characters and requests of 100 parameters.
        values = flattened(run.config).items()
        settings = [Param(_plain(key), str(value)[:500]) for key, value in values]
        for first in range(0, len(settings), 100):
            self._client.log_batch(self._id, params=settings[first : first + 100])
        return self._id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(time.time() * 1000)
        values = [Metric(_plain(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = {"step": [step] * len(rows), **{name: [row[name] for row in rows] for name in rows[0]}}
        self._client.log_table(self._id, columns, "samples.json")

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class _TrackioTracker(Tracker):
    """trackio: a run in the project `TRACKIO_PROJECT`, or `weft`; a resumed run keeps its name.

    trackio keeps all values, so Weft does not send steps again.
    """

    def open(self, run: TrackedRun) -> str:
        import trackio  # pyright: ignore[reportMissingImports]

        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", WEFT),
            name=run.id or run.name,
            config=dict(run.config),
            # A new run must not continue an earlier run that has its name.
            resume="allow" if run.id else "never",
            embed=False,
        )
        return self._run.name

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import pandas as pd
        import trackio  # pyright: ignore[reportMissingImports]

        table = trackio.Table(dataframe=pd.DataFrame([{"step": step, **row} for row in rows]))
        self._run.log({"samples": table}, step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish()


NAMED: Mapping[str, tuple[type[Tracker], str]] = {
    "tensorboard": (_TensorboardTracker, "tensorboardX"),
    "wandb": (_WandbTracker, "wandb"),
    "mlflow": (_MlflowTracker, "mlflow"),
    "trackio": (_TrackioTracker, "trackio"),
}
"""Name -> (tracker, its package)."""
