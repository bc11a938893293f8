"""Filters: nodes that decide which rows go on."""

from __future__ import annotations

import numpy as np

from ..dataflow.batch import Batch
from ..dataflow.metrics import Metrics, Sum
from ..dataflow.operation import Shape, node
from ..dataflow.takes import GROUPS, Quorum
from .advantages import have_equal_rewards


@node(shape=Shape.FILTER, reads=lambda by: (by,), takes=Quorum)
def first_of_group(samples: Batch, n: int, *, by: str = "reward", deadline_s: float | None = None) -> Batch:
    """The first `n` rows of each group that have the column `by`; the others are cancelled and counted as over-issued.

    Generate more samples than are needed, and no group waits for its slowest: `rollout.generate(prompts, n=10)`, then
    `first_of_group(samples, 8)`. Work on a cancelled row that has not begun is left undone, a late result is let go.

    Args:
        n: rows of a group that go on; fewer when the group has fewer.
        by: the column that makes a row count as finished.
        deadline_s: seconds after a group's first finished row when those that are there go on without the others; None
            waits for `n`.

    >>> first_of_group(Batch.of(sample_id=[1, 2], reward=[0.0, 1.0]), 2).numpy("sample_id").tolist()
    [1, 2]
    """
    return samples


@node(shape=Shape.FILTER, reads=lambda by: (by,), takes=GROUPS)
def drop_zero_variance(samples: Batch, *, by: str = "reward") -> tuple[Batch, Metrics]:
    """Drops groups whose rewards are all equal: relative to each other their rows have an advantage of 0, and no gradient
    (dynamic sampling, DAPO, arXiv:2503.14476, eq. 11).

    In training other prompts are issued in their place, so that a step keeps its size; where all groups are alike it goes on
    sampling and does not end.

    Args:
        samples: whole groups.
        by: the column that is compared, exactly.

    Returns:
        The other groups, and `zero_variance_groups`: how many were dropped; groups of one row are among them. A group with a
        reward that is not a number is kept.

    >>> samples = Batch.of(group_id=[7, 8, 7, 8], reward=[1.0, 1.0, 0.0, 1.0])
    >>> kept, metrics = drop_zero_variance(samples)
    >>> kept["group_id"].to_pylist(), metrics["zero_variance_groups"].value
    ([7, 7], 1.0)
    """
    equal, (_, index) = have_equal_rewards(samples, by), samples.groups()
    return samples.take(np.flatnonzero(~equal[index])), {"zero_variance_groups": Sum(float(equal.sum()))}
