"""Sharding: how tensors lie over the ranks of a group (replicas outermost, each of `tensor_parallel` ranks), and sums over all of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from ...dataflow.errors import UserError
from ..worker import Context
from .engine import ModelConfig


def join_mesh(context: Context, config: ModelConfig, device: torch.device) -> DeviceMesh | None:
    """The (dp, tp) mesh of the group, joined through its rendezvous; None for a group of one, which needs no sockets. Ranks that share
    tokens stand beside each other along dp.

    Raises:
        UserError: a replica's ranks do not divide those of the group, or there is no rendezvous.
        WorkerError: a rank did not come in time.
    """
    for name, size in (("tensor_parallel", config.tensor_parallel), ("sequence_parallel", config.sequence_parallel)):
        if context.world_size % size:
            raise UserError(f"{name}={size} does not divide the {context.world_size} ranks of {context.name!r}")
    if context.world_size == 1:
        return None
    if context.rendezvous is None:
        raise UserError(f"worker group {context.name!r} has {context.world_size} ranks but no rendezvous")
    if context.rendezvous.on_one_machine:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # do not listen to others
    store = context.rendezvous.join(context.name, context.rank, context.world_size)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=context.rank, world_size=context.world_size)
    shape = (context.world_size // config.tensor_parallel, config.tensor_parallel)
    return init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor without a gradient; gathered, by all ranks together, where it lies on several."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh.ndim > 1:  # first over replicas, as FSDP gathers: torch warns of the other order
        tensor = tensor.redistribute(placements=[Replicate(), *tensor.placements[1:]])
    return tensor.full_tensor()


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def lying_as(tensor: Tensor, part: Tensor) -> Tensor:
    """A tensor of which this rank has this part, and which lies over the ranks as another one does; on the part's device."""
    return DTensor(part, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else part  # pyright: ignore


def offset_of(tensor: Tensor) -> list[int]:
    """Where this rank's part begins in the full tensor, for each dimension."""
    if isinstance(tensor, DTensor):
        return list(tensor.__create_chunk_list__()[0].offsets)
    return [0] * tensor.ndim


def box_of(tensor: Tensor, start: Sequence[int], shape: Sequence[int]) -> Tensor:
    """A view of a box of a tensor.

    >>> box_of(torch.arange(6).view(2, 3), (0, 1), (2, 2)).tolist()
    [[1, 2], [4, 5]]
    """
    for dimension, (first, length) in enumerate(zip(start, shape, strict=True)):
        tensor = tensor.narrow(dimension, first, length)
    return tensor


def writes(tensor: Tensor, rank: int) -> bool:
    """Whether a rank writes its part: the part is not empty, and the rank is the first of those that hold equal copies."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    mesh = tensor.device_mesh
    place = zip(mesh.get_coordinate() or (), tensor.placements, strict=True)
    first = 0 in mesh.mesh and all(not placement.is_replicate() or at == 0 for at, placement in place)
    return first and tensor.to_local().numel() > 0


def gradient_norm(gradients: Iterable[Tensor], also: float = 0.0) -> float:
    """2-norm of all gradients together, each element counted once wherever it lies; equal on all ranks.

    Args:
        also: added on every rank before the sums are exchanged: a nan here makes the norm nan on every rank.
    """
    groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        mesh, shards = None, ()
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            shards = tuple(i for i, placement in enumerate(gradient.placements) if not placement.is_replicate())
        groups.setdefault((mesh, shards), []).append(local_part(gradient))
    total = 0.0
    for (mesh, shards), locals_ in groups.items():
        squares = nn.utils.get_total_norm(locals_).double().square() + also
        for dimension in shards:
            assert mesh is not None
            if mesh.size(dimension) == 1:  # torch may give the mesh of an engine that was closed, which is equal
                continue
            dist.all_reduce(squares, group=mesh.get_group(dimension))
        total += squares.item()
    return math.sqrt(total) if math.isfinite(total) else math.nan
