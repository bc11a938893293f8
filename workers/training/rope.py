"""Rope whose frequencies follow the length of a sequence (longrope, dynamic NTK), for rows that share a forward pass.

`transformers` takes the longest position of all rows for the length, and asks the device for it. Here a copy of the model's own module gets
each row by itself, on the host, which knows its length: a row has the frequencies that it has alone, and no device is waited for.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .host_copies import to_device
from .packed_sequences import PackedSequences


def follows_length(model: nn.Module) -> bool:
    """Whether the frequencies of the model's rope depend on the length of a sequence."""
    return any(_follows_length(module) for module in model.modules())


class RopesByRow:
    """The ropes of such a model, told before each pass of its rows; they are padded, `[B, L]` tokens, or packed, `[1, T]`.

    Args:
        causal_lm: the forward methods of its ropes are replaced.
    """

    def __init__(self, causal_lm: nn.Module) -> None:
        self._rows: PackedSequences | None = None
        for module in causal_lm.modules():
            if _follows_length(module):
                module.forward = partial(self._forward, copy.deepcopy(module).cpu())

    def begin(self, rows: PackedSequences) -> None:
        """A pass of these rows begins."""
        self._rows = rows

    def _forward(self, rope: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        assert self._rows is not None
        like = torch.empty((), dtype=x.dtype).expand(x.shape)  # a rope looks at its type and where it is
        across = len(position_ids) == 1
        parts = []
        for row in self._rows.positions_by_row(padded=not across):
            # Frequencies of a longer sequence are kept until a short one comes: the one before must not matter.
            rope(like, torch.zeros_like(row[:, :1]), *args, **kwargs)
            parts.append(rope(like, row, *args, **kwargs))
        found = (torch.cat(each, dim=1 if across else 0) for each in zip(*parts, strict=True))
        return tuple(to_device(each, x.device) for each in found)


def _follows_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)  # of each kind of layer, in some models
    names = kinds.values() if isinstance(kinds, Mapping) else [kinds]
    return any(isinstance(name, str) and (name == "longrope" or "dynamic" in name) for name in names)
