"""Updates: what every trained worker does with its engine, whatever its model says of a token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...algorithms.loss import Loss
from ...algorithms.old_policy import needs_old_logprobs
from ...dataflow.batch import Batch
from ...dataflow.column import OLD_LOGPROBS, PROMPT_IDS, RESPONSE_IDS, RESPONSE_MASK
from ...dataflow.errors import UserError
from ...dataflow.metrics import Metrics, merge
from ...dataflow.takes import TrainingBatch
from ..dispatch import Coordinates, Dispatch
from ..remote import remote
from ..vocabulary import check_vocabulary
from ..worker import Context, Worker
from .bad_steps import BadSteps
from .engine import Head, ModelConfig, OptimizerConfig, TrainingEngine
from .lora import Lora

if TYPE_CHECKING:
    from ...dataflow.graph import Node, Source


class TrainedConfig(ModelConfig, OptimizerConfig):
    """A model, how it lies over its ranks, and how it is optimised."""

    activation_checkpointing: bool = False
    """Compute activations a second time in the backward pass instead of keeping them: slower, and far less memory."""
    lora: Lora | None = None
    """Train an adapter (and a scalar head, if there is one) and leave the model as it is; None: train the model."""


def loss_reads(loss: Loss) -> tuple[str, ...]:
    """Columns that an update with this loss cannot do without."""
    return (str(PROMPT_IDS), str(RESPONSE_IDS), *loss.reads)


def loss_may_read(loss: Loss) -> tuple[str, ...]:
    """Columns that it uses where there are any."""
    return (*loss.may_read, str(RESPONSE_MASK))


def training_batch(loss: Loss, epochs: int, minibatches: int) -> TrainingBatch:
    """The batch of an update. In one pass of one step its gradients may be accumulated over several calls."""
    return TrainingBatch(whole_groups=loss.whole_groups, accumulates=epochs == minibatches == 1)


class Updates:
    """Optimizer steps of an engine, several in an update; counted, and taken up again from checkpoints.

    Made and called on all ranks alike, each with the rows of its replica.
    """

    def __init__(self, config: OptimizerConfig, context: Context, engine: TrainingEngine) -> None:
        self._context, self._engine = context, engine
        self._bad_steps = BadSteps(context, engine, config.stop_after_bad_steps)
        self.version = 0
        """The number of updates so far."""

    def update(
        self, batch: Batch, loss: Loss, *, epochs: int, minibatches: int, last: bool, first: Loss | None = None
    ) -> Metrics:
        """One new version of the weights: `epochs` passes over the rows, each of `minibatches` optimizer steps.

        With several minibatches each rank shuffles and cuts its own rows. In one pass of one step the rows may come in
        several calls, as they become ready: gradients are accumulated until the `last` of them.

        Args:
            first: the same loss, which also observes what can be seen before the first step alone.

        Returns:
            `loss`, `grad_norm` (before clipping; of every step where it is finite, applied or not), `learning_rate`, `tokens`
            (trained on, over all passes), `skipped_steps` (not applied: bad, or without a token to train on), `bad_steps` (of
            those, the steps whose loss or gradient is not finite, or whose gradient's norm is above `skip_above_grad_norm`),
            and what the loss reports.

        Raises:
            DivergedError: `stop_after_bad_steps` steps in a row were bad. The rows of each are in the run's `skipped/`.
        """
        observed = first or loss
        if not last:
            self._bad_steps.add(batch)
            return self._engine.accumulate(batch, observed, last=False)
        parts: list[Metrics] = []
        cuts = [rows for epoch in range(epochs) for rows in self._cut(batch, minibatches, epoch, loss.whole_groups)]
        for number, rows in enumerate(cuts, 1):
            part = batch if minibatches == 1 else batch.take(rows)
            self._bad_steps.add(part)
            accumulated, step = self._engine.accumulate(part, observed, last=True), self._engine.apply()
            parts += [accumulated, step.metrics]
            self._bad_steps.note(step, loss, update=self.version + 1, number=number if len(cuts) > 1 else None)
            observed = loss  # later steps see other weights than those before the update
        self.version += 1
        return merge(parts)

    def _cut(self, batch: Batch, minibatches: int, epoch: int, whole_groups: bool) -> list[np.ndarray]:
        """Rows of each minibatch: drawn one by one, or by groups."""
        if minibatches == 1:
            return [np.arange(len(batch))]
        unit_of_row = batch.groups()[1] if whole_groups else np.arange(len(batch))
        order = np.arange(unit_of_row.max(initial=-1) + 1)
        # Rows come as they were finished: short ones first.
        np.random.default_rng((self._context.seed, self.version, epoch)).shuffle(order)
        return [np.flatnonzero(np.isin(unit_of_row, part)) for part in np.array_split(order, minibatches)]

    def save(self, path: Path) -> float:
        """Copy the state of training, to be written to a new folder while training goes on; returns seconds that it waited."""
        return self._engine.snapshot(path, {"version": self.version, "bad_steps": self._bad_steps.in_a_row})

    def load(self, path: Path) -> None:
        """Go on from a checkpoint, of any number of ranks."""
        notes = self._engine.restore(path)
        self.version = notes["version"]
        self._bad_steps.forget(notes.get("bad_steps", ()))


class TrainedWorker(Worker):
    """Parent of the workers that are updated: their engine, how far they are, and what they go on from.

    The engine may be given, for tests and for other engines; by default it is `FsdpEngine`.
    """

    def __init__(
        self,
        config: TrainedConfig,
        context: Context = Context(),
        engine: TrainingEngine | None = None,
        *,
        head: Head = "logprobs",
    ) -> None:
        super().__init__(config, context)
        if engine is None:
            from .fsdp import FsdpEngine

            again = config.activation_checkpointing
            engine = FsdpEngine(config, context, config, head=head, lora=config.lora, activation_checkpointing=again)
        self.engine = engine
        self._updates = Updates(config, context, engine)

    @classmethod
    def check(cls, config: Any, nodes: Sequence[Node], source: Source) -> None:
        config.check()
        check_vocabulary(config.model, source)
        if config.lora is not None:
            config.lora.check(config.model, config.tensor_parallel)
        check_updates(nodes)

    @property
    def version(self) -> int:
        """Policy version: the number of updates so far."""
        return self._updates.version

    @property
    def coordinates(self) -> Coordinates:
        return self.engine.coordinates

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def save(self, path: str | Path, merged: bool = False) -> None:
        """Write the model as a Hugging Face folder, its head and tokenizer included; a folder of that name is replaced.

        With `lora` it is the folder of the adapter, as `peft` writes it, or, `merged`, of the model with the adapter in it.
        """
        self.engine.save(Path(path), merged=merged)

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str | Path) -> float:
        """Copy the state of training, to be written to a new folder while training goes on; returns seconds that it waited."""
        return self._updates.save(Path(path))

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool = False) -> bool:
        """Whether the last checkpoint is on the disk; raises what its writing failed with."""
        return self.engine.written(wait=wait)

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str | Path) -> None:
        """Go on from a checkpoint, of any number of ranks: weights, optimizer, version, random states."""
        self._updates.load(Path(path))

    def onload(self) -> None:
        self.engine.onload()

    def offload(self) -> None:
        self.engine.offload()

    def close(self) -> None:
        self.engine.close()


def check_updates(nodes: Iterable[Node]) -> None:
    """See that the updates of a graph can be made.

    Raises:
        UserError: naming the node and its argument.
    """
    for node in nodes:
        loss = node.arguments.get("loss")
        if isinstance(loss, type) or (loss is not None and not isinstance(loss, Loss)):
            hint = f"; make a value of it: {loss.__name__}()" if isinstance(loss, type) else ""
            raise UserError(f"node {node.name!r}: loss must be a Loss such as PolicyLoss(), not {loss!r}{hint}")
        for name in ("epochs", "minibatches"):
            value = node.arguments.get(name, 1)
            if not isinstance(value, int) or value < 1:
                raise UserError(f"node {node.name!r}: {name} must be a whole number of at least 1, not {value!r}")
        _check_old_policy(node, loss)


def _check_old_policy(node: Node, loss: Loss | None) -> None:
    """After the first of several steps the policy is no longer the one from before the update, and cannot stand for it."""
    steps = {name: node.arguments.get(name, 1) for name in ("epochs", "minibatches")}
    if loss is not None and needs_old_logprobs(loss, **steps) and str(OLD_LOGPROBS) not in node.reads:
        given = ", ".join(f"{name}={value}" for name, value in steps.items())
        raise UserError(
            f"node {node.name!r} takes several optimizer steps ({given}), and after the first its loss has no old policy to "
            f"compare with unless the rows have {str(OLD_LOGPROBS)!r}; take one step, or write them before the update: "
            "samples = old_logprobs(samples, actor=actor) (weft.algorithms.old_policy)"
        )
