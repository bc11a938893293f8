"""EngineWorker: base class of workers that run a training engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from ..algorithms.loss import Loss
from ..algorithms.policy_loss import needs_old_logprobs
from ..dataflow.column import (
    IMAGES,
    KEPT_COUNTS,
    KEPT_IDS,
    KNOWN,
    OLD_LOGPROBS,
    PROMPT_IDS,
    RESPONSE_IDS,
    RESPONSE_MASK,
    ROUTES,
    TEMPERATURE,
    Column,
)
from ..dataflow.errors import UserError
from ..dataflow.operation import TrainingBatch
from .dispatch import Coordinates, Dispatch, RowCost, row_cost_of
from .models.images import check_images
from .models.model_folder import (
    check_vocabulary,
    complete_text_settings,
    context_of,
    may_share_prompts,
    num_experts,
    read_model_config,
)
from .training.engine import Head, ModelConfig, TrainingConfig, TrainingEngine
from .training.memory import MISSING_TORCHAO
from .training.updates import Updates
from .worker import Context, Worker, remote

if TYPE_CHECKING:
    from ..dataflow.graph import Node
    from ..dataflow.source import Source


def logprobs_may_read(of: str, replay: bool = True) -> tuple[Column, ...]:
    """Return the optional columns of a log-probability pass over the column `of`. Only sampled
    responses have kept sets, and `routes` that a mixture of experts replays."""
    if of != str(RESPONSE_IDS):
        return (TEMPERATURE, IMAGES)
    return (TEMPERATURE, IMAGES, KEPT_COUNTS, KEPT_IDS, *([ROUTES] if replay else []))


class EngineWorker(Worker):
    """A worker with the `TrainingEngine` that `config.engine` creates. Default: an `FsdpEngine`. If
    `alone`, this rank holds a complete model and joins no group."""

    def __init__(
        self,
        config: ModelConfig,
        context: Context,
        training: TrainingConfig | None = None,
        *,
        head: Head = "logprobs",
        alone: bool = False,
    ) -> None:
        super().__init__(config, context)
        make = config.engine
        if make is None:
            # Import late, because the driver imports this module, but not torch.
            from .training.fsdp import FsdpEngine as make
        # A rank that is `alone` must not wait at a rendezvous.
        where = replace(context, rank=0, world_size=1, rendezvous=None) if alone else context
        self.engine: TrainingEngine = make(config, where, training, head=head)
        # Report an incomplete engine now rather than in the middle of a run.
        wanted = [name for name in vars(TrainingEngine) if name[0] != "_"]
        missing = [name for name in wanted if not hasattr(self.engine, name)]
        if missing:
            made = type(self.engine).__name__
            raise UserError(
                f"engine={config.engine!r} made a {made}, which is not a TrainingEngine: it "
                f"has no {', '.join(missing)}"
            )

    @classmethod
    def check(cls, config: Any, nodes: Sequence[Node], source: Source) -> None:
        config.check()
        check_vocabulary(config.model, source)
        check_images(config.model, source)
        if config.engine is None or getattr(config.engine, "reads_kept_sets", False):
            return
        for node in nodes:
            if str(KEPT_IDS) in node.reads:
                raise UserError(
                    f"node {node.name!r}: {config.engine!r} does not read kept sets, so it cannot train on samples with "
                    "top_p, top_k, min_p or min_tokens; sample without them, or give the engine reads_kept_sets = True (docs/your_own.md)"
                )

    @classmethod
    def longest_row(cls, config: Any) -> int | None:
        return context_of(read_model_config(config.model))

    @classmethod
    def row_cost(cls, config: Any) -> RowCost:
        return row_cost_of(config.model)

    @classmethod
    def shares_prompts(cls, config: Any) -> bool:
        can = config.engine is None or getattr(config.engine, "shares_prompts", False)
        return can and config.sequence_parallel == 1 and may_share_prompts(config.model)

    @property
    def coordinates(self) -> Coordinates:
        return self.engine.coordinates

    def onload(self) -> None:
        self.engine.onload()

    def offload(self) -> None:
        self.engine.offload()

    def close(self) -> None:
        self.engine.close()


# Trained workers: actor and critic


class TrainedConfig(ModelConfig, TrainingConfig):
    """A model, its sharding and its training."""

    @model_validator(mode="after")
    def _check_moments(self) -> TrainedConfig:
        if self.optimizer == "muon" and (self.moments == "8bit" or self.offload != "nothing"):
            other = 'moments="8bit"' if self.moments == "8bit" else f'offload="{self.offload}"'
            raise ValueError(
                f'optimizer="muon" cannot be combined with {other}: Muon updates whole float32 matrices '
                "on the device; leave one of them out"
            )
        if self.moments == "8bit" and self.offload != "nothing":
            raise ValueError(
                f'moments="8bit" cannot be combined with offload="{self.offload}": 8-bit '
                "updates are slow on the host; leave one of them out"
            )
        return self


def loss_reads(loss: Loss) -> tuple[str | Column, ...]:
    """Return the required columns of an update with this loss."""
    return (PROMPT_IDS, RESPONSE_IDS, *_declared(loss.reads))


def loss_may_read(loss: Loss) -> tuple[str | Column, ...]:
    """Return the optional columns of an update with this loss."""
    return (*_declared(loss.may_read), RESPONSE_MASK, IMAGES)


def _declared(names: Iterable[str]) -> Iterator[str | Column]:
    """Return columns by name. A name that Weft declares never means a column of a data file."""
    return (KNOWN.get(name, name) for name in names)


def training_batch(loss: Loss, epochs: int, minibatches: int, config: TrainedConfig) -> TrainingBatch:
    """Return how to batch the rows of an update. With one pass and one minibatch, gradients may
    accumulate over several calls, unless the loss is not a sum over rows."""
    # The router loss needs the whole step's expert loads before the first backward pass.
    in_parts = epochs == minibatches == 1 and config.router_loss is None
    return TrainingBatch(whole_groups=loss.whole_groups, accumulates=in_parts)


class TrainedWorker(EngineWorker):
    """Base class of trained workers, with updates and checkpoints."""

    def __init__(
        self, config: TrainedConfig, context: Context = Context(), *, head: Head = "logprobs"
    ) -> None:
        super().__init__(config, context, config, head=head)
        self._updates = Updates(config, context, self.engine)

    @classmethod
    def check(cls, config: Any, nodes: Sequence[Node], source: Source) -> None:
        super().check(config, nodes, source)
        if config.moments == "8bit" and find_spec("torchao") is None:
            raise UserError(MISSING_TORCHAO)
        if config.lora is not None:
            config.lora.check(config.tensor_parallel)
            # This check imports torch, which takes seconds, so skip it where it cannot fail.
            if config.lora.targets != "all-linear" or config.lora.dora:
                from .training.adapter import check_layers

                check_layers(config.model, config.lora)
        if config.router_loss is not None and num_experts(complete_text_settings(config.model)) is None:
            raise UserError(
                f"router_loss={config.router_loss:g}: {config.model} is not a mixture of "
                "experts; leave it out"
            )
        check_updates(nodes)

    @property
    def version(self) -> int:
        """Policy version: the number of updates so far."""
        return self._updates.version

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def save(self, path: str | Path, merged: bool = False) -> None:
        """Write model, head and tokenizer as a Hugging Face folder, replacing an existing one.
        `merged` merges an adapter into the model; otherwise, write only the adapter, in the format
        of `peft`."""
        self.engine.save(Path(path), merged=merged)

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str | Path) -> float:
        """Copy the training state, and write it to a new folder in the background. Return the
        number of seconds that training waited."""
        return self._updates.save(Path(path))

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool = False) -> bool:
        """Return whether the last checkpoint is on disk."""
        return self.engine.written(wait=wait)

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str | Path) -> None:
        """Restore the training state from a checkpoint, written by any number of ranks."""
        self._updates.load(Path(path))


def check_updates(nodes: Iterable[Node]) -> None:
    """Check the arguments of a graph's updates."""
    for node in nodes:
        loss = node.arguments.get("loss")
        if isinstance(loss, type) or (loss is not None and not isinstance(loss, Loss)):
            hint = f"; make a value of it: {loss.__name__}()" if isinstance(loss, type) else ""
            raise UserError(
                f"node {node.name!r}: loss must be a Loss such as PolicyLoss(), not {loss!r}{hint}"
            )
        for name in ("epochs", "minibatches"):
            value = node.arguments.get(name, 1)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(
                    f"node {node.name!r}: {name} must be an integer of at least 1, not {value!r}"
                )
        # Without old log-probabilities, the old policy is lost after the first of several steps.
        steps = {name: node.arguments.get(name, 1) for name in ("epochs", "minibatches")}
        if (
            loss is not None
            and needs_old_logprobs(loss, **steps)
            and str(OLD_LOGPROBS) not in node.reads
        ):
            given = ", ".join(f"{name}={value}" for name, value in steps.items())
            raise UserError(
                f"node {node.name!r} takes several optimizer steps ({given}), but after the "
                "first its loss has no old policy to compare with unless the rows have "
                f"{str(OLD_LOGPROBS)!r}; take one step, or write them before the update: "
                "samples = old_logprobs(samples, actor=actor) (weft.algorithms.policy_loss)"
            )
