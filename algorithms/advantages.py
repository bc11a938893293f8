"""Advantages of sampled responses from their rewards, relative to the other responses to the same prompt.

An estimator is a function or a value `(outcomes) -> advantages [B]`; `group_advantages` makes a node of a graph of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ..dataflow.batch import Batch
from ..dataflow.column import ADVANTAGES, BASELINE_REWARD, RESPONSE_IDS, RESPONSE_MASK, REWARD
from ..dataflow.errors import UserError, nearest
from ..dataflow.lazy import torch
from ..dataflow.metrics import Mean, Metrics
from ..dataflow.operation import Shape, node
from .loss import response_rows
from .values import whitened

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Outcomes:
    """What an estimator knows of B responses; nothing of it has a gradient.

    >>> Outcomes.of([1.0, 0.0], groups=[0, 0]).lengths.tolist()
    [1, 1]
    """

    rewards: Tensor
    """[B]; compared as float32."""
    groups: Tensor
    """[B] int64, which group each row is of, 0 to the number of groups - 1; rows of a group in any order."""
    lengths: Tensor
    """[B] int64, trained tokens of each response."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """[B] each: what an estimator names in its attribute `reads`."""

    @classmethod
    def of(cls, rewards: object, groups: object, lengths: object = None, **columns: object) -> Outcomes:
        """From tensors or lists; without lengths, every response has one token."""
        values = torch.as_tensor(rewards)
        index = torch.as_tensor(groups, dtype=torch.int64)
        counts = (
            torch.ones_like(index) if lengths is None else torch.as_tensor(lengths, dtype=torch.int64)
        )
        return cls(
            values, index, counts, {name: torch.as_tensor(column) for name, column in columns.items()}
        )

    def __getitem__(self, column: object) -> Tensor:
        name = str(column)
        if name not in self.columns:
            hint = nearest(name, self.columns) or f"; there are {', '.join(self.columns) or 'none'}"
            raise UserError(f"the estimator reads column {name!r}, which its outcomes do not have{hint}")
        return self.columns[name]


Estimator: TypeAlias = "Callable[[Outcomes], Tensor]"
"""An estimator that looks at further columns names them in an attribute `reads`; the graph is then checked for them."""


def group_normalized(outcomes: Outcomes, *, epsilon: float = 1e-6) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + epsilon) over i's group (GRPO, arXiv:2402.03300, §4.1.2).

    The deviation is the sample's (divided by n - 1), as in the implementations that followed the paper.

    Args:
        outcomes: B rows.
        epsilon: keeps a group of nearly equal rewards from exploding.

    Returns:
        [B] float32; exactly 0 for a group of one row or of equal rewards, never NaN; empty for no rows.

    >>> group_normalized(Outcomes.of([1.0, 0.0, 5.0, 0.0], groups=[0, 0, 1, 0])).tolist()
    [1.1546..., -0.5773..., 0.0, -0.5773...]
    """
    centred, sizes = _centred(outcomes)
    variances = _sums(centred.square(), outcomes.groups, len(sizes)) / (sizes - 1).clamp(min=1)
    return (centred / (variances.sqrt() + epsilon).index_select(0, outcomes.groups)).float()


def group_centred(outcomes: Outcomes) -> Tensor:
    """A_i = r_i - mean(r) over i's group (Dr. GRPO, arXiv:2503.20783, §3.1): no division, so no bias to easy or hard prompts.

    Args:
        outcomes: B rows.

    Returns:
        [B] float32; exactly 0 for a group of one row or of equal rewards; empty for no rows.

    >>> group_centred(Outcomes.of([1.0, 0.0, 5.0, 0.5], groups=[0, 0, 1, 0])).tolist()
    [0.5, -0.5, 0.0, 0.0]
    """
    return _centred(outcomes)[0].float()


def leave_one_out(outcomes: Outcomes) -> Tensor:
    """A_i = r_i - mean of the others' rewards in i's group (RLOO, arXiv:2402.14740, eq. 7): n / (n - 1) (r_i - mean(r)).

    Args:
        outcomes: B rows.

    Returns:
        [B] float32; exactly 0 for a group of one row (it has no others) or of equal rewards; empty for no rows.

    >>> leave_one_out(Outcomes.of([1.0, 0.0, 5.0, 0.5], groups=[0, 0, 1, 0])).tolist()
    [0.75, -0.75, 0.0, 0.0]
    """
    centred, sizes = _centred(outcomes)
    return (centred * (sizes / (sizes - 1).clamp(min=1)).index_select(0, outcomes.groups)).float()


def length_weighted(outcomes: Outcomes) -> Tensor:
    """A_i = r_i - sum(L r) / sum(L) over i's group, with the lengths L (OPO's optimal baseline, arXiv:2505.23585).

    It is the baseline of least variance where the squared norm of a response's gradient is proportional to its length.

    Args:
        outcomes: B rows with their lengths.

    Returns:
        [B] float32; exactly 0 for a group of one row or of equal rewards; r_i less a plain mean in a group whose rows are all
        empty; empty for no rows.

    >>> length_weighted(Outcomes.of([1.0, 0.0], groups=[0, 0], lengths=[3, 1])).tolist()
    [0.25, -0.75]
    """
    centred, sizes = _centred(outcomes)
    lengths = outcomes.lengths.double()
    totals = _sums(lengths, outcomes.groups, len(sizes)).clamp(min=1)
    offsets = _sums(lengths * centred, outcomes.groups, len(sizes)) / totals
    return (centred - offsets.index_select(0, outcomes.groups)).float()


def valid_groups_centred(outcomes: Outcomes) -> Tensor:
    """A_i = B / (B - M) (r_i - mean(r)), M rows being in groups of equal rewards (GPG, arXiv:2504.02546, with F_norm = 1).

    Rows of equal rewards teach nothing but count in the mean that the loss becomes; the factor makes up for them. It is over all
    rows given at once: the step's under `Synchronous`, the groups that happen to be ready under the other schedules.

    Args:
        outcomes: B rows.

    Returns:
        [B] float32; all 0 where no group has unequal rewards; empty for no rows.

    >>> valid_groups_centred(Outcomes.of([1.0, 0.0, 1.0, 1.0], groups=[0, 0, 1, 1])).tolist()
    [1.0, -1.0, 0.0, 0.0]
    """
    centred, sizes = _centred(outcomes)
    spread = _sums(centred.abs(), outcomes.groups, len(sizes))
    num_valid = float(sizes[spread > 0].sum())
    return (centred * (len(centred) / max(num_valid, 1.0))).float()


def best_of_group(outcomes: Outcomes) -> Tensor:
    """A_i = max(r) - max of the others' rewards in i's group (max@k, pass@k for rewards of 0 and 1; arXiv:2503.19595).

    The group is the k: the objective is the best reward of k samples, and what counts is how much a row adds to it.
    Only a single best row has an advantage.

    Args:
        outcomes: B rows.

    Returns:
        [B] float32, never negative; exactly 0 for a group of one row (it has no others) or of several best rows; empty for no
        rows.

    >>> best_of_group(Outcomes.of([1.0, 0.25, 5.0, 0.0], groups=[0, 0, 1, 0])).tolist()
    [0.75, 0.0, 0.0, 0.0]
    """
    rewards, groups = outcomes.rewards.double(), outcomes.groups
    sizes = torch.bincount(groups)

    def largest(values: Tensor) -> Tensor:
        of_group = torch.full((len(sizes),), -torch.inf, dtype=values.dtype)
        return of_group.scatter_reduce_(0, groups, values, "amax").index_select(0, groups)

    best = rewards == largest(rewards)
    alone = (_sums(best.double(), groups, len(sizes)) == 1) & (sizes > 1)
    lead = rewards - largest(torch.where(best, -torch.inf, rewards))
    return torch.where(best & alone.index_select(0, groups), lead, 0.0).float()


@dataclass(frozen=True)
class GreedyBaseline:
    """A_i = r_i - the reward of the greedy response to the same prompt (ReMax, arXiv:2310.10505).

    The graph samples twice: `greedy = reward.score(rollout.generate(prompts, sampling=Sampling(temperature=0)),
    into="baseline_reward")`, then `rollout.generate(greedy, n=...)`, whose rows carry the columns of their parents.

    >>> greedy_baseline(Outcomes.of([1.0, 0.0], groups=[0, 1], baseline_reward=[0.5, 0.25])).tolist()
    [0.5, -0.25]
    """

    column: str = str(BASELINE_REWARD)
    """[B] the greedy response's reward, at each row of its prompt."""

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.column,)

    def __call__(self, outcomes: Outcomes) -> Tensor:
        """[B] float32; empty for no rows."""
        return (outcomes.rewards.double() - outcomes[self.column].double()).float()


greedy_baseline = GreedyBaseline()

GROUP_RELATIVE = (
    group_normalized,
    group_centred,
    leave_one_out,
    length_weighted,
    valid_groups_centred,
    best_of_group,
)
"""Estimators whose advantages are all 0 in groups of one row."""


def is_group_relative(estimator: object) -> bool:
    """Whether an estimator is one of `GROUP_RELATIVE`, perhaps with some of its arguments given.

    >>> import functools
    >>> is_group_relative(functools.partial(group_normalized, epsilon=1.0)), is_group_relative(greedy_baseline)
    (True, False)
    """
    return getattr(estimator, "func", estimator) in GROUP_RELATIVE


def have_equal_rewards(samples: Batch, reward: str) -> np.ndarray:
    """[groups] bool, in the order of `samples.groups()`: whether all rewards of a group are equal. A reward that is not a number is
    equal to none.

    >>> have_equal_rewards(Batch.of(group_id=[7, 8, 7, 8], reward=[1.0, 1.0, 0.0, 1.0]), "reward").tolist()
    [False, True]
    """
    rewards, (groups, index) = samples.numpy(reward), samples.groups()
    first = np.zeros(len(groups), dtype=rewards.dtype)
    first[index] = rewards  # of each group some row's
    return np.bincount(index, weights=rewards != first[index], minlength=len(groups)) == 0


def _columns_of(estimator: Estimator) -> tuple[str, ...]:
    """Columns that an estimator reads beside the rewards."""
    return getattr(estimator, "reads", ())


def groups_without_signal(
    samples: Batch, *, reward: str = str(REWARD), estimator: Estimator = group_normalized, **_: object
) -> Metrics:
    """The share of groups whose rewards are all equal: relative to each other their rows have an advantage of 0. There is no such
    share where the estimator compares with something else.

    >>> samples = Batch.of(group_id=[7, 8, 7, 8], reward=[1.0, 1.0, 0.0, 1.0])
    >>> groups_without_signal(samples)["groups_without_signal"].value
    0.5
    """
    if _columns_of(estimator):
        return {}
    equal = have_equal_rewards(samples, reward)
    return {"groups_without_signal": Mean(float(equal.sum()), float(len(equal)))}


@node(
    shape=Shape.GROUP,
    reads=lambda reward, estimator: (reward, RESPONSE_IDS, *_columns_of(estimator)),
    may_read=(RESPONSE_MASK,),
    writes=(ADVANTAGES,),
    measure=groups_without_signal,
)
def group_advantages(
    samples: Batch,
    *,
    estimator: Estimator = group_normalized,
    reward: str = str(REWARD),
    whiten: bool = False,
) -> Batch:
    """Advantages relative to the rest of the group, the same for every token of a response.

    Args:
        samples: whole groups. In a run their share without signal (`groups_without_signal`) is among the metrics.
        estimator: advantages of rows from their outcomes.
        reward: the column that is compared.
        whiten: bring the advantages of all trained tokens given at once to mean 0 and deviation 1. With
            `estimator=group_centred` it is REINFORCE++'s baseline form (arXiv:2501.03262). What is "at once" is the step under
            `Synchronous`, and the groups that happen to be ready under the other schedules.

    >>> samples = Batch.of(group_id=[7, 7], reward=[1.0, 0.0], response_ids=[[5, 6], [8]])
    >>> group_advantages(samples, estimator=group_centred)["advantages"].to_pylist()
    [[0.5, 0.5], [-0.5]]
    """
    _, index = samples.groups()
    others = _columns_of(estimator)
    rows = response_rows(samples, RESPONSE_IDS, reward, *others)
    groups = torch.from_numpy(index.astype(np.int64, copy=False))
    outcomes = Outcomes(
        rows[reward], groups, rows.trained_lengths.long(), {name: rows[name] for name in others}
    )
    advantages_T = rows.per_token(estimator(outcomes))
    if whiten:
        advantages_T = whitened(advantages_T, rows)
    return samples.with_columns(advantages=(advantages_T, rows.cu_seqlens))


def _centred(outcomes: Outcomes) -> tuple[Tensor, Tensor]:
    """Rewards less their group's mean [B], and the groups' sizes [groups], in float64.

    Sums of equal float32 numbers are exact in float64, and so is their mean: equal rewards give exact zeros. Otherwise the
    rounding of a mean, divided by a deviation of the same size, would make an advantage out of nothing.
    """
    rewards, groups = outcomes.rewards.float().double(), outcomes.groups
    sizes = torch.bincount(groups).double()
    return rewards - (_sums(rewards, groups, len(sizes)) / sizes).index_select(0, groups), sizes


def _sums(values: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    return torch.bincount(groups, weights=values, minlength=num_groups)
