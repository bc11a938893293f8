"""Sharding: the device mesh of a group (replicas outermost, each of `tensor_parallel` ranks), parts
of tensors, and sums over ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from ...dataflow.errors import RunError, UserError
from ..worker import Context
from .engine import ModelConfig


def join_mesh(context: Context, config: ModelConfig, device: torch.device) -> DeviceMesh | None:
    """Join the (dp, tp) mesh of the group through its rendezvous. A group of one needs no sockets
    and gets None. Ranks that share tokens are adjacent along dp.

    Raises:
        UserError: the ranks of a replica do not divide those of the group, or there is no
            rendezvous.
        WorkerError: a rank did not join in time.
    """
    for name, size in (
        ("tensor_parallel", config.tensor_parallel),
        ("sequence_parallel", config.sequence_parallel),
    ):
        if context.world_size % size:
            raise UserError(
                f"{name}={size} does not divide the {context.world_size} ranks of {context.name!r}"
            )
    if context.world_size == 1:
        return None
    if context.rendezvous is None:
        raise UserError(f"worker group {context.name!r} has {context.world_size} ranks but no rendezvous")
    if context.rendezvous.on_one_machine:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # accept connections from this machine only
    store = context.rendezvous.join(context.name, context.rank, context.world_size)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=context.rank, world_size=context.world_size)
    shape = (context.world_size // config.tensor_parallel, config.tensor_parallel)
    return init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor without a gradient. Collective if the tensor is sharded."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    if (
        tensor.device_mesh.ndim > 1
    ):  # gather over replicas first, as FSDP does: torch warns about the other order
        tensor = tensor.redistribute(placements=[Replicate(), *tensor.placements[1:]])
    return tensor.full_tensor()


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def lying_as(tensor: Tensor, part: Tensor) -> Tensor:
    """Return a tensor with this rank's part, sharded like another tensor, on the part's device."""
    return DTensor(part, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else part  # pyright: ignore


def offset_of(tensor: Tensor) -> list[int]:
    """Return the first index of this rank's part in each dimension of the full tensor."""
    if isinstance(tensor, DTensor):
        return list(tensor.__create_chunk_list__()[0].offsets)
    return [0] * tensor.ndim


def box_of(tensor: Tensor, start: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return a view of a box of a tensor.

    >>> box_of(torch.arange(6).view(2, 3), (0, 1), (2, 2)).tolist()
    [[1, 2], [4, 5]]
    """
    for dimension, (first, length) in enumerate(zip(start, shape, strict=True)):
        tensor = tensor.narrow(dimension, first, length)
    return tensor


def writes(tensor: Tensor, rank: int) -> bool:
    """Return whether a rank writes its part: the part is not empty, and no earlier rank holds an
    equal copy."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    mesh = tensor.device_mesh
    place = zip(mesh.get_coordinate() or (), tensor.placements, strict=True)
    first = 0 in mesh.mesh and all(not placement.is_replicate() or at == 0 for at, placement in place)
    return first and tensor.to_local().numel() > 0


def gradient_norm(gradients: Iterable[Tensor], also: float = 0.0) -> float:
    """Return the 2-norm of all gradients together, counting each sharded or replicated element
    once. Equal on all ranks.

    Args:
        also: added on every rank before the sums are exchanged. A nan makes the norm nan on every
            rank.
    """
    groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        mesh, shards = None, ()
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            shards = tuple(
                i for i, placement in enumerate(gradient.placements) if not placement.is_replicate()
            )
        groups.setdefault((mesh, shards), []).append(local_part(gradient))
    total = 0.0
    for (mesh, shards), locals_ in groups.items():
        squares = nn.utils.get_total_norm(locals_).double().square() + also
        for dimension in shards:
            assert mesh is not None
            if mesh.size(dimension) == 1:  # torch may return the equal mesh of a closed engine
                continue
            dist.all_reduce(squares, group=mesh.get_group(dimension))
        total += squares.item()
    return math.sqrt(total) if math.isfinite(total) else math.nan


# Replicated tensors: norms, and embeddings and head if their rows do not divide evenly, with their
# moments. Ranks never exchange them; they stay equal because each rank computes the same. If that
# failed, no loss would show it, so each checkpoint compares them.


_ROUNDING = 1e-3
"""Allowed difference between copies relative to the largest element, because kernels add in any
order."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_alike(state: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
    """Check that the ranks of `mesh` hold equal replicated tensors. Collective. Copies that differ
    by rounding are replaced by the first rank's.

    Raises:
        RunError: copies differ, on all ranks; the message names the tensor and the rank.
    """
    alike = {name: local_part(tensor) for name, tensor in state.items() if not _is_split(tensor, mesh)}
    own = torch.stack([digest(tensor) for tensor in alike.values()])
    all_digests = [torch.empty_like(own) for _ in range(mesh.size())]
    dist.all_gather(all_digests, own, group=mesh.get_group())
    for name in differing(list(alike), all_digests):
        _align(name, alike[name], mesh)


def digest(tensor: Tensor) -> Tensor:
    """Return [2] int64: the sum of a tensor's bits as integers, and the bits of its norm.

    >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002])
    >>> bool((digest(one) == digest(one.clone())).all()), bool((digest(one) == digest(other)).all())
    (True, False)
    """
    tensor = tensor.detach().contiguous()
    norm = (
        torch.linalg.vector_norm(tensor, dtype=torch.float64)
        if tensor.is_floating_point()
        else tensor.sum().double()
    )
    return torch.stack(
        [tensor.view(_BITS[tensor.element_size()]).sum(dtype=torch.int64), norm.view(torch.int64)]
    )


def differing(names: Sequence[str], digests: Sequence[Tensor]) -> list[str]:
    """Return the names whose digests differ between ranks.

    Args:
        digests: [names, 2] of each rank.

    >>> differing(["norm", "head"], [torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 5]])])
    ['head']
    """
    same = torch.stack([(other == digests[0]).all(-1) for other in digests]).all(0)
    return [name for name, equal in zip(names, same.tolist(), strict=True) if not equal]


def _is_split(tensor: Tensor, mesh: DeviceMesh) -> bool:
    """Return whether the ranks of `mesh` hold different parts of a tensor."""
    if not isinstance(tensor, DTensor):
        return False
    names, along = tensor.device_mesh.mesh_dim_names or (), (mesh.mesh_dim_names or ("",))[0]
    return along in names and not tensor.placements[names.index(along)].is_replicate()


def _align(name: str, tensor: Tensor, mesh: DeviceMesh) -> None:
    """Replace a copy by the first rank's if it differs only by rounding."""
    theirs, group = tensor.clone(), mesh.get_group()
    dist.broadcast(theirs, group=group, group_src=0)
    allowed = _ROUNDING * float(theirs.abs().max()) if theirs.numel() else 0.0
    off = (
        float((tensor.double() - theirs.double()).abs().nan_to_num(torch.inf).max())
        if theirs.numel()
        else 0.0
    )
    far = torch.zeros(mesh.size(), dtype=torch.float64, device=tensor.device)
    far[mesh.get_local_rank()] = off if off > allowed else 0.0
    dist.all_reduce(far, group=group)
    for rank, difference in enumerate(far.tolist()):
        if difference:
            raise RunError(
                f"tensor-parallel rank {rank} holds another {name!r} than rank 0 (off by "
                f"{difference:.2g}), and all must hold the same: the run cannot continue "
                "with it; start again from an earlier checkpoint"
            )
    with torch.no_grad():
        tensor.copy_(theirs)


# MeshOfOne: a device mesh of only this process, so that FSDP can run on a single rank without
# touching other process groups.


_INTERFACE = "GLOO_SOCKET_IFNAME"


class MeshOfOne:
    """A (dp, tp) mesh of one rank with separate process groups.

    torch has one default group per process. If another library (vLLM in the same process) has
    created it, its groups stay untouched. If another library has added groups to ours, `close`
    keeps the default group.

    Raises:
        UserError: the process is one of several ranks of another library.
    """

    def __init__(self, device: torch.device) -> None:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        self._made_default = not dist.is_initialized()
        if not self._made_default and dist.get_world_size() != 1:
            raise UserError(
                f"this process is one of {dist.get_world_size()} ranks of another library; a mesh of one rank cannot be made in it"
            )
        with _on_loopback():
            if self._made_default:
                store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
                dist.init_process_group(backend, store=store, rank=0, world_size=1)
            self._default = dist.group.WORLD
            self._groups: list[ProcessGroup] = [
                cast(Any, dist.new_group([0], backend=backend)) for _ in ("dp", "tp")
            ]
        self.mesh = DeviceMesh.from_group(
            self._groups, device.type, mesh=[[0]], mesh_dim_names=("dp", "tp")
        )

    def close(self) -> None:
        """Destroy the groups of this mesh, and the default group if it is ours and unused."""
        if dist.group.WORLD is not self._default or not dist.is_initialized():
            return  # all groups have been destroyed, including ours
        for group in self._groups:
            with suppress(ValueError, RuntimeError):  # destroyed already
                dist.destroy_process_group(group)
        if self._made_default and len(dist.distributed_c10d._world.pg_map) == 1:  # pyright: ignore[reportPrivateUsage]
            dist.destroy_process_group()


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Make new groups listen to this machine only."""
    before = os.environ.get(_INTERFACE)
    os.environ.setdefault(_INTERFACE, "lo")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_INTERFACE]
