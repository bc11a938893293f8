"""BadSteps: optimizer steps that are not applied because they are not finite, or diverge. The rows of each are written to a file, and
too many in a row end the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from ...algorithms.loss import Loss
from ...dataflow.batch import Batch
from ...dataflow.buffer.disk import make_folder, replacing
from ...dataflow.buffer.run_files import SKIPPED
from ...dataflow.column import SAMPLE_ID
from ...dataflow.errors import DivergedError
from ..worker import Context
from .engine import OptimizerStep, TrainingEngine

LOSS = "loss"
"""Column of each row's share of the undivided loss of its step."""


class BadSteps:
    """The rows of the coming step, and the reasons of the latest bad steps. All ranks construct and call it together, because computing
    the losses of single rows takes all of them.

    Args:
        stop_after: this many bad steps in a row end the run.
    """

    def __init__(self, context: Context, engine: TrainingEngine, stop_after: int) -> None:
        self._context, self._engine, self._stop_after = context, engine, stop_after
        self._folder = None if context.run_dir is None else context.run_dir / SKIPPED / context.name
        self._rows: list[Batch] = []
        self.in_a_row: tuple[str, ...] = ()
        """The fault of each bad step since the last one that was applied. Checkpoints save it."""

    def add(self, rows: Batch) -> None:
        """These belong to the step to come. They are held (in segments of the buffer, not copied) until it is over."""
        if self._folder is not None:
            self._rows.append(rows)

    def note(self, step: OptimizerStep, loss: Loss, *, update: int, number: int | None = None) -> None:
        """Take note of what became of the step. A bad one's rows are written to
        `skipped/GROUP/update_000012_rank_0.arrow` in the run's directory, or `update_000012_step_3_rank_0.arrow`.

        Args:
            update: the policy version that the update makes.
            number: of the step in an update of several, the first being 1.

        Raises:
            DivergedError: `stop_after` steps in a row were bad; one without a token to train on is neither good nor bad.
            OSError: the rows could not be written.
        """
        rows, self._rows = self._rows, []
        if step.applied:
            self.in_a_row = ()
        if step.bad is None:
            return
        number_in = "" if number is None else f"_step_{number}"
        losses = [self._engine.losses(part, loss) for part in rows]
        if self._folder is not None and self._engine.coordinates.tp == 0 and sum(map(len, rows)):
            _write(rows, losses, self._folder / f"update_{update:06d}{number_in}_rank_{self._context.rank}.arrow")
        wrong = [part.take(np.flatnonzero(~np.isfinite(own))) for part, own in zip(rows, losses, strict=True)]
        samples = [id for part in wrong if SAMPLE_ID in part for id in part.numpy(SAMPLE_ID).tolist()]
        at_fault = f"; on this rank it comes from samples {_few(samples)}" if samples else ""
        self.in_a_row += (f"update {update}{number_in.replace('_', ' ')}: {step.bad}{at_fault}",)
        if len(self.in_a_row) >= self._stop_after:
            raise DivergedError(self._message(), samples[:4])

    def forget(self, in_a_row: Iterable[str] = ()) -> None:
        """Go on from a checkpoint: with its bad steps, and no rows."""
        self._rows, self.in_a_row = [], tuple(in_a_row)

    def _message(self) -> str:
        rows = (
            f"their rows are in {self._folder}" if self._folder else "their rows are not kept, without a run directory"
        )
        return "\n  ".join(
            [
                f"{len(self.in_a_row)} bad optimizer steps in a row (stop_after_bad_steps={self._stop_after}):",
                *self.in_a_row,
                "None of them was applied: the weights, also those of a checkpoint made since, are those of the last step before "
                f"them; {rows}",
            ]
        )


def _few(samples: Sequence[int]) -> str:
    return ", ".join(map(str, samples[:4])) + ", ..." * (len(samples) > 4)


def _write(rows: Sequence[Batch], losses: Sequence[np.ndarray], path: Path) -> None:
    """All rows of a step as one Arrow IPC file. Parts may differ in columns (`response_mask`): null means absent."""
    parts = [
        pa.Table.from_batches([part.with_columns(**{LOSS: own}).record]) for part, own in zip(rows, losses, strict=True)
    ]
    table = pa.concat_tables(parts, promote_options="permissive")
    make_folder(path.parent)
    with replacing(path) as partial, pa.ipc.new_file(partial, table.schema) as file:
        file.write_table(table)
