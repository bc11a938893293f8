"""TrackioTracker: trackio, local (`trackio show`) or in a Space (`TRACKIO_SPACE_ID`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from .tracker import TrackedRun

PROJECT = "weft"


class TrackioTracker:
    """A run in the project `TRACKIO_PROJECT`, or `weft`. It goes on under its name. Every value is kept, so steps that are made again are
    not sent again."""

    overwrites = False

    def __init__(self) -> None:
        self._run: Any = None

    def open(self, run: TrackedRun) -> str:
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=run.id or run.name,
            config=dict(run.config),
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

    def flush(self) -> None:
        """trackio writes in a thread, every half second."""

    def close(self, *, failed: bool) -> None:
        self._run.finish()
