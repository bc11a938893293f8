"""Copies from the host to the device that the host does not wait for.

A plain `tensor.to(device)` of CUDA returns when everything is done that the device has been given before: at the beginning of each
microbatch the host would wait for the one before, and then the device for the host.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(known: Tensor | np.ndarray, device: torch.device) -> Tensor:
    """What the host knows, on the device; itself, if that is the host. Nobody writes to it afterwards.

    >>> to_device(np.array([1, 2]), torch.device("cpu"))
    tensor([1, 2])
    """
    tensor = torch.from_numpy(known) if isinstance(known, np.ndarray) else known
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # other memory is copied once more, and in part waited for
    return tensor.to(device, non_blocking=True)
