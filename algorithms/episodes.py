"""Episodes: the outcomes that statistics over a group count.

A harness may make several rows of one attempt at a prompt (sub-agents, a compacted context). These
rows share `episode_id` and the reward. Two rules hold for all statistics over groups:

- An episode counts once, however many rows it has.
- An episode without a trained token does not vote. Its rows have a `response_mask` of zeros, for
  example because a node masked them: their reward says nothing about the policy.

Failed episodes have no rows. A schedule that masks stale rows does so when the update claims them,
so these rows have voted before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..dataflow.batch import Batch
from ..dataflow.column import EPISODE_ID, GROUP_ID, RESPONSE_MASK, SAMPLE_ID
from ..dataflow.errors import UserError


@dataclass(frozen=True)
class Episodes:
    """The episodes of a batch that vote. Without the column `episode_id`, each row is an episode.

    >>> samples = Batch.of(group_id=[7, 7, 7], episode_id=[1, 2, 1], reward=[1.0, 0.0, 1.0])
    >>> episodes = Episodes.of(samples)
    >>> episodes.values("reward").tolist(), episodes.to_rows(np.array([5, 6])).tolist()
    ([1.0, 0.0], [5, 6, 5])
    """

    samples: Batch
    of_row: np.ndarray
    """[rows] int64: index of each row's episode; -1 if it does not vote."""
    first: np.ndarray
    """[episodes] int64: the first row of each episode."""

    @classmethod
    def of(cls, samples: Batch) -> Episodes:
        ids = samples.numpy(EPISODE_ID) if EPISODE_ID in samples else np.arange(len(samples))
        _, first, of_row = np.unique(ids, return_index=True, return_inverse=True)
        if RESPONSE_MASK in samples:
            mask, cu_seqlens = samples.ragged_numpy(RESPONSE_MASK)
            trained = np.diff(np.concatenate([[0], np.cumsum(mask != 0)])[cu_seqlens])
            votes = np.bincount(of_row, weights=trained, minlength=len(first)) > 0
            of_row, first = np.where(votes, np.cumsum(votes) - 1, -1)[of_row], first[votes]
        return cls(samples, of_row, first)

    def __len__(self) -> int:
        return len(self.first)

    def groups(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the sorted `keys` of groups with an episode, `[groups]`, and `index` `[episodes]`:
        episode i is in group `keys[index[i]]`."""
        return np.unique(self.samples.numpy(GROUP_ID)[self.first], return_inverse=True)

    def values(self, column: object) -> np.ndarray:
        """Return a per-row column's value for each episode, `[episodes]`. Raises a UserError if
        rows of an episode have different values, or if the column has no numbers."""
        of_rows = self.samples.numpy(column)
        if of_rows.dtype == object:
            self.samples.tensor(column)  # raises an error that names the column and its type
        wrong = self._differing(of_rows)
        if len(wrong):
            row = int(wrong[0])
            episode = int(self.of_row[row])
            first = int(self.first[episode])
            raise UserError(
                f"{self.name(episode)} has different values in column {str(column)!r}: "
                f"{of_rows[first]} in {row_name(self.samples, first)}, {of_rows[row]} in "
                f"{row_name(self.samples, row)}. An episode has one "
                "outcome: let the harness return it, or write the same value to all rows of the episode"
            )
        return of_rows[self.first]

    def agree_on(self, column: object) -> bool:
        """Return whether the rows of each episode have the same value of a per-row column."""
        return not len(self._differing(self.samples.numpy(column)))

    def _differing(self, of_rows: np.ndarray) -> np.ndarray:
        """Return the rows whose value differs from that of the first row of their episode."""
        own = np.flatnonzero(self.of_row >= 0)
        one, other = of_rows[self.first[self.of_row[own]]], of_rows[own]
        return own[(one != other) & ((one == one) | (other == other))]  # NaN equals NaN

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Return the sum over each episode's rows of `values` [rows], `[episodes]` float64."""
        own = self.of_row >= 0
        return np.bincount(self.of_row[own], weights=values[own], minlength=len(self))

    def to_rows(self, values: np.ndarray) -> np.ndarray:
        """Return `values` [episodes] for each row, `[rows]`; 0 for episodes that do not vote."""
        out = np.zeros(len(self.of_row), dtype=values.dtype)
        own = self.of_row >= 0
        out[own] = values[self.of_row[own]]
        return out

    def name(self, episode: int) -> str:
        """Name an episode in messages."""
        row = int(self.first[episode])
        if EPISODE_ID in self.samples:
            return f"episode {self.samples.numpy(EPISODE_ID)[row]}"
        return row_name(self.samples, row)


def row_name(samples: Batch, row: int) -> str:
    """Name a row in messages: by its sample id, if the batch has one."""
    return f"sample {samples.numpy(SAMPLE_ID)[row]}" if SAMPLE_ID in samples else f"row {row}"
