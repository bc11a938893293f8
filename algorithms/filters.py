"""Filters: nodes that decide which rows go on."""

from __future__ import annotations

from ..dataflow.batch import Batch
from ..dataflow.operation import Shape, node


@node(shape=Shape.FILTER, reads=("{by}",), quorum=True)
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
