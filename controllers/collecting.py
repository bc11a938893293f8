"""Garbage collection while a run goes on, or is restored."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (500_000, 1_000, 1_000)
"""Of Python's collector. A driver allocates some objects for each row, which live as long as the row and are in no circle when it is
finished. To look through all of them again and again took a third of the driver's time."""


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
