"""The training engine protocol, and the settings of models and training (`optimizer.py` has those
of the optimizer).

A `TrainingEngine` computes log-probabilities and takes optimizer steps for a worker. `FsdpEngine`
(`fsdp.py`) implements it with FSDP2 and tensor parallelism on `transformers` models;
`ModelConfig.engine` selects another implementation. `microbatches.py` cuts rows into microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from pydantic import Field, model_validator

from ...algorithms.loss import Loss
from ...dataflow.batch import Batch
from ...dataflow.config import Config
from ...dataflow.errors import UserError
from ...dataflow.metrics import Metrics
from ...dataflow.operation import bind_signature
from ..dispatch import Coordinates
from ..models.model_folder import (
    check_causal_lm,
    complete_text_settings,
    num_heads,
    read_model_config,
    sees_images,
    text_settings,
)
from ..models.weight_files import check_weights
from .lora import Lora
from .optimizer import OptimizerConfig
from .tensor_parallel_plan import check_tensor_parallel

if TYPE_CHECKING:
    import torch

    from ...resharding.incoming import IncomingWeights
    from ...resharding.weights import TensorPart
    from ..worker import Context


@runtime_checkable
class EngineFactory(Protocol):
    """Create the `TrainingEngine` of a rank, in the rank's process, such as `FsdpEngine`. All ranks
    of the group create theirs at the same time and meet at `context.rendezvous`
    (`workers/rendezvous.py`)."""

    def __call__(
        self,
        config: ModelConfig,
        context: Context,
        training: TrainingConfig | None = None,
        *,
        head: Head = "logprobs",
    ) -> TrainingEngine:
        """Return the engine.

        Args:
            config: settings of the group, including those added by subclasses of `ModelConfig`.
            training: how to train the model, or None for a model that only computes. A trained
                group passes its own configuration.
            head: output of the model for each response token.

        Raises:
            UserError: the engine does not support these settings.
        """
        ...


class ModelConfig(Config):
    """A causal language model, and how its group shards it over ranks."""

    model: str | Path
    """Required. Set it to the folder or Hugging Face id of a causal language model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of computation and of published weights. Parameters, optimizer state and the values
    computed from logits are always float32. Choose "bfloat16" on GPUs: a pass takes half the time
    and memory."""
    gradients: Literal["float32", "bfloat16"] = "float32"
    """Dtype of gradients when ranks reduce them; each rank keeps its shard in float32. "bfloat16"
    requires dtype="bfloat16". It halves traffic and memory, but rounds every sum over microbatches
    and ranks. Choose "bfloat16" if the network between ranks is slow or gathered gradients do not
    fit into memory."""
    microbatch_tokens: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """[tokens] Maximum number of tokens in one forward pass, including padding if the model cannot
    pack rows. None selects 1,280 on a CPU and 16,384 on a GPU. Lower it if a pass runs out of
    memory (`weft plan` estimates the need); raise it if a GPU is not busy."""
    tensor_parallel: int = Field(default=1, ge=1)
    """[ranks] Number of ranks that share each layer. It must divide the group's number of ranks and
    the dimensions that the model's `transformers` plan shards: attention heads and experts. Raise
    it if the gathered weights or activations of a layer do not fit on one device."""
    sequence_parallel: int = Field(default=1, ge=1)
    """[ranks] Number of ranks that split the tokens of a pass (Ulysses, arXiv:2309.14509). It must
    divide the group's number of ranks and the model's attention heads, and cannot be combined with
    `tensor_parallel`. Raise it if the activations of one long response do not fit on a device."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """[stages] Number of pipeline stages that the layers are split into. Values above 1 need an
    `engine` that supports pipelines; `FsdpEngine` does not. Raise it if a model is too large for
    the ranks of one node ([pipelines](pipelines.md))."""
    engine: EngineFactory | None = None
    """Class or function that creates the training engine of each rank. Weft calls it with the same
    arguments as `FsdpEngine`, the default. Set it to train with another library ([your
    own](your_own.md#an-engine))."""
    gather: Literal["auto", "once", "layerwise"] = "auto"
    """When ranks gather sharded parameters. "once" gathers them once per step, which is fastest,
    but each rank then holds the whole model and its gradient. "layerwise" gathers each layer in
    every microbatch. "auto" selects "once" below 2 GiB of parameters. Choose "layerwise" if memory
    is short, "once" if it is plentiful."""

    offload: Literal["nothing", "moments", "everything"] = "nothing"
    """State to keep in host memory while it is not in use. "moments" offloads the optimizer's
    moments; each step brings them to the device in parts. "everything" offloads parameters (also of
    frozen models), gradients and moments; each layer is on the device only while it computes, and
    the host runs the optimizer. Choose "moments" if a model fits on its GPUs but AdamW's state does
    not, "everything" if the model itself does not fit."""

    compile: bool = False
    """Compile each layer with `torch.compile`, which fuses elementwise operations. The first step
    takes a minute longer. It cannot be combined with mixtures of experts or `tensor_parallel`. Set
    it for long runs on GPUs; CPUs gain nothing."""

    free_on_resume: ClassVar[frozenset[str]] = frozenset({
        "microbatch_tokens", "tensor_parallel", "sequence_parallel", "pipeline_parallel", "gather", "offload",
        "compile",
    })  # fmt: skip

    @model_validator(mode="after")
    def _settings_fit_together(self) -> ModelConfig:
        if self.gradients == "bfloat16" and self.dtype == "float32":
            raise ValueError(
                'gradients="bfloat16" would round the float32 gradients of '
                'dtype="float32"; set dtype="bfloat16" too'
            )
        if self.compile and self.tensor_parallel > 1:
            raise ValueError(
                f"compile=True and tensor_parallel={self.tensor_parallel}: torch fails to "
                "compile layers that ranks share; leave one of them out"
            )
        if self.offload == "everything" and self.gather == "once":
            raise ValueError(
                'offload="everything" gathers one layer at a time, and gather="once" all '
                "of them; leave one of them out"
            )
        return self

    @property
    def replica_ranks(self) -> int:
        """Number of ranks that compute the same rows together."""
        return self.tensor_parallel * self.sequence_parallel * self.pipeline_parallel

    def check(self) -> None:
        """Check these settings against the model's settings and files. Raises UserError if the
        model does not exist, cannot be trained, or cannot be split this way."""
        settings = read_model_config(self.model)
        check_causal_lm(self.model, settings)
        for name in ("tensor_parallel", "sequence_parallel", "pipeline_parallel"):
            if getattr(self, name) > 1 and sees_images(settings):
                raise UserError(
                    f"{name}={getattr(self, name)}: model {str(self.model)!r} (type {settings['model_type']!r}) reads images, and "
                    "ranks cannot share its layers or tokens yet; leave it at 1"
                )
        if self.engine is not None:
            _check_call(self.engine)
        # Other engines may train dtypes that FsdpEngine does not support.
        check_weights(self.model, trained=self.engine is None)
        if self.pipeline_parallel > 1 and self.engine is None:
            raise UserError(
                f"pipeline_parallel={self.pipeline_parallel}: FsdpEngine has no pipeline; set engine=... to one that has, or leave it at 1"
            )
        if self.tensor_parallel > 1:
            check_tensor_parallel(self.model, complete_text_settings(self.model), self.tensor_parallel)
        if self.sequence_parallel > 1:
            what, heads = (
                f"sequence_parallel={self.sequence_parallel}",
                num_heads(text_settings(settings)),
            )
            if self.tensor_parallel > 1:
                raise UserError(
                    f"{what} and tensor_parallel={self.tensor_parallel}: ranks share tokens or layers, not both; leave one of them at 1"
                )
            if heads is not None and heads % self.sequence_parallel:
                raise UserError(f"{what} does not divide the model's attention heads ({heads})")


def _check_call(make: EngineFactory) -> None:
    name = f"engine={getattr(make, '__qualname__', repr(make))}"
    try:
        bind_signature(make, 0, ("config", "context", "training"), {"head": "logprobs"}, name=name)
    except ValueError as error:  # also from `inspect.signature`, for an odd partial
        said = str(error) if isinstance(error, UserError) else f"{name}: {error}"
        raise UserError(
            f"{said}. It is called with (config, context, training, head=...): docs/your_own.md"
        ) from None


Head = Literal["logprobs", "values", "rewards"]
"""Output of a model for each response token. "logprobs": its log-probability. "values": a scalar
head's value *before* the token, as a critic predicts. "rewards": a scalar head's reward of the
sequence up to and *including* the token; the last reward covers the whole sequence."""

Recomputed = bool | Annotated[int, Field(ge=1)] | Literal["elementwise"]
"""Activations to recompute in the backward pass: none, of all layers, of every n-th layer, or
all but the results of matrix products and attention, which take the most time."""


class TrainingConfig(OptimizerConfig):
    """How to train a model: optimizer, adapter, recomputation of activations, and router
    balancing."""

    activation_checkpointing: Recomputed = False
    """Recompute activations in the backward pass instead of storing them. True recomputes all
    layers, which slows a step by about a third; a number n recomputes every n-th layer.
    "elementwise" recomputes everything but the results of matrix products and attention, which take
    the most time. Set it if activations do not fit into memory."""
    router_loss: float | None = Field(default=None, gt=0)
    """[factor] Coefficient of the load-balancing loss for a mixture's routers (arXiv:2101.03961,
    equations 4 to 6, as `transformers` computes it); None disables the loss. With it, each step
    waits for all its rows, and reads them twice unless they carry recorded routes. Set it, for
    example to the model's own `router_aux_loss_coef`, in supervised training or if
    `max_expert_load` grows."""
    lora: Lora | None = None
    """Train an adapter (and the scalar head, if there is one) and freeze the model. None trains the
    whole model. Set it if the model's gradients and moments do not fit into memory."""
    free_on_resume: ClassVar[frozenset[str]] = frozenset(("activation_checkpointing",))
    fixed_on_resume: ClassVar[frozenset[str]] = frozenset(("lora",))


@dataclass(frozen=True)
class OptimizerStep:
    """Result of an optimizer step, equal on all ranks: applied, bad, or without tokens."""

    metrics: Metrics
    applied: bool
    bad: str | None = None
    """Why a step was not applied: its loss or gradient is not finite, or it diverges."""


class TrainingEngine(Protocol):
    """A model on the ranks of one group. Every method is collective: all ranks call it, each with
    the rows of its replica."""

    @property
    def coordinates(self) -> Coordinates:
        """Coordinates of this rank in the mesh of its group."""
        ...

    def logprobs(self, batch: Batch, *, adapter: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probability of each response token: `(values [T] float32 nats, cu_seqlens
        [rows + 1])`. `adapter=False` uses the model without its adapter."""
        ...

    def logprobs_and_entropies(self, batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Like `logprobs`, with entropies: `(values [T], entropies [T] nats, cu_seqlens)`."""
        ...

    def values(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return the scalar head's output at each response token, like `logprobs`."""
        ...

    def accumulate(self, batch: Batch, loss: Loss, *, last: bool) -> Metrics:
        """Add the gradient of these rows (of all replicas) to the current optimizer step. Set
        `last` when no more rows follow. Merged over calls and replicas, the metrics are those of
        the complete step."""
        ...

    def apply(self) -> OptimizerStep:
        """Take the optimizer step: divide the accumulated gradient by the count of all rows, clip
        it, and apply it. A bad step is dropped and leaves parameters, moments and step count
        bitwise unchanged."""
        ...

    def losses(self, batch: Batch, loss: Loss) -> np.ndarray:
        """Return each row's contribution to the undivided loss under the current weights, without a
        gradient: `[rows]` float32. A loss over whole groups is split equally among the rows of each
        group."""
        ...

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full parameters under their Hugging Face names, gathered one at a time, in the
        dtype of computation. Adapters are merged."""
        ...

    def published_parts(self) -> Iterator[TensorPart]:
        """Yield this rank's part of the weights to publish, in the dtype of computation: views of
        the parameters, under the names and in the shapes of the checkpoint.

        Ranks with equal copies leave a part to the first of them, so all ranks together give each
        element once. A model with an adapter gives either the adapter alone, under the names of
        `peft`, or the merged weights (`Lora.published`), a share on each rank.
        """
        ...

    def receive_weights(self, incoming: IncomingWeights) -> str:
        """Load a published version of the weights, each rank its own parts. Return its checksum.
        Raises WeightSyncError if names or shapes do not fit the model, or data arrived damaged."""
        ...

    def save(self, folder: Path, *, merged: bool = False) -> None:
        """Write a folder that `from_pretrained` loads, tokenizer included. A model with an adapter
        writes the adapter in the format of `peft`, unless `merged` is set."""
        ...

    def snapshot(self, folder: Path, notes: Mapping[str, Any] | None = None) -> float:
        """Copy the state that training resumes from, and write it to `folder` (a new one, the same
        for all ranks) in the background (`snapshot.py` lists the files), with JSON values that
        `restore` returns.

        Returns:
            Seconds that the call took. The first call also allocates memory for the copy. A call
            waits until the previous snapshot is written; check `written` first to learn whether
            that one failed.

        Raises:
            RuntimeError: there are accumulated gradients that no step has applied.
        """
        ...

    def written(self, *, wait: bool) -> bool:
        """Return whether all ranks have written the last snapshot to disk.

        Raises:
            OSError: this rank could not write a file (the error names it and, when the disk is
                full, the bytes needed), or the folder already has a snapshot.
            RuntimeError: another rank could not write.
        """
        ...

    def restore(self, folder: Path) -> Mapping[str, Any]:
        """Resume from a snapshot and return its notes. The number of ranks may differ; random
        states are restored only when it is the same. Raises UserError if the folder is not a
        snapshot of this model, and ValueError if a file is damaged."""
        ...

    def onload(self) -> None:
        """Move parameters and optimizer state to the device."""
        ...

    def offload(self) -> None:
        """Move parameters and optimizer state to host memory."""
        ...

    def close(self) -> None: ...
