"""Tensor parallelism: split a model's layers over a replica's ranks by its `transformers` plan.

Split parameters become `DTensor`s, which FSDP shards further. Each rank holds some whole experts
(arXiv:2006.16668). All ranks of a replica have the same tokens. Each rank computes its own experts,
and a sum over ranks combines the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from ...dataflow.errors import UserError
from .adapter import shared_parts
from .sharding import local_part
from .tensor_parallel_plan import COLUMNS, EXPERTS, PARTIAL, ROWS, TensorParallelPlan


def share_layers(causal_lm: Any, mesh: DeviceMesh) -> frozenset[str]:
    """Split a `transformers` model on the meta device, which may have LoRA layers, in place. Return
    the names of replicated parameters whose gradients must be summed (`add_up`). Raises UserError
    if a layer does not divide evenly, or if experts are not in the form of `transformers`."""
    plan = TensorParallelPlan.of_model(causal_lm.tp_plan, causal_lm.ep_plan)
    # `sharded_model.py` splits embeddings and head.
    elsewhere = (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings())
    partials: set[str] = set()
    for name, module in list(causal_lm.named_modules()):
        style = plan.style_of(name)
        if style is None or any(module is known for known in elsewhere):
            continue
        if style in PARTIAL:
            partials |= {f"{name}.{own}" for own, _ in module.named_parameters()}
        elif style in EXPERTS:
            _share_experts(name, module, mesh)
        else:
            _share_linear(name, module, style, mesh)
    return frozenset(partials)


def add_up(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Sum the gradients of parameters over the ranks of a mesh, in one collective."""
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return
    together = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(together, group=mesh.get_group())
    for gradient, total in zip(gradients, together.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def _share_linear(name: str, module: nn.Module, style: str, mesh: DeviceMesh) -> None:
    weight, ranks = cast(Tensor, cast(Any, module).weight), mesh.size()
    dimension = 0 if style in ROWS else 1
    if weight.shape[dimension] % ranks:
        raise UserError(
            f"tensor_parallel={ranks} does not divide the "
            f"{'outputs' if style in ROWS else 'inputs'} of {name}, a layer of "
            f"{weight.shape[1]} inputs and {weight.shape[0]} outputs"
        )
    carried: ParallelStyle
    if style in ROWS:
        carried = ColwiseParallel(output_layouts=Replicate() if ROWS[style] else None)
    else:
        carried = RowwiseParallel(input_layouts=Replicate() if COLUMNS[style] else None)
    if isinstance(module, LoraLayer):
        parts = shared_parts(rows=style in ROWS)
        parallelize_module(cast(nn.Module, module), mesh, dict.fromkeys(parts, carried))
    else:
        parallelize_module(module, mesh, carried)


# Experts


def _share_experts(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    experts, ranks = cast(Any, module).num_experts, mesh.size()
    if experts % ranks:
        raise UserError(f"tensor_parallel={ranks} does not divide the {experts} experts of {name}")
    if odd := [own for own, p in module.named_parameters() if "." in own or p.shape[0] != experts]:
        raise UserError(
            f"tensor_parallel={ranks} cannot share the experts of {name}: {odd[0]} is not stacked by expert"
        )

    def shard(_: str, own: nn.Module, mesh: DeviceMesh) -> None:
        for parameter_name, parameter in list(own.named_parameters(recurse=False)):
            shared = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            shared = nn.Parameter(shared, requires_grad=parameter.requires_grad)
            own.register_parameter(parameter_name, shared)

    distribute_module(module, mesh, shard)
    held = cast(Any, module)
    held.num_experts = experts // ranks
    held._is_expert_parallel = True  # grouped matrix products skip experts beyond the last one
    held.forward = partial(_own_experts, module, held.forward, mesh)


def _own_experts(
    module: nn.Module,
    forward: Callable[..., Tensor],
    mesh: DeviceMesh,
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    """Compute this rank's experts, and sum over ranks. The inputs are equal on all ranks:
    [T, hidden] states, each token's experts ([T, k] int64), and their outputs' weights ([T, k])."""
    held, group = cast(Any, module), mesh.get_group()
    experts: int = held.num_experts
    chosen = chosen - mesh.get_local_rank() * experts
    elsewhere = (chosen < 0) | (chosen >= experts)
    # A loop over experts cannot skip tokens of other ranks' experts, so for these it computes its
    # first expert with weight 0.
    loops = getattr(getattr(held, "config", None), "_experts_implementation", "eager") == "eager"
    chosen = chosen.masked_fill(elsewhere, 0 if loops else experts)
    weights = _SumOfGradients.apply(weights, group).masked_fill(elsewhere, 0.0)
    whole = dict(module._parameters)
    try:
        for name, parameter in whole.items():
            if isinstance(parameter, DTensor):
                module._parameters[name] = cast(Any, parameter.to_local())
        out = forward(_SumOfGradients.apply(hidden, group), chosen, weights)
    finally:
        module._parameters.update(whole)
    return cast(Tensor, _Sum.apply(out, group))


class _SumOfGradients(torch.autograd.Function):
    """Identity for an input that all ranks have, but use for different parts; its backward pass
    sums the gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # The collective works in place, and autograd may still use this gradient elsewhere.
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """Sum over ranks. Each rank's input gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None
