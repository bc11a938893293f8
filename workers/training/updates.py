"""Updates: optimizer steps of an engine, counted, and resumed from checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...algorithms.loss import Loss
from ...dataflow.batch import Batch
from ...dataflow.metrics import Metrics, merge
from ..worker import Context
from .bad_steps import BadSteps
from .engine import OptimizerConfig, TrainingEngine
from .microbatch_plan import OptimizerSteps


class Updates:
    """The updates of an engine, each of one or more optimizer steps. All ranks construct and call it together, each with the rows of
    its replica.
    """

    def __init__(self, config: OptimizerConfig, context: Context, engine: TrainingEngine) -> None:
        self._context, self._engine = context, engine
        self._bad_steps = BadSteps(context, engine, config.stop_after_bad_steps)
        self.version = 0
        """The number of updates so far."""

    def update(
        self, batch: Batch, loss: Loss, *, epochs: int, minibatches: int, last: bool, first: Loss | None = None
    ) -> Metrics:
        """Make one new version of the weights: `epochs` passes over the rows, each of `minibatches` optimizer steps.

        With several minibatches each rank shuffles and cuts its own rows. In one pass of one step the rows may come in
        several calls, as they become ready: gradients are accumulated until the `last` of them.

        Args:
            first: the same loss with metrics that are defined only before the first step.

        Returns:
            `loss`; `grad_norm` (before clipping, of every step where it is finite, applied or not); `learning_rate`; `tokens`
            (trained on, over all passes); `skipped_steps` (not applied: bad, or without a token to train on); `bad_steps` (those
            whose loss or gradient is not finite, or whose gradient norm is above `skip_above_grad_norm`); and the metrics of the
            loss.

        Raises:
            DivergedError: `stop_after_bad_steps` steps in a row were bad. The rows of each are in the run's `skipped/`.
        """
        observed = first or loss
        if not last:
            self._bad_steps.add(batch)
            return self._engine.accumulate(batch, observed, last=False)
        parts: list[Metrics] = []
        units = batch.groups()[1] if loss.whole_groups else np.arange(len(batch))
        cuts = OptimizerSteps(epochs, minibatches).cut(units, (self._context.seed, self.version))
        for number, rows in enumerate(cuts, 1):
            part = batch if minibatches == 1 else batch.take(rows)
            self._bad_steps.add(part)
            accumulated, step = self._engine.accumulate(part, observed, last=True), self._engine.apply()
            parts += [accumulated, step.metrics]
            self._bad_steps.note(step, loss, update=self.version + 1, number=number if len(cuts) > 1 else None)
            observed = loss  # later steps no longer see the weights before the update
        self.version += 1
        return merge(parts)

    def save(self, path: Path) -> float:
        """Copy the state of training, which is written to a new folder while training goes on; returns the seconds that training waited."""
        return self._engine.snapshot(path, {"version": self.version, "bad_steps": self._bad_steps.in_a_row})

    def load(self, path: Path) -> None:
        """Go on from a checkpoint, of any number of ranks."""
        notes = self._engine.restore(path)
        self.version = notes["version"]
        self._bad_steps.forget(notes.get("bad_steps", ()))
