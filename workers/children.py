"""Children: what an expansion yields of its rows where they come one by one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..dataflow.batch import Batch


@dataclass(frozen=True)
class Children:
    """New rows of some parents. An expansion that returns or yields a plain `Batch` gives all rows of the parents in it.

    A row is the same row, with the same `sample_id`, by its parent and its number, whoever makes it and when. So a parent whose worker
    died keeps the rows that were yielded, and the next worker makes the others: it finds their numbers in the column `made_before`.
    """

    rows: Batch
    """[rows] with a column `parent_id`."""
    numbers: np.ndarray
    """[rows] int64 number of each row among those of its parent, from 0."""
    finished: np.ndarray
    """int64 sample ids of the parents that get no more rows."""
