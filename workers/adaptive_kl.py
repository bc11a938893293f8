"""AdaptiveKlWorker: a KL penalty in the reward, with an adaptive coefficient."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ..algorithms.kl import AdaptiveCoefficient, k1
from ..algorithms.loss import response_rows
from ..algorithms.rewards import token_rewards
from ..dataflow.batch import Batch
from ..dataflow.column import (
    REFERENCE_LOGPROBS,
    RESPONSE_LOGPROBS,
    RESPONSE_MASK,
    REWARD,
    TOKEN_REWARDS,
    TURN_ENDS,
)
from ..dataflow.metrics import Mean, Metrics
from ..dataflow.operation import TrainingBatch
from ..dataflow.runs.files import Disk
from ..dataflow.safe_files import read_json
from .dispatch import Dispatch
from .worker import Context, Worker, remote

_FILE = "coefficient.json"


class CoefficientWorker(Worker):
    """Base class of workers with a coefficient that changes, which checkpoints save. A subclass sets
    the attribute `coefficient` to its settings."""

    coefficient: Any

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str | Path) -> float:
        """Write the coefficient to a new folder. Return 0: training does not wait."""
        # All ranks have the same coefficient.
        if self.context.rank == 0:
            Path(path).mkdir(parents=True)
            Disk().write_whole(
                Path(path) / _FILE, json.dumps({"value": self.coefficient.value}).encode()
            )
        return 0.0

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool = False) -> bool:
        return True

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str | Path) -> None:
        stored = read_json(Path(path) / _FILE)
        # Restore only the value, because a resumed run may change the other settings.
        self.coefficient = self.config.model_copy(update={"value": float(stored["value"])})


class AdaptiveKlConfig(AdaptiveCoefficient):
    """A KL penalty in the reward with an adaptive coefficient. The horizon counts responses."""

    estimator: Callable[..., Any] = k1
    """Function (logprobs [T], reference_logprobs [T]) -> [T] nats: `k1`, `k2`, `k3` or `absolute`.
    Choose `k3` for less variance."""

    retired: ClassVar[Mapping[str, str]] = {
        "coefficient": "set its value, target and horizon: group(AdaptiveKlWorker, target=6.0, ...)"
    }


class AdaptiveKlWorker(CoefficientWorker):
    """Adds a KL penalty to rewards. It is a worker so that checkpoints save the coefficient."""

    Config = AdaptiveKlConfig

    def __init__(self, config: AdaptiveKlConfig, context: Context = Context()) -> None:
        super().__init__(config, context)
        self.coefficient: AdaptiveCoefficient = config

    @remote(
        dispatch=Dispatch.ONE_TO_ALL,
        reads=lambda reward, old: (reward, old, REFERENCE_LOGPROBS),
        may_read=(RESPONSE_MASK, TURN_ENDS),
        writes=(TOKEN_REWARDS,),
    )
    def token_rewards(
        self, samples: Batch, *, reward: str = str(REWARD), old: str = str(RESPONSE_LOGPROBS)
    ) -> Batch:
        """Compute `rewards.token_rewards` with the current coefficient."""
        estimator = self.config.estimator
        return token_rewards(
            samples, coefficient=self.coefficient, estimator=estimator, reward=reward, old=old
        )

    @remote(
        dispatch=Dispatch.ONE_TO_ALL,
        reads=lambda old: (old, REFERENCE_LOGPROBS),
        may_read=(RESPONSE_MASK,),
        takes=TrainingBatch(),
    )
    def update(self, samples: Batch, *, old: str = str(RESPONSE_LOGPROBS)) -> Metrics:
        """Set the next step's coefficient from these samples' divergence. `old` is the column of
        the sampling policy's log-probabilities. Return `kl_coefficient` (used in these rewards) and
        `kl` (nats per response). Responses without a trained token do not count."""
        used = self.coefficient
        rows = response_rows(samples, old, REFERENCE_LOGPROBS)
        kl = self.config.estimator(rows[old], rows[REFERENCE_LOGPROBS])
        total, number = float(kl[rows.trained > 0].sum()), float(rows.counted.sum())
        if number:
            self.coefficient = used.updated(total / number, number)
        return {"kl_coefficient": Mean(used.value), "kl": Mean(total, number)}
