"""Compiled layers: each layer of a model by `torch.compile`, as a setting.

Compiled is what a layer does with its tokens, not what is around it: FSDP gathers its parameters before, activations are checkpointed
outside, and attention over packed rows, which depends on lengths that the host knows, runs as it is, between two compiled parts. All layers
of a kind share what is compiled, and the number of tokens is dynamic, so nothing is compiled anew from microbatch to microbatch.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from ...dataflow.errors import UserError
from .response_model import ResponseModel

_BACKEND = "inductor"


def compile_layers(model: ResponseModel, device: torch.device) -> None:
    """Have the layers of a model compiled, when they first run.

    Raises:
        UserError: it is a mixture of experts, its layers are not known, or there is nothing to compile with.
    """
    if model.routers is not None:
        raise UserError(
            f"compile=True: model {model.causal_lm.name_or_path!r} is a mixture of experts, whose routers are watched layer by "
            "layer; leave it out"
        )
    if not model.layers:
        raise UserError(
            f"compile=True: the layers of model {model.causal_lm.name_or_path!r} are not known; leave it out"
        )
    _check_compiler(device)
    for layer in model.layers:
        cast(Any, layer).forward = torch.compile(layer.forward, backend=_BACKEND, dynamic=True)


def _check_compiler(device: torch.device) -> None:
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:
            raise UserError(
                f"compile=True takes a C++ compiler on a CPU, and there is none (g++, or what CXX names): {error}"
            ) from None
        return
    from torch.utils._triton import has_triton

    if not has_triton():
        raise UserError("compile=True takes Triton on a GPU, and this torch has none: pip install triton")
