"""Corrections: weights for tokens that another policy sampled, from the ratio of its probabilities
to the trainer's.

TruncatedImportance(cap=2.0)                                  the weight is the ratio, at most `cap`
Rejection(keep=(0.5, 2.0))                                    leave out tokens with extreme ratios
(TruncatedImportance(cap=5.0), Rejection(keep=(0.5, 5.0)))    both: IcePop
DriftRejection(limit=0.5)                                     leave out bad responses that have drifted
DivergenceRejection(limit=0.01, over="mean")                  leave out responses with a large divergence

`step_corrections.py` has corrections that compare all tokens of a step.

An update involves three policies. The *generator* (behavior policy) sampled the tokens, perhaps
with older weights or other numerics. The *trainer* is the policy in its own engine before the
update (the proximal policy of decoupled PPO). The *current* policy gets the gradient. A correction
maps the ratio trainer / generator to a constant weight for the policy gradient of each token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import Field, model_validator

from ..dataflow.column import ADVANTAGES
from ..dataflow.config import Config
from ..dataflow.lazy import torch
from .kl import k3
from .loss import PackedRows
from .surrogates import sequence_product, sequence_ratio, tensors_of, token_ratio

if TYPE_CHECKING:
    from torch import Tensor


Level = Literal["token", "sequence", "geometric"]
Extent = Literal["token", "sum", "mean", "max"]


@runtime_checkable
class Correction(Protocol):
    """A function from log-ratios to weights."""

    weighs: ClassVar[bool]
    """Whether the weight corrects for the ratio; otherwise it is 0 or 1 and selects tokens."""

    def __call__(self, log_ratio: Tensor, rows: PackedRows) -> tuple[Tensor, Tensor, Tensor]:
        """Return three [T] tensors: the weights (finite, without a gradient), whether a bound
        truncated the weight (bool), and whether the token is masked (bool).

        `log_ratio` is [T] nats, log p_trainer - log p_generator, and 0 for tokens that are not
        trained.
        """
        ...


class RatioCorrection(Config):
    """A correction by the ratio p_trainer / p_generator."""

    level: Level = "token"
    """Ratio to use: "token", "sequence" (product over the response) or "geometric" (geometric mean
    over the response). Choose the level of the reward for an exact correction, "token" for less
    variance."""

    def _ratio(self, log_ratio: Tensor, rows: PackedRows) -> Tensor:
        return _LEVELS[self.level](log_ratio.detach(), rows).exp()


class TruncatedImportance(RatioCorrection):
    """Truncated importance sampling: w = clip(p_trainer / p_generator, floor, cap).

    At token level this is IMPALA's rho (arXiv:1802.01561, §4.1); between a training and a
    generation engine it is known as TIS (F. Yao et al., "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training", 2025). Combined with a clipped ratio current / trainer, it
    is decoupled PPO (arXiv:2110.00641; for language models AReaL, arXiv:2505.24298):
    `PolicyLoss(old="old_logprobs", correction=TruncatedImportance())`.

    The cap biases the gradient towards the generator. Sequence-level weights are exact for a reward
    of the whole response, but their variance grows with the length. "geometric" avoids this
    variance but has another bias.

    >>> log_ratio, rows = torch.tensor([2.0, 0.5]).log(), PackedRows.of([2])
    >>> TruncatedImportance(cap=1.5)(log_ratio, rows)[0].tolist()
    [1.5, 0.5]
    >>> TruncatedImportance(cap=0.9, floor=0.6)(log_ratio, rows)[0].tolist()
    [0.89..., 0.60...]
    >>> [TruncatedImportance(level=level)(log_ratio, rows)[0].tolist() for level in ("sequence", "geometric")]
    [[1.0, 1.0], [1.0, 1.0]]
    """

    cap: float = Field(default=2.0, gt=0)
    """[ratio] Maximum weight of a token. Lower it if single tokens make the gradient jump; raise it
    for less bias towards the generator."""
    floor: float = Field(default=0.0, ge=0)
    """[ratio] Minimum weight of a token. Raise it to keep tokens in the loss that the trainer finds
    unlikely, at the cost of a bias."""

    @model_validator(mode="after")
    def _floor_is_below_cap(self) -> TruncatedImportance:
        if self.floor > self.cap:
            raise ValueError(f"floor must be at most cap, which is {self.cap:g}, not {self.floor:g}")
        return self

    weighs: ClassVar[bool] = True

    def __call__(self, log_ratio: Tensor, rows: PackedRows) -> tuple[Tensor, Tensor, Tensor]:
        ratio = self._ratio(log_ratio, rows)
        weights = ratio.clamp(self.floor, self.cap)
        return weights, weights != ratio, torch.zeros_like(ratio, dtype=torch.bool)


class Rejection(RatioCorrection):
    """Mask tokens, or whole responses, whose p_trainer / p_generator is outside `keep`.

    At token level this is the double-sided mask of IcePop (Ring-1T, arXiv:2510.18855); at the other
    levels it rejects sequences. Masked tokens have no policy gradient, but count in the mean of the
    loss. Otherwise the few remaining tokens of a bad batch would weigh as much as a good batch.

    >>> log_ratio, rows = torch.tensor([4.0, 1.0, 1.0]).log(), PackedRows.of([2, 1])
    >>> Rejection(keep=(0.5, 2.0))(log_ratio, rows)[0].tolist()
    [0.0, 1.0, 1.0]
    >>> Rejection(keep=(0.5, 2.0), level="sequence")(log_ratio, rows)[0].tolist()
    [0.0, 0.0, 1.0]
    """

    keep: tuple[
        Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=1, allow_inf_nan=True)]
    ] = (0.5, 2.0)
    """[ratio] Minimum and maximum p_trainer / p_generator to keep; the maximum may be infinity.
    Raise the minimum to mask more tokens that the trainer finds unlikely. Lower the maximum if
    training is unstable."""

    retired: ClassVar[Mapping[str, str]] = dict.fromkeys(("low", "high"), "set keep=(low, high)")

    weighs: ClassVar[bool] = False

    def __call__(self, log_ratio: Tensor, rows: PackedRows) -> tuple[Tensor, Tensor, Tensor]:
        ratio = self._ratio(log_ratio, rows)
        # NaN fails both comparisons, so its token is masked.
        smallest, largest = self.keep
        inside = (ratio >= smallest) & (ratio <= largest)
        return inside.to(ratio.dtype), torch.zeros_like(inside), ~inside


class DriftRejection(Config):
    """Mask responses with a negative advantage that the trainer finds much less likely than the
    generator did: mean_t (log p_generator - log p_trainer) > limit (off-policy sequence masking,
    DeepSeek-V3.2, arXiv:2512.02556, §3.1). Such responses are mistakes that the policy no longer
    makes.

    As with `Rejection`, masked tokens have no policy gradient, but count in the mean of the loss.

    >>> rows = PackedRows.of([2, 2, 1], advantages=[-1.0, -1.0, 1.0, 1.0, -1.0])
    >>> DriftRejection(limit=0.5)(torch.tensor([-2.0, 0.0, -2.0, 0.0, -0.1]), rows)[0].tolist()
    [0.0, 0.0, 1.0, 1.0, 1.0]
    """

    limit: float = Field(default=0.5, gt=0)
    """[nats/token] Mean drift above which a response is masked. Lower it if training on stale rows
    is unstable."""

    weighs: ClassVar[bool] = False

    def __call__(self, log_ratio: Tensor, rows: PackedRows) -> tuple[Tensor, Tensor, Tensor]:
        drift = -sequence_ratio(log_ratio.detach(), rows)
        # NaN fails the comparison, so its row is masked if its advantage is negative.
        masked = (rows.only_trained(rows[ADVANTAGES]) < 0) & ~(drift <= self.limit)
        return (~masked).to(drift.dtype), torch.zeros_like(masked), masked


class DivergenceRejection(Config):
    """Mask tokens, or whole responses, with a large estimate of KL(generator || trainer). With
    `over="max"`, a single token rejects its response (trust region masking, Li et al. 2026, "Trust
    Region Masking for Long-Horizon LLM Reinforcement Learning").

    Unlike the ratio of a response, it does not overlook gaps of opposite signs, because `k2` and `k3`
    are never negative. As with `Rejection`, masked tokens have no policy gradient, but count
    in the mean of the loss.

    >>> log_ratio, rows = torch.tensor([0.5, -0.5, 0.1]), PackedRows.of([2, 1])
    >>> [DivergenceRejection(limit=0.15, over=over)(log_ratio, rows)[0].tolist() for over in ("token", "sum")]
    [[1.0, 1.0, 1.0], [0.0, 0.0, 1.0]]
    """

    limit: float = Field(gt=0)
    """[nats] Required. Largest estimate to keep. The metric `generator_kl_k3` is the mean of `k3` over
    tokens. Lower the limit if training is unstable."""
    estimator: Callable[..., Any] = k3
    """Function (logprobs [T], reference_logprobs [T]) -> [T] nats: `k2`, `k3` or `absolute`. `k3` is
    unbiased. Choose `k2` to treat rises and falls of a probability alike."""
    over: Extent = "token"
    """Tokens that the estimate covers: each alone, or the sum, mean or largest of a response's tokens.
    Choose "max" or "sum" to leave out responses with single bad tokens, "mean" for long responses."""

    weighs: ClassVar[bool] = False

    def __call__(self, log_ratio: Tensor, rows: PackedRows) -> tuple[Tensor, Tensor, Tensor]:
        estimate = self.estimator(-log_ratio.detach(), torch.zeros_like(log_ratio))
        # NaN fails the comparison, so its token or row is masked.
        masked = ~(_EXTENTS[self.over](estimate, rows) <= self.limit)
        return (~masked).to(log_ratio.dtype), torch.zeros_like(masked), masked


def combined(
    corrections: Sequence[Correction], log_ratio: Tensor, rows: PackedRows
) -> tuple[Tensor, Tensor, Tensor]:
    """Combine corrections: multiply their weights, and mask tokens that any of them masks.

    >>> icepop = (TruncatedImportance(cap=5.0), Rejection(keep=(0.5, 5.0)))
    >>> combined(icepop, torch.tensor([4.0, 8.0, 0.25]).log(), PackedRows.of([3]))[0].tolist()
    [4.0, 0.0, 0.0]
    """
    weights = torch.ones_like(log_ratio)
    truncated = masked = torch.zeros_like(log_ratio, dtype=torch.bool)
    for correction in corrections:
        own_weights, own_truncated, own_masked = tensors_of(
            correction, correction(log_ratio.detach(), rows), "weights, truncated, masked"
        )
        weights, truncated, masked = (
            weights * own_weights,
            truncated | own_truncated,
            masked | own_masked,
        )
    return torch.where(masked, 0.0, weights).detach(), truncated & ~masked, masked


_LEVELS: dict[Level, Callable[..., Any]] = {
    "token": token_ratio,
    "sequence": sequence_product,
    "geometric": sequence_ratio,
}


def _largest(values_T: Tensor, rows: PackedRows) -> Tensor:
    """Return the largest value of each row's trained tokens, at least 0, at each of its tokens: [T]."""
    largest = torch.zeros(len(rows), dtype=values_T.dtype, device=values_T.device)
    values_T = values_T * rows.trained
    return rows.per_token(largest.scatter_reduce_(0, rows.row_of_token, values_T, "amax"))


_EXTENTS: dict[Extent, Callable[..., Any]] = {
    "token": token_ratio,
    "sum": sequence_product,
    "mean": sequence_ratio,
    "max": _largest,
}
