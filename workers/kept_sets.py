"""Kept sets: the tokens that truncated sampling (`Sampling.truncates`) leaves to sample from.

A set is stored as the ids of its tokens, or of all others if those are fewer. So a set of the 20
likeliest tokens has 20 ids, and the set of all tokens but one stop token has one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..dataflow.column import KEPT_COUNTS, KEPT_IDS

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class KeptSets:
    """The kept sets of L tokens, in 4 bytes for each token and each id."""

    counts: np.ndarray
    """[L] int32. n: the set has the next n ids; -n: all tokens but the next n ids; 0: all tokens."""
    ids: np.ndarray
    """[sum of |counts|] int32 token ids."""

    @classmethod
    def whole(cls, length: int) -> KeptSets:
        """Return the sets of tokens that were sampled from the whole vocabulary, or not sampled."""
        return cls(np.zeros(length, np.int32), np.zeros(0, np.int32))

    @classmethod
    def of_mask(cls, kept: Tensor) -> KeptSets:
        """Return the sets of a [L, vocabulary] bool mask, true for kept tokens.

        >>> import torch
        >>> sets = KeptSets.of_mask(torch.tensor([[True, False, False, True], [True, True, False, True], [True] * 4]))
        >>> sets.counts.tolist(), sets.ids.tolist()
        ([2, -1, 0], [0, 3, 2])
        """
        sizes, vocabulary = kept.sum(1), kept.shape[1]
        few = 2 * sizes <= vocabulary
        ids = (kept == few[:, None]).nonzero()[:, 1]
        counts = sizes - vocabulary * ~few
        return cls(*(each.cpu().numpy().astype(np.int32) for each in (counts, ids)))

    @classmethod
    def of_lists(cls, kept: Iterable[Sequence[int]], vocabulary: int) -> KeptSets:
        """Return the sets of these token ids.

        >>> sets = KeptSets.of_lists([[3, 0], [0, 1, 3]], vocabulary=4)
        >>> sets.counts.tolist(), sets.ids.tolist()
        ([2, -1], [3, 0, 2])
        """
        found = KeptSetsRecord()
        for each in kept:
            ids = np.asarray(each, np.int32)
            few = 2 * len(ids) <= vocabulary
            stored = ids if few else np.setdiff1d(np.arange(vocabulary, dtype=np.int32), ids)
            found.append(len(stored) if few else -len(stored), stored)
        return found.sets

    @classmethod
    def concat(cls, parts: Sequence[KeptSets]) -> KeptSets:
        """Return the sets of all parts, at least one, in order."""
        return cls(
            *(np.concatenate(each) for each in zip(*((p.counts, p.ids) for p in parts), strict=True))
        )

    @cached_property
    def ends(self) -> np.ndarray:
        """[L + 1] int64: the ids of token i are `ids[ends[i]:ends[i + 1]]`."""
        return np.concatenate([[0], np.cumsum(np.abs(self.counts), dtype=np.int64)])

    def __getitem__(self, part: slice) -> KeptSets:
        """Return the sets of a contiguous part of the tokens."""
        start, stop, _ = part.indices(len(self.counts))
        return KeptSets(self.counts[start:stop], self.ids[self.ends[start] : self.ends[stop]])


class KeptSetsRecord:
    """The kept sets of a response while an engine samples it, as compact as `KeptSets`."""

    def __init__(self) -> None:
        self._counts, self._ids = array("i"), array("i")

    def append(self, count: int, ids: np.ndarray) -> None:
        """Add the set of a token: an element of `KeptSets.counts`, and its int32 ids."""
        self._counts.append(count)
        self._ids.frombytes(ids.tobytes())

    @property
    def sets(self) -> KeptSets:
        return KeptSets(np.array(self._counts, np.int32), np.array(self._ids, np.int32))


def record_kept_sets(kept: Tensor, records: Iterable[KeptSetsRecord]) -> None:
    """Add a row of a mask, [responses, vocabulary] bool, to the record of each response."""
    sets = KeptSets.of_mask(kept)
    for row, record in enumerate(records):
        part = sets[row : row + 1]
        record.append(int(part.counts[0]), part.ids)


def kept_columns(rows: Sequence[KeptSets]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the columns `kept_counts` and `kept_ids` of rows, one `KeptSets` for each."""
    parts = {str(KEPT_COUNTS): [r.counts for r in rows], str(KEPT_IDS): [r.ids for r in rows]}
    none = np.zeros(0, np.int32)
    return {
        name: (np.concatenate([none, *each]), np.cumsum([0, *map(len, each)]))
        for name, each in parts.items()
    }
