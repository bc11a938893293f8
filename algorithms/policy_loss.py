"""Losses that a training engine can take a step on: the policy gradient, and plain likelihood.

PolicyLoss()                                                            GRPO with DAPO's token mean, no KL
PolicyLoss(aggregation=sequence_mean, kl=KlPenalty(coefficient=0.04))               GRPO as published
PolicyLoss(aggregation=fixed_length(1024))                              Dr. GRPO
PolicyLoss(clip_high=0.28)                                              DAPO
PolicyLoss(ratio=sequence_ratio, aggregation=sequence_mean, clip_low=3e-4, clip_high=4e-4)   GSPO
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ..dataflow.column import ADVANTAGES, REFERENCE_LOGPROBS, RESPONSE_LOGPROBS, RESPONSE_MASK
from ..dataflow.config import Config
from ..dataflow.lazy import torch
from ..dataflow.metrics import Mean, Metrics
from .aggregation import Aggregation, token_mean
from .kl import KlPenalty, k3
from .loss import PackedRows
from .ratios import clipped_surrogate, token_ratio

if TYPE_CHECKING:
    from torch import Tensor


class PolicyLoss(Config):
    """Clipped policy gradient: l_t = -min(r_t A_t, clip(r_t) A_t) + beta KL_t - c H_t, then aggregated.

    Variants are values of its parts, not branches.

    >>> rows = PackedRows.of([2], advantages=[1.0, 1.0], response_logprobs=[-1.0, -1.0])
    >>> loss_sum, metrics = PolicyLoss()(torch.tensor([-1.0, -0.5]), rows)  # ratios 1 and 1.65; the second is clipped
    >>> round(loss_sum.item(), 4), PolicyLoss().count(rows), metrics["clip_fraction"].value
    (-2.2, 2.0, 0.5)
    """

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """How far below 1 the ratio earns."""
    clip_high: float = Field(default=0.2, ge=0)
    """How far above 1 the ratio earns; DAPO takes more here than below."""
    ratio: Callable[..., Any] = token_ratio
    """(log_ratio [T], rows) -> log-ratio [T]: `token_ratio` or `sequence_ratio`."""
    aggregation: Aggregation = token_mean
    """`token_mean`, `sequence_mean` or `fixed_length(max_tokens)`."""
    kl: KlPenalty | None = None
    """Penalty for leaving the reference; the graph must then write `reference_logprobs`."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Bonus for entropy; above 0 it costs one more pass over the logits."""
    old: str = str(RESPONSE_LOGPROBS)
    """Column with the log-probabilities under the policy that the ratio compares with."""

    @property
    def reads(self) -> tuple[str, ...]:
        return (str(ADVANTAGES), self.old, *((str(REFERENCE_LOGPROBS),) if self.kl else ()))

    @property
    def may_read(self) -> tuple[str, ...]:
        return (str(RESPONSE_MASK),)

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coefficient > 0

    def count(self, rows: PackedRows) -> float:
        return self.aggregation.count(rows)

    def __call__(self, logprobs: Tensor, rows: PackedRows) -> tuple[Tensor, Metrics]:
        """The undivided loss, and its metrics.

        Args:
            logprobs: [T] nats, of the response tokens under the policy; gradient flows.
            rows: with the columns of `reads`, none of which gets a gradient.

        Returns:
            (scalar, metrics `clip_fraction`, `approx_kl` (k3 from the old policy) and, where asked for, `kl`
            and `entropy`; means over trained tokens). 0 with a gradient of 0 when every token is masked.
        """
        weights, trained = self.aggregation.weights(rows), rows.trained > 0

        def read(column: str) -> Tensor:
            # A masked token may hold anything, even nan, which would survive a weight of 0, forwards and backwards.
            return torch.where(trained, rows[column], 0.0)

        log_ratio = torch.where(trained, logprobs - read(self.old), 0.0)
        losses, clipped = clipped_surrogate(
            self.ratio(log_ratio, rows).exp(), read(str(ADVANTAGES)), self.clip_low, self.clip_high
        )
        watched = {"clip_fraction": clipped, "approx_kl": k3(-log_ratio.detach(), torch.zeros_like(log_ratio))}
        if self.kl:
            kl = self.kl.estimator(logprobs, read(str(REFERENCE_LOGPROBS)))
            losses, watched["kl"] = losses + self.kl.coefficient * kl, kl
        if self.needs_entropy:
            entropy = read("entropy")
            losses, watched["entropy"] = losses - self.entropy_coefficient * entropy, entropy
        loss_sum = (weights * losses).sum()
        with torch.no_grad():
            sums = [torch.where(trained, values, 0.0).sum() for values in watched.values()]
            totals = torch.stack([trained.sum(), *sums]).tolist()  # one transfer from the device for all of them
        return loss_sum, {name: Mean(total, totals[0]) for name, total in zip(watched, totals[1:], strict=True)}


class NegativeLogLikelihood(Config):
    """Supervised loss: l_t = -log p(y_t), by default the mean over all trained tokens of the step.

    >>> rows = PackedRows.of([2, 1], response_mask=[1, 0, 1])
    >>> NegativeLogLikelihood()(torch.tensor([-1.0, -9.0, -2.0]), rows)[0].item(), NegativeLogLikelihood().count(rows)
    (3.0, 2.0)
    """

    aggregation: Aggregation = token_mean
    """`token_mean`, `sequence_mean` or `fixed_length(max_tokens)`."""

    @property
    def reads(self) -> tuple[str, ...]:
        return ()

    @property
    def may_read(self) -> tuple[str, ...]:
        return (str(RESPONSE_MASK),)

    @property
    def needs_entropy(self) -> bool:
        return False

    def count(self, rows: PackedRows) -> float:
        return self.aggregation.count(rows)

    def __call__(self, logprobs: Tensor, rows: PackedRows) -> tuple[Tensor, Metrics]:
        """The undivided loss (0 when every token is masked); it has no metrics beside the loss itself."""
        losses = torch.where(rows.trained > 0, -logprobs, 0.0)
        return (self.aggregation.weights(rows) * losses).sum(), {}
