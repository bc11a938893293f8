"""Corrections for tokens that another policy sampled: weights from the ratio between the trainer and the generator.

Three policies meet in one update. The *generator* (behaviour policy) sampled the tokens, under older weights, other
numerics, or a truncated distribution. The *trainer* is what the policy's own engine says of the same tokens, before the update
(the proximal policy of decoupled PPO). The *current* policy is the one that gets the gradient. A correction looks at
trainer / generator and says how much each token's policy gradient counts; it is a number, never a path for a gradient.

TruncatedImportance(cap=2.0)                                    weigh with the ratio, at most `cap`
Rejection(low=0.5, high=2.0)                                    leave out what is too far off
(TruncatedImportance(cap=5.0), Rejection(low=0.5, high=5.0))    both: IcePop
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from pydantic import Field, model_validator

from ..dataflow.config import Config
from ..dataflow.lazy import torch
from .loss import PackedRows
from .surrogates import sequence_product, sequence_ratio, token_ratio

if TYPE_CHECKING:
    from torch import Tensor

Level = Literal["token", "sequence", "geometric"]
"""Whose ratio: a token's own; the product over the trained tokens of its response; their geometric mean."""

MAX_LOG_RATIO = 20.0
"""Nats. Ratios are reported up to e^20, so that one token of no probability does not make a mean infinite."""


@dataclass(frozen=True)
class Weighting:
    """What a correction makes of T tokens."""

    weights: Tensor
    """[T] finite, no gradient: what a token's policy-gradient loss is multiplied with."""
    truncated: Tensor
    """[T] bool: the ratio was larger than the largest weight, or smaller than the smallest."""
    masked: Tensor
    """[T] bool: left out."""


@runtime_checkable
class Correction(Protocol):
    """A rule from log-ratios to weights. A value: equal settings, equal weights."""

    @property
    def weighs(self) -> bool:
        """Whether its weight stands for the ratio; if not, it is 0 or 1 and only chooses among tokens."""
        ...

    def __call__(self, log_ratio: Tensor, rows: PackedRows) -> Weighting:
        """The weights of these tokens.

        Args:
            log_ratio: [T] nats, log trainer - log generator, 0 where a token is not trained on; no gradient.
            rows: the rows that the tokens belong to.
        """
        ...


class TruncatedImportance(Config):
    """Truncated importance sampling: w = min(p_trainer / p_generator, cap), and at least `floor`.

    IMPALA's rho (arXiv:1802.01561, §4.1) at each token; between a training and a generating engine: TIS (F. Yao et al., "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025). Together with a clipped ratio current / trainer
    it is decoupled PPO (arXiv:2110.00641; for language models AReaL, arXiv:2505.24298):
    `PolicyLoss(old="old_logprobs", correction=TruncatedImportance())`.

    The cap makes the weights bounded, and the gradient biased towards the generator. A weight at the level of the sequence is
    the exact one for a reward of the whole response; its variance grows with the length, which "geometric" avoids by
    another bias.

    >>> log_ratio, rows = torch.tensor([2.0, 0.5]).log(), PackedRows.of([2])
    >>> TruncatedImportance(cap=1.5)(log_ratio, rows).weights.tolist()
    [1.5, 0.5]
    >>> TruncatedImportance(cap=0.9, floor=0.6)(log_ratio, rows).weights.tolist()
    [0.89..., 0.60...]
    >>> [TruncatedImportance(level=level)(log_ratio, rows).weights.tolist() for level in ("sequence", "geometric")]
    [[1.0, 1.0], [1.0, 1.0]]
    """

    cap: float = Field(default=2.0, gt=0)
    """[ratio] Largest weight of a token. Lower it if single tokens make the gradient jump (a value below 1 also scales down tokens whose
    policies agree), raise it for less bias towards the generator."""
    floor: float = Field(default=0.0, ge=0)
    """[ratio] Smallest weight of a token. Raise it to keep tokens in the loss that the trainer finds unlikely; this over-weights them."""
    level: Level = "token"
    """"token", "sequence" (product over the response) or "geometric" (geometric mean over the response). Choose the level of the reward
    for an exact correction, tokens for one of less variance."""

    @model_validator(mode="after")
    def _floor_is_below_cap(self) -> TruncatedImportance:
        if self.floor > self.cap:
            raise ValueError(f"floor must be at most cap, which is {self.cap:g}, not {self.floor:g}")
        return self

    @property
    def weighs(self) -> bool:
        return True

    def __call__(self, log_ratio: Tensor, rows: PackedRows) -> Weighting:
        """Weights as above; 1 in a row without a trained token, none for no tokens."""
        ratio = _LEVELS[self.level](log_ratio.detach(), rows).exp()
        weights = ratio.clamp(self.floor, self.cap)
        return Weighting(weights, weights != ratio, torch.zeros_like(ratio, dtype=torch.bool))


class Rejection(Config):
    """Leaves out tokens, or whole responses, whose p_trainer / p_generator lies outside [low, high]: weight 0, otherwise 1.

    The double-sided mask of IcePop (Ring-1T, arXiv:2510.18855) at the level of tokens; rejection of sequences at the two
    others. What is left out has no policy gradient, and is still counted in the mean that the loss becomes: otherwise the few
    tokens left of a bad batch would weigh as much as a whole good one.

    >>> log_ratio, rows = torch.tensor([4.0, 1.0, 1.0]).log(), PackedRows.of([2, 1])
    >>> Rejection(low=0.5, high=2.0)(log_ratio, rows).weights.tolist()
    [0.0, 1.0, 1.0]
    >>> Rejection(low=0.5, high=2.0, level="sequence")(log_ratio, rows).weights.tolist()
    [0.0, 0.0, 1.0]
    """

    low: float = Field(default=0.5, ge=0, le=1)
    """[ratio] Smallest p_trainer / p_generator that is kept. Raise it to leave out more tokens that the trainer finds less likely."""
    high: float = Field(default=2.0, ge=1, allow_inf_nan=True)
    """[ratio] Largest p_trainer / p_generator that is kept; infinity for no bound. Lower it where the gap of log-probabilities is large
    and training is unstable."""
    level: Level = "token"
    """"token", "sequence" (product over the response) or "geometric" (geometric mean over the response). Choose the level of the reward
    for an exact correction, tokens for one of less variance."""

    @property
    def weighs(self) -> bool:
        return False

    def __call__(self, log_ratio: Tensor, rows: PackedRows) -> Weighting:
        """Weights as above; a ratio that is not a number is outside, a row without a trained token inside."""
        ratio = _LEVELS[self.level](log_ratio.detach(), rows).exp()
        inside = (ratio >= self.low) & (ratio <= self.high)
        return Weighting(inside.to(ratio.dtype), torch.zeros_like(inside), ~inside)


def combined(corrections: Sequence[Correction], log_ratio: Tensor, rows: PackedRows) -> Weighting:
    """All of them at once: weights multiplied; a token that one of them leaves out is out.

    Args:
        corrections: in any order; none gives weights of 1.
        log_ratio: [T] nats, log trainer - log generator, 0 where a token is not trained on; no gradient.
        rows: the rows that the tokens belong to.

    >>> icepop = (TruncatedImportance(cap=5.0), Rejection(low=0.5, high=5.0))
    >>> combined(icepop, torch.tensor([4.0, 8.0, 0.25]).log(), PackedRows.of([3])).weights.tolist()
    [4.0, 0.0, 0.0]
    """
    weights = torch.ones_like(log_ratio)
    truncated = masked = torch.zeros_like(log_ratio, dtype=torch.bool)
    for correction in corrections:
        one = correction(log_ratio.detach(), rows)
        weights, truncated, masked = weights * one.weights, truncated | one.truncated, masked | one.masked
    return Weighting(torch.where(masked, 0.0, weights).detach(), truncated & ~masked, masked)


_LEVELS: dict[Level, Callable[..., Any]] = {
    "token": token_ratio,
    "sequence": sequence_product,
    "geometric": sequence_ratio,
}
