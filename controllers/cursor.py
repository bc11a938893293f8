"""Cursor: how far a run has come in its data."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

CURSOR = "cursor"
"""Key of the note in a log that does not begin with the first row of the data: it says where the log begins."""


def positions(size: int, seed: int, *, shuffle: bool) -> Iterator[int]:
    """Rows of a source in the order in which they are issued, without end.

    Args:
        size: rows of the source.
        seed: of the run; each epoch has an order of its own, drawn from the seed.
        shuffle: False issues the rows as they stand.
    """
    for epoch in itertools.count():
        yield from np.random.default_rng((seed, epoch)).permutation(size).tolist() if shuffle else range(size)


@dataclass(frozen=True)
class Cursor:
    """The place in the data from which a run goes on without its rows in flight."""

    issued: int = 0
    """Rows of the source that were issued, in the order of the run."""
    again: tuple[int, ...] = ()
    """Rows among them that are issued once more, before all others, because no update was made with their responses."""

    def rest(self, order: Iterator[int], issued: int) -> Iterator[int]:
        """The rows that remain after `issued` rows were issued from this cursor."""
        return itertools.islice(itertools.chain(self.again, itertools.islice(order, self.issued, None)), issued, None)

    def after(self, issued: int, untrained: Iterable[int]) -> Cursor:
        """The cursor after `issued` rows from this one; the `untrained` rows among them have to be issued again."""
        return Cursor(self.issued + max(0, issued - len(self.again)), (*untrained, *self.again[issued:]))
