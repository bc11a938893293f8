"""Corrections that compare all tokens of a step, so that a node computes them before the update.

PolicyLoss(correction=TopEntropy(share=0.2))                                   the 20 % of tokens with the highest entropy
PolicyLoss(surrogate=Unclipped(), correction=SecondMoment(limit=0.04))         M2PO
PolicyLoss(old="old_logprobs", correction=NormalizedImportance())              truncated weights with a mean of 1
PolicyLoss(correction=PolicyFiltration(power=2.0))                             PF-PPO

`grpo`, `ppo` and `distillation` add the node `step_weights` for such a loss; in your own graph, call
`with_step_weights(samples, loss=loss)` before the update. A call of the node covers the whole step
under `Synchronous`, or the ready groups under other schedules; if `functions` has several ranks, only
a rank's own groups.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from ..dataflow.batch import Batch
from ..dataflow.column import (
    ADVANTAGES,
    ENTROPIES,
    OLD_LOGPROBS,
    RESPONSE_IDS,
    RESPONSE_LOGPROBS,
    RESPONSE_MASK,
    REWARD,
    TOKEN_WEIGHTS,
)
from ..dataflow.config import Config
from ..dataflow.lazy import torch
from ..dataflow.operation import Shape, node
from .corrections import TruncatedImportance
from .loss import Loss, PackedRows, response_rows

if TYPE_CHECKING:
    from torch import Tensor


class StepCorrection(Config):
    """Base class. As a `Correction`, it returns the column `token_weights`; a weight of 0 masks the
    token. As with `Rejection`, masked tokens count in the mean of the loss."""

    weighs: ClassVar[bool] = False
    selects: ClassVar[bool] = False
    """Whether it chooses tokens or rows for another reason than the gap to the generator. Metrics of the
    gap leave it out."""
    reads: ClassVar[tuple[str, ...]] = (str(TOKEN_WEIGHTS),)
    """Columns that a loss with this correction reads."""
    compares: ClassVar[tuple[str, ...]] = ()
    """Columns that `weights` reads."""

    @abstractmethod
    def weights(self, rows: PackedRows) -> Tensor:
        """Return the weight of each token, [T] float64; the values of masked tokens do not matter."""

    def __call__(self, log_ratio: Tensor, rows: PackedRows) -> tuple[Tensor, Tensor, Tensor]:
        weights = torch.where(rows.trained > 0, rows[TOKEN_WEIGHTS], 1.0).to(log_ratio.dtype)
        masked = weights == 0
        return weights, torch.zeros_like(masked), masked


class TopEntropy(StepCorrection):
    """Only the tokens with the highest entropy have a policy gradient (arXiv:2506.01939): there, a
    response chooses its direction. All tokens of the step compete.

    Needs the column `entropies`, which the graphs compute with the old log-probabilities.

    >>> rows = PackedRows.of([3, 2], entropies=[0.1, 2.0, 0.0, 0.5, 1.0])
    >>> TopEntropy(share=0.4).weights(rows).tolist()
    [0.0, 1.0, 0.0, 0.0, 1.0]
    """

    share: float = Field(default=0.2, gt=0, le=1)
    """[share] Tokens with a gradient, of all trained tokens of a step, at least one. Lower it if
    entropy collapses; 1 keeps all."""

    selects: ClassVar[bool] = True
    compares: ClassVar[tuple[str, ...]] = (str(ENTROPIES),)

    def weights(self, rows: PackedRows) -> Tensor:
        places = _trained_places(rows)
        entropies = rows[ENTROPIES][places].nan_to_num(nan=-torch.inf)
        order = entropies.argsort(descending=True, stable=True)
        # The small addend keeps rounding from losing a token.
        kept = places[order[: max(1, int(self.share * len(places) + 1e-9))]]
        return torch.zeros(rows.num_tokens, dtype=torch.float64).index_fill_(0, kept, 1.0)


class SecondMoment(StepCorrection):
    """M2PO (arXiv:2510.01161): mask the tokens whose probability has moved most in the direction of
    their advantage, until the mean of (log p_trainer - log p_generator)^2 over the other tokens that
    moved in this direction is at most `limit`.

    Those are the tokens that PPO could clip: p_trainer > p_generator with a positive advantage, or <
    with a negative one. Unlike a clip, it masks nothing while the rows are only moderately stale:
    `PolicyLoss(surrogate=Unclipped(), correction=SecondMoment())`. p_trainer is the policy before the
    update; the paper measures it again for each minibatch.

    >>> columns = {"old_logprobs": [-1.0, -1.0, -1.0, -1.0], "advantages": [1.0, 1.0, 1.0, -1.0]}
    >>> rows = PackedRows.of([4], response_logprobs=[-1.1, -2.0, 5.0, -3.0], **columns)
    >>> SecondMoment(limit=0.04).weights(rows).tolist()  # the first two count, with 0.01 and 1
    [1.0, 0.0, 1.0, 1.0]
    """

    limit: float = Field(default=0.04, gt=0)
    """[nats^2] Largest mean of the squared log-ratios. Lower it if training on stale rows is
    unstable."""

    compares: ClassVar[tuple[str, ...]] = (str(OLD_LOGPROBS), str(RESPONSE_LOGPROBS), str(ADVANTAGES))

    def weights(self, rows: PackedRows) -> Tensor:
        log_ratio, advantages = _log_ratio(rows), rows.only_trained(rows[ADVANTAGES])
        [places] = ((log_ratio * advantages.sign()) > 0).nonzero(as_tuple=True)
        squares, order = log_ratio[places].square().sort(stable=True)
        # The means of the smallest n squares grow with n.
        means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, dtype=torch.float64)
        masked = places[order[int((means <= self.limit).sum()) :]]
        return torch.ones(rows.num_tokens, dtype=torch.float64).index_fill_(0, masked, 0.0)


class NormalizedImportance(StepCorrection):
    """Truncated importance weights, divided by their mean over the step (self-normalized importance
    sampling): the mean over tokens, or over rows if the weights have the level of a response.

    Without it, a generator that has drifted makes all weights small, or all large, which changes the
    effective learning rate.

    >>> rows = PackedRows.of([2], old_logprobs=[0.0, 0.0], response_logprobs=[-0.6931472, 0.6931472])
    >>> [round(weight, 3) for weight in NormalizedImportance().weights(rows).tolist()]  # 2 and 1/2, divided by 5/4
    [1.6, 0.4]
    """

    importance: TruncatedImportance = TruncatedImportance()
    """The weights to normalize. Set `TruncatedImportance(cap, floor, level)` for other limits."""

    weighs: ClassVar[bool] = True
    compares: ClassVar[tuple[str, ...]] = (str(OLD_LOGPROBS), str(RESPONSE_LOGPROBS))

    def weights(self, rows: PackedRows) -> Tensor:
        weights, _, _ = self.importance(_log_ratio(rows), rows)
        counted = rows.trained.double() * weights.isfinite()
        if self.importance.level != "token":  # each row counts once
            counted = counted / rows.per_token(rows.trained_lengths.double().clamp(min=1))
        total = float((weights.nan_to_num(0.0, 0.0) * counted).sum())
        return weights * (float(counted.sum()) / total) if total > 0 else weights


class PolicyFiltration(StepCorrection):
    """PF-PPO (arXiv:2409.06957): rows weigh in proportion to |r|^power, with a mean of 1, because a
    reward model is most reliable for very good and very bad responses. With rewards of 0 and 1, only
    right responses count.

    verl draws the rows of a step again, with these probabilities. A weight is the expected number of
    copies of a row, so it gives the same mean gradient with less variance. The critic is not affected.

    >>> PolicyFiltration().weights(PackedRows.of([2, 1, 1], reward=[2.0, 0.0, -2.0])).tolist()
    [1.5..., 1.5..., 0.0..., 1.5...]
    """

    power: float = Field(default=2.0, gt=0)
    """[exponent] Raise it to concentrate on extreme rewards."""

    selects: ClassVar[bool] = True
    compares: ClassVar[tuple[str, ...]] = (str(REWARD),)

    def weights(self, rows: PackedRows) -> Tensor:
        sizes = rows[REWARD].double().abs().pow(self.power)
        mean = sizes[rows.counted].mean() if rows.counted.any() else torch.zeros(())
        # If all rewards are 0, all rows weigh the same.
        return rows.per_token(sizes / mean if float(mean) > 0 else torch.ones_like(sizes))


@node(
    shape=Shape.GROUP,
    reads=lambda rule: (*rule.compares, RESPONSE_IDS),
    may_read=(RESPONSE_MASK,),
    writes=(TOKEN_WEIGHTS,),
)
def step_weights(samples: Batch, *, rule: StepCorrection) -> Batch:
    """Compute the weights of a correction over all trained tokens of the call; 1 at other tokens.

    >>> samples = Batch.of(response_ids=[[5, 6], [7]], entropies=[[0.1, 2.0], [1.0]])
    >>> step_weights(samples, rule=TopEntropy(share=0.4))["token_weights"].to_pylist()
    [[0.0, 1.0], [0.0]]
    """
    rows = response_rows(samples, RESPONSE_IDS, *rule.compares)
    weights = torch.ones(rows.num_tokens)
    if bool((rows.trained > 0).any()):
        weights = torch.where(rows.trained > 0, rule.weights(rows), 1.0).float()
    return samples.with_columns(token_weights=(weights, rows.cu_seqlens))


def step_correction_of(loss: Loss | None) -> StepCorrection | None:
    """Return the correction of a loss that compares the tokens of a step, if it has one."""
    chosen = getattr(
        getattr(loss, "policy", None) or loss, "correction", ()
    )  # `policy` of `Distillation`
    found = chosen if isinstance(chosen, tuple) else (chosen,)
    return next((one for one in found if isinstance(one, StepCorrection)), None)


def with_step_weights(samples: Any, *, loss: Loss | None) -> Any:
    """Add `token_weights` if a correction of the loss needs them. For use in `@graph` functions."""
    rule = step_correction_of(loss)
    return samples if rule is None else step_weights(samples, rule=rule)


def _trained_places(rows: PackedRows) -> Tensor:
    return torch.from_numpy(np.flatnonzero(rows.trained.numpy() > 0))


def _log_ratio(rows: PackedRows) -> Tensor:
    """Return log p_trainer - log p_generator, [T] float64 nats; 0 at masked tokens."""
    return rows.only_trained(rows[OLD_LOGPROBS].double() - rows[RESPONSE_LOGPROBS].double())
