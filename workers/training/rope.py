"""Rope whose frequencies follow the length of a sequence (longrope, dynamic NTK), for rows that share a forward pass.

`transformers` takes the longest position of all rows for the length. Here the model's own module gets each row by itself, so a row has the
frequencies that it has alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def follows_length(model: nn.Module) -> bool:
    """Whether the frequencies of the model's rope depend on the length of a sequence."""
    return any(_follows_length(module) for module in model.modules())


def put_rope_by_row(model: nn.Module) -> None:
    """Change such a model in place, once: its rope sees one row at a time, padded rows `[B, L]` or packed ones `[1, T]`."""
    for module in model.modules():
        if _follows_length(module) and "forward" not in vars(module):
            module.forward = _by_row(module.forward)


def _follows_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)  # of each kind of layer, in some models
    names = kinds.values() if isinstance(kinds, Mapping) else [kinds]
    return any(isinstance(name, str) and (name == "longrope" or "dynamic" in name) for name in names)


def _by_row(rope: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        across = position_ids.shape[0] == 1
        parts = []
        for row in _rows(position_ids[0]) if across else position_ids.split(1):
            # Frequencies of a longer sequence are kept until a short one comes: the one before must not matter.
            rope(x, torch.zeros_like(row[:, :1]), *args, **kwargs)
            parts.append(rope(x, row, *args, **kwargs))
        return tuple(torch.cat(each, dim=1 if across else 0) for each in zip(*parts, strict=True))

    return forward


def _rows(positions: Tensor) -> list[Tensor]:
    """Packed positions cut where the next is not one more; `[1, L]` each.

    >>> [row.tolist() for row in _rows(torch.tensor([0, 1, 2, 0, 0, 1]))]
    [[[0, 1, 2]], [[0]], [[0, 1]]]
    """
    starts = (torch.diff(positions) != 1).nonzero()[:, 0] + 1
    return [row[None] for row in positions.tensor_split(starts.cpu())]
