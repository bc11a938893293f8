"""Garbage collection while a run goes on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (100_000, 20, 20)
"""Of Python's collector: a driver allocates some objects for each row that live as long as the row, and none of them in cycles with what
the rest of the process holds on to. With the default of 700, a third of its time went into looking through them."""


@contextmanager
def collected_seldom(seldom: bool) -> Iterator[None]:
    """Have Python look for garbage less often.

    Args:
        seldom: nothing is changed without it, such as where workers share the process: their garbage may hold tensors.
    """
    before = gc.get_threshold()
    if seldom:
        gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
