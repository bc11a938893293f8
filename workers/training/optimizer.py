"""Settings of the optimizer, and the learning rate of each step. `moments.py` implements AdamW and
Muon."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from ...dataflow.config import Config

FINAL_RATIO = 0.1
"""Final learning rate of a decay, relative to the peak; above 0, so that training can continue."""


class OptimizerConfig(Config):
    """AdamW (arXiv:1711.05101) or Muon, the learning-rate schedule, gradient clipping, and bad steps."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """Update rule. "muon" (https://kellerjordan.github.io/posts/muon/) makes the singular values of
    each layer's matrices of updates nearly equal; embeddings, head, norms and biases still use AdamW.
    Updates are scaled to the size of AdamW's (arXiv:2502.16982), so the same learning rate suits both.
    It needs half the memory for the moments of these matrices, and more time: each rank gathers every
    matrix. It cannot be combined with `offload` or `moments="8bit"`, and refuses stacked experts. Set
    it to "muon" for supervised training and long runs."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """[rate] Peak learning rate. Raise it if the reward does not improve (adapters need about ten
    times the rate of full training); lower it if the reward collapses."""
    frozen_steps: int = Field(default=0, ge=0)
    """[optimizer steps] Number of first steps with a rate of 0, before the warm-up. Set it for the
    actor of PPO, so that a new critic learns first."""
    warmup_steps: int = Field(default=0, ge=0)
    """[optimizer steps] Length of the linear warm-up from 0 to the peak rate. Raise it if training
    is unstable in the first steps."""
    decay: Literal["constant"] | tuple[Literal["linear", "cosine"], int] = "constant"
    """Decay of the learning rate after the warm-up. "constant" keeps the peak rate. ("linear", 500)
    or ("cosine", 500) decays to a tenth of the peak at optimizer step 500 and stays there. Set one
    if you know the run's number of optimizer steps; a larger number ends at a higher rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """[factor] Decoupled weight decay: each step subtracts learning_rate * weight_decay times each
    weight matrix; norms and biases do not decay. Raise it in supervised training on little data."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """[rate] Decay rates of AdamW's first and second moments. 0.95 averages the second moments over
    about 20 steps, because gradients change during a run; 0.999 averages over about 1,000. Change
    them to reproduce another recipe."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """[norm] Maximum gradient norm; clipping scales larger gradients down to it. None disables
    clipping. Lower it if single batches destabilize training."""
    skip_above_grad_norm: float | None = Field(default=None, gt=0)
    """[norm] Treat a step as bad if its gradient norm before clipping is larger. With None, only
    steps that are not finite are bad. Set it if rare batches ruin a run."""
    moments: Literal["float32", "8bit"] = "float32"
    """Storage format of AdamW's moments. "8bit" takes a quarter of the memory and rounds the
    moments (arXiv:2110.02861). It requires torchao (`weft[torchao]`), and cannot be combined with
    `offload`. Choose it if parameters and gradients fit on the GPUs but moments do not."""
    stop_after_bad_steps: int = Field(default=3, ge=1)
    """[optimizer steps] Stop the run after this number of consecutive bad steps, none of which is
    applied. Raise it if bad steps come in bursts and training recovers."""

    retired: ClassVar[Mapping[str, str]] = {
        "final_ratio": "the rate falls to a tenth; a decay over more steps ends higher",
        "decay_steps": 'set decay=("linear", steps) or decay=("cosine", steps)',
    }

    @field_validator("decay", mode="before")
    @classmethod
    def _decay_has_steps(cls, decay: Any) -> Any:
        if decay != "constant" and not isinstance(decay, tuple):
            raise ValueError(
                f'decay must be "constant", ("linear", steps) or ("cosine", steps), not {decay!r}'
            )
        return decay

    @model_validator(mode="after")
    def _decay_ends_after_the_warm_up(self) -> OptimizerConfig:
        begins = self.frozen_steps + self.warmup_steps
        if self.decay != "constant" and self.decay[1] <= begins:
            raise ValueError(
                f"decay={self.decay!r} needs more steps than frozen_steps and warmup_steps ({begins})"
            )
        return self

    def rate(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 0.

        >>> linear = OptimizerConfig(learning_rate=1.0, warmup_steps=2, decay=("linear", 5))
        >>> [round(linear.rate(step), 2) for step in range(7)]
        [0.5, 1.0, 1.0, 0.7, 0.4, 0.1, 0.1]
        >>> [OptimizerConfig(learning_rate=1.0, frozen_steps=2, warmup_steps=2).rate(step) for step in range(5)]
        [0.0, 0.0, 0.5, 1.0, 1.0]
        """
        if step < self.frozen_steps:
            return 0.0
        begins = self.frozen_steps + self.warmup_steps
        if step < begins:
            return self.learning_rate * (step + 1 - self.frozen_steps) / self.warmup_steps
        if self.decay == "constant":
            return self.learning_rate
        shape, steps = self.decay
        done = min(1.0, (step - begins) / (steps - begins))
        left = 1 - done if shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * (FINAL_RATIO + (1 - FINAL_RATIO) * left)
