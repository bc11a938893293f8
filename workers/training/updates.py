"""Updates: run and count an engine's optimizer steps, and resume from checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from ...algorithms.loss import Loss
from ...dataflow.batch import Batch
from ...dataflow.column import SAMPLE_ID
from ...dataflow.errors import DivergedError
from ...dataflow.metrics import Metrics, merge
from ...dataflow.runs.files import SKIPPED, make_folder, replacing
from ..worker import Context
from .engine import OptimizerStep, TrainingEngine
from .microbatch_plan import OptimizerSteps
from .optimizer import OptimizerConfig

LOSS = "loss"
"""Column with each row's contribution to the loss of its step, before division by the count."""


class _BadSteps:
    """Keeps the rows of the current step, and the reasons why the latest steps were bad. All ranks
    must call its methods together, because computing the losses of single rows takes all ranks."""

    def __init__(self, context: Context, engine: TrainingEngine, stop_after: int) -> None:
        self._context, self._engine, self._stop_after = context, engine, stop_after
        self._folder = None if context.run_dir is None else context.run_dir / SKIPPED / context.name
        self._rows: list[Batch] = []
        self.in_a_row: tuple[str, ...] = ()
        """Reason of each bad step since the last applied one. Checkpoints save them."""

    def add_rows(self, rows: Batch) -> None:
        """Add rows of the current step. The buffer keeps their segments until the step is over."""
        if self._folder is not None:
            self._rows.append(rows)

    def note(self, step: OptimizerStep, loss: Loss, *, update: int, number: int | None = None) -> None:
        """Record the result of a step. `number` counts an update's steps from 1; None if it has
        only one. Write the rows of a bad step to `skipped/GROUP/update_000012_rank_0.arrow` in the
        run's directory, or to `update_000012_step_3_rank_0.arrow`. Raises DivergedError if the last
        `stop_after` steps were bad, not counting steps without a token to train on."""
        rows, self._rows = self._rows, []
        if step.applied:
            self.in_a_row = ()
        if step.bad is None:
            return
        number_in = "" if number is None else f"_step_{number}"
        # Computing losses is collective, so ranks that write no file take part too.
        losses = [self._engine.losses(part, loss) for part in rows]
        if self._folder is not None and self._engine.coordinates.tp == 0 and sum(map(len, rows)):
            name = f"update_{update:06d}{number_in}_rank_{self._context.rank}.arrow"
            _write(rows, losses, self._folder / name)
        samples: list[int] = []
        for part, own in zip(rows, losses, strict=True):
            if SAMPLE_ID in part:
                samples += part.numpy(SAMPLE_ID)[~np.isfinite(own)].tolist()
        few = ", ".join(map(str, samples[:4])) + ", ..." * (len(samples) > 4)
        at_fault = f"; on this rank it comes from samples {few}" if samples else ""
        self.in_a_row += (f"update {update}{number_in.replace('_', ' ')}: {step.bad}{at_fault}",)
        if len(self.in_a_row) >= self._stop_after:
            raise DivergedError(self._message(), samples[:4])

    def forget(self, in_a_row: Iterable[str] = ()) -> None:
        """Drop all rows, and set the reasons of bad steps to those of a checkpoint."""
        self._rows, self.in_a_row = [], tuple(in_a_row)

    def _message(self) -> str:
        rows = (
            f"their rows are in {self._folder}"
            if self._folder
            else "their rows are not kept, without a run directory"
        )
        return "\n  ".join(
            [
                f"{len(self.in_a_row)} bad optimizer steps in a row (stop_after_bad_steps={self._stop_after}):",
                *self.in_a_row,
                "None of them was applied: the current weights, also in later checkpoints, "
                f"are those from before the bad steps; {rows}",
            ]
        )


def _write(rows: Sequence[Batch], losses: Sequence[np.ndarray], path: Path) -> None:
    """Write a step's rows as one Arrow IPC file, with nulls for columns that a batch lacks."""
    parts = [
        pa.Table.from_batches([part.with_columns(**{LOSS: own}).record])
        for part, own in zip(rows, losses, strict=True)
    ]
    table = pa.concat_tables(parts, promote_options="permissive")
    make_folder(path.parent)
    with replacing(path) as partial, pa.ipc.new_file(partial, table.schema) as file:
        file.write_table(table)


class Updates:
    """Makes updates of one or more optimizer steps. All ranks must call its methods together."""

    def __init__(self, config: OptimizerConfig, context: Context, engine: TrainingEngine) -> None:
        self._context, self._engine = context, engine
        self._bad_steps = _BadSteps(context, engine, config.stop_after_bad_steps)
        self.version = 0

    def update(
        self,
        batch: Batch,
        loss: Loss,
        *,
        epochs: int,
        minibatches: int,
        last: bool,
        first: Loss | None = None,
    ) -> Metrics:
        """Make one new version of the weights; see `ActorWorker.update`. `first` is the same loss,
        with metrics that are only defined before the first step.

        Returns:
            `loss`; `grad_norm` (before clipping, over all steps with a finite norm, applied or
            not); `learning_rate`; `tokens` (trained on, over all passes); `skipped_steps` (not
            applied: bad, or without a token to train on); `bad_steps` (loss or gradient not finite,
            or gradient norm above `skip_above_grad_norm`); and the metrics of the loss.

        Raises:
            DivergedError: the last `stop_after_bad_steps` steps were bad. Their rows are in
                `skipped/` in the run's directory.
        """
        observed = first or loss
        if not last:
            self._bad_steps.add_rows(batch)
            return self._engine.accumulate(batch, observed, last=False)
        parts: list[Metrics] = []
        units = batch.groups()[1] if loss.whole_groups else np.arange(len(batch))
        # The key contains the version, so a resumed run shuffles like an uninterrupted one.
        cuts = OptimizerSteps(epochs, minibatches).cut(units, (self._context.seed, self.version))
        for number, rows in enumerate(cuts, 1):
            part = batch if minibatches == 1 else batch.take(rows)
            self._bad_steps.add_rows(part)
            accumulated, step = self._engine.accumulate(part, observed, last=True), self._engine.apply()
            parts += [accumulated, step.metrics]
            self._bad_steps.note(
                step, loss, update=self.version + 1, number=number if len(cuts) > 1 else None
            )
            observed = loss  # later steps see weights that the update has changed
        self.version += 1
        return merge(parts)

    def save(self, path: Path) -> float:
        """Copy the training state and write it in the background. Return the seconds that the call
        took."""
        return self._engine.snapshot(
            path, {"version": self.version, "bad_steps": self._bad_steps.in_a_row}
        )

    def load(self, path: Path) -> None:
        """Resume from a checkpoint; the number of ranks may differ."""
        notes = self._engine.restore(path)
        self.version = notes["version"]
        self._bad_steps.forget(notes.get("bad_steps", ()))
