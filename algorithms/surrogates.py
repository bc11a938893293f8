"""Surrogate objectives and importance ratios.

Clipped(low=0.2, high=0.28)     PPO's clipped ratio, here with DAPO's bounds
Clipped(dual=3.0)               dual clip
Cispo(high=4.0)                 clips the weight, but keeps the gradient of every token
Sapo()                          a soft gate instead of a clip
Vespo()                         a soft weight by the ratio of the response
Dppo()                          masks tokens whose probability moved too far
PlainPolicyGradient()           no ratio: REINFORCE, GPG
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, runtime_checkable

from pydantic import Field, model_validator

from ..dataflow.column import ADVANTAGES
from ..dataflow.config import Config
from ..dataflow.errors import UserError
from ..dataflow.lazy import torch
from .loss import PackedRows

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""[nats] Ratios are capped at e^20, so that one token with probability 0 does not make a mean
infinite."""


@runtime_checkable
class Surrogate(Protocol):
    """A function from ratios and advantages to losses."""

    def __call__(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses of T tokens, and whether a bound changed each ([T] bool).

        Args:
            ratio: [T] p / p_old, of the token or of its response; with a gradient.
            logprobs: [T] nats, log p of the token; with a gradient.
            advantages: [T]; no gradient.
        """
        ...


class Clipped(Config):
    """PPO's clipped surrogate: -min(r A, clip(r, 1 - low, 1 + high) A) (arXiv:1707.06347, eq. 7). A
    clipped token has no gradient.

    `high` above `low` is DAPO's clip-higher (arXiv:2503.14476, eq. 10). `dual` limits the loss of a
    token with a negative advantage to -dual A (arXiv:1912.09729); without it, a huge ratio makes
    the loss unbounded.

    >>> ratio, advantages = torch.tensor([1.5, 1.5, 0.5, 9.0]), torch.tensor([1.0, -1.0, -1.0, -1.0])
    >>> losses, clipped = Clipped(low=0.2, high=0.25, dual=3.0)(ratio, ratio.log(), advantages)
    >>> losses.tolist(), clipped.tolist()
    ([-1.25, 1.5, 0.800000..., 3.0], [True, False, True, True])
    """

    low: float = Field(default=0.2, ge=0, le=1)
    """[ratio] Clip range below 1. Lower it if updates are too large."""
    high: float = Field(default=0.2, ge=0)
    """[ratio] Clip range above 1. Raise it above `low` (DAPO uses 0.28) if entropy falls, so that
    rare tokens can become more likely."""
    dual: float | None = Field(default=None, gt=1)
    """[ratio] Dual clip (arXiv:1912.09729): upper limit on the ratio of tokens with a negative
    advantage; None sets no limit. Set it (3 is common) if stale rows make the loss jump."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Clipped:
        if self.dual is not None and self.dual <= 1 + self.high:
            raise ValueError(f"dual must be above 1 + high, which is {1 + self.high}, not {self.dual}")
        return self

    def __call__(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        plain = -ratio * advantages
        bounded = -ratio.clamp(1 - self.low, 1 + self.high) * advantages
        losses, clipped = torch.maximum(plain, bounded), bounded > plain
        if self.dual is not None:
            # Only negative advantages can make the loss unbounded.
            most = torch.where(advantages < 0, -self.dual * advantages, torch.inf)
            losses, clipped = torch.minimum(losses, most), clipped | (losses > most)
        return losses, clipped


class Unclipped(Config):
    """-r A: the importance-weighted policy gradient, without a bound. Use it with a ratio that is
    bounded itself (`GeometricRatio`).

    >>> Unclipped()(torch.tensor([2.0]), torch.tensor([-1.0]), torch.tensor([1.5]))[0].tolist()
    [-3.0]
    """

    def __call__(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        return -ratio * advantages, torch.zeros_like(ratio, dtype=torch.bool)


class Cispo(Config):
    """CISPO: -sg(clip(r, 1 - low, 1 + high)) A log p, where sg stops gradients (arXiv:2506.13585,
    §3.1). Every token keeps its gradient, weighted by the clipped ratio, even rare tokens, whose
    gradient PPO's clip would drop.

    >>> ratio, logprobs = torch.tensor([9.0, 0.5]), torch.tensor([-1.0, -2.0])
    >>> losses, clipped = Cispo(high=4.0)(ratio, logprobs, torch.tensor([1.0, -1.0]))
    >>> losses.tolist(), clipped.tolist()
    ([5.0, -1.0], [True, False])
    """

    low: float = Field(default=1.0, ge=0, le=1)
    """[ratio] Clip range of the weight below 1; 1, the paper's choice, sets no bound. Lower it to
    keep the weight of tokens that have become unlikely."""
    high: float = Field(default=4.0, ge=0)
    """[ratio] Clip range of the weight above 1. Lower it if single tokens make the gradient
    jump."""

    def __call__(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        ratio = ratio.detach()
        weight = ratio.clamp(1 - self.low, 1 + self.high)
        return -weight * advantages * logprobs, weight != ratio


class Sapo(Config):
    """SAPO: -(4 / tau) sigmoid(tau (r - 1)) A, where tau depends on the sign of A
    (arXiv:2511.20347).

    At r = 1 the gradient equals the gradient of -r A; it fades as r moves away from 1. A larger
    temperature makes it fade faster. The paper's is larger for negative advantages, whose gradients
    raise the probability of every other token.

    >>> losses, clipped = Sapo()(torch.tensor([1.0, 1.0]), torch.tensor([-1.0, -1.0]), torch.tensor([1.0, -2.1]))
    >>> losses.tolist(), clipped.tolist()
    ([-2.0, 4.0], [False, False])
    """

    temperatures: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (1.0, 1.05)
    """[factor] tau for positive advantages, and tau for all others. Raise a tau to make gradients
    fade sooner; raise the second if training is unstable."""

    retired: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("positive", "negative"), "set temperatures=(positive, negative)"
    )

    def __call__(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        positive, negative = self.temperatures
        temperatures = torch.full_like(ratio, negative).masked_fill_(advantages > 0, positive)
        # 4 / tau makes the slope at r = 1 equal to 1.
        gates = 4 / temperatures * torch.sigmoid(temperatures * (ratio - 1))
        return -gates * advantages, torch.zeros_like(ratio, dtype=torch.bool)


class Vespo(Config):
    """VESPO: -sg(phi(w)) A log p, with phi(w) = w^k exp(lambda (1 - w)) (arXiv:2602.10693). w is the
    ratio of the whole response to the generator: `PolicyLoss(old="response_logprobs",
    ratio=sequence_product, surrogate=Vespo())`.

    phi(1) = 1, and phi fades smoothly towards 0 for responses that have become much more or much less
    likely, without a clip and without normalization by the length. `k` and `lambda` depend on the
    sign of A.

    >>> ratio = torch.tensor([1.0, 2.0, 0.5])
    >>> losses, _ = Vespo()(ratio, torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([1.0, 1.0, -1.0]))
    >>> losses.tolist()  # 4 e^-3 for w = 2, and e / 8 for w = 1 / 2
    [1.0, 0.1991..., -0.3397...]
    """

    positive: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (2.0, 3.0)
    """[exponent, rate] k and lambda for advantages of 0 or more. Raise lambda to make the weights fade
    sooner when a response becomes more likely, and k when it becomes less likely."""
    negative: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (3.0, 2.0)
    """[exponent, rate] k and lambda for negative advantages. Raise lambda to make the weights fade sooner
    when a bad response becomes more likely, and k when it becomes less likely."""

    def __call__(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        ratio, bad = ratio.detach(), advantages < 0
        k, rate = (
            torch.full_like(ratio, positive).masked_fill_(bad, negative)
            for positive, negative in zip(self.positive, self.negative, strict=True)
        )
        # In log space, because w^k overflows where exp(-lambda w) is 0.
        weight = (k * ratio.log() + rate * (1 - ratio)).exp()
        return -weight * advantages * logprobs, torch.zeros_like(ratio, dtype=torch.bool)


class Dppo(Config):
    """DPPO with the binary total variation (arXiv:2602.04879): -r A, without a gradient for tokens
    whose probability p has moved too far in the direction of their advantage: p - p_old > high for
    A > 0, p_old - p > low for others. Plus `penalty` (log r)^2 for every token (arXiv:2602.02276),
    masked by Dppo or not. With `penalty=1e-3`, this is the default loss of prime-rl.

    A clip of the ratio stops unlikely tokens after tiny changes, and lets likely ones move far. Use
    it with `token_ratio`, because p_old is p / r.

    >>> old, new = torch.tensor([0.01, 0.5, 0.9]), torch.tensor([0.05, 0.75, 0.6])
    >>> losses, masked = Dppo()(new / old, new.log(), torch.tensor([1.0, 1.0, -1.0]))
    >>> losses.tolist(), masked.tolist()
    ([-5.0..., 0.0, 0.0], [False, True, True])
    """

    low: float = Field(default=0.2, ge=0, le=1)
    """[probability] Largest fall of a token with a negative advantage. Lower it if updates are too
    large."""
    high: float = Field(default=0.2, ge=0, le=1)
    """[probability] Largest rise of a token with a positive advantage. Lower it if updates are too
    large."""
    penalty: float = Field(default=0.0, ge=0)
    """[loss/nat^2] Coefficient of (log r)^2. Set it (1e-3 is common) if rows are stale, to pull every
    token back to the old policy."""

    def __call__(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        # Avoid log(0) for a token that the current policy has ruled out.
        log_ratio = ratio.clamp(min=torch.finfo(ratio.dtype).tiny).log()
        moved = logprobs.detach().exp() - (logprobs - log_ratio).detach().exp()
        masked = torch.where(advantages > 0, moved > self.high, -moved > self.low)
        losses = torch.where(masked, 0.0, -ratio * advantages)
        return losses + self.penalty * log_ratio.square(), masked


class PlainPolicyGradient(Config):
    """-A log p, the plain policy gradient (REINFORCE; GPG, arXiv:2504.02546), which ignores the
    ratio.

    >>> PlainPolicyGradient()(torch.tensor([2.0]), torch.tensor([-1.5]), torch.tensor([2.0]))[0].tolist()
    [3.0]
    """

    def __call__(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        return -logprobs * advantages, torch.zeros_like(logprobs, dtype=torch.bool)


def tensors_of(rule: object, result: Any, names: str) -> tuple[Tensor, ...]:
    """Return the result of a surrogate or a correction. Raises a UserError if it is not a tuple of
    tensors with these names; a single tensor would be unpacked token by token."""
    if isinstance(result, tuple) and len(result) == len(names.split(", ")):
        return result
    kind = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
    raise UserError(
        f"{getattr(rule, '__name__', type(rule).__name__)} returned {kind}; it must return ({names})"
    )


# Importance ratios between the current and the old policy, of tokens and of whole responses.
#
# Two engines differ by some hundredths of a nat per token, which add up in the ratio of a response.
# So for whole responses, `PolicyLoss` compares with the trainer's log-probabilities.


def token_ratio(log_ratio: Tensor, rows: PackedRows) -> Tensor:
    """The log-ratio of each token [T], log r_t = log p(y_t) - log p_old(y_t), as in PPO
    (arXiv:1707.06347, §3). Differentiable.

    >>> import torch
    >>> token_ratio(torch.tensor([0.5, -0.5]), PackedRows.of([2])).tolist()
    [0.5, -0.5]
    """
    return log_ratio


def sequence_ratio(log_ratio: Tensor, rows: PackedRows) -> Tensor:
    """Length-normalized ratio of responses, exp(mean_t log r_t) (GSPO, arXiv:2507.18071, eq. 7).
    Returns log-ratios [T], equal for all tokens of a row. Masked tokens do not count.

    With `sequence_mean` and one advantage per response, the clipped surrogate is GSPO's objective
    (eq. 5), including its gradient.

    >>> import torch
    >>> sequence_ratio(torch.tensor([0.5, -0.25, 1.0]), PackedRows.of([2, 1])).tolist()
    [0.125, 0.125, 1.0]
    """
    means_B = rows.sums(log_ratio * rows.trained) / rows.trained_lengths.clamp(min=1)
    return rows.per_token(means_B)


def sequence_token_ratio(log_ratio: Tensor, rows: PackedRows) -> Tensor:
    """GSPO-token (arXiv:2507.18071, eq. 14): the value of `sequence_ratio` at each token, with the
    gradient of the token's own ratio. With equal advantages in a response, the loss and the gradient
    are GSPO's; unlike there, advantages may differ by token.

    >>> import torch
    >>> sequence_token_ratio(torch.tensor([0.5, -0.25, 1.0]), PackedRows.of([2, 1])).tolist()
    [0.125, 0.125, 1.0]
    """
    return sequence_ratio(log_ratio, rows).detach() + log_ratio - log_ratio.detach()


class GeometricRatio(Config):
    """GMPO (arXiv:2507.20673): the geometric mean over a response of its tokens' ratios, each
    clipped to [e^-low, e^high] on the side that its advantage would exploit. As a log-ratio [T],
    equal for all tokens of a row.

    Clipping is done here, so the surrogate must not clip: `PolicyLoss(ratio=GeometricRatio(),
    surrogate=Unclipped(), aggregation=sequence_mean)`.

    >>> import torch
    >>> rows = PackedRows.of([2], advantages=[1.0, 1.0])
    >>> GeometricRatio(low=0.4, high=0.4)(torch.tensor([0.8, -0.6]), rows).tolist()  # (0.4 - 0.6) / 2
    [-0.10..., -0.10...]
    """

    low: float = Field(default=0.4, ge=0)
    """[nats] Lower bound of a token's log-ratio is -low, for negative advantages. Lower it if updates
    are too large."""
    high: float = Field(default=0.4, ge=0)
    """[nats] Upper bound of a token's log-ratio, for positive advantages. Raise it to let rare tokens
    gain more."""

    def __call__(self, log_ratio: Tensor, rows: PackedRows) -> Tensor:
        positive = rows.only_trained(rows[ADVANTAGES]) > 0
        clipped = torch.where(positive, log_ratio.clamp(max=self.high), log_ratio.clamp(min=-self.low))
        return sequence_ratio(clipped, rows)


def sequence_product(log_ratio: Tensor, rows: PackedRows) -> Tensor:
    """Ratio of the whole response, prod_t r_t, at each of its tokens (RLOO, arXiv:2402.14740), as a
    log-ratio [T].

    >>> import torch
    >>> sequence_product(torch.tensor([0.5, -0.25, 1.0]), PackedRows.of([2, 1])).tolist()
    [0.25, 0.25, 1.0]
    """
    return rows.per_token(rows.sums(log_ratio * rows.trained))
