"""Loading: load a `transformers` model on the ranks of a group. Each rank reads only its parts, and
all check their passes against the model's own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...dataflow.errors import UserError
from ..models.images import ImageReader
from ..models.node_folder import node_folder
from ..worker import Context
from .adapter import Adapter
from .agreement import find_agreement
from .causal_lm import build_causal_lm, move_buffers
from .engine import Head, ModelConfig, TrainingConfig
from .response_model import ResponseModel
from .sharded_model import ShardedModel, keep_in
from .stored_weights import open_stored

# Compiled layers (`torch.compile`). Gathering by FSDP and activation checkpointing stay outside.
# Attention over packed rows, which depends on lengths on the host, runs uncompiled between two
# compiled parts. Layers of the same kind share compiled code, and the number of tokens is dynamic,
# so microbatches cause no recompilation.


_BACKEND = "inductor"


def compile_layers(model: ResponseModel, device: torch.device) -> None:
    """Compile the layers of a model when they first run.

    Raises:
        UserError: the model is a mixture of experts, its layers are unknown, or there is no
            compiler.
    """
    if model.routers is not None:
        raise UserError(
            f"compile=True: model {model.causal_lm.name_or_path!r} is a mixture of experts, "
            "whose routers are observed layer by layer; leave it out"
        )
    if not model.layers:
        raise UserError(
            f"compile=True: the layers of model {model.causal_lm.name_or_path!r} are "
            "unknown; leave it out"
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
                "compile=True needs a C++ compiler on a CPU, but there is none (g++, or "
                f"the one in CXX): {error}"
            ) from None
        return
    from torch.utils._triton import has_triton

    if not has_triton():
        raise UserError("compile=True needs Triton on a GPU, but this torch has none: pip install triton")


# Loading


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready for passes."""

    response: ResponseModel
    sharded: ShardedModel
    """The same model with its sharding."""
    bytes_read: int
    """Bytes of the model's files that this rank read."""
    images: ImageReader | None
    """Processor of a model that reads images, or None for a text model."""


def load_model(
    config: ModelConfig,
    context: Context,
    training: TrainingConfig | None,
    head: Head,
    mesh: DeviceMesh | None,
    device: torch.device,
) -> LoadedModel:
    """Load a model, sharding it before it has values. Collective.

    Args:
        config, context, training, head: see `EngineFactory`.
        mesh: mesh of the ranks; None if this rank has the whole model.
        device: device that computes.

    Raises:
        UserError: the model cannot be trained, or does not fit the ranks.
    """
    scalar, lora = head != "logprobs", training and training.lora
    again = training is not None and training.activation_checkpointing
    folder = node_folder(config.model, advance=context.advance)
    build = partial(
        build_causal_lm, config.model, folder, head, context.seed, activation_checkpointing=again
    )
    plain, skeleton = build(), build()
    weights = open_stored(config.model, folder, plain, share=(context.rank, context.world_size))
    response = ResponseModel(skeleton.causal_lm, scalar=scalar)
    response.requires_grad_(training is not None)
    made, adapter = dict(skeleton.made), None
    if training is None:
        keep_in(response, getattr(torch, config.dtype))
    if lora is not None:
        adapter = Adapter(skeleton.causal_lm, lora, getattr(torch, config.dtype), context.seed)
        made |= adapter.made
        adapter.made.clear()
    sharded = ShardedModel(config, response, mesh, device, adapter)
    sharded.fill(weights, made)
    bytes_read = weights.bytes_read
    del weights, made  # free the tensors of a completely loaded model
    move_buffers(plain.causal_lm, device)
    tried = ResponseModel(plain.causal_lm, scalar=scalar)
    images = ImageReader(config.model, folder) if tried.sees else None
    agreement = find_agreement(tried, sharded.full_base_tensor, by_layer=mesh is not None, images=images)
    sharded.check_head(agreement.head_form)
    agreement.put_on(response)
    sharded.share_tokens()
    if config.compile:
        compile_layers(response, device)
    return LoadedModel(response, sharded, bytes_read, images)
