"""Copies in host memory, and how many threads one process may use for its part of a transfer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import numpy as np
import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor over another one of its shape; in host memory, by the calling thread alone.

    torch shares a copy out over all cores and waits for each. Both sides of a transfer run at once, so a core that the other side has
    makes all others wait: a receiver with two threads on two cores took twice as long as with one, beside two ranks that gave.
    """
    if target.is_cpu and source.is_cpu and (dtype := target.dtype) == source.dtype:
        bits = _BITS.get(dtype.itemsize)
        if bits is not None:
            np.copyto(_array(target, bits), _array(source, bits))
            return
    target.copy_(source)


def _array(tensor: torch.Tensor, bits: torch.dtype) -> np.ndarray:
    if tensor.requires_grad:
        tensor = tensor.detach()
    return (tensor if tensor.dtype is bits else tensor.view(bits)).numpy()


@contextlib.contextmanager
def threads_beside(others: int) -> Iterator[None]:
    """torch's operations in this thread leave each of so many other processes of this machine a core.

    >>> before = torch.get_num_threads()
    >>> with threads_beside(10_000):
    ...     torch.get_num_threads()
    1
    >>> torch.get_num_threads() == before
    True
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, len(os.sched_getaffinity(0)) - others)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
