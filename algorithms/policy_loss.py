"""Losses for a policy: the policy gradient, and plain likelihood.

PolicyLoss()                                                            GRPO with DAPO's token mean, no KL
PolicyLoss(aggregation=sequence_mean, kl=KlPenalty(coefficient=0.04))               GRPO as published
PolicyLoss(aggregation=fixed_length(1024))                              Dr. GRPO
PolicyLoss(surrogate=Clipped(high=0.28))                                DAPO
PolicyLoss(surrogate=Clipped(low=3e-4, high=4e-4), ratio=sequence_ratio, aggregation=sequence_mean)          GSPO
PolicyLoss(ratio=GeometricRatio(), surrogate=Unclipped(), aggregation=sequence_mean)                         GMPO
PolicyLoss(surrogate=Cispo(high=4.0))                                   CISPO
PolicyLoss(surrogate=Sapo(), aggregation=sequence_mean)                 SAPO
PolicyLoss(correction=TruncatedImportance(cap=2.0))                     truncated importance sampling (TIS)
PolicyLoss(old="old_logprobs", correction=TruncatedImportance())        decoupled PPO
PolicyLoss(covariance=ClipCov())                                        Clip-Cov
PolicyLoss(covariance=KlCov(), surrogate=Unclipped())                   KL-Cov
PolicyLoss(correction=(TruncatedImportance(cap=5.0), Rejection(keep=(0.5, 5.0))))            IcePop
PolicyLoss(old="response_logprobs", ratio=sequence_product, surrogate=Vespo())               VESPO
PolicyLoss(surrogate=Dppo(penalty=1e-3))                                DPPO, as in prime-rl
PolicyLoss(surrogate=Unclipped(), correction=SecondMoment())            M2PO
PolicyLoss(correction=TopEntropy(share=0.2))                            only tokens with a high entropy
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from ..dataflow.column import (
    ADVANTAGES,
    ENTROPIES,
    HIGH_COVARIANCE,
    OLD_LOGPROBS,
    REFERENCE_LOGPROBS,
    RESPONSE_LOGPROBS,
)
from ..dataflow.lazy import torch
from ..dataflow.metrics import Metrics
from .aggregation import AggregatedLoss
from .corrections import Correction, combined
from .covariance import CovarianceRule
from .kl import KlPenalty, k3
from .loss import Loss, PackedRows, observed
from .protocols import Policy
from .step_corrections import StepCorrection, step_correction_of
from .surrogates import MAX_LOG_RATIO, Clipped, Dppo, Surrogate, Vespo, tensors_of, token_ratio

if TYPE_CHECKING:
    from torch import Tensor


class PolicyLoss(AggregatedLoss):
    """Policy-gradient loss: l_t = w_t s(r_t, A_t) + beta KL_t - c H_t, then aggregated.

    s is the surrogate, by default -min(r A, clip(r) A), and r = current / old is the probability
    ratio. w is the weight from `correction`, or 1 without one.

    >>> rows = PackedRows.of([2], advantages=[1.0, 1.0], response_logprobs=[-1.0, -1.0])
    >>> loss_sum, metrics = PolicyLoss()(torch.tensor([-1.0, -0.5]), rows)  # ratios 1 and 1.65; the second is clipped
    >>> round(loss_sum.item(), 4), PolicyLoss().count(rows), metrics["clip_fraction"].value
    (-2.2, 2.0, 0.5)
    """

    surrogate: Surrogate = Clipped()
    """Surrogate objective: `Clipped(low, high, dual)`, `Cispo(low, high)`, `Sapo(temperatures)`,
    `Vespo(positive, negative)`, `Dppo(low, high, penalty)`, `PlainPolicyGradient()` or `Unclipped()`.
    Choose one that bounds the ratio if batches are stale or trained on more than once."""
    ratio: Callable[..., Any] = token_ratio
    """Function (log_ratio [T], rows) -> log-ratio [T]: `token_ratio`, `sequence_ratio`,
    `sequence_token_ratio`, `GeometricRatio(low, high)` or `sequence_product`. Choose a sequence
    ratio if the reward is for the whole response (GSPO)."""
    kl: KlPenalty | None = None
    """Penalty for divergence from the reference; the graph must then write `reference_logprobs`.
    Set it if the policy exploits the reward."""
    entropy_coefficient: Annotated[float, Field(ge=0)] | Literal["entropy_coefficient"] = 0.0
    """[loss/nat] Coefficient of the entropy bonus, which costs one more pass over the logits unless it
    is 0. "entropy_coefficient" reads it from this column, which an `AdaptiveEntropyWorker` writes.
    Raise it if entropy collapses."""
    covariance: CovarianceRule | None = None
    """Treatment of the tokens that lower the entropy most: `ClipCov()` or `KlCov()`. Set it if entropy
    collapses and an entropy bonus does not help."""
    old: str | None = None
    """Column with the old policy's log-probabilities, the denominator of the ratio. With None,
    token ratios use the generator's `response_logprobs`. Sequence ratios, and ratios combined with
    a weighting correction, use the trainer's `old_logprobs` if the rows have that column. Otherwise
    they use the current policy: the ratio is 1 and the loss is a plain policy gradient, which is
    correct only with one optimizer step per update. Set it if another node of the graph computes
    the column."""
    correction: Correction | tuple[Correction, ...] = ()
    """Correction for tokens that the generator sampled from a different distribution than the
    trainer's; the weights of several corrections are multiplied. It applies to the policy gradient,
    but not to the KL penalty or the entropy bonus. Set it for stale rows, or if the log-probability
    gap is large."""

    @model_validator(mode="after")
    def _ratio_counts_once(self) -> PolicyLoss:
        of_step = [repr(one) for one in self._corrections if isinstance(one, StepCorrection)]
        if len(of_step) > 1:
            raise ValueError(
                f"only one correction may compare the tokens of a step, not {' and '.join(of_step)}"
            )
        weighing = [repr(one) for one in self._corrections if one.weighs]
        if len(weighing) > 1:
            raise ValueError(
                f"only one correction may weigh with the ratio to the generator, not {' and '.join(weighing)}"
            )
        if weighing and self.old == str(RESPONSE_LOGPROBS):
            raise ValueError(
                f"{weighing[0]} weighs with the ratio to the generator, which the clipped ratio already includes when "
                f"old={self.old!r}; leave `old` out, or compare with the trainer's own: old={str(OLD_LOGPROBS)!r}"
            )
        if self.ratio is not token_ratio and isinstance(self.surrogate, Dppo):
            raise ValueError("Dppo compares probabilities of tokens, so it needs ratio=token_ratio")
        # VESPO does not clip; its weight fades.
        clips = not isinstance(self.surrogate, Vespo)
        if clips and self.ratio is not token_ratio and self.old == str(RESPONSE_LOGPROBS):
            raise ValueError(
                f"a sequence ratio adds up the gaps between trainer and generator over all tokens, and clips "
                f"on-policy rows when old={self.old!r}; leave `old` out, or compare with the trainer's own: "
                f"old={str(OLD_LOGPROBS)!r}"
            )
        return self

    @property
    def reads(self) -> tuple[str, ...]:
        generator = str(RESPONSE_LOGPROBS)
        wanted = [str(ADVANTAGES), self.old or ("" if self._compares_with_trainer else generator)]
        wanted += [generator] if self._corrections else []
        wanted += [str(REFERENCE_LOGPROBS)] if self.kl else []
        wanted += [self.entropy_coefficient] if isinstance(self.entropy_coefficient, str) else []
        wanted += [str(HIGH_COVARIANCE)] if self.covariance else []
        wanted += [c for one in self._corrections for c in getattr(one, "reads", ())]
        return tuple(dict.fromkeys(filter(None, wanted)))

    @property
    def may_read(self) -> tuple[str, ...]:
        trainer = (str(OLD_LOGPROBS),) if self._compares_with_trainer and not self.old else ()
        wanted = (*super().may_read, str(RESPONSE_LOGPROBS), *trainer)
        return tuple(c for c in wanted if c not in self.reads)

    @property
    def _corrections(self) -> tuple[Correction, ...]:
        return self.correction if isinstance(self.correction, tuple) else (self.correction,)

    @property
    def corrects_gap(self) -> bool:
        """Whether a correction accounts for the gap between trainer and generator."""
        return bool(self._gap_corrections)

    @property
    def _gap_corrections(self) -> tuple[Correction, ...]:
        return tuple(one for one in self._corrections if not getattr(one, "selects", False))

    @property
    def _compares_with_trainer(self) -> bool:
        # Gaps between engines add up over a response, and a weighing correction already accounts
        # for the generator.
        return self.ratio is not token_ratio or any(one.weighs for one in self._corrections)

    def _old_column(self, rows: PackedRows) -> str | None:
        """Return the column that the ratio compares with; None for the current policy."""
        if self.old or not self._compares_with_trainer:
            return self.old or str(RESPONSE_LOGPROBS)
        return str(OLD_LOGPROBS) if OLD_LOGPROBS in rows else None

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coefficient != 0

    def __call__(self, logprobs: Tensor, rows: PackedRows) -> tuple[Tensor, Metrics]:
        """Return the loss (a scalar) before the engine divides it by the count, and metrics
        (`docs/metrics.md`).

        The loss is 0 with a gradient of 0 if every token is masked. Ratios are capped at e^20,
        without a gradient beyond, so that one token with probability 0 does not make the loss
        infinite.

        If the rows have `response_logprobs`, metrics compare the generator with the old policy, or
        with the current policy if the old one is missing or is the generator.
        """
        trained, only = rows.trained > 0, rows.only_trained
        old_column = self._old_column(rows)
        old = logprobs.detach() if old_column is None else rows[old_column]
        # Masked tokens may be NaN, so drop them before any arithmetic.
        log_ratio = only(logprobs - old)
        ratio = self.ratio(log_ratio, rows).clamp(max=MAX_LOG_RATIO).exp()
        found = self.surrogate(ratio, only(logprobs), only(rows[ADVANTAGES]))
        losses, clipped = tensors_of(self.surrogate, found, "losses, clipped")
        # The old policy sampled the tokens, so this estimates KL(old || current): d changes its
        # sign.
        approx_kl = k3(-log_ratio.detach(), torch.zeros_like(log_ratio))
        watched = {"clip_fraction": clipped, "approx_kl": approx_kl}
        if self.covariance:
            marked = only(rows[HIGH_COVARIANCE]) > 0
            losses = self.covariance(losses, log_ratio.clamp(max=MAX_LOG_RATIO), marked)
            watched["high_covariance_fraction"] = marked
        largest: dict[str, Tensor] = {}
        counted: dict[str, Tensor] = {}
        if self._corrections or RESPONSE_LOGPROBS in rows:
            # If the old policy is the generator, compare the generator with the current policy.
            trainer = logprobs.detach() if old_column == str(RESPONSE_LOGPROBS) else old
            off = only(trainer - rows[RESPONSE_LOGPROBS]).detach()
            ratio = off.clamp(max=MAX_LOG_RATIO).exp()
            watched |= {"generator_kl_k1": -off, "generator_kl_k3": k3(-off, torch.zeros_like(off))}
            watched["mean_generator_ratio"] = largest["max_generator_ratio"] = ratio
            if self._corrections:
                weights, _, masked = combined(self._corrections, off, rows)
                # A weight of 0 is not enough: the loss of a masked token may be NaN.
                losses = torch.where(masked, 0.0, losses * weights)
                counted["masked_tokens"] = trained & masked
                left = rows.sums((trained & ~masked).float())
                counted["masked_rows"] = rows.counted & (left == 0)
            if self._gap_corrections:
                weights, truncated, masked = combined(self._gap_corrections, off, rows)
                watched |= {"mean_importance_weight": weights, "truncated_fraction": truncated}
                watched["masked_fraction"] = masked
        if self.kl:
            kl = self.kl.estimator(only(logprobs), only(rows[REFERENCE_LOGPROBS]))
            if self.kl.weighted:
                kl = kl * log_ratio.clamp(max=MAX_LOG_RATIO).exp()
            losses, watched["kl"] = losses + self.kl.coefficient * kl, kl
        if self.needs_entropy or "entropy" in rows:
            watched["entropy"] = only(rows["entropy"])
        if self.needs_entropy:
            coefficient: Any = self.entropy_coefficient
            if isinstance(coefficient, str):
                coefficient = rows.per_token(rows[coefficient])
            losses = losses - coefficient * watched["entropy"]
        # Do not divide here: the engine divides by the counts of all ranks.
        loss_sum = (self.aggregation.weights(rows) * losses).sum()
        return loss_sum, observed(trained, watched, largest=largest, counts=counted)


class NegativeLogLikelihood(AggregatedLoss):
    """Supervised loss: l_t = -log p(y_t), by default averaged over all trained tokens of the step.

    >>> rows = PackedRows.of([2, 1], response_mask=[1, 0, 1])
    >>> NegativeLogLikelihood()(torch.tensor([-1.0, -9.0, -2.0]), rows)[0].item(), NegativeLogLikelihood().count(rows)
    (3.0, 2.0)
    """

    def __call__(self, logprobs: Tensor, rows: PackedRows) -> tuple[Tensor, Metrics]:
        """Return the loss before the engine divides it by the count, and the mean `entropy` if the
        rows have entropies."""
        watched = {"entropy": rows["entropy"]} if "entropy" in rows else {}
        metrics = observed(rows.trained > 0, watched) if watched else {}
        return (self.aggregation.weights(rows) * rows.only_trained(-logprobs)).sum(), metrics


# The old policy: the actor before its update, the denominator of a loss's ratios.


def old_logprobs(
    samples: Any, *, actor: Policy, entropies: bool = False, collisions: bool = False
) -> Any:
    """Add `old_logprobs`: the actor's log-probabilities before the update.

    For use in `@graph` functions; `grpo` and `ppo` call it if their loss needs it. It costs a
    forward pass, which also computes the entropy of each token if `entropies` is set, and
    `log_collisions` if `collisions` is set.
    """
    # A user's own policy may not accept these.
    wanted = {"entropies": entropies, "collisions": collisions}
    more: dict[str, Any] = {name: True for name, is_set in wanted.items() if is_set}
    return actor.logprobs(samples, into=str(OLD_LOGPROBS), **more)


def needs_old_logprobs(loss: Loss, *, epochs: int = 1, minibatches: int = 1) -> bool:
    """Return whether an update with this loss needs `old_logprobs`.

    It does if the loss requires the column, or if the loss may use it and the update takes several
    optimizer steps. Without the column, the loss compares with the current policy, which differs
    from the old one after the first step.

    >>> from .policy_loss import PolicyLoss
    >>> from .surrogates import sequence_ratio
    >>> gspo = PolicyLoss(ratio=sequence_ratio)
    >>> needs_old_logprobs(gspo), needs_old_logprobs(gspo, minibatches=4), needs_old_logprobs(PolicyLoss(), minibatches=4)
    (False, True, False)
    """
    column = str(OLD_LOGPROBS)
    return column in loss.reads or (column in loss.may_read and (epochs, minibatches) != (1, 1))


def needs_forward_pass(loss: Loss, *, epochs: int = 1, minibatches: int = 1) -> bool:
    """Return whether a graph must compute `old_logprobs` before an update with this loss: for the
    update itself, or because a correction of the loss compares them, or entropies, over the step."""
    rule = step_correction_of(loss)
    compared = () if rule is None else rule.compares
    return bool({str(OLD_LOGPROBS), str(ENTROPIES)} & set(compared)) or needs_old_logprobs(
        loss, epochs=epochs, minibatches=minibatches
    )


def needs_entropies(loss: Loss) -> bool:
    """Return whether a correction of the loss compares the column `entropies`."""
    rule = step_correction_of(loss)
    return rule is not None and str(ENTROPIES) in rule.compares
