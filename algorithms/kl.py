"""Estimators of the KL divergence from a reference, per sampled token (J. Schulman, "Approximating KL Divergence", 2020).

With tokens drawn from the policy p and q the reference, d = log p - log q of the drawn token. k1, k2 and k3 have the *value*
(in expectation) of KL(p || q), save that k2 is biased by O(d^3); `absolute` is a distance of its own, and `full_kl` the divergence
itself, over the whole vocabulary. Their *gradients*, taken through `logprobs` as a loss, differ (arXiv:2506.09477): none of them
adds the score-function term for the sampling itself. `StraightThrough` takes the value of one and the gradient of another.

A penalty is a term of the loss (`KlPenalty`) or a part of the reward (`rewards.penalized_token_rewards`), there with a constant
coefficient or an `AdaptiveCoefficient`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ..dataflow.config import Config
from ..dataflow.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """k1 = d, with d = log p - log q (Schulman 2020). Unbiased value, high variance, may be negative.

    As a loss its gradient is grad log p, zero in expectation: it does *not* pull towards the reference. Use it inside
    the reward, or use `k2` or `k3` in a loss.

    Args:
        logprobs: [T] nats, of the sampled tokens under the policy; gradient flows.
        reference_logprobs: [T] nats, of the same tokens under the reference; no gradient.

    Returns:
        [T]; empty for no tokens.

    >>> k1(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])).tolist()
    [0.5, -1.0]
    """
    return logprobs - reference_logprobs.detach()


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """k2 = d^2 / 2, with d = log p - log q (Schulman 2020). Never negative, low variance, biased by O(d^3).

    As a loss its gradient, d * grad log p, is an unbiased estimate of the gradient of KL(p || q).

    Args:
        logprobs: [T] nats, of the sampled tokens under the policy; gradient flows.
        reference_logprobs: [T] nats, of the same tokens under the reference; no gradient.

    Returns:
        [T]; empty for no tokens.

    >>> k2(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])).tolist()
    [0.125, 0.5]
    """
    return (logprobs - reference_logprobs.detach()).square() / 2


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """k3 = exp(-d) - 1 + d, with d = log p - log q (Schulman 2020; GRPO, arXiv:2402.03300, eq. 4). Unbiased, never negative.

    As a loss its gradient is (1 - q/p) grad log p: that of KL(q || p), the other direction, when tokens come from p. Where
    p has left a token to q (q/p huge) it grows without bound; d is clamped at -20, where the gradient ends.

    Args:
        logprobs: [T] nats, of the sampled tokens under the policy; gradient flows.
        reference_logprobs: [T] nats, of the same tokens under the reference; no gradient.

    Returns:
        [T]; empty for no tokens.

    >>> k3(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0 - 0.6931472])).tolist()
    [0.0, 0.19314...]
    """
    d = (logprobs - reference_logprobs.detach()).clamp(min=-20.0)
    return torch.expm1(-d) + d


def absolute(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """|d|, with d = log p - log q. Not an estimate of the KL divergence, which it bounds from above on average.

    As a loss its gradient is sign(d) grad log p: of one size however far a token is off.

    Args:
        logprobs: [T] nats, of the sampled tokens under the policy; gradient flows.
        reference_logprobs: [T] nats, of the same tokens under the reference; no gradient.

    Returns:
        [T]; empty for no tokens. The gradient at d = 0 is 0.

    >>> absolute(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])).tolist()
    [0.5, 1.0]
    """
    return (logprobs - reference_logprobs.detach()).abs()


def full_kl(logits: Tensor, reference_logits: Tensor) -> Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v), exactly, with its gradient: no sampling, but the vocabulary in memory.

    Args:
        logits: [T, V] of the policy, at any scale; gradient flows.
        reference_logits: [T, V] of the reference; no gradient. The two swapped (and detached) give the other direction.

    Returns:
        [T] nats, never negative beyond rounding; empty for no tokens.

    >>> full_kl(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0986123, 0.0]])).tolist()  # 1/2, 1/2 from 3/4, 1/4
    [0.1438...]
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    return (logprobs.exp() * (logprobs - torch.log_softmax(reference_logits.detach(), dim=-1))).sum(-1)


@dataclass(frozen=True)
class StraightThrough:
    """The value of one estimator with the gradient of another: `StraightThrough(k3)` reports k3 and pulls as k2 does.

    k2 is the one whose gradient is that of KL(p || q).

    >>> logprobs = torch.tensor([-2.0], requires_grad=True)
    >>> kl = StraightThrough(k1)(logprobs, torch.tensor([-1.0]))
    >>> kl.item(), torch.autograd.grad(kl, logprobs)[0].item()
    (-1.0, -1.0)
    """

    value: Callable[..., Any]
    """(logprobs [T], reference_logprobs [T]) -> [T]: what is reported and counted."""
    gradient: Callable[..., Any] = k2
    """The same: what is differentiated."""

    def __call__(self, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
        """[T]; empty for no tokens."""
        pull = self.gradient(logprobs, reference_logprobs)
        return self.value(logprobs, reference_logprobs).detach() + (pull - pull.detach())


class AdaptiveCoefficient(Config):
    """A coefficient that a proportional controller steers towards a target divergence (arXiv:1909.08593, §2.2).

    beta <- beta (1 + e K), with e = clip(KL / target - 1, -0.2, 0.2) and the gain K = num_steps / horizon. A value: the next one is
    a new one. A constant coefficient is a number.

    >>> AdaptiveCoefficient(value=0.1, target=6.0, horizon=1000).updated(observed_kl=12.0, num_steps=100).value
    0.102...
    """

    value: float = Field(default=0.2, ge=0)
    """[reward/nat] The coefficient as it stands. Raise it where the policy leaves the reference before the controller has reacted."""
    target: float = Field(default=6.0, gt=0)
    """[nats] How far a response should be from the reference. Raise it to allow more change."""
    horizon: float = Field(default=10_000, gt=0)
    """[steps] How long it takes the coefficient to change by a fifth at most, in the unit of `num_steps` (the paper's are episodes).
    Raise it where the coefficient swings."""

    def updated(self, observed_kl: float, num_steps: float) -> AdaptiveCoefficient:
        """The coefficient after `num_steps` steps with this mean divergence (nats a response).

        Raises:
            UserError: when the new coefficient would be below 0 (more than five horizons at once).
        """
        error = min(max(observed_kl / self.target - 1, -0.2), 0.2)
        value = self.value * (1 + error * num_steps / self.horizon)
        return AdaptiveCoefficient(value=value, target=self.target, horizon=self.horizon)


class KlPenalty(Config):
    """coefficient * estimator(policy || reference), added to the loss of every trained token.

    >>> KlPenalty(coefficient=0.04).estimator is k3
    True
    """

    coefficient: float = Field(gt=0)
    """[loss/nat] Penalty for a nat of divergence; the GRPO paper's is 0.04. Raise it where responses drift away from the reference."""
    estimator: Callable[..., Any] = k3
    """(logprobs [T], reference_logprobs [T]) -> [T]: `k1`, `k2`, `k3`, `absolute` or a `StraightThrough` of two of them. Choose `k1` for
    an unbiased value, `k3` for one of little variance."""
