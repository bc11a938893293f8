"""Advantages of sampled responses from their rewards, relative to the other responses to the same prompt.

An estimator is a function `(rewards [B], groups [B]) -> advantages [B]`; `group_advantages` makes a node of a graph of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ..dataflow.batch import Batch
from ..dataflow.column import ADVANTAGES, RESPONSE_IDS, REWARD
from ..dataflow.lazy import torch
from ..dataflow.operation import Shape, node

if TYPE_CHECKING:
    from torch import Tensor

Estimator: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"


def group_normalized(rewards: Tensor, groups: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + epsilon) over i's group (GRPO, arXiv:2402.03300, §4.1.2).

    The deviation is the sample's (divided by n - 1), as in the implementations that followed the paper.

    Args:
        rewards: [B]; no gradient.
        groups: [B] int64, which group each row is of, 0 to the number of groups - 1; rows of a group in any order.
        epsilon: keeps a group of nearly equal rewards from exploding.

    Returns:
        [B] float32; exactly 0 for a group of one row or of equal rewards, never NaN; empty for no rows.

    >>> group_normalized(torch.tensor([1.0, 0.0, 5.0, 0.0]), torch.tensor([0, 0, 1, 0])).tolist()
    [1.1546..., -0.5773..., 0.0, -0.5773...]
    """
    centred, sizes = _centred(rewards, groups)
    variances = _sums(centred.square(), groups, len(sizes)) / (sizes - 1).clamp(min=1)
    return (centred / (variances.sqrt()[groups] + epsilon)).float()


def group_centred(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = r_i - mean(r) over i's group (Dr. GRPO, arXiv:2503.20783, §3.1): no division, so no bias to easy or hard prompts.

    Args:
        rewards: [B]; no gradient.
        groups: [B] int64, which group each row is of, 0 to the number of groups - 1; rows of a group in any order.

    Returns:
        [B] float32; exactly 0 for a group of one row or of equal rewards; empty for no rows.

    >>> group_centred(torch.tensor([1.0, 0.0, 5.0, 0.5]), torch.tensor([0, 0, 1, 0])).tolist()
    [0.5, -0.5, 0.0, 0.0]
    """
    return _centred(rewards, groups)[0].float()


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = r_i - mean of the others' rewards in i's group (RLOO, arXiv:2402.14740, eq. 7): n / (n - 1) (r_i - mean(r)).

    Args:
        rewards: [B]; no gradient.
        groups: [B] int64, which group each row is of, 0 to the number of groups - 1; rows of a group in any order.

    Returns:
        [B] float32; exactly 0 for a group of one row (it has no others) or of equal rewards; empty for no rows.

    >>> leave_one_out(torch.tensor([1.0, 0.0, 5.0, 0.5]), torch.tensor([0, 0, 1, 0])).tolist()
    [0.75, -0.75, 0.0, 0.0]
    """
    centred, sizes = _centred(rewards, groups)
    return (centred * (sizes / (sizes - 1).clamp(min=1))[groups]).float()


@node(shape=Shape.GROUP, reads=(REWARD, RESPONSE_IDS), writes=(ADVANTAGES,))
def group_advantages(samples: Batch, *, estimator: Estimator = group_normalized) -> Batch:
    """Advantages relative to the rest of the group, the same for every token of a response.

    >>> samples = Batch.of(group_id=[7, 7], reward=[1.0, 0.0], response_ids=[[5, 6], [8]])
    >>> group_advantages(samples, estimator=group_centred)["advantages"].to_pylist()
    [[0.5, 0.5], [-0.5]]
    """
    _, index = samples.groups()
    rewards = torch.tensor(samples.numpy(REWARD))  # a copy: Arrow's memory is read-only, which torch would warn of
    advantages_B = estimator(rewards, torch.from_numpy(index.astype(np.int64, copy=False)))
    _, cu_seqlens = samples.ragged_numpy(RESPONSE_IDS)
    advantages_T = np.repeat(advantages_B.numpy(), np.diff(cu_seqlens))
    return samples.with_columns(advantages=(advantages_T, cu_seqlens))


def _centred(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards less their group's mean [B], and the groups' sizes [groups], in float64.

    The mean is taken of differences from one row of the group, so that equal rewards give exact zeros: the rounding
    of a plain mean, divided by a deviation of the same size, would make an advantage out of nothing.
    """
    rewards, num_groups = rewards.double(), int(groups.max()) + 1 if len(groups) else 0
    one_of_group = torch.zeros(num_groups, dtype=rewards.dtype).index_copy_(0, groups, rewards)
    differences = rewards - one_of_group[groups]
    sizes = torch.bincount(groups, minlength=num_groups).double()
    return differences - (_sums(differences, groups, num_groups) / sizes)[groups], sizes


def _sums(values: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    return torch.zeros(num_groups, dtype=values.dtype).index_add_(0, groups, values)
