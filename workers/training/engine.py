"""TrainingEngine: computes log-probabilities and takes optimizer steps for a worker.

`FsdpEngine` (`fsdp.py`) implements it with FSDP2 and tensor parallelism on `transformers` models; `ModelConfig.engine` takes
another one. The settings of engines and the learning-rate schedule stand here, too; `microbatches.py` cuts rows into microbatches.
"""

from __future__ import annotations

import math
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
from .tensor_parallel_plan import check_tensor_parallel

if TYPE_CHECKING:
    import torch

    from ...resharding.incoming import IncomingWeights
    from ...resharding.weights import Part
    from ..worker import Context


@runtime_checkable
class EngineFactory(Protocol):
    """Makes the `TrainingEngine` of a rank, in its process. All ranks of the group make theirs together; they meet at
    `context.rendezvous` (`workers/rendezvous.py`). `FsdpEngine` is one."""

    def __call__(
        self,
        config: ModelConfig,
        context: Context,
        training: TrainingConfig | None = None,
        *,
        head: Head = "logprobs",
    ) -> TrainingEngine:
        """The engine.

        Args:
            config: of the group; also what it is set to beyond `ModelConfig`.
            context: of the rank.
            training: how the model is trained; None: it only computes. The configuration of a group that is trained is one, too.
            head: what the model computes for each response token.

        Raises:
            UserError: it does not do what it is asked for.
        """
        ...


class ModelConfig(Config):
    """A causal language model, and how it lies over the ranks of its group."""

    model: str | Path
    """Folder, or Hugging Face id, of a causal language model. Choose it; there is no default."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What it computes in, and what is published; parameters, optimizer state and what logits become are float32 either way. Choose
    "bfloat16" on GPUs: half the time and memory of a pass."""
    gradients: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are reduced between ranks; each rank keeps its shard in float32. Choose
    "bfloat16" where the network between ranks is slow, or gathered gradients do not fit: it takes half of both, and rounds every sum of
    microbatches and ranks. Only with dtype="bfloat16"."""
    microbatch_tokens: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """[tokens] Limit for one forward pass. Padding counts if the model cannot pack rows. None takes 1,280 on a CPU and 16,384 on a GPU.
    Lower it if a pass does not fit into memory (`weft plan` estimates it), raise it if a GPU is not busy."""
    tensor_parallel: int = Field(default=1, ge=1)
    """[ranks] How many share each layer; must divide the ranks of the group, and what
    the plan of `transformers` for the model shares: attention heads, and experts. Raise it where a layer's
    gathered weights or activations do not fit on one device."""
    sequence_parallel: int = Field(default=1, ge=1)
    """[ranks] How many share the tokens of a pass (Ulysses, arXiv:2309.14509); must divide the ranks of the group and the model's attention
    heads; not together with `tensor_parallel`. Raise it where the activations of one long response do not fit on a device."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """[stages] Over which the layers are split. It needs an `engine` with a pipeline; `FsdpEngine` has none. Raise it
    where a model is too large for the ranks of one node ([pipelines](pipelines.md))."""
    engine: EngineFactory | None = None
    """Makes the training engine of each rank: a class or function called as `FsdpEngine` is, which None stands for. Give one to train
    with another library ([your own](your_own.md#an-engine))."""
    gather: Literal["auto", "once", "layerwise"] = "auto"
    """When ranks gather the parameters that they share: "once" a step, all of them (fastest; needs room for the whole model and its
    gradient on every rank), or "layerwise" in every microbatch. "auto": once, below 2 GiB of parameters. Choose "layerwise" where memory
    is short, "once" where it is plenty."""

    offload: Literal["nothing", "moments", "everything"] = "nothing"
    """What lies in host memory between its uses: nothing; the optimizer's "moments", which visit the device in parts during a step; or
    "everything", parameters (of frozen models, too), gradients and moments: each layer visits the device while it computes, and the host
    takes the steps. Choose "moments" where a model fits on its GPUs and AdamW does not, "everything" where the model itself does not."""

    compile: bool = False
    """Have each layer compiled by `torch.compile`, which joins elementwise operations; the first step takes a minute longer. Set it in long
    runs on GPUs; on CPUs it gains nothing. Not for mixtures of experts, and not together with `tensor_parallel`."""

    free_on_resume: ClassVar[frozenset[str]] = frozenset(
        (
            "microbatch_tokens",
            "tensor_parallel",
            "sequence_parallel",
            "pipeline_parallel",
            "gather",
            "offload",
            "compile",
        )
    )

    @model_validator(mode="after")
    def _check_gradient_dtype(self) -> ModelConfig:
        if self.gradients == "bfloat16" and self.dtype == "float32":
            raise ValueError(
                'gradients="bfloat16" rounds what dtype="float32" has computed exactly; set dtype="bfloat16" too'
            )
        return self

    @model_validator(mode="after")
    def _compiles_whole_layers(self) -> ModelConfig:
        if self.compile and self.tensor_parallel > 1:
            raise ValueError(
                f"compile=True and tensor_parallel={self.tensor_parallel}: torch fails to compile layers that ranks share; leave "
                "one of them out"
            )
        return self

    @property
    def replica_ranks(self) -> int:
        """Ranks that compute the same rows together."""
        return self.tensor_parallel * self.sequence_parallel * self.pipeline_parallel

    @model_validator(mode="after")
    def _gathers_what_is_on_the_host_by_layer(self) -> ModelConfig:
        if self.offload == "everything" and self.gather == "once":
            raise ValueError(
                'offload="everything" gathers each layer for its passes, and gather="once" all of them at once; leave one of them out'
            )
        return self

    def check(self) -> None:
        """Find mistakes that the model's own settings tell of.

        Raises:
            UserError: no such model, or one that cannot be trained, or not shared like this.
        """
        settings = read_model_config(self.model)
        check_causal_lm(self.model, settings)
        for name in ("tensor_parallel", "sequence_parallel", "pipeline_parallel"):
            if getattr(self, name) > 1 and sees_images(settings):
                raise UserError(
                    f"{name}={getattr(self, name)}: model {str(self.model)!r} (type {settings['model_type']!r}) sees images, and its ranks "
                    "share neither layers nor tokens yet; leave it at 1"
                )
        if self.engine is not None:
            _check_call(self.engine)
        check_weights(self.model, trained=self.engine is None)
        if self.pipeline_parallel > 1 and self.engine is None:
            raise UserError(
                f"pipeline_parallel={self.pipeline_parallel}: FsdpEngine has no pipeline; give engine=... one that has, or leave it at 1"
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
    """Check that a factory takes what it is called with.

    Raises:
        UserError: it does not.
    """
    name = f"engine={getattr(make, '__qualname__', repr(make))}"
    try:
        bind_signature(make, 0, ("config", "context", "training"), {"head": "logprobs"}, name=name)
    except (
        ValueError
    ) as error:  # of `inspect.signature`, too: a partial whose function does not take what it sets
        said = str(error) if isinstance(error, UserError) else f"{name}: {error}"
        raise UserError(
            f"{said}. It is called with (config, context, training, head=...): docs/your_own.md"
        ) from None


Head = Literal["logprobs", "values", "rewards"]
"""What a model says of each response token: its log-probability; by a scalar head the value *before* it, which is what a critic
predicts; or by a scalar head the reward of the sequence up to it, *with* it. A causal model's last reward has seen all."""

Recomputed = bool | Annotated[int, Field(ge=1)] | Literal["elementwise"]
"""Activations that are computed a second time in the backward pass: none, those of all layers, of every so-many-th layer, or of all but
matrix products and attention, which take the time."""

FINAL_RATIO = 0.1
"""Last learning rate over peak rate. A run that goes on still learns a little; a larger `decay_steps` ends at a higher rate."""


class OptimizerConfig(Config):
    """AdamW (arXiv:1711.05101), its learning-rate schedule, gradient clipping, and which steps are not taken."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """[rate] The peak. Raise it where the reward does not move (adapters take ten times as much), lower it where it collapses."""
    warmup_steps: int = Field(default=0, ge=0)
    """[optimizer steps] How long the rate rises linearly from 0 to its peak. Raise it where the first steps do harm."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls after the warm-up, to a tenth: "constant" is not at all. Choose "linear" or "cosine" for a run of known length."""
    decay_steps: int | None = Field(default=None, ge=1)
    """[optimizer steps] How many from the start until the rate has fallen to a tenth; needed unless constant. Set it to the length of the
    run, or to more for a higher end."""
    weight_decay: float = Field(default=0.0, ge=0)
    """[factor] How much of a matrix, times the rate, is taken off it in each step; norms and biases have none. Raise it in supervised
    training on little data."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """[rate] Decay of AdamW's moments. The second, 0.95, averages about 20 steps, because gradients change during a run; 0.999 averages
    about 1,000. Set them to reproduce a recipe with other values."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """[norm] Gradients of a larger one are scaled down to it; None leaves them. Lower it where single batches do harm."""
    skip_above_grad_norm: float | None = Field(default=None, gt=0)
    """[norm] A step whose gradient has a larger one (before it is scaled down) is bad; None: only one that is not finite. Set it where
    rare batches ruin a run."""
    moments: Literal["float32", "8bit"] = "float32"
    """How AdamW's moments are kept: "8bit" takes a quarter of the memory (arXiv:2110.02861, by torchao: `weft[torchao]`), and rounds them.
    Choose it where parameters and gradients fit on the GPUs and moments do not; not together with `offload`."""
    stop_after_bad_steps: int = Field(default=3, ge=1)
    """[optimizer steps] How many bad ones in a row end the run. Bad steps are not applied. Raise it where they come in bursts and the run
    recovers."""

    retired: ClassVar[Mapping[str, str]] = {
        "final_ratio": "a rate falls to a tenth, and a larger decay_steps ends higher",
    }

    @model_validator(mode="after")
    def _decay_has_an_end(self) -> OptimizerConfig:
        if self.decay != "constant" and (
            self.decay_steps is None or self.decay_steps <= self.warmup_steps
        ):
            raise ValueError(
                f"decay={self.decay!r} needs decay_steps above warmup_steps ({self.warmup_steps}), not {self.decay_steps}"
            )
        return self

    def rate(self, step: int) -> float:
        """Learning rate of optimizer step `step`, the first being 0.

        >>> linear = OptimizerConfig(learning_rate=1.0, warmup_steps=2, decay="linear", decay_steps=5)
        >>> [round(linear.rate(step), 2) for step in range(7)]
        [0.5, 1.0, 1.0, 0.7, 0.4, 0.1, 0.1]
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.decay == "constant" or self.decay_steps is None:
            return self.learning_rate
        done = min(1.0, (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        left = 1 - done if self.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * (FINAL_RATIO + (1 - FINAL_RATIO) * left)


class TrainingConfig(OptimizerConfig):
    """How a model is trained: by which optimizer, as a whole or by an adapter, what is computed twice, and what balances its routers."""

    activation_checkpointing: Recomputed = False
    """Compute activations a second time in the backward pass instead of keeping them: True for those of all layers (a step is slower by
    about a third), a number n for every n-th layer, "elementwise" for all but the outcomes of matrix products and attention, which
    take the time. Set it where activations do not fit into memory."""
    router_loss: float | None = Field(default=None, gt=0)
    """[factor] Coefficient of the loss that balances the routers of a mixture (arXiv:2101.03961, equations 4 to 6, as `transformers`
    computes it), added to the loss of each step; None: there is no such loss. A step then waits for all of its rows, and reads them once
    more unless their routes are there. Set it, for example to the model's own `router_aux_loss_coef`, in supervised training, and where
    `max_expert_load` grows."""
    lora: Lora | None = None
    """Train an adapter (and a scalar head, if there is one) and freeze the model; None: train the model. Set it where gradients and
    moments of the model do not fit."""
    free_on_resume: ClassVar[frozenset[str]] = frozenset(("activation_checkpointing",))
    fixed_on_resume: ClassVar[frozenset[str]] = frozenset(("lora",))


@dataclass(frozen=True)
class OptimizerStep:
    """The outcome of an optimizer step, equal on all ranks: applied, bad, or without a token to train on."""

    metrics: Metrics
    applied: bool
    bad: str | None = None
    """Why it was not applied though there were tokens to train on: it is not finite, or it diverges."""


class TrainingEngine(Protocol):
    """A model on the ranks of one group. Every method is collective: all ranks call it, each with the rows of its replica."""

    @property
    def coordinates(self) -> Coordinates:
        """Coordinates of this rank in the mesh of its group."""
        ...

    def logprobs(self, batch: Batch, *, adapter: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Log-probability of each response token: `(values [T] float32 nats, cu_seqlens [rows + 1])`; without its `adapter`, of
        the model that it was put on."""
        ...

    def logprobs_and_entropies(self, batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The same pass with the entropy of each token's distribution: `(values [T], entropies [T] float32 nats, cu_seqlens)`."""
        ...

    def values(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """The scalar head's output at each response token: `(values [T] float32, cu_seqlens [rows + 1])`."""
        ...

    def accumulate(self, batch: Batch, loss: Loss, *, last: bool) -> Metrics:
        """Add the gradient of these rows (of all replicas) to that of the optimizer step to come; `last`: no more rows come.
        Merged over calls and replicas, the metrics are those of the complete step."""
        ...

    def apply(self) -> OptimizerStep:
        """The optimizer step: the gradient that was accumulated, divided by the count of all rows, clipped and applied; or,
        when the step is bad, dropped: parameters, moments and the number of steps stay what they are, to the bit."""
        ...

    def losses(self, batch: Batch, loss: Loss) -> np.ndarray:
        """What each row adds to the undivided loss, under the present weights: `[rows]` float32, without a gradient. Of a loss that
        takes groups together, each row has an equal part of its group's."""
        ...

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full parameters under their Hugging Face names, gathered one at a time, in the dtype that is computed in; those that
        have an adapter are merged with it."""
        ...

    def published_parts(self) -> Iterator[Part]:
        """What this rank gives of a version of the weights: those of its parts of which no rank before it holds an equal copy, in the
        dtype that is computed in. The ranks' parts together are all weights, each element once, by the names and in the shapes of the
        checkpoint. A model with an adapter gives the adapter alone, in the names of `peft`, or the weights merged with it
        (`Lora.published`). They are views of the parameters, except where an adapter is merged: then each rank makes its share of the
        merged weights."""
        ...

    def receive_weights(self, incoming: IncomingWeights) -> str:
        """Take over a version that is given away; each rank takes its own parts. Returns the checksum of the version.

        Raises:
            WeightSyncError: names or shapes are not the model's, or something did not arrive as it was published.
        """
        ...

    def save(self, folder: Path, *, merged: bool = False) -> None:
        """Write a folder that `from_pretrained` loads, tokenizer included: of the model, or, where there is one and it is not
        asked to be `merged`, of the adapter (`peft`'s own)."""
        ...

    def snapshot(self, folder: Path, notes: Mapping[str, Any] | None = None) -> float:
        """Copy the state that training resumes from, and write it to `folder` in the background (`snapshot.py` lists it).

        Args:
            folder: a new one, the same for all ranks.
            notes: values of JSON that `restore` returns.

        Returns:
            Seconds that it took. The first one also allocates memory for the copy; one that comes before the last is
            written waits for that. Whether that one failed is for `written` to say, before.

        Raises:
            RuntimeError: gradients have been accumulated and not applied.
        """
        ...

    def written(self, *, wait: bool) -> bool:
        """Whether the last snapshot is on the disk, on all ranks, or failed.

        Raises:
            OSError: this rank could not write a file, which is named (and, when the disk is full, the bytes needed), or
                the folder has a snapshot already.
            RuntimeError: another rank could not.
        """
        ...

    def restore(self, folder: Path) -> Mapping[str, Any]:
        """Go on from a snapshot, of any number of ranks, as if nothing had happened since; returns its notes.

        Random states are those of the snapshot when the number of ranks is.

        Raises:
            UserError: the folder is no snapshot, or one of another model.
            ValueError: a file is damaged.
        """
        ...

    def onload(self) -> None:
        """Bring parameters and optimizer state to the device."""
        ...

    def offload(self) -> None:
        """Move parameters and optimizer state to host memory."""
        ...

    def close(self) -> None: ...
