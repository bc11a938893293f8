"""The device of a rank: its only visible one, or the one of its local rank; never shared with
another rank."""

from __future__ import annotations

import sys

from ..dataflow.errors import UserError
from ..dataflow.lazy import torch
from .worker import Context


def device_index(context: Context, visible: int) -> int:
    """Return the index of this rank's GPU among the visible ones, at least one.

    >>> device_index(Context(local_rank=3, devices=("3",)), 1), device_index(Context(local_rank=3), 8)
    (0, 3)

    Raises:
        UserError: the process sees its node's GPUs, but the node has more ranks than GPUs.
    """
    if context.devices:
        return 0
    if context.local_rank >= visible:
        raise UserError(
            f"rank {context.rank} of {context.name!r} is number {context.local_rank} of its "
            f"group on its node, counted from 0, but sees only {visible} GPUs there: two "
            "ranks would share one; use fewer ranks per node"
        )
    return context.local_rank


def peak_device_bytes() -> int:
    """Return the most bytes that PyTorch has held on this process's current GPU; 0 if it has used
    none."""
    loaded = sys.modules.get("torch")
    if loaded is None or not loaded.cuda.is_available() or not loaded.cuda.is_initialized():
        return 0
    return loaded.cuda.max_memory_reserved()


def rank_device(context: Context) -> torch.device:
    """Return the device of a rank, and make it the current one, so that `cuda` without a number
    means it. Raises like `device_index`."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", device_index(context, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device
