"""WandbTracker: Weights & Biases, online or offline (`WANDB_MODE=offline`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from .tracker import TrackedRun

PROJECT = "weft"


class WandbTracker:
    """A run in the project `WANDB_PROJECT`, or `weft`. It goes on under its id, so that its curves do.

    W&B drops what comes for a step before its latest, as evaluations do. Therefore its own step only counts the calls, and the step of
    training is a metric that all curves are drawn over. Nothing can be taken back: steps that are made again are not sent again.
    """

    overwrites = False

    def __init__(self) -> None:
        self._run: Any = None
        self._logged = 0

    def open(self, run: TrackedRun) -> str:
        import wandb  # pyright: ignore[reportMissingImports]

        self._logged = run.logged
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
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

    def flush(self) -> None:
        """W&B's own process has what was logged."""

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
