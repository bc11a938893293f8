"""Entropy control by covariance (arXiv:2505.22617).

PolicyLoss(covariance=ClipCov())                                   Clip-Cov
PolicyLoss(covariance=KlCov(), surrogate=Unclipped())              KL-Cov

A policy gradient lowers the entropy by the covariance of log-probability and advantage over tokens.
A few tokens with a very high covariance cause most of it: likely tokens with a high
advantage, and unlikely tokens with a low one. `high_covariance` marks such tokens before the update,
and the loss treats them differently.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, model_validator

from ..dataflow.batch import Batch
from ..dataflow.column import (
    ADVANTAGES,
    HIGH_COVARIANCE,
    OLD_LOGPROBS,
    RESPONSE_IDS,
    RESPONSE_LOGPROBS,
    RESPONSE_MASK,
    SAMPLE_ID,
)
from ..dataflow.config import Config
from ..dataflow.lazy import torch
from ..dataflow.operation import Shape, node
from .loss import Loss, response_rows

if TYPE_CHECKING:
    from torch import Tensor


class CovarianceRule(Config):
    """Base class: which tokens are marked, and how the loss treats them."""

    share: float = Field(default=2e-4, gt=0, le=1)
    """[share] Marked tokens among all trained tokens of a step, at least one. Raise it if entropy still
    falls; the paper uses 2e-4 to 2e-3."""

    @abstractmethod
    def marks(self, covariance: np.ndarray, number: int, draw: np.random.Generator) -> np.ndarray:
        """Return the indexes of at most `number` tokens to mark, given the covariance [T] of each."""

    @abstractmethod
    def __call__(self, losses: Tensor, log_ratio: Tensor, marked: Tensor) -> Tensor:
        """Return the new losses [T]. `log_ratio` is [T] nats, current over old policy, with a
        gradient, and `marked` is [T] bool."""


class ClipCov(CovarianceRule):
    """Clip-Cov: marked tokens have no policy gradient, but count in the mean of the loss. They are drawn
    at random from all tokens whose covariance is within `bounds`.

    >>> rule = ClipCov(share=0.5, bounds=(1.0, 5.0))
    >>> rule.marks(np.array([0.5, 2.0, 7.0, 3.0]), 2, np.random.default_rng(0)).tolist()
    [1, 3]
    >>> rule(torch.tensor([1.0, 2.0]), torch.zeros(2), torch.tensor([True, False])).tolist()
    [0.0, 2.0]
    """

    bounds: tuple[float, float] = (1.0, 5.0)
    """[nats times advantage] Covariance between which tokens may be marked. The mean covariance is far
    below the first. Lower the first if nothing is marked."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> ClipCov:
        if not self.bounds[0] < self.bounds[1]:
            raise ValueError(
                f"bounds must rise, from the lowest covariance to the highest; {self.bounds} does not"
            )
        return self

    def marks(self, covariance: np.ndarray, number: int, draw: np.random.Generator) -> np.ndarray:
        found = np.flatnonzero((covariance >= self.bounds[0]) & (covariance <= self.bounds[1]))
        return np.sort(draw.permutation(found)[:number])

    def __call__(self, losses: Tensor, log_ratio: Tensor, marked: Tensor) -> Tensor:
        return torch.where(marked, 0.0, losses)


class KlCov(CovarianceRule):
    """KL-Cov: the tokens with the highest covariance get a penalty for moving away from
    the old policy, `coefficient` |log p - log p_old|, as in the authors' program.

    >>> rule = KlCov(coefficient=0.5)
    >>> rule.marks(np.array([0.5, 2.0, 7.0, 3.0]), 2, np.random.default_rng(0)).tolist()
    [2, 3]
    >>> rule(torch.tensor([1.0, 2.0]), torch.tensor([-2.0, 3.0]), torch.tensor([True, False])).tolist()
    [2.0, 2.0]
    """

    coefficient: float = Field(default=1.0, gt=0)
    """[loss/nat] Strength of the penalty. Lower it if marked tokens hardly change."""

    def marks(self, covariance: np.ndarray, number: int, draw: np.random.Generator) -> np.ndarray:
        return np.sort(np.argsort(-covariance, kind="stable")[:number])

    def __call__(self, losses: Tensor, log_ratio: Tensor, marked: Tensor) -> Tensor:
        return losses + torch.where(marked, self.coefficient * log_ratio.abs(), 0.0)


@node(
    shape=Shape.GROUP,
    reads=(ADVANTAGES, RESPONSE_LOGPROBS, RESPONSE_IDS),
    may_read=(OLD_LOGPROBS, RESPONSE_MASK),
    writes=(HIGH_COVARIANCE,),
)
def high_covariance(samples: Batch, *, rule: CovarianceRule) -> Batch:
    """Mark the tokens whose log-probability and advantage have a high covariance over all trained
    tokens of the call: (log p - mean log p) (A - mean A). p is the actor before the update, if
    the rows have `old_logprobs`, otherwise the generator. A call covers the whole step under
    `Synchronous`, or the ready groups under other schedules.

    >>> columns = {"response_logprobs": [[-1.0, -3.0], [-2.0]], "advantages": [[1.0, 1.0], [-2.0]]}
    >>> samples = Batch.of(sample_id=[1, 2], response_ids=[[5, 6], [7]], **columns)  # covariances 1, -1 and 0
    >>> high_covariance(samples, rule=KlCov(share=0.5))["high_covariance"].to_pylist()
    [[1, 0], [0]]
    """
    old = OLD_LOGPROBS if OLD_LOGPROBS in samples else RESPONSE_LOGPROBS
    rows = response_rows(samples, RESPONSE_IDS, old, ADVANTAGES)
    trained = np.flatnonzero(rows.trained.numpy() > 0)
    marked = np.zeros(rows.num_tokens, np.uint8)
    if len(trained):
        logprobs, advantages = (rows[c].numpy()[trained].astype(np.float64) for c in (old, ADVANTAGES))
        covariance = (logprobs - logprobs.mean()) * (advantages - advantages.mean())
        # The draw depends on the rows alone, so a repeated call marks the same tokens.
        draw = np.random.default_rng(samples.numpy(SAMPLE_ID).astype(np.uint64))
        number = max(1, int(rule.share * len(trained)))
        marked[trained[rule.marks(covariance, number, draw)]] = 1
    return samples.with_columns(high_covariance=(marked, rows.cu_seqlens))


def with_covariance(samples: Any, *, loss: Loss | None) -> Any:
    """Add `high_covariance` if the loss has a rule for it. For use in `@graph` functions."""
    rule = getattr(loss, "covariance", None)
    return samples if rule is None else high_covariance(samples, rule=rule)
