"""TensorboardTracker: event files in `tensorboard/` of the run's directory; `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .tracker import TrackedRun, plain

FOLDER = "tensorboard"


class TensorboardTracker:
    """Writes with `tensorboardX`, which needs neither TensorFlow nor torch. Steps after a checkpoint replace earlier ones: the new file
    begins with the step from which on TensorBoard forgets what other files say (`purge_step`)."""

    overwrites = True

    def __init__(self) -> None:
        self._writer: Any = None

    def open(self, run: TrackedRun) -> str:
        self._writer = new_writer(run.folder / FOLDER, None if run.after is None else run.after + 1)
        if not run.id:
            self._writer.add_text("config", f"```json\n{json.dumps(run.config, indent=2)}\n```", 0)
        return FOLDER

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(plain(name), value, step)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """As text in indented blocks, which no text of a sample can end."""
        parts = (f"{name}: {value}" for row in rows for name, value in (*row.items(), ("", "")))
        self._writer.add_text("samples", textwrap.indent("\n".join(parts), "    ", lambda line: True), step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()


def new_writer(folder: Path, purge_step: int | None) -> Any:
    """A writer of event files. tensorboardX imports torch where there is one, only to take its tensors: seconds, and hundreds of megabytes
    of memory, for a process that writes a few numbers."""
    had = "torch" in sys.modules
    if not had:
        sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    try:
        from tensorboardX import SummaryWriter

        # The names of its files tell seconds apart, and a second file of the same name would take the place of the first.
        return SummaryWriter(str(folder), purge_step=purge_step, filename_suffix=f".{time.time_ns()}")
    finally:
        if not had:
            del sys.modules["torch"]
