"""MlflowTracker: an MLflow server, or its local store."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ...dataflow.config import flattened
from .tracker import TrackedRun, plain

EXPERIMENT = "weft"
LONGEST = 500
"""Characters of a parameter's value that every version of MLflow takes."""
MOST = 100
"""Parameters in one request."""


class MlflowTracker:
    """A run in the experiment `MLFLOW_EXPERIMENT_NAME`, or `weft`, at `MLFLOW_TRACKING_URI`. It goes on under its id. MLflow keeps every
    value of a step that it was ever sent, so steps that are made again are not sent again."""

    overwrites = False

    def __init__(self) -> None:
        self._client: Any = None
        self._id = ""

    def open(self, run: TrackedRun) -> str:
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._client, self._id = MlflowClient(), run.id
        if self._id:
            self._client.update_run(self._id, status="RUNNING")
            return self._id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
        settings = [Param(plain(key), str(value)[:LONGEST]) for key, value in flattened(run.config).items()]
        for first in range(0, len(settings), MOST):
            self._client.log_batch(self._id, params=settings[first : first + MOST])
        return self._id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(plain(n), v, now, step) for n, v in metrics.items()])

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = {"step": [step] * len(rows), **{name: [row[name] for row in rows] for name in rows[0]}}
        self._client.log_table(self._id, columns, "samples.json")

    def flush(self) -> None:
        """Every request is answered when it is stored."""

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")
