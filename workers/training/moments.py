"""AdamW's moments: what it keeps of each parameter. Each way of keeping them is a class.

PlainMoments       float32, beside their parameters
HostMoments        float32, in host memory (`offload.py`)
EightBitMoments    in 8 bits, beside their parameters (`eight_bit.py`)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Their names, as torch gives them: the running means of gradients, and of their squares."""


class PlainMoments(torch.optim.AdamW):
    """AdamW with float32 moments that lie where their parameters do."""

    def first_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """The moments of a parameter before its first step."""
        return {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in MOMENTS}

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """The moments and the number of steps of a parameter; made as AdamW makes them at its first step, if there are none yet."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= self.first_moments(parameter)
        return state

    def follow(self, device: torch.device) -> None:
        """Move moments to the device of their parameters, which have been moved there."""
        for state in self.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(device)
