"""Losses on pairs of a better and a worse response, or on single good and bad responses.

PreferenceLoss()                                                                    DPO
PreferenceLoss(comparison=Logistic(label_smoothing=0.1))                            conservative DPO (cDPO)
PreferenceLoss(comparison=RobustLogistic(label_smoothing=0.1))                      robust DPO
PreferenceLoss(beta=1, score=LogRatio(per_token=True), comparison=Squared(tau=0.1)) IPO
PreferenceLoss(comparison=Exo(label_smoothing=1e-3))                                EXO on pairs
PreferenceLoss(comparison=Hinge())                                                  the hinge of SLiC, on log-ratios
PreferenceLoss(comparison=ApoZero())                                                APO-zero; ApoDown(): APO-down
PreferenceLoss(comparison=NoiseContrastive())                                       NCA on pairs
PreferenceLoss(comparison=DiscoPop())                                               DiscoPOP
PreferenceLoss(beta=1, comparison=Sppo(eta=10))                                     SPPO with hard labels
PreferenceLoss(score=DivergenceRatio(divergence="js"))                              f-DPO
PreferenceLoss(score=LogRatio(per_token=True))                                      length-normalised DPO
PreferenceLoss(score=LogRatio(beyond=0.5))                                          LD-DPO
PreferenceLoss(beta=2, score=LogLikelihood(per_token=True), margin=1)               SimPO
PreferenceLoss(beta=1, score=LogOdds(), weight=0.1, likelihood=1)                   ORPO
PreferenceLoss(score=LogLikelihood(), likelihood=1)                                 CPO
PreferenceLoss(likelihood=1)                                                        DPO with likelihood (RPO)
PreferenceLoss(on_policy=True)                                                      WPO
DesirabilityLoss()                                                                  KTO: single responses, good or bad
ClassifierLoss()                                                                    BCO: the same data

A pair is a group of two rows; one is `preferred`. s_w is the score of the preferred
response, and s_l the score of the other. Every loss on pairs has the form

    weight * f(beta (s_w - s_l) - margin) + likelihood * (mean negative log-likelihood of the
    preferred one)
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import Field, model_validator

from ..dataflow.column import GROUP_ID, PREFERRED, REFERENCE_LOGPROBS, REFERENCE_POINT
from ..dataflow.config import Config
from ..dataflow.errors import UserError
from ..dataflow.lazy import torch
from ..dataflow.metrics import Metrics
from .loss import LOG_COLLISIONS, FrozenLoss, PackedRows, observed
from .surrogates import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Score(Protocol):
    """A score per response; training raises it for the preferred response."""

    reads: ClassVar[tuple[str, ...]]

    def __call__(self, logprobs: Tensor, rows: PackedRows) -> Tensor:
        """Return the scores [B], with a gradient to `logprobs` [T]. Masked tokens may have any
        value."""
        ...


class LikelihoodScore(Config):
    """A score computed from log-probabilities."""

    per_token: bool = False
    """Average over trained tokens instead of summing (SimPO). Set it to weight long and short
    responses equally, or if longer responses win by length alone."""


class LogRatio(LikelihoodScore):
    """s = sum_t log p(y_t) - log p_ref(y_t): DPO's implicit reward over beta (arXiv:2305.18290, eq.
    5, without log Z).

    >>> rows = PackedRows.of([2, 1], reference_logprobs=[-1.0, -1.0, -3.0], group_id=[7, 7])
    >>> logprobs = torch.tensor([-0.5, -0.5, -1.0])
    >>> LogRatio()(logprobs, rows).tolist(), LogRatio(per_token=True)(logprobs, rows).tolist()
    ([1.0, 2.0], [0.5, 2.0])
    >>> LogRatio(beyond=0.5)(logprobs, rows).tolist()  # the second token counts half
    [0.75, 2.0]
    """

    beyond: float = Field(default=1.0, ge=0, le=1)
    """[factor] Weight of the trained tokens of a longer response beyond the length of the other
    response of its pair (LD-DPO's alpha, arXiv:2409.06411). Lower it if responses grow
    longer; 0 compares equal lengths."""

    reads: ClassVar[tuple[str, ...]] = (str(REFERENCE_LOGPROBS),)

    @model_validator(mode="after")
    def _sums_what_it_weighs(self) -> LogRatio:
        if self.per_token and self.beyond != 1:
            raise ValueError(
                f"per_token=True already ignores lengths, so beyond must be 1, not {self.beyond:g}"
            )
        return self

    def __call__(self, logprobs: Tensor, rows: PackedRows) -> Tensor:
        ratios = logprobs - rows[REFERENCE_LOGPROBS]
        if self.beyond != 1:
            ratios = ratios * torch.where(_in_shorter(rows), 1.0, self.beyond)
        return _of_rows(ratios, rows, self.per_token)


class DivergenceRatio(Config):
    """s = f'(u) for the ratio u = p(y) / p_ref(y): DPO under another divergence from the reference
    (f-DPO, arXiv:2309.16240). "forward_kl": s = -1 / u; "js": s = log(2 u / (1 + u)).
    `LogRatio` is the case of the reverse KL.

    >>> rows = PackedRows.of([1], reference_logprobs=[-1.0])
    >>> [DivergenceRatio(divergence=name)(torch.tensor([-1.0]), rows).tolist() for name in ("forward_kl", "js")]
    [[-1.0], [0.0]]
    """

    divergence: Literal["forward_kl", "js"] = "js"
    """Divergence that holds the policy near the reference. Choose "js" for more diversity than DPO's
    reverse KL, "forward_kl" for the most."""

    reads: ClassVar[tuple[str, ...]] = (str(REFERENCE_LOGPROBS),)

    def __call__(self, logprobs: Tensor, rows: PackedRows) -> Tensor:
        ratio = _of_rows(logprobs - rows[REFERENCE_LOGPROBS], rows, per_token=False)
        if self.divergence == "forward_kl":
            return -torch.exp(-ratio.clamp(min=-MAX_LOG_RATIO))
        return math.log(2) + torch.nn.functional.logsigmoid(ratio)


class LogLikelihood(LikelihoodScore):
    """s = sum_t log p(y_t), without a reference; per token it is SimPO's reward over beta
    (arXiv:2405.14734).

    >>> rows = PackedRows.of([2, 1])
    >>> LogLikelihood(per_token=True)(torch.tensor([-0.5, -1.5, -1.0]), rows).tolist()
    [-1.0, -1.0]
    """

    reads: ClassVar[tuple[str, ...]] = ()

    def __call__(self, logprobs: Tensor, rows: PackedRows) -> Tensor:
        return _of_rows(logprobs, rows, self.per_token)


class LogOdds(Config):
    """s = log(P / (1 - P)), where log P is the mean of log p(y_t) over the trained tokens (ORPO,
    arXiv:2403.07691, eq. 3 and 4). P is capped at 1 - 1e-6, without a gradient beyond, because the
    odds of 1 are infinite.

    >>> LogOdds()(torch.tensor([0.5]).log(), PackedRows.of([1])).tolist()
    [0.0]
    """

    reads: ClassVar[tuple[str, ...]] = ()

    def __call__(self, logprobs: Tensor, rows: PackedRows) -> Tensor:
        log_p = _of_rows(logprobs, rows, per_token=True).clamp(max=-1e-6)
        return log_p - torch.log(-torch.expm1(log_p))


# Comparisons map `ahead` [P], which is beta (s_w - s_l) - margin, to losses [P].


class Logistic(Config):
    """DPO's loss, l = -(1 - e) log sigmoid(z) - e log sigmoid(-z) (arXiv:2305.18290, eq. 7). With
    label smoothing e, this is conservative DPO.

    If e is the probability that a label is swapped, this is the cross-entropy to the labels (E.
    Mitchell, "A note on DPO with noisy preferences", 2023). Its minimum is then at z = log((1 - e)
    / e) instead of infinity.

    >>> Logistic()(torch.tensor([0.0])).tolist(), Logistic(label_smoothing=0.25)(torch.tensor([2.0])).tolist()
    ([0.6931...], [0.6269...])
    """

    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """[share] e, the share of swapped labels. Set it to the error rate of the labels; raise it if
    annotators disagree."""

    def __call__(self, ahead: Tensor) -> Tensor:
        e, loss = self.label_smoothing, -torch.nn.functional.logsigmoid(ahead)
        return (1 - e) * loss - e * torch.nn.functional.logsigmoid(-ahead) if e else loss


class RobustLogistic(Logistic):
    """l = (-(1 - e) log sigmoid(z) + e log sigmoid(-z)) / (1 - 2 e): robust DPO (arXiv:2403.00409).

    If the share e = `label_smoothing` of the labels is swapped, its expectation is the loss of
    `Logistic()` on correct labels.

    >>> RobustLogistic(label_smoothing=0.25)(torch.tensor([2.0])).tolist()
    [-0.8730...]
    """

    @model_validator(mode="after")
    def _some_labels_are_swapped(self) -> RobustLogistic:
        if not self.label_smoothing:
            raise ValueError(
                "label_smoothing must be above 0, the share of swapped labels; without any, use Logistic()"
            )
        return self

    def __call__(self, ahead: Tensor) -> Tensor:
        e, log_sigmoid = self.label_smoothing, torch.nn.functional.logsigmoid
        return ((1 - e) * -log_sigmoid(ahead) + e * log_sigmoid(-ahead)) / (1 - 2 * e)


class Exo(RobustLogistic):
    """l = sigmoid(z) log(sigmoid(z) / (1 - e)) + sigmoid(-z) log(sigmoid(-z) / e): the reverse KL from
    the policy's preference to the label, which is correct with probability 1 - e (EXO,
    arXiv:2402.00856, eq. 16). e = `label_smoothing` must be above 0; 1e-3 is usual for clean labels.

    `Logistic(label_smoothing=e)` is the forward KL, up to a constant. Both have their minimum at z =
    log((1 - e) / e), but with the reverse KL, pairs far from it have little gradient.

    >>> Exo(label_smoothing=0.25)(torch.tensor([0.0])).tolist()  # log(4 / 3) / 2
    [0.1438...]
    """

    def __call__(self, ahead: Tensor) -> Tensor:
        log_sigmoid, e = torch.nn.functional.logsigmoid, self.label_smoothing
        right, wrong = log_sigmoid(ahead), log_sigmoid(-ahead)
        return right.exp() * (right - math.log1p(-e)) + wrong.exp() * (wrong - math.log(e))


class Squared(Config):
    """IPO's loss, l = (z - 1 / (2 tau))^2 (arXiv:2310.12036, eq. 17).

    Its minimum is at a finite z, so it does not overfit to pairs whose labels all agree. tau
    replaces beta: set `PreferenceLoss(beta=1)`. In the paper, z is a difference of sums over
    tokens. Means over tokens, `LogRatio(per_token=True)`, make tau independent of the length.

    >>> Squared(tau=0.5)(torch.tensor([3.0])).tolist()
    [4.0]
    """

    tau: float = Field(default=0.1, gt=0)
    """[1/nat] Strength of the pull to the reference: the preferred response's target lead is 1 / (2
    tau). Raise it to stay closer to the reference."""

    def __call__(self, ahead: Tensor) -> Tensor:
        return (ahead - 1 / (2 * self.tau)).square()


class Hinge(Config):
    """l = max(0, 1 - z): the hinge of SLiC (arXiv:2305.10425); on log-ratios as in RSO
    (arXiv:2309.06657).

    >>> Hinge()(torch.tensor([0.25, 2.0])).tolist()
    [0.75, 0.0]
    """

    def __call__(self, ahead: Tensor) -> Tensor:
        return (1 - ahead).clamp(min=0)


class DiscoPop(Config):
    """l = -(1 - g) log sigmoid(z) + g exp(-z), with the gate g = sigmoid(z / temperature) (DiscoPOP,
    arXiv:2406.08414): logistic for pairs in the wrong order, exponential for others.

    >>> DiscoPop()(torch.tensor([0.0])).tolist()  # (log 2 + 1) / 2
    [0.8465...]
    """

    temperature: float = Field(default=0.05, gt=0, le=1)
    """[reward] Width of the change from one loss to the other. Raise it for a smoother change."""

    def __call__(self, ahead: Tensor) -> Tensor:
        log_sigmoid = torch.nn.functional.logsigmoid
        gate = torch.sigmoid(ahead / self.temperature)
        # One exponential: at a large negative z, the product of gate and exp(-z) would be 0 times infinity.
        exponential = torch.exp(log_sigmoid(ahead / self.temperature) - ahead)
        return -(1 - gate) * log_sigmoid(ahead) + exponential


# Separate comparisons map both rewards, beta s_w and beta s_l, to losses [P].


class SeparateComparison(Config):
    """Base class: a comparison that also depends on how likely each response is, not only on their
    difference."""

    @abstractmethod
    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return losses [P] for the rewards of both responses, [P] each."""
        ...


class ApoZero(SeparateComparison):
    """l = 1 - sigmoid(r_w) + sigmoid(r_l) (APO-zero, arXiv:2408.06266): raises the preferred
    response above the reference and lowers the other below. Choose it if preferred responses are
    better than the model's.

    >>> ApoZero()(torch.tensor([0.0]), torch.tensor([0.0])).tolist()
    [1.0]
    """

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


class ApoDown(SeparateComparison):
    """l = sigmoid(r_w) + 1 - sigmoid(r_w - r_l) (APO-down, arXiv:2408.06266): lowers both
    responses, the preferred one less. Choose it if the model is better than preferred responses.

    >>> ApoDown()(torch.tensor([0.0]), torch.tensor([0.0])).tolist()
    [1.0]
    """

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)


class NoiseContrastive(SeparateComparison):
    """l = -log sigmoid(r_w) - (log sigmoid(-r_w) + log sigmoid(-r_l)) / 2 (NCA on pairs,
    arXiv:2402.05369): keeps the preferred response likely, which DPO does not.

    >>> NoiseContrastive()(torch.tensor([0.0]), torch.tensor([0.0])).tolist()  # 2 log 2
    [1.3862...]
    """

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        log_sigmoid = torch.nn.functional.logsigmoid
        return -log_sigmoid(chosen) - (log_sigmoid(-chosen) + log_sigmoid(-rejected)) / 2


class Sppo(SeparateComparison):
    """l = (r_w - eta / 2)^2 + (r_l + eta / 2)^2 (SPPO, arXiv:2405.00675, eq. 4.7, if the preferred
    response always wins and the other always loses): the log-ratios of both responses move to eta / 2
    and -eta / 2.

    eta replaces beta: set `PreferenceLoss(beta=1)`. For SPPO's iterations, let the reference follow the
    policy.

    >>> Sppo(eta=4)(torch.tensor([1.0]), torch.tensor([0.5])).tolist()  # 1 + 6.25
    [7.25]
    """

    eta: float = Field(default=10.0, gt=0)
    """[nats] Target difference between the log-ratios of both responses. Lower it to stay closer to the
    reference."""

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (chosen - self.eta / 2).square() + (rejected + self.eta / 2).square()


class PairLoss(FrozenLoss):
    """A loss on pairs: groups of two rows, one of them `preferred`. Counts pairs with a trained
    token in both responses."""

    margin: float | str = 0.0
    """[reward] Target lead of the preferred response (SimPO's gamma), or the name of a column with
    the lead of each pair, equal in both rows. Raise it to push pairs further apart. Give a column
    if annotators rated how much better a response is."""

    @property
    def reads(self) -> tuple[str, ...]:
        of_pairs = (str(GROUP_ID), str(PREFERRED))
        return (*of_pairs, self.margin) if isinstance(self.margin, str) else of_pairs

    @property
    def whole_groups(self) -> bool:
        return True

    def count(self, rows: PackedRows) -> float:
        groups, index = torch.unique(rows[GROUP_ID], return_inverse=True)
        sizes = torch.bincount(index, minlength=len(groups))
        preferred = torch.bincount(index[rows[PREFERRED] > 0], minlength=len(groups))
        wrong = torch.nonzero((sizes != 2) | (preferred != 1))
        if len(wrong):
            k = int(wrong[0])
            raise UserError(
                f"group {int(groups[k])} has {int(sizes[k])} rows, {int(preferred[k])} of them preferred; a preference loss takes "
                "pairs: two rows, one of them preferred (nodes pairs and best_and_worst make such groups)"
            )
        return float(self._sides(rows)[2].sum())

    def _sides(self, rows: PackedRows) -> tuple[Tensor, Tensor, Tensor]:
        """Return the row indexes of preferred and of other responses, and whether these form pairs,
        [max(0, B - 1)] each.

        Sorts rows by group, preferred row first, so the rows of a pair are neighbors, and masks
        other neighbors. A shape that depends on a value would make the host wait for the device.
        """
        groups = rows[GROUP_ID]
        order = (rows[PREFERRED] <= 0).to(torch.uint8).argsort(stable=True)
        # torch has no lexsort, but a stable sort keeps the order of the sort before it.
        order = order[groups[order].argsort(stable=True)]
        chosen, rejected = order[:-1], order[1:]
        paired = (groups[chosen] == groups[rejected]) & rows.counted[chosen] & rows.counted[rejected]
        return chosen, rejected, paired

    def _margin(self, rows: PackedRows, chosen: Tensor) -> Tensor | float:
        """Return the margin of each pair [P], or a single margin for all."""
        return rows[self.margin][chosen] if isinstance(self.margin, str) else self.margin

    def _observed(self, chosen: Tensor, rejected: Tensor, paired: Tensor, **more: Tensor) -> Metrics:
        ahead = chosen - rejected
        watched = {"chosen_reward": chosen, "rejected_reward": rejected, "reward_margin": ahead}
        return observed(paired, {**watched, "preference_accuracy": ahead > 0, **more})


class PreferenceLoss(PairLoss):
    """Preference loss: l = weight f(beta (s_w - s_l) - margin) + likelihood nll(y_w), the mean over
    pairs.

    s_w and s_l are the scores of the preferred and the rejected response, y_w is the preferred
    response, and f is the comparison.

    >>> columns = {"group_id": [4, 4], "preferred": [0, 1], "reference_logprobs": [-1.0, -1.0]}
    >>> loss_sum, metrics = PreferenceLoss(beta=0.5)(torch.tensor([-2.0, -1.0]), PackedRows.of([1, 1], **columns))
    >>> round(loss_sum.item(), 4), metrics["reward_margin"].value, metrics["preference_accuracy"].value
    (0.4741, 0.5, 1.0)
    """

    beta: float = Field(default=0.1, gt=0)
    """[reward/nat] Reward per nat of score. Raise it to stay closer to the reference."""
    score: Score = LogRatio()
    """Score to compare: `LogRatio`, `LogLikelihood` or `LogOdds`. Choose `LogLikelihood` or
    `LogOdds` to train without a reference."""
    comparison: Callable[..., Any] = Logistic()
    """Function (beta (s_w - s_l) - margin [P]) -> losses [P]: `Logistic`, `RobustLogistic`, `Exo`,
    `Squared`, `Hinge` or `DiscoPop`; or one of both rewards, without a margin: `ApoZero`, `ApoDown`,
    `NoiseContrastive` or `Sppo`. Choose `RobustLogistic` for noisy labels, `Squared` for labels that never
    contradict each other."""
    weight: float = Field(default=1.0, gt=0)
    """[factor] Weight of the comparison term (ORPO's lambda). Lower it to give the likelihood term
    more weight."""
    likelihood: float = Field(default=0.0, ge=0)
    """[factor] Weight of the preferred response's negative log-likelihood, averaged over its
    trained tokens (arXiv:2404.19733; ORPO: 1). Raise it if preferred responses become less
    likely."""
    on_policy: bool = False
    """Multiply the comparison of a pair by how likely the policy is to sample both responses (WPO,
    arXiv:2406.11827): min(1, w(y_w) w(y_l)) without a gradient, where log w(y) is the mean over the
    trained tokens of log p(y_t) - log sum_v p(v)^2. Set it if another model wrote the responses."""

    @model_validator(mode="after")
    def _separate_rewards_have_no_margin(self) -> PreferenceLoss:
        if isinstance(self.comparison, SeparateComparison) and self.margin != 0:
            raise ValueError(
                f"comparison={self.comparison!r} compares no difference, so margin must be 0, not {self.margin!r}"
            )
        return self

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, *self.score.reads)

    @property
    def may_read(self) -> tuple[str, ...]:
        return (*super().may_read, *([LOG_COLLISIONS] if self.on_policy else []))

    def __call__(self, logprobs: Tensor, rows: PackedRows) -> tuple[Tensor, Metrics]:
        """Return the loss before the engine divides it by the count, and means over pairs. Without
        a pair, the loss is 0 with a gradient of 0."""
        chosen, rejected, paired = self._sides(rows)
        rewards = self.beta * self.score(logprobs, rows)
        # Neighbors that are not a pair may have NaN, so mask them before and after the loss.
        of_chosen, of_rejected = (torch.where(paired, rewards[side], 0.0) for side in (chosen, rejected))
        if isinstance(self.comparison, SeparateComparison):
            losses = self.weight * self.comparison(of_chosen, of_rejected)
        else:
            ahead = of_chosen - of_rejected - self._margin(rows, chosen)
            losses = self.weight * self.comparison(ahead)
        sums = _of_rows(logprobs, rows, per_token=False)
        watched = {"chosen_logprob": sums[chosen], "rejected_logprob": sums[rejected]}
        if self.on_policy:
            likely = _of_rows(logprobs.detach() - rows[LOG_COLLISIONS], rows, per_token=True)
            both = torch.where(paired, likely[chosen] + likely[rejected], 0.0)
            watched["policy_weight"] = both.exp().clamp(max=1)
            losses = watched["policy_weight"] * losses
        if self.likelihood:
            nll = -sums[chosen] / rows.trained_lengths[chosen].clamp(min=1)
            losses, watched["chosen_nll"] = losses + self.likelihood * nll, nll
        return torch.where(paired, losses, 0.0).sum(), self._observed(
            rewards[chosen], rewards[rejected], paired, **watched
        )


class DesirabilityLoss(FrozenLoss):
    """KTO's loss (arXiv:2402.01306, eq. 7), the mean over responses.

    l = w_D (1 - sigmoid(beta (s - z0))) for a good response, and w_U (1 - sigmoid(beta (z0 - s)))
    for a bad one. The column `preferred` marks good responses; they need not form pairs.

    z0, the column `reference_point` [nats], is the divergence from the reference that all responses
    are compared with. The graph `kto` estimates it before the update, so it does not depend on
    microbatches or ranks.

    >>> columns = {"preferred": [1, 0], "reference_logprobs": [-2.0, -2.0], "reference_point": [0.5, 0.5]}
    >>> loss_sum, metrics = DesirabilityLoss(beta=1)(torch.tensor([-1.5, -1.5]), PackedRows.of([1, 1], **columns))
    >>> loss_sum.item(), metrics["chosen_reward"].value
    (1.0, 0.5)
    """

    beta: float = Field(default=0.1, gt=0)
    """[reward/nat] Reward per nat of log-ratio. Raise it to stay closer to the reference; KTO's loss
    then saturates sooner."""
    weights: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (1.0, 1.0)
    """[factor] w_D and w_U, the weights of good and of bad responses. Raise the weight of the rarer
    kind: the paper recommends that weight times number of responses is about equal for both."""

    retired: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("desirable_weight", "undesirable_weight"), "set weights=(desirable, undesirable)"
    )

    @property
    def reads(self) -> tuple[str, ...]:
        return (str(PREFERRED), str(REFERENCE_LOGPROBS), str(REFERENCE_POINT))

    def count(self, rows: PackedRows) -> float:
        return float(rows.counted.sum())

    def __call__(self, logprobs: Tensor, rows: PackedRows) -> tuple[Tensor, Metrics]:
        """Return the loss before the engine divides it by the count, and means over good and over
        bad responses. Without trained tokens, the loss is 0 with a gradient of 0."""
        scores = LogRatio()(logprobs, rows)
        counted, good = rows.counted, rows[PREFERRED] > 0
        point = torch.where(counted, rows[REFERENCE_POINT], 0.0)
        above = self.beta * (scores - point)
        of_good, of_bad = self.weights
        losses = torch.where(good, of_good * self._loss(above), of_bad * self._loss(-above))
        rewards = self.beta * scores
        metrics = observed(counted & good, {"chosen_reward": rewards})
        metrics |= observed(counted & ~good, {"rejected_reward": rewards})
        metrics |= observed(counted, {"reference_point": point})
        return torch.where(counted, losses, 0.0).sum(), metrics

    def _loss(self, ahead: Tensor) -> Tensor:
        """Return the loss of responses whose rewards are this far on the right side of the reference
        point."""
        return torch.sigmoid(-ahead)


class ClassifierLoss(DesirabilityLoss):
    """BCO's loss (binary classifier optimization, arXiv:2404.04656), the mean over responses.

    l = -w_D log sigmoid(beta (s - d)) for a good response, and -w_U log sigmoid(beta (d - s)) for a
    bad one: the log-ratio classifies responses. d, the column `reference_point` [nats], is halfway
    between the mean log-ratios of good and of bad responses. The graph `bco` computes it.

    >>> columns = {"preferred": [1, 0], "reference_logprobs": [-2.0, -2.0], "reference_point": [0.5, 0.5]}
    >>> loss_sum, _ = ClassifierLoss(beta=1)(torch.tensor([-1.5, -1.5]), PackedRows.of([1, 1], **columns))
    >>> round(loss_sum.item(), 4)  # 2 log 2
    1.3863
    """

    def _loss(self, ahead: Tensor) -> Tensor:
        return torch.nn.functional.softplus(-ahead)


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """Return the loss of a reward model on pairs: l = -log sigmoid(r_w - r_l - m)
    (arXiv:2203.02155, eq. 1; with a margin arXiv:2307.09288, eq. 2).

    Args:
        chosen, rejected: [P] rewards of both responses; with a gradient.
        margin: target lead of the preferred response, [P] or a number; no gradient.

    >>> bradley_terry(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 2.0]), margin=torch.tensor([0.0, 1.0])).tolist()
    [0.6931..., 3.0485...]
    """
    return -torch.nn.functional.logsigmoid(chosen - rejected - margin)


def _in_shorter(rows: PackedRows) -> Tensor:
    """Return whether each token is within the length of the shorter response of its pair, [T] bool.
    Only trained tokens count. A row without a partner is its own pair."""
    trained = rows.trained
    # A stable sort by group puts the rows of a pair next to each other, without a wait for the device.
    order = rows[GROUP_ID].argsort(stable=True)
    lengths = rows.trained_lengths[order]
    paired = rows[GROUP_ID][order].diff() == 0
    alone = torch.full_like(lengths[:1], torch.inf)
    before = torch.cat([alone, torch.where(paired, lengths[:-1], torch.inf)])
    after = torch.cat([torch.where(paired, lengths[1:], torch.inf), alone])
    shorter = torch.empty_like(lengths).index_copy(0, order, torch.minimum(before, after))
    place = trained.cumsum(0)  # counts from 1, over all rows
    start = torch.nn.functional.pad(rows.trained_lengths.cumsum(0), (1, 0))[:-1]
    return place - rows.per_token(start) <= rows.per_token(shorter)


def _of_rows(values: Tensor, rows: PackedRows, per_token: bool) -> Tensor:
    """Return the sum, or the mean, over the trained tokens of each row, [B]; 0 for a row without
    one."""
    sums = rows.sums(rows.only_trained(values))
    return sums / rows.trained_lengths.clamp(min=1) if per_token else sums
