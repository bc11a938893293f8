"""Estimators of the KL divergence from a reference, per sampled token (J. Schulman, "Approximating KL Divergence", 2020).

With tokens drawn from the policy p and q the reference, d = log p - log q of the drawn token. All three have the *value*
(in expectation) of KL(p || q), save that k2 is biased by O(d^3). Their *gradients*, taken through `logprobs` as a loss, differ
(arXiv:2506.09477): none of them adds the score-function term for the sampling itself.
"""

from __future__ import annotations

from collections.abc import Callable
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


class KlPenalty(Config):
    """coefficient * estimator(policy || reference), added to the loss of every trained token.

    >>> KlPenalty(coefficient=0.04).estimator is k3
    True
    """

    coefficient: float = Field(gt=0)
    """Nats of penalty for a nat of divergence; the GRPO paper's is 0.04."""
    estimator: Callable[..., Any] = k3
    """(logprobs [T], reference_logprobs [T]) -> [T]: `k1`, `k2` or `k3`."""
