"""MovingAverage: the average of the versions of a model's weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .sharding import local_part, lying_as


class MovingAverage:
    """a = (1 - mix) a + mix w over the versions w of a model's weights (TR-DPO's soft update,
    arXiv:2404.09656); at first, a has the values of the model. Each rank averages its own part.

    The average is float32 in host memory, because half precision would lose small changes.

    >>> weights = {"head": torch.tensor([0.0])}
    >>> average = MovingAverage(weights, mix=0.5)
    >>> for version, value in enumerate((1.0, 3.0), 1):
    ...     _ = weights["head"].fill_(value)  # the version arrives
    ...     average.add(weights, version)
    ...     weights["head"].item()
    0.5
    1.75
    """

    def __init__(self, tensors: Mapping[str, Tensor], mix: float) -> None:
        self.mix = mix
        self.version = 0
        """Latest version in the average."""
        self._parts = {
            name: local_part(tensor.detach()).to("cpu", torch.float32, copy=True)
            for name, tensor in tensors.items()
            if tensor.is_floating_point()
        }

    def add(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Add the version that the tensors hold, and replace it by the average. Each version counts
        once, even if it arrives again after a failure."""
        if version != self.version:
            for name, average in self._parts.items():
                change = local_part(tensors[name].detach()).to("cpu", torch.float32, copy=True)
                # Operations of one rounding each, so that the result does not depend on the sharding.
                average += change.sub_(average).mul_(self.mix)
        self.put(tensors, version)

    def put(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Replace the values of the tensors by the average up to this version."""
        for name, average in self._parts.items():
            local_part(tensors[name].detach()).copy_(average)
        self.version = version

    def state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the average, sharded like the tensors; tensors of integers as they are."""
        return {
            name: lying_as(tensor.detach(), self._parts.get(name, local_part(tensor.detach())))
            for name, tensor in tensors.items()
        }
