"""The optimizer of a model: AdamW, of the kind that keeps its moments as the settings say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .eight_bit import EightBitMoments
from .engine import ModelConfig, OptimizerConfig
from .moments import PlainMoments
from .offload import HostMoments


def make_optimizer(
    model: ModelConfig, config: OptimizerConfig, parameters: Iterable[nn.Parameter], device: torch.device
) -> PlainMoments:
    """An optimizer of the parameters that have a gradient; matrices alone have weight decay.

    Args:
        model: says where moments lie.
        config: of the optimizer.
        device: that computes.

    Raises:
        UserError: moments are to be kept in 8 bits, and torchao is not installed.
    """
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None  # one operation takes one mesh
            groups.setdefault((parameter.ndim > 1, mesh), []).append(parameter)
    kinds = [
        {"params": of_kind, "weight_decay": config.weight_decay if is_matrix else 0.0}
        for (is_matrix, _), of_kind in groups.items()
    ]
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "fused": True}
    if model.offload == "moments":
        return HostMoments(kinds, device, **settings)
    if config.moments == "8bit":
        return EightBitMoments(kinds, device, **settings)
    return PlainMoments(kinds, **settings)
