"""Advantages of responses: their rewards relative to other responses to the same prompt.

An estimator is a callable `(outcomes) -> advantages [B]`. `group_advantages` turns it into a graph
node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ..dataflow.batch import Batch
from ..dataflow.column import (
    ADVANTAGES,
    BASELINE_REWARD,
    EPISODE_ID,
    RESPONSE_IDS,
    RESPONSE_MASK,
    REWARD,
    SHAPED_REWARD,
)
from ..dataflow.errors import UserError, nearest
from ..dataflow.lazy import torch
from ..dataflow.metrics import Mean, Metric, Metrics
from ..dataflow.operation import Shape, node
from .episodes import Episodes
from .loss import PackedRows, response_rows
from .values import whitened

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Outcomes:
    """Outcomes of B episodes, the input of an estimator. Without a harness, each response is an
    episode. The tensors have no gradient.

    >>> Outcomes.of([1.0, 0.0], groups=[0, 0]).lengths.tolist()
    [1, 1]
    """

    rewards: Tensor
    """[B]; converted to float32 before comparisons."""
    groups: Tensor
    """[B] int64: group index of each episode, from 0 to the number of groups - 1, in any order."""
    lengths: Tensor
    """[B] int64: trained tokens of each episode."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Columns that the estimator's attribute `reads` names, [B] each."""

    @classmethod
    def of(cls, rewards: object, groups: object, lengths: object = None, **columns: object) -> Outcomes:
        """Create outcomes from tensors or lists. Without lengths, each response has one token."""
        values = torch.as_tensor(rewards)
        index = torch.as_tensor(groups, dtype=torch.int64)
        counts = torch.as_tensor(
            torch.ones_like(index) if lengths is None else lengths, dtype=torch.int64
        )
        return cls(values, index, counts, {n: torch.as_tensor(column) for n, column in columns.items()})

    def __getitem__(self, column: object) -> Tensor:
        name = str(column)
        if name not in self.columns:
            hint = nearest(name, self.columns) or f"; there are {', '.join(self.columns) or 'none'}"
            raise UserError(f"the estimator reads column {name!r}, which its outcomes do not have{hint}")
        return self.columns[name]


Estimator: TypeAlias = "Callable[[Outcomes], Tensor]"
"""A function from outcomes to advantages [B]. An attribute `reads` names further columns."""


def group_normalized(outcomes: Outcomes, *, epsilon: float = 1e-6) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + epsilon) over i's group (GRPO, arXiv:2402.03300, §4.1.2).

    std is the sample standard deviation (division by n - 1). `epsilon` limits the advantages if the
    rewards of a group are nearly equal. Returns [B] float32: exactly 0, never NaN, in a group of
    one row or of equal rewards.

    >>> group_normalized(Outcomes.of([1.0, 0.0, 5.0, 0.0], groups=[0, 0, 1, 0])).tolist()
    [1.1546..., -0.5773..., 0.0, -0.5773...]
    """
    centred, sizes = _centred(outcomes)
    # Avoid 0 / 0 in a group of one row.
    variances = _sums(centred.square(), outcomes.groups, len(sizes)) / (sizes - 1).clamp(min=1)
    return (centred / (variances.sqrt() + epsilon).index_select(0, outcomes.groups)).float()


def group_centred(outcomes: Outcomes) -> Tensor:
    """A_i = r_i - mean(r) over i's group (Dr. GRPO, arXiv:2503.20783, §3.1). Exactly 0 in a group
    of one row or of equal rewards.

    >>> group_centred(Outcomes.of([1.0, 0.0, 5.0, 0.5], groups=[0, 0, 1, 0])).tolist()
    [0.5, -0.5, 0.0, 0.0]
    """
    return _centred(outcomes)[0].float()


def batch_normalized(outcomes: Outcomes, *, epsilon: float = 1e-6) -> Tensor:
    """A_i = (r_i - mean(r) over i's group) / (std(r) over all episodes of the call + epsilon) (Lite
    PPO, arXiv:2508.08221).

    A group of nearly equal rewards keeps small advantages, which its own standard deviation would
    enlarge. std is the sample standard deviation, around the mean of all rewards. A call covers the
    whole step under `Synchronous`, or the ready groups under other schedules. Exactly 0 in a group
    of one row or of equal rewards.

    >>> batch_normalized(Outcomes.of([1.0, 0.0, 3.0, 2.0], groups=[0, 0, 1, 1])).tolist()
    [0.3872..., -0.3872..., 0.3872..., -0.3872...]
    """
    centred, _ = _centred(outcomes)
    rewards = outcomes.rewards.float().double()
    deviation = rewards.std() if len(rewards) > 1 else torch.zeros((), dtype=torch.float64)
    return (centred / (deviation + epsilon)).float()


def mean_normalized(outcomes: Outcomes) -> Tensor:
    """A_i = (r_i - mean(r)) / mean(r) over i's group (MaxRL, arXiv:2602.02710).

    With rewards of 0 and 1, this approximates the gradient of log p, the logarithm of the success
    rate, to the order of the group size. So prompts that are rarely solved weigh about 1 / p.
    Rewards must not be negative: a group with a mean of 0 or below has advantages of 0. Exactly 0
    in a group of one row or of equal rewards.

    >>> mean_normalized(Outcomes.of([1.0, 0.0, 0.0, 0.0], groups=[0, 0, 0, 0])).tolist()
    [3.0, -1.0, -1.0, -1.0]
    """
    centred, sizes = _centred(outcomes)
    means = _sums(outcomes.rewards.float().double(), outcomes.groups, len(sizes)) / sizes
    scales = torch.where(means > 0, 1 / means, 0.0)
    return (centred * scales.index_select(0, outcomes.groups)).float()


def leave_one_out(outcomes: Outcomes) -> Tensor:
    """A_i = r_i - mean of the other rewards in i's group = n / (n - 1) (r_i - mean(r)) (RLOO,
    arXiv:2402.14740, eq. 7). Exactly 0 in a group of one row or of equal rewards.

    >>> leave_one_out(Outcomes.of([1.0, 0.0, 5.0, 0.5], groups=[0, 0, 1, 0])).tolist()
    [0.75, -0.75, 0.0, 0.0]
    """
    centred, sizes = _centred(outcomes)
    return (centred * (sizes / (sizes - 1).clamp(min=1)).index_select(0, outcomes.groups)).float()


def length_weighted(outcomes: Outcomes) -> Tensor:
    """A_i = r_i - sum(L r) / sum(L) over i's group, where L are the lengths (OPO's optimal
    baseline, arXiv:2505.23585).

    This baseline minimizes the variance if the squared norm of a response's gradient is
    proportional to its length. Exactly 0 in a group of one row or of equal rewards. If all rows of
    a group are empty, the baseline is the plain mean.

    >>> length_weighted(Outcomes.of([1.0, 0.0], groups=[0, 0], lengths=[3, 1])).tolist()
    [0.25, -0.75]
    """
    centred, sizes = _centred(outcomes)
    lengths = outcomes.lengths.double()
    totals = _sums(lengths, outcomes.groups, len(sizes)).clamp(min=1)  # all rows of a group may be empty
    offsets = _sums(lengths * centred, outcomes.groups, len(sizes)) / totals
    return (centred - offsets.index_select(0, outcomes.groups)).float()


def valid_groups_centred(outcomes: Outcomes) -> Tensor:
    """A_i = B / (B - M) (r_i - mean(r)), where M rows are in groups of equal rewards (GPG,
    arXiv:2504.02546, with F_norm = 1).

    Rows in groups of equal rewards have no gradient, but count in the mean of the loss. The factor
    compensates for that. It covers all rows of one call: the whole step under `Synchronous`, or the
    ready groups under other schedules. Returns zeros if all groups have equal rewards.

    >>> valid_groups_centred(Outcomes.of([1.0, 0.0, 1.0, 1.0], groups=[0, 0, 1, 1])).tolist()
    [1.0, -1.0, 0.0, 0.0]
    """
    centred, sizes = _centred(outcomes)
    spread = _sums(centred.abs(), outcomes.groups, len(sizes))
    num_valid = float(sizes[spread > 0].sum())
    return (centred * (len(centred) / max(num_valid, 1.0))).float()


def best_of_group(outcomes: Outcomes) -> Tensor:
    """A_i = max(r) - max of the other rewards in i's group (max@k, or pass@k if rewards are 0 and
    1; arXiv:2503.19595).

    The objective is the best reward of k samples, where k is the group size. So only a unique best
    row has an advantage: its lead over the second best. Never negative. Exactly 0 in a group of one
    row, or with several best rows.

    >>> best_of_group(Outcomes.of([1.0, 0.25, 5.0, 0.0], groups=[0, 0, 1, 0])).tolist()
    [0.75, 0.0, 0.0, 0.0]
    """
    rewards, groups = outcomes.rewards.double(), outcomes.groups
    sizes = torch.bincount(groups)

    def largest(values: Tensor) -> Tensor:
        of_group = torch.full((len(sizes),), -torch.inf, dtype=values.dtype)
        return of_group.scatter_reduce_(0, groups, values, "amax").index_select(0, groups)

    best = rewards == largest(rewards)
    # With several best rows, removing one does not change the maximum.
    alone = (_sums(best.double(), groups, len(sizes)) == 1) & (sizes > 1)
    lead = rewards - largest(torch.where(best, -torch.inf, rewards))
    return torch.where(best & alone.index_select(0, groups), lead, 0.0).float()


@dataclass(frozen=True)
class GreedyBaseline:
    """A_i = r_i - the reward of the greedy response to the same prompt (ReMax, arXiv:2310.10505).

    The graph `greedy_baselines` samples and scores the greedy responses.

    >>> greedy_baseline(Outcomes.of([1.0, 0.0], groups=[0, 1], baseline_reward=[0.5, 0.25])).tolist()
    [0.5, -0.25]
    """

    column: str = str(BASELINE_REWARD)
    """Column with the reward of the prompt's greedy response, [B]."""

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.column,)

    def __call__(self, outcomes: Outcomes) -> Tensor:
        return (outcomes.rewards.double() - outcomes[self.column].double()).float()


greedy_baseline = GreedyBaseline()


@dataclass(frozen=True)
class RewardNormalized:
    """A_i = normalize(sum_k w_k a_ki), where a_k is `group_normalized` of the k-th reward (GDPO,
    arXiv:2601.05242). The sum is normalized over all episodes of the call, to mean 0 and standard
    deviation 1.

    Normalizing the sum of the rewards, as GRPO does, gives different combinations of rewards the
    same advantage. This one keeps them apart, and a reward with a large range does not drown
    others.

    >>> columns = {"reward/right": [1.0, 0.0, 0.0, 1.0], "reward/short": [0.0, 1.0, 0.0, 1.0]}
    >>> outcomes = Outcomes.of([1.0, 1.0, 0.0, 2.0], [0, 0, 0, 0], **columns)
    >>> RewardNormalized(("reward/right", "reward/short"))(outcomes).tolist()
    [0.0, 0.0, -1.2247..., 1.2247...]
    """

    rewards: tuple[str, ...]
    """Columns of the rewards, such as "reward/right" of a reward function `right`."""
    weights: tuple[float, ...] = ()
    """Weight of each reward; () weighs all equally."""
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if not self.rewards or (self.weights and len(self.weights) != len(self.rewards)):
            raise UserError(
                f"RewardNormalized takes at least one column of rewards and one weight for each, not rewards={self.rewards!r} and "
                f"weights={self.weights!r}"
            )

    @property
    def reads(self) -> tuple[str, ...]:
        return self.rewards

    def __call__(self, outcomes: Outcomes) -> Tensor:
        total = torch.zeros(len(outcomes.groups), dtype=torch.float64)
        for column, weight in zip(self.rewards, self.weights or [1.0] * len(self.rewards), strict=True):
            own = replace(outcomes, rewards=outcomes[column])
            total += weight * group_normalized(own, epsilon=self.epsilon).double()
        if len(total) < 2:
            return total.float()
        return ((total - total.mean()) / (total.std() + self.epsilon)).float()


GROUP_RELATIVE = (
    group_normalized,
    group_centred,
    batch_normalized,
    mean_normalized,
    leave_one_out,
    length_weighted,
    valid_groups_centred,
    best_of_group,
)
"""Estimators whose advantages are all 0 in groups of one row."""


def is_group_relative(estimator: object) -> bool:
    """Return whether an estimator is in `GROUP_RELATIVE`, possibly through `functools.partial`."""
    return getattr(estimator, "func", estimator) in GROUP_RELATIVE


def have_equal_rewards(samples: Batch, reward: str) -> np.ndarray:
    """Return whether the rewards of each group are equal: [groups] bool, in the order of
    `samples.groups()`; false for groups with a NaN. Only episodes that vote count (`Episodes`).

    >>> have_equal_rewards(Batch.of(group_id=[7, 8, 7, 8], reward=[1.0, 1.0, 0.0, 1.0]), "reward").tolist()
    [False, True]
    """
    episodes, (groups, of_row) = Episodes.of(samples), samples.groups()
    rewards, index = episodes.values(reward), of_row[episodes.first]
    first = np.zeros(len(groups), dtype=rewards.dtype)
    first[index] = rewards
    return np.bincount(index, weights=rewards != first[index], minlength=len(groups)) == 0


def _columns_of(estimator: Estimator) -> tuple[str, ...]:
    return getattr(estimator, "reads", ())


def groups_without_signal(
    samples: Batch,
    *,
    reward: str = str(REWARD),
    estimator: Estimator = group_normalized,
    within: str | None = None,
    **_: object,
) -> Metrics:
    """Measure the share of groups with equal rewards, whose advantages are all 0. Empty if the
    estimator reads other columns, or if `within` divides groups: equal rewards of a group and
    advantages of 0 then are not the same.

    If `reward` is `shaped_reward`, also measure `signal_of_shaping`: of the groups whose shaped
    rewards differ, the share with equal rewards before the shaping.

    >>> samples = Batch.of(group_id=[7, 8, 7, 8], reward=[1.0, 1.0, 0.0, 1.0])
    >>> groups_without_signal(samples)["groups_without_signal"].value
    0.5
    """
    if _columns_of(estimator) or within is not None:
        return {}
    equal = have_equal_rewards(samples, reward)
    metrics: dict[str, Metric] = {"groups_without_signal": Mean(float(equal.sum()), float(len(equal)))}
    if reward == str(SHAPED_REWARD) and REWARD in samples and Episodes.of(samples).agree_on(REWARD):
        shaping = have_equal_rewards(samples, str(REWARD))[~equal]
        metrics["signal_of_shaping"] = Mean(float(shaping.sum()), float(len(shaping)))
    return metrics


@node(
    shape=Shape.GROUP,
    reads=lambda reward, estimator, within: (
        *(reward, RESPONSE_IDS, *_columns_of(estimator)),
        *(() if within is None else (within,)),
    ),
    may_read=lambda reward: (
        *(RESPONSE_MASK, EPISODE_ID),
        *((REWARD,) if reward == str(SHAPED_REWARD) else ()),
    ),
    writes=lambda into: (into,),
    measure=groups_without_signal,
)
def group_advantages(
    samples: Batch,
    *,
    estimator: Estimator = group_normalized,
    reward: str = str(REWARD),
    within: str | None = None,
    whiten: bool = False,
    into: str = str(ADVANTAGES),
) -> Batch:
    """Compute advantages within each group, equal for all trained tokens of an episode.

    An episode counts once, however many rows it has. Masked tokens have an advantage of 0. Episodes
    without a trained token do not count, and their advantages are 0.

    Args:
        samples: whole groups.
        within: a column of numbers that divides groups: only rows with equal values are compared. With
            "parent_id", solutions of a problem that a proposer wrote are compared with other
            solutions of this problem only (hierarchical GRPO).
        whiten: normalize the advantages of all trained tokens of one call to mean 0 and standard
            deviation 1. With `estimator=group_centred`, this is the baseline variant of REINFORCE++
            (arXiv:2501.03262). A call covers the whole step under `Synchronous`, or the ready
            groups under other schedules.
        into: the column to write, [L] float32.

    >>> samples = Batch.of(group_id=[7, 7], reward=[1.0, 0.0], response_ids=[[5, 6], [8]])
    >>> group_advantages(samples, estimator=group_centred)["advantages"].to_pylist()
    [[0.5, 0.5], [-0.5]]
    """
    rows = response_rows(samples, RESPONSE_IDS)
    advantages_B = episode_advantages(Episodes.of(samples), rows, estimator, reward, within)
    advantages_T = rows.only_trained(rows.per_token(advantages_B))
    if whiten:
        advantages_T = whitened(advantages_T, rows)
    return samples.with_columns(**{into: (advantages_T, rows.cu_seqlens)})


def episode_advantages(
    episodes: Episodes,
    rows: PackedRows,
    estimator: Estimator,
    reward: str,
    within: str | None = None,
) -> Tensor:
    """Return the advantage of each row's episode: [rows], 0 for episodes that do not vote."""
    values = [torch.from_numpy(episodes.values(name)) for name in (reward, *_columns_of(estimator))]
    groups, lengths = episodes.groups()[1], episodes.sums(rows.trained_lengths.numpy())
    if within is not None:
        parts = np.unique(episodes.values(within), return_inverse=True)[1]
        groups = np.unique(groups * (parts.max(initial=0) + 1) + parts, return_inverse=True)[1]
    columns = dict(zip(_columns_of(estimator), values[1:], strict=True))
    outcomes = Outcomes(
        values[0], torch.from_numpy(groups), torch.from_numpy(lengths.astype(np.int64)), columns
    )
    return torch.from_numpy(episodes.to_rows(estimator(outcomes).numpy()))


def _centred(outcomes: Outcomes) -> tuple[Tensor, Tensor]:
    """Return rewards minus the mean of their group [B], and group sizes [groups], both in float64.

    Sums of equal float32 numbers are exact in float64, so equal rewards give exact zeros. Rounding
    errors, divided by an equally small deviation, would look like advantages.
    """
    rewards, groups = outcomes.rewards.float().double(), outcomes.groups
    sizes = torch.bincount(groups).double()
    return rewards - (_sums(rewards, groups, len(sizes)) / sizes).index_select(0, groups), sizes


def _sums(values: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    return torch.bincount(groups, weights=values, minlength=num_groups)
