"""AdaptiveEntropyWorker: an entropy bonus with an adaptive coefficient."""

from __future__ import annotations

import numpy as np
from pydantic import Field, model_validator

from ..algorithms.loss import response_rows
from ..dataflow.batch import Batch
from ..dataflow.column import ENTROPIES, ENTROPY_COEFFICIENT, RESPONSE_MASK
from ..dataflow.config import Config
from ..dataflow.metrics import Mean, Metrics
from ..dataflow.operation import TrainingBatch
from .adaptive_kl import CoefficientWorker
from .dispatch import Dispatch
from .worker import Context, remote


class AdaptiveEntropyConfig(Config):
    """An entropy bonus only while the policy's entropy is low (Skywork-OR1, arXiv:2505.22312): its
    coefficient is c if the mean entropy of the sampled tokens is at most `target`, otherwise 0. After
    each step, c rises by `change` if the entropy was at most `target`, and otherwise falls by it,
    within 0 and `largest`.

    >>> AdaptiveEntropyConfig(value=0.01, target=0.3).updated(0.2).value
    0.015
    """

    value: float = Field(default=0.0, ge=0)
    """[loss/nat] c in the first step. Raise it if the entropy falls before c has adapted."""
    target: float = Field(default=0.2, gt=0)
    """[nats/token] Entropy below which the bonus applies. Set it near the entropy of the first steps,
    to keep that entropy."""
    change: float = Field(default=0.005, gt=0)
    """[loss/nat] Change of c after each step. Lower it if the entropy oscillates."""
    largest: float = Field(default=1.0, gt=0)
    """[loss/nat] Upper limit of c. Lower it if the entropy bonus outweighs the reward."""

    @model_validator(mode="after")
    def _value_is_within_the_limit(self) -> AdaptiveEntropyConfig:
        if self.value > self.largest:
            raise ValueError(f"value must be at most largest, which is {self.largest}, not {self.value}")
        return self

    def at(self, entropy: float) -> float:
        """Return the coefficient at a mean entropy [nats/token]."""
        # A resumed run may have a lower limit.
        return min(self.value, self.largest) if entropy <= self.target else 0.0

    def updated(self, entropy: float) -> AdaptiveEntropyConfig:
        """Return the settings after a step with this mean entropy [nats/token]."""
        moved = self.value + (self.change if entropy <= self.target else -self.change)
        return self.model_copy(update={"value": min(max(moved, 0.0), self.largest)})


class AdaptiveEntropyWorker(CoefficientWorker):
    """Sets the coefficient of the entropy bonus. It is a worker so that checkpoints save it. In the
    loss, name its column: `PolicyLoss(entropy_coefficient="entropy_coefficient")`."""

    Config = AdaptiveEntropyConfig

    def __init__(self, config: AdaptiveEntropyConfig, context: Context = Context()) -> None:
        super().__init__(config, context)
        self.coefficient: AdaptiveEntropyConfig = config

    @remote(
        dispatch=Dispatch.ONE_TO_ALL,
        reads=(ENTROPIES,),
        may_read=(RESPONSE_MASK,),
        writes=(ENTROPY_COEFFICIENT,),
    )
    def coefficients(self, samples: Batch) -> Batch:
        """Write the current coefficient to all rows of the call."""
        total, number = _sum_of(samples)
        value = self.coefficient.at(total / number) if number else 0.0
        return samples.with_columns(
            **{str(ENTROPY_COEFFICIENT): np.full(len(samples), value, dtype=np.float32)}
        )

    @remote(
        dispatch=Dispatch.ONE_TO_ALL,
        reads=(ENTROPIES, ENTROPY_COEFFICIENT),
        may_read=(RESPONSE_MASK,),
        takes=TrainingBatch(),
    )
    def update(self, samples: Batch) -> Metrics:
        """Set the next step's coefficient from the mean entropy of these samples' trained tokens.
        Return `entropy_coefficient`, the mean of these samples' coefficients."""
        total, number = _sum_of(samples)
        if not number:
            return {}
        self.coefficient = self.coefficient.updated(total / number)
        return {"entropy_coefficient": Mean.of(samples.numpy(ENTROPY_COEFFICIENT).tolist())}


def _sum_of(samples: Batch) -> tuple[float, float]:
    """Return the sum of the trained tokens' finite entropies, and the number of these tokens."""
    rows = response_rows(samples, ENTROPIES)
    entropies = rows[ENTROPIES][rows.trained > 0].double()
    entropies = entropies[entropies.isfinite()]
    return float(entropies.sum()), float(len(entropies))
