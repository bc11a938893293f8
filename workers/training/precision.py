"""Mixed precision of one process: what FSDP's `MixedPrecisionPolicy` does on several ranks, so that any number of them computes the same.

Parameters that are trained are held in float32. For a pass, forward and backward, each stands rounded in its place; gradients arrive in
float32 (over several ranks, after they were added up in `ModelConfig.gradients`). Frozen models are held in the dtype of their passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .response_model import ResponseModel


def keep_in(model: ResponseModel, dtype: torch.dtype) -> None:
    """Let a model on the meta device have its parameters in another dtype; a scalar head keeps its own, because half precision is too
    coarse for values."""
    kept = set(model.scalar_head.parameters()) if model.scalar_head is not None else set[nn.Parameter]()
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter not in kept:
            parameter.data = parameter.data.to(dtype)


@contextmanager
def rounded_parameters(model: nn.Module, dtype: torch.dtype, *, but: nn.Module | None = None) -> Iterator[None]:
    """Replace parameters by copies in another dtype. The backward pass must be inside as well, because it may recompute activations.

    Args:
        but: a module whose parameters stay as they are.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> with rounded_parameters(layer, torch.bfloat16):
    ...     layer.weight.dtype, layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    (torch.bfloat16, None)
    >>> layer.weight.dtype, layer.weight.grad.dtype
    (torch.float32, torch.float32)
    """
    kept = set(but.modules()) if but is not None else set()
    owners = [module for module in model.modules() if module not in kept]
    before = [dict(module._parameters) for module in owners]
    rounded: dict[Tensor, Tensor] = {}  # a tied parameter is rounded once, as FSDP gathers it once
    for parameters in before:
        for parameter in parameters.values():
            if parameter is not None and parameter.is_floating_point() and parameter not in rounded:
                rounded[parameter] = parameter.to(dtype)
    try:
        for module, parameters in zip(owners, before, strict=True):
            for name, parameter in parameters.items():
                if parameter is not None:
                    module._parameters[name] = rounded.get(parameter, parameter)  # pyright: ignore[reportArgumentType]
        yield
    finally:
        for module, parameters in zip(owners, before, strict=True):
            module._parameters.update(parameters)
