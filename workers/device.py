"""The device of a rank: the one that it alone sees, or else that of its local rank; never one that another rank has."""

from __future__ import annotations

import sys

from ..dataflow.errors import UserError
from ..dataflow.lazy import torch
from .worker import Context


def device_index(context: Context, visible: int) -> int:
    """Which of the GPUs that a process sees is its own.

    >>> device_index(Context(local_rank=3, devices=("3",)), 1), device_index(Context(local_rank=3), 8)
    (0, 3)

    Args:
        context: of the rank.
        visible: GPUs that the process sees, at least one.

    Raises:
        UserError: the process sees its node's GPUs, and they are fewer than the ranks there.
    """
    if context.devices:
        return 0
    if context.local_rank >= visible:
        raise UserError(
            f"rank {context.rank} of {context.name!r} is number {context.local_rank} of its group on its node, counted from 0, and sees "
            f"only {visible} GPUs there: two ranks would share one; take fewer ranks on a node"
        )
    return context.local_rank


def peak_device_bytes() -> int:
    """Most bytes that PyTorch has held on the current GPU of this process; 0: it has used none."""
    loaded = sys.modules.get("torch")
    if loaded is None or not loaded.cuda.is_available() or not loaded.cuda.is_initialized():
        return 0
    return loaded.cuda.max_memory_reserved()


def rank_device(context: Context) -> torch.device:
    """The device of a rank, which becomes the current one of its process: `cuda` without a number means it, too.

    Raises:
        UserError: as `device_index`.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", device_index(context, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device
