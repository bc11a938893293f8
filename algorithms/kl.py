"""Per-token estimators of the KL divergence (J. Schulman, "Approximating KL Divergence", 2020).

The policy p samples the tokens, q is the reference, and d = log p - log q of the sampled token. The
*values* of k1 and k3 are unbiased estimates of KL(p || q); k2 has a bias of O(d^3). `absolute` is a
different distance, and `full_kl` is the exact divergence over the vocabulary.

As losses, the estimators have different *gradients* through `logprobs` (arXiv:2506.09477); none
includes the score-function term of the sampling itself. `StraightThrough` combines the value of one
estimator with the gradient of another.

A penalty belongs either to the loss (`KlPenalty`) or to the reward
(`rewards.penalized_token_rewards`, with a constant coefficient or an `AdaptiveCoefficient`).
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
    """k1 = d = log p - log q (Schulman 2020). Unbiased, with high variance; may be negative.

    As a loss, its gradient is grad log p, whose expectation is zero, so it does *not* pull towards
    the reference. Use k1 in a reward, and `k2` or `k3` in a loss.

    Args, here and below: logprobs: [T] nats, of the sampled tokens under the policy; with a
        gradient. reference_logprobs: [T] nats, of the same tokens under the reference; no gradient.

    >>> k1(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])).tolist()
    [0.5, -1.0]
    """
    return logprobs - reference_logprobs.detach()


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """k2 = d^2 / 2, with d = log p - log q (Schulman 2020). Never negative, with low variance and a
    bias of O(d^3). As a loss, its gradient d * grad log p is an unbiased estimate of grad KL(p || q).

    >>> k2(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])).tolist()
    [0.125, 0.5]
    """
    return (logprobs - reference_logprobs.detach()).square() / 2


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """k3 = exp(-d) - 1 + d, with d = log p - log q (Schulman 2020; GRPO, arXiv:2402.03300, eq. 4).
    Unbiased and never negative.

    As a loss, its gradient is (1 - q/p) grad log p, which estimates the gradient of the opposite
    direction KL(q || p). d is clamped at -20, without a gradient below, because exp(-d) would
    overflow for tokens that the policy has almost ruled out.

    >>> k3(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0 - 0.6931472])).tolist()
    [0.0, 0.19314...]
    """
    d = (logprobs - reference_logprobs.detach()).clamp(min=-20.0)
    return torch.expm1(-d) + d


def absolute(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """|d|, with d = log p - log q. Its mean is an upper bound on the KL divergence. As a loss, its
    gradient is sign(d) grad log p, whose size does not depend on d; at d = 0 it is 0.

    >>> absolute(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])).tolist()
    [0.5, 1.0]
    """
    return (logprobs - reference_logprobs.detach()).abs()


def full_kl(logits: Tensor, reference_logits: Tensor) -> Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v), computed exactly from unnormalized logits [T, V].
    The gradient flows to `logits` only.

    >>> full_kl(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0986123, 0.0]])).tolist()  # 1/2, 1/2 from 3/4, 1/4
    [0.1438...]
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    return (logprobs.exp() * (logprobs - torch.log_softmax(reference_logits.detach(), dim=-1))).sum(-1)


@dataclass(frozen=True)
class StraightThrough:
    """The value of one estimator with the gradient of another.

    `StraightThrough(k3)` has the value of k3 and the gradient of k2, which is the gradient of KL(p
    || q).

    >>> logprobs = torch.tensor([-2.0], requires_grad=True)
    >>> kl = StraightThrough(k1)(logprobs, torch.tensor([-1.0]))
    >>> kl.item(), torch.autograd.grad(kl, logprobs)[0].item()
    (-1.0, -1.0)
    """

    value: Callable[..., Any]
    """Estimator for the value: (logprobs [T], reference_logprobs [T]) -> [T]."""
    gradient: Callable[..., Any] = k2
    """Estimator for the gradient, with the same signature."""

    def __call__(self, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
        # The value of `pull - pull.detach()` is 0, but it carries the gradient.
        pull = self.gradient(logprobs, reference_logprobs)
        return self.value(logprobs, reference_logprobs).detach() + (pull - pull.detach())


class AdaptiveCoefficient(Config):
    """A KL coefficient that adapts to reach a target divergence (arXiv:1909.08593, §2.2).

    The update is beta <- beta (1 + e K), with the error e = clip(KL / target - 1, -0.2, 0.2) and
    the gain K = num_steps / horizon. For a constant coefficient, use a number.

    >>> AdaptiveCoefficient(value=0.1, target=6.0, horizon=1000).updated(observed_kl=12.0, num_steps=100).value
    0.102...
    """

    value: float = Field(default=0.2, ge=0)
    """[reward/nat] Initial coefficient. Raise it if the policy leaves the reference before the
    coefficient has adapted."""
    target: float = Field(default=6.0, gt=0)
    """[nats] Target KL divergence of the policy from the reference, per response. Raise it to let
    the policy move further away."""
    horizon: float = Field(default=10_000, gt=0)
    """[steps] The coefficient changes by at most a fifth in this many steps, in the unit of
    `num_steps` (episodes in the paper). Raise it if the coefficient oscillates."""

    def updated(self, observed_kl: float, num_steps: float) -> AdaptiveCoefficient:
        """Return the coefficient after `num_steps` steps with this mean divergence [nats/response].
        Raises a UserError if it would be below 0, which takes more than five horizons at once."""
        error = min(max(observed_kl / self.target - 1, -0.2), 0.2)
        value = self.value * (1 + error * num_steps / self.horizon)
        return AdaptiveCoefficient(value=value, target=self.target, horizon=self.horizon)


class KlPenalty(Config):
    """A KL penalty on the loss of every trained token: coefficient * estimator(policy ||
    reference)."""

    coefficient: float = Field(gt=0)
    """[loss/nat] Required. Penalty per nat of divergence; the GRPO paper uses 0.04. Raise it if
    responses drift away from the reference."""
    estimator: Callable[..., Any] = k3
    """Function (logprobs [T], reference_logprobs [T]) -> [T] nats: `k1`, `k2`, `k3`, `absolute` or
    a `StraightThrough` of two of them. Choose `k1` for an unbiased value, `k3` for low variance."""
    weighted: bool = False
    """Multiply the estimate by the ratio of current and old policy, with a gradient. The value is then
    unbiased for stale rows, and the gradient includes how the sampling changes (the score function):
    with `k1` or `k3`, it is the gradient of the KL divergence (arXiv:2506.09477). Set it if rows are
    stale."""
