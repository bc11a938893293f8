"""The training engine protocol, and the settings of models and training (the optimizer's are in
`optimizer.py`).

A `TrainingEngine` computes log-probabilities and takes optimizer steps for a worker. The default,
`FsdpEngine` (`fsdp.py`), runs `transformers` models with FSDP2 and tensor parallelism.
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
    """Creates a rank's `TrainingEngine` in that rank's process; `FsdpEngine` is one. All ranks of a
    group create their engines at the same time, and connect through `context.rendezvous`
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
            config: settings of the group, including those that a subclass of `ModelConfig` adds.
            training: how to train the model, or None for a frozen model. A trained group passes its
                own configuration.

        Raises:
            UserError: the engine does not support these settings.
        """
        ...


class ModelConfig(Config):
    """A causal language model, and how its group shards it over ranks."""

    model: str | Path
    """Required. Folder or Hugging Face id of a causal language model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of computation and of published weights. Parameters, optimizer state and the values
    computed from logits are always float32. Choose "bfloat16" on GPUs: it halves the time and
    memory of a pass."""
    gradients: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which ranks reduce gradients; each rank keeps its shard in float32. "bfloat16"
    requires dtype="bfloat16". It halves traffic and memory, but rounds every sum over microbatches
    and ranks. Choose it if the network is slow or gathered gradients do not fit into memory."""
    microbatch_tokens: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """[tokens] Maximum number of tokens in one forward pass, including padding if the model cannot
    pack rows. None selects 1,280 on a CPU and 16,384 on a GPU. Lower it if a pass runs out of
    memory (`weft plan` estimates the need); raise it if a GPU is idle."""
    tensor_parallel: int = Field(default=1, ge=1)
    """[ranks] Number of ranks that share each layer. It must divide the group's number of ranks and
    the model's attention and key-value heads, feed-forward width and experts. Raise it if a layer's
    gathered weights or activations do not fit on one device."""
    sequence_parallel: int = Field(default=1, ge=1)
    """[ranks] Number of ranks that split the tokens of a pass (Ulysses, arXiv:2309.14509). It must
    divide the group's number of ranks and the model's attention heads. It cannot be combined with
    `tensor_parallel`. Raise it if the activations of one long response do not fit on a device."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """[stages] Number of pipeline stages. Values above 1 need an `engine` that supports pipelines;
    `FsdpEngine` does not. Raise it if a model is too large for the ranks of one node
    ([pipelines](pipelines.md))."""
    engine: EngineFactory | None = None
    """Class or function that creates the training engine of each rank; None selects `FsdpEngine`.
    Weft calls it with the same arguments. Set it to train with another library
    ([your own](your_own.md#an-engine))."""
    gather: Literal["auto", "once", "layerwise", "node"] = "auto"
    """When ranks gather sharded parameters. "once" gathers them once per step: the fastest way, but
    each rank then holds the whole model and its gradient. "layerwise" gathers each layer in every
    microbatch. "node" does so within each node, which holds a copy of all state, and adds up gradients
    over nodes once per step (hybrid sharding). "auto" selects "once" below 2 GiB of parameters,
    otherwise "node" on several nodes with GPUs if a copy takes up to a quarter of a node's GPU memory.
    Choose "layerwise" if memory is short, "once" if it is plentiful, "node" if the network between
    nodes is slow."""
    offload: Literal["nothing", "moments", "everything"] = "nothing"
    """State to keep in host memory while it is not in use. "moments" offloads the optimizer's
    moments; each step copies them to the device in parts. "everything" also offloads gradients and
    parameters, even of frozen models: the device holds a layer only while it computes, and the host
    runs the optimizer. Choose "moments" if a model fits on its GPUs but AdamW's state does not,
    "everything" if the model itself does not fit."""

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
        return self.tensor_parallel * self.sequence_parallel * self.pipeline_parallel

    def check(self) -> None:
        """Check these settings against the model's settings and files. Raises UserError if the
        model does not exist, cannot be trained, or cannot be split over ranks this way."""
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
        # Other engines may train dtypes that FsdpEngine cannot.
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
    except ValueError as error:  # `inspect.signature` also raises it, for an invalid partial
        said = str(error) if isinstance(error, UserError) else f"{name}: {error}"
        raise UserError(
            f"{said}. It is called with (config, context, training, head=...): docs/your_own.md"
        ) from None


Head = Literal["logprobs", "values", "rewards"]
"""What a model outputs for each response token. "logprobs": its log-probability. "values": the
scalar head's value *before* the token, as for a critic. "rewards": the scalar head's reward up to
and *including* the token, so that the last token's reward covers the whole sequence."""

Recomputed = bool | Annotated[int, Field(ge=1)] | Literal["elementwise"]
"""Layers whose activations the backward pass recomputes: none (False), all (True), or every n-th
(n). "elementwise" recomputes everything but the results of matrix products and attention."""


class TrainingConfig(OptimizerConfig):
    """How to train a model: optimizer, adapter, recomputation, router balancing."""

    activation_checkpointing: Recomputed = False
    """Recompute activations in the backward pass instead of storing them. True recomputes all
    layers, which slows a step by about a third; a number n recomputes every n-th layer.
    "elementwise" keeps the results of matrix products and attention, the slowest operations. Set it
    if activations do not fit into memory."""
    router_loss: float | None = Field(default=None, gt=0)
    """[factor] Coefficient of the load-balancing loss for a mixture's routers (arXiv:2101.03961,
    equations 4 to 6, as `transformers` computes it). None disables the loss. With it, each step
    waits for all its rows, and reads them twice unless they have recorded routes. Set it in
    supervised training, or if `max_expert_load` grows; start with the model's own
    `router_aux_loss_coef`."""
    lora: Lora | None = None
    """Train an adapter (and the scalar head, if there is one) and freeze the model. None trains the
    whole model. Set it if gradients and moments do not fit into memory."""
    free_on_resume: ClassVar[frozenset[str]] = frozenset(("activation_checkpointing",))
    fixed_on_resume: ClassVar[frozenset[str]] = frozenset(("lora",))


@dataclass(frozen=True)
class OptimizerStep:
    """Result of an optimizer step, equal on all ranks. The step was applied, was bad, or had no
    tokens."""

    metrics: Metrics
    applied: bool
    bad: str | None = None
    """Why a step was not applied: a loss or gradient that is not finite, or a gradient norm above
    the limit."""


class TrainingEngine(Protocol):
    """A model on the ranks of one group. Every method is collective: all ranks call it at the same
    time, each with the rows of its replica.

    If rows have kept sets, log-probabilities, entropies and gradients cover only these tokens
    (`Microbatches.kept_sets`). Set `reads_kept_sets = True` on a class that supports this.
    """

    @property
    def coordinates(self) -> Coordinates:
        """Coordinates of this rank in the mesh of its group."""
        ...

    def logprobs(self, batch: Batch, *, adapter: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probability of each response token:
        `(values [T] float32 nats, cu_seqlens [rows + 1])`. `adapter=False` runs the model without
        its adapter."""
        ...

    def logprobs_and_entropies(
        self, batch: Batch, *, collisions: bool = False
    ) -> tuple[np.ndarray, ...]:
        """Like `logprobs`, but also return each token's entropy:
        `(values [T], entropies [T] nats, cu_seqlens)`. With `collisions`, also log sum_v p_v^2:
        `(values, entropies, log-collisions [T] nats, cu_seqlens)`."""
        ...

    def top_logprobs(self, batch: Batch, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the k (at most the vocabulary) likeliest tokens at each position of the responses:
        `(log-probabilities [T, k] nats, largest first, token ids [T, k] int32, cu_seqlens)`."""
        ...

    def values(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return the scalar head's output for each response token, in the format of `logprobs`."""
        ...

    def accumulate(self, batch: Batch, loss: Loss, *, last: bool) -> Metrics:
        """Add the gradient of these rows on all replicas to the current optimizer step. Set `last`
        for the last rows of the step. The metrics of the whole step are those of its calls and
        replicas, merged."""
        ...

    def apply(self) -> OptimizerStep:
        """Take the optimizer step: divide the accumulated gradient by the loss's count over all
        rows, clip it, and update the parameters. A bad step leaves parameters, moments and step
        count bitwise unchanged."""
        ...

    def losses(self, batch: Batch, loss: Loss) -> np.ndarray:
        """Return each row's contribution to the loss before division by the count, under the
        current weights and without a gradient: `[rows]` float32. The rows of a group share a whole
        group's loss equally."""
        ...

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full parameters under their Hugging Face names, in the dtype of forward passes. The
        engine gathers one at a time, and merges adapters."""
        ...

    def published_parts(self) -> Iterator[TensorPart]:
        """Yield this rank's share of the weights to publish: views of the parameters, with the
        names and shapes of the checkpoint, in the dtype of forward passes.

        If several ranks hold equal copies, only the first yields the part, so all ranks together
        yield each element once. For a model with an adapter, `Lora.published` selects the adapter
        alone (with the names of `peft`) or the merged weights.
        """
        ...

    def receive_weights(self, incoming: IncomingWeights) -> str:
        """Load this rank's parts of a published version, and return the version's checksum. Raises
        WeightSyncError if names or shapes do not fit the model, or if data arrived damaged."""
        ...

    def save(self, folder: Path, *, merged: bool = False) -> None:
        """Write a folder that `from_pretrained` loads, including the tokenizer. For a model with an
        adapter, write only the adapter in the format of `peft`, unless `merged` is set."""
        ...

    def snapshot(self, folder: Path, notes: Mapping[str, Any] | None = None) -> float:
        """Copy the state from which training can resume, then write it to `folder` in the
        background (`snapshot.py` lists the files). The folder must be new, and the same for all
        ranks. `notes` are JSON values that `restore` returns.

        Returns:
            Seconds that the call blocked training. The first call also allocates memory for the
            copy. Each call waits until the previous snapshot is on disk; call `written` first to
            learn whether that one failed.

        Raises:
            RuntimeError: `accumulate` has added gradients that `apply` has not applied.
        """
        ...

    def written(self, *, wait: bool) -> bool:
        """Return whether all ranks have written the last snapshot to disk.

        Raises:
            OSError: this rank could not write a file, or the folder already has a snapshot. The
                message names the file and, if the disk is full, the bytes needed.
            RuntimeError: another rank could not write its files.
        """
        ...

    def restore(self, folder: Path) -> Mapping[str, Any]:
        """Resume from a snapshot and return its notes. The number of ranks may differ; random
        states are restored only if it is equal. Raises UserError if the folder is not a snapshot of
        this model, and ValueError if a file is damaged."""
        ...

    def onload(self) -> None:
        """Move parameters and optimizer state to the device."""
        ...

    def offload(self) -> None:
        """Move parameters and optimizer state to host memory."""
        ...

    def close(self) -> None: ...
