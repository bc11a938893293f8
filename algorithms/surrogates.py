"""Surrogates: the loss of a token from its ratio and advantage, and what keeps the ratio from running away.

Clipped(low=0.2, high=0.28)     the usual bound, here DAPO's
Clipped(dual=3.0)               dual clip
Cispo(high=4.0)                 the weight is bounded, never the gradient
Sapo()                          a soft gate instead of a bound
PlainPolicyGradient()           no ratio: REINFORCE, GPG
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from pydantic import Field, model_validator

from ..dataflow.config import Config
from ..dataflow.lazy import torch
from .loss import PackedRows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Surrogated:
    """What a surrogate makes of T tokens."""

    losses: Tensor
    """[T] gradient flows."""
    clipped: Tensor
    """[T] bool: the bound was taken."""


@runtime_checkable
class Surrogate(Protocol):
    """A rule from ratios and advantages to losses. A value: equal settings, equal losses."""

    def __call__(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Surrogated:
        """The losses of these tokens.

        Args:
            ratio: [T] p / p_old, of the token or of its response; gradient flows.
            logprobs: [T] nats, log p of the token; gradient flows.
            advantages: [T]; no gradient.
        """
        ...


class Clipped(Config):
    """-min(r A, clip(r, 1 - low, 1 + high) A) (PPO, arXiv:1707.06347, eq. 7).

    `high` above `low` is DAPO's clip-higher (arXiv:2503.14476, eq. 10). With `dual`, the loss of a token of negative advantage
    is at most -dual A, also where a huge ratio would make it unbounded (arXiv:1912.09729).

    >>> ratio, advantages = torch.tensor([1.5, 1.5, 0.5, 9.0]), torch.tensor([1.0, -1.0, -1.0, -1.0])
    >>> made = Clipped(low=0.2, high=0.25, dual=3.0)(ratio, ratio.log(), advantages)
    >>> made.losses.tolist(), made.clipped.tolist()
    ([-1.25, 1.5, 0.800000..., 3.0], [True, False, True, True])
    """

    low: float = Field(default=0.2, ge=0, le=1)
    """[ratio] How far below 1 the ratio earns. Lower it where updates are too large."""
    high: float = Field(default=0.2, ge=0)
    """[ratio] How far above 1 the ratio earns. Raise it above `low` (DAPO takes 0.28) where entropy falls: rare tokens then can grow."""
    dual: float | None = Field(default=None, gt=1)
    """[ratio] Largest ratio that costs at a negative advantage; None: any. Set it (3 is usual) where stale rows make the loss jump."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Clipped:
        if self.dual is not None and self.dual <= 1 + self.high:
            raise ValueError(f"dual must be above 1 + high, which is {1 + self.high}, not {self.dual}")
        return self

    def __call__(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Surrogated:
        """The losses; a clipped token has no gradient."""
        plain = -ratio * advantages
        bounded = -ratio.clamp(1 - self.low, 1 + self.high) * advantages
        losses, clipped = torch.maximum(plain, bounded), bounded > plain
        if self.dual is not None:
            most = torch.where(advantages < 0, -self.dual * advantages, torch.inf)
            losses, clipped = torch.minimum(losses, most), clipped | (losses > most)
        return Surrogated(losses, clipped)


class Cispo(Config):
    """-sg(clip(r, 1 - low, 1 + high)) A log p (CISPO, arXiv:2506.13585, §3.1), sg stopping the gradient.

    Every token keeps a gradient, the rare ones that turn a line of thought among them, which PPO's clip would drop.

    >>> ratio, logprobs = torch.tensor([9.0, 0.5]), torch.tensor([-1.0, -2.0])
    >>> made = Cispo(high=4.0)(ratio, logprobs, torch.tensor([1.0, -1.0]))
    >>> made.losses.tolist(), made.clipped.tolist()
    ([5.0, -1.0], [True, False])
    """

    low: float = Field(default=1.0, ge=0, le=1)
    """[ratio] How far below 1 the weight may be; 1, the paper's choice, is no bound. Lower it where tokens that have become unlikely are
    to keep their weight."""
    high: float = Field(default=4.0, ge=0)
    """[ratio] How far above 1 the weight may be. Lower it where single tokens make the gradient jump."""

    def __call__(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Surrogated:
        """The losses; a clipped token keeps the gradient of its bounded weight."""
        ratio = ratio.detach()
        weight = ratio.clamp(1 - self.low, 1 + self.high)
        return Surrogated(-weight * advantages * logprobs, weight != ratio)


class Sapo(Config):
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A (SAPO, arXiv:2511.20347): a gate that closes softly.

    At r = 1 its gradient is that of r A, and it fades on both sides. A larger `negative` fades faster where the advantage is
    negative, whose gradients raise the probability of every other token.

    >>> made = Sapo()(torch.tensor([1.0, 1.0]), torch.tensor([-1.0, -1.0]), torch.tensor([1.0, -2.1]))
    >>> made.losses.tolist(), made.clipped.tolist()
    ([-2.0, 4.0], [False, False])
    """

    positive: float = Field(default=1.0, gt=0)
    """[factor] tau where the advantage is above 0. Raise it to close the gate sooner."""
    negative: float = Field(default=1.05, gt=0)
    """[factor] tau elsewhere. Raise it where training is unstable: gradients of negative advantages then fade sooner."""

    def __call__(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Surrogated:
        """The losses; no token is clipped."""
        temperatures = torch.full_like(ratio, self.negative).masked_fill_(advantages > 0, self.positive)
        gates = 4 / temperatures * torch.sigmoid(temperatures * (ratio - 1))
        return Surrogated(-gates * advantages, torch.zeros_like(ratio, dtype=torch.bool))


class PlainPolicyGradient(Config):
    """-A log p, the plain policy gradient (REINFORCE; GPG, arXiv:2504.02546), for one optimizer step a batch.

    >>> PlainPolicyGradient()(torch.tensor([2.0]), torch.tensor([-1.5]), torch.tensor([2.0])).losses.tolist()
    [3.0]
    """

    def __call__(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Surrogated:
        """The losses, whatever the ratio; no token is clipped."""
        return Surrogated(-logprobs * advantages, torch.zeros_like(logprobs, dtype=torch.bool))


# Ratios
#
# Importance ratios between the policy and the one before the update, of tokens and of whole
# responses.
#
# The gaps between two engines, of some hundredths of a nat a token, add up in the ratio of a
# response. `PolicyLoss` therefore compares whole responses with the trainer's own log-
# probabilities and never with the generator's.


def token_ratio(log_ratio: Tensor, rows: PackedRows) -> Tensor:
    """Each token's own ratio r_t = p(y_t) / p_old(y_t), as in PPO (arXiv:1707.06347, §3): the log-ratio as it is.

    Args:
        log_ratio: [T] log p - log p_old; gradient flows.
        rows: the rows that the tokens belong to.

    Returns:
        [T] log-ratio.

    >>> import torch
    >>> token_ratio(torch.tensor([0.5, -0.5]), PackedRows.of([2])).tolist()
    [0.5, -0.5]
    """
    return log_ratio


def sequence_ratio(log_ratio: Tensor, rows: PackedRows) -> Tensor:
    """The response's length-normalised ratio s = exp(mean_t log r_t), at each of its tokens (GSPO, arXiv:2507.18071, eq. 7).

    With `sequence_mean` and an advantage that is the same over the response, the clipped surrogate is GSPO's objective
    (eq. 5), gradient included.

    Args:
        log_ratio: [T] log p - log p_old; gradient flows.
        rows: the rows that the tokens belong to; masked tokens stay out of the mean.

    Returns:
        [T] log-ratio, equal over the tokens of a row; 0 for a row with every token masked.

    >>> import torch
    >>> sequence_ratio(torch.tensor([0.5, -0.25, 1.0]), PackedRows.of([2, 1])).tolist()
    [0.125, 0.125, 1.0]
    """
    means_B = rows.sums(log_ratio * rows.trained) / rows.trained_lengths.clamp(min=1)
    return rows.per_token(means_B)


def sequence_product(log_ratio: Tensor, rows: PackedRows) -> Tensor:
    """The ratio of whole responses, prod_t r_t, at each of their tokens (RLOO, arXiv:2402.14740, which acts by the response).

    Args:
        log_ratio: [T] log p - log q; gradient flows.
        rows: the rows that the tokens belong to; masked tokens stay out of the product.

    Returns:
        [T] log-ratio, equal over the tokens of a row; 0 for a row with every token masked.

    >>> import torch
    >>> sequence_product(torch.tensor([0.5, -0.25, 1.0]), PackedRows.of([2, 1])).tolist()
    [0.25, 0.25, 1.0]
    """
    return rows.per_token(rows.sums(log_ratio * rows.trained))
