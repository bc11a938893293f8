"""LoRA settings, and the actor without its adapter as a reference model. `adapter.py` applies the
settings with `peft`; this module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from ...dataflow.column import REFERENCE_LOGPROBS, RESPONSE_IDS
from ...dataflow.config import Config
from ...dataflow.errors import UserError, nearest
from ...dataflow.graph import Handle


class Lora(Config):
    """Low-rank adaptation (arXiv:2106.09685): W + s B A, with frozen W and trained A [rank, in] and
    B [out, rank].

    B starts at 0, so the first policy is the model itself. A depends on the run's seed, not on the
    number of ranks.
    """

    rank: int = Field(default=16, ge=1, le=65_536)
    """[rank] Rank of the product B A. Raise it if an adapter learns less than full training."""
    alpha: float = Field(default=32, ge=1)
    """[factor] Numerator of the scale s = alpha / rank. Raise it with the rank to keep the scale.
    For rsLoRA at large ranks (arXiv:2312.03732), multiply by the rank's square root: 32 *
    128**0.5."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Linear layers to adapt, by the ends of their names, such as "q_proj" or "self_attn.q_proj".
    "all-linear" selects all linear layers except heads and vision layers. Choose fewer for a
    smaller adapter."""
    published: Literal["adapter", "merged"] | None = None
    """What followers receive: "adapter", which they add to the model in their own folder, or
    "merged" weights, which lose small updates when rounded to bfloat16. None selects "adapter" if
    the dtype is bfloat16 and all followers can serve adapters, or if a follower serves several
    actors, otherwise "merged". Set it to "adapter" to get an error if a follower cannot."""
    dora: bool = False
    """Train the norm m of each row of the weight separately: m (W + s B A) / |W + s B A| (DoRA,
    arXiv:2402.09353). Set it to come closer to full training. Steps take longer: every forward pass
    computes the whole matrix."""

    free_on_resume: ClassVar[frozenset[str]] = frozenset(("published",))
    retired: ClassVar[Mapping[str, str]] = {
        "rslora": "s is alpha / rank; multiply alpha by rank**0.5 for alpha / sqrt(rank)"
    }

    @field_validator("alpha")
    @classmethod
    def _is_an_integer_if_it_can_be(cls, alpha: float) -> float:
        # Checkpoints compare alpha as text, so 16.0 becomes 16.
        return int(alpha) if alpha == int(alpha) else alpha

    def is_on(self, name: str) -> bool:
        """Return whether a linear layer of the backbone gets an adapter.

        >>> Lora(targets=("q_proj",)).is_on("layers.0.self_attn.q_proj"), Lora(targets=("q_proj",)).is_on("layers.0.mlp.up_proj")
        (True, False)
        """
        return self.targets == "all-linear" or any(
            f".{name}".endswith(f".{target}") for target in self.targets
        )

    @model_validator(mode="after")
    def _has_targets(self) -> Lora:
        if not self.targets:
            raise ValueError('targets is empty; name linear layers, or "all-linear"')
        return self

    def check(self, tensor_parallel: int) -> None:
        """Raise UserError if tensor-parallel ranks cannot share the adapter."""
        if self.dora and tensor_parallel > 1:
            raise UserError(
                f"Lora.dora: tensor_parallel={tensor_parallel} splits the rows that DoRA "
                "normalizes; leave one of them out"
            )


def check_targets(targets: tuple[str, ...], layers: list[str], owner: str) -> None:
    """Check that each target is a suffix of some layer's name; the error names the closest.

    >>> check_targets(("q_prj",), ["layers.0.q_proj", "layers.0.k_proj"], "the model")
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: Lora.targets: the model has no layer 'q_prj'; did you mean 'q_proj'?
    """
    for target in targets:
        if not any(f".{layer}".endswith(f".{target}") for layer in layers):
            known = sorted({layer.rpartition(".")[2] for layer in layers})
            hint = nearest(target.rpartition(".")[2], known) or f"; it has {', '.join(known)}"
            raise UserError(f"Lora.targets: {owner} has no layer {target!r}{hint}")


@dataclass(frozen=True)
class _AdapterOff:
    actor: Any

    def logprobs(
        self, batch: Any, *, into: str = str(REFERENCE_LOGPROBS), of: str = str(RESPONSE_IDS)
    ) -> Any:
        return self.actor.logprobs(batch, into=into, of=of, adapter=False)


def adapter_off(actor: Any) -> _AdapterOff:
    """Return the actor's model without its adapter as a reference, at the cost of a forward pass
    but no memory: `grpo(..., actor=actor, reference=weft.adapter_off(actor))`. Raises UserError if
    `actor` is not a handle with `lora`."""
    if not isinstance(actor, Handle) or getattr(actor.config, "lora", None) is None:
        raise UserError(f"adapter_off() takes a handle made with lora=weft.Lora(...), not {actor!r}")
    return _AdapterOff(actor)
