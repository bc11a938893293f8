"""The (dp, tp) mesh of a group, the parts of tensors that a rank holds, their names in the
checkpoint, and sums over ranks."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout  # pyright: ignore[reportPrivateUsage]
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

from ...dataflow.errors import RunError, UserError
from ...resharding.buckets import SIGNED_BITS
from ...resharding.weights import Box, TensorPart, contiguous_strides
from ..worker import Context
from .engine import ModelConfig

_MESH_NAMES = ("dp", "tp")
NODES = "nodes"
_HOLDERS = {"tp": "tensor-parallel rank", NODES: "node"}


def join_mesh(context: Context, config: ModelConfig, device: torch.device) -> DeviceMesh | None:
    """Join the group's (dp, tp) mesh through its rendezvous. A group of one rank needs no sockets
    and gets None. Ranks that share tokens are adjacent along dp. Raises UserError if
    `tensor_parallel` or `sequence_parallel` does not divide the ranks or there is no rendezvous,
    and WorkerError if a rank did not join in time."""
    for name in ("tensor_parallel", "sequence_parallel"):
        if context.world_size % (size := getattr(config, name)):
            raise UserError(
                f"{name}={size} does not divide the {context.world_size} ranks of {context.name!r}"
            )
    if context.world_size == 1:
        return None
    if context.rendezvous is None:
        raise UserError(
            f"worker group {context.name!r} has {context.world_size} ranks but no rendezvous"
        )
    if context.rendezvous.on_one_machine:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # accept connections from this machine only
    store = context.rendezvous.join(context.name, context.rank, context.world_size)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = group_timeout(context)
    dist.init_process_group(
        backend, store=store, rank=context.rank, world_size=context.world_size, timeout=timeout
    )
    shape = (context.world_size // config.tensor_parallel, config.tensor_parallel)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=_MESH_NAMES)
    _set_timeouts(mesh, timeout)
    return mesh


def group_timeout(context: Context) -> timedelta:
    """Return the timeout of a group's collectives: longer than the driver's deadline, whose error names
    the rank that the others wait for. NCCL's own timeout of 10 minutes would end ranks that wait while
    rank 0 writes a large model."""
    return min(timedelta(days=7), timedelta(seconds=2 * min(context.deadline_s, 1e6)))


def _set_timeouts(mesh: DeviceMesh, timeout: timedelta) -> None:
    for group in mesh.get_all_groups():
        _set_pg_timeout(timeout, group)


# Hybrid sharding (HSDP): each node holds a copy of the model, sharded over the node's ranks. Ranks
# gather parameters and scatter gradients within their node; the nodes add up gradients once a step.


def split_by_node(mesh: DeviceMesh, context: Context) -> DeviceMesh:
    """Return a (nodes, shards, tp) mesh of the ranks of a (dp, tp) mesh. Its flattened dimension "dp"
    has all replicas. All ranks must call this function."""
    tensor_parallel = mesh["tp"].size()
    shape = (context.nodes, mesh["dp"].size() // context.nodes, tensor_parallel)
    split = init_device_mesh(mesh.device_type, shape, mesh_dim_names=(NODES, "shards", "tp"))
    timeout = group_timeout(context)
    _set_timeouts(split, timeout)
    _set_timeouts(split[NODES, "shards"]._flatten("dp"), timeout)
    return split


def is_split_by_node(mesh: DeviceMesh) -> bool:
    return NODES in (mesh.mesh_dim_names or ())


def share_of_node(tensor: Tensor, part: TensorPart) -> TensorPart:
    """Return the rows of a rank's part that its node publishes, if every node holds an equal part."""
    if not isinstance(tensor, DTensor) or not is_split_by_node(tensor.device_mesh) or not part.box.shape:
        return part
    node, nodes = tensor.device_mesh[NODES].get_local_rank(), tensor.device_mesh[NODES].size()
    rows, first = part.box.shape[0], part.box.starts[0]
    start, stop = rows * node // nodes, rows * (node + 1) // nodes
    box = Box((first + start, *part.box.starts[1:]), (first + stop, *part.box.stops[1:]))
    return part._replace(box=box, tensor=part.tensor[start:stop])


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor, without a gradient. If the tensor is sharded, all ranks must call
    this function."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    # Gather over replicas first, as FSDP does; torch warns about the other order.
    *replicas, last = tensor.placements
    tensor = tensor.redistribute(placements=[*(Replicate() for _ in replicas), last])
    return tensor.full_tensor()


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def lying_as(tensor: Tensor, part: Tensor) -> Tensor:
    """Return a tensor sharded like another one, with `part` on this rank, on the device of
    `part`."""
    return DTensor(part, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else part  # pyright: ignore


def box_of(tensor: Tensor) -> Box:
    shape = tuple(local_part(tensor).shape)
    starts = (0,) * len(shape)
    if isinstance(tensor, DTensor):
        starts = tuple(tensor.__create_chunk_list__()[0].offsets)
    return Box(starts, tuple(map(operator.add, starts, shape)))


def writes(tensor: Tensor, rank: int, *, of_node: bool = False) -> bool:
    """Return whether a rank writes its part: only if the part is not empty and the rank is the
    first with an equal copy, or the first `of_node`."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    mesh = tensor.device_mesh
    place = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), tensor.placements, strict=True)
    first = 0 in mesh.mesh and all(
        not placement.is_replicate() or at == 0 or (of_node and name == NODES)
        for name, at, placement in place
    )
    return first and tensor.to_local().numel() > 0


def gradient_norm(gradients: Iterable[Tensor], also: float = 0.0) -> float:
    """Return the 2-norm of all gradients together, counting each element once; equal on all ranks.
    Each rank adds `also` before the sum, so nan on one rank makes the norm nan on all."""
    groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        mesh, shards = None, ()
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            shards = tuple(i for i, p in enumerate(gradient.placements) if not p.is_replicate())
        groups.setdefault((mesh, shards), []).append(local_part(gradient))
    total = 0.0
    for (mesh, shards), locals_ in groups.items():
        squares = nn.utils.get_total_norm(locals_).double().square() + also
        for dimension in shards:
            assert mesh is not None
            if mesh.size(dimension) == 1:  # torch may return an equal mesh of a closed engine
                continue
            dist.all_reduce(squares, group=mesh.get_group(dimension))
        if mesh is not None and is_split_by_node(mesh):
            # The nodes' copies must take the same decisions. Their gradients are equal, but `also`
            # and the order of sums are not.
            nodes = mesh.get_group(NODES)
            dist.all_reduce(squares, group=nodes)
            squares /= nodes.size()
        total += squares.item()
    return math.sqrt(total) if math.isfinite(total) else math.nan


# Replicated tensors: over tensor-parallel ranks, layer norms, and embeddings and head if their rows
# do not divide evenly; over nodes, all tensors; and the optimizer moments of these. Ranks never
# exchange them; they stay equal because each rank computes the same updates. A divergence would not
# show in any loss, so each checkpoint compares the copies.


_ROUNDING = 1e-3
"""Relative difference allowed between copies, because kernels add numbers in varying order."""


def check_alike(state: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
    """Check that the ranks of `mesh` hold equal replicated tensors. All ranks must call this
    function. If copies differ only by rounding, all ranks take the first rank's copy. If they
    differ by more, raises RunError on all ranks."""
    alike = {name: local_part(tensor) for name, tensor in state.items() if not _is_split(tensor, mesh)}
    # Offloaded moments are on the host, and parameters on the device.
    own = torch.stack([digest(tensor).to(mesh.device_type) for tensor in alike.values()])
    all_digests = [torch.empty_like(own) for _ in range(mesh.size())]
    dist.all_gather(all_digests, own, group=mesh.get_group())
    for name in differing(list(alike), all_digests):
        _align(name, alike[name], mesh)


def digest(tensor: Tensor) -> Tensor:
    """Return a digest of a tensor, [2] int64: the sum of its bits as integers, and the bits of its
    norm.

    >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002])
    >>> bool((digest(one) == digest(one.clone())).all()), bool((digest(one) == digest(other)).all())
    (True, False)
    """
    tensor = tensor.detach().contiguous()
    if tensor.is_floating_point():
        norm = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    else:
        norm = tensor.sum().double()
    bits = tensor.view(SIGNED_BITS[tensor.element_size()]).sum(dtype=torch.int64)
    return torch.stack([bits, norm.view(torch.int64)])


def differing(names: Sequence[str], digests: Sequence[Tensor]) -> list[str]:
    """Return the names whose digests differ between ranks. `digests` has a [names, 2] tensor per
    rank.

    >>> differing(["norm", "head"], [torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 5]])])
    ['head']
    """
    same = torch.stack([(other == digests[0]).all(-1) for other in digests]).all(0)
    return [name for name, equal in zip(names, same.tolist(), strict=True) if not equal]


def _is_split(tensor: Tensor, mesh: DeviceMesh) -> bool:
    if not isinstance(tensor, DTensor):
        return False
    names, along = tensor.device_mesh.mesh_dim_names or (), (mesh.mesh_dim_names or ("",))[0]
    return along in names and not tensor.placements[names.index(along)].is_replicate()


def _align(name: str, tensor: Tensor, mesh: DeviceMesh) -> None:
    theirs, group = tensor.clone(), mesh.get_group()
    dist.broadcast(theirs, group=group, group_src=0)
    allowed = off = 0.0
    if theirs.numel():
        allowed = _ROUNDING * float(theirs.abs().max())
        off = float((tensor.double() - theirs.double()).abs().nan_to_num(torch.inf).max())
    along = (mesh.mesh_dim_names or ("",))[0]
    far = torch.zeros(mesh.size(), dtype=torch.float64, device=tensor.device)
    far[mesh.get_local_rank()] = off if off > allowed else 0.0
    dist.all_reduce(far, group=group)
    for rank, difference in enumerate(far.tolist()):
        if difference:
            raise RunError(
                f"{_HOLDERS[along]} {rank} holds another {name!r} than {_HOLDERS[along]} 0 (off by "
                f"{difference:.2g}), and all must hold the same: the run cannot continue "
                "with it; start again from an earlier checkpoint"
            )
    with torch.no_grad():
        tensor.copy_(theirs)


_INTERFACE = "GLOO_SOCKET_IFNAME"


def mesh_of_one(device: torch.device) -> tuple[DeviceMesh, Callable[[], None]]:
    """Return a (dp, tp) mesh of one rank with its own process groups, so that FSDP can run on a
    single rank. Also return a function that destroys these groups, and the default group if this
    function created it and nothing else uses it. Leaves process groups of other libraries, such as
    vLLM, alone. Raises UserError if another library has made this process one of several
    ranks."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    made_default = not dist.is_initialized()
    if not made_default and dist.get_world_size() != 1:
        raise UserError(
            f"this process is one of {dist.get_world_size()} ranks of another library; a mesh of one rank cannot be made in it"
        )
    with _on_loopback():
        if made_default:
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        default = dist.group.WORLD
        groups: list[Any] = [dist.new_group([0], backend=backend) for _ in _MESH_NAMES]
    mesh = DeviceMesh.from_group(groups, device.type, mesh=[[0]], mesh_dim_names=_MESH_NAMES)

    def close() -> None:
        if dist.group.WORLD is not default or not dist.is_initialized():
            return  # all groups are already destroyed, including these
        for group in groups:
            with suppress(ValueError, RuntimeError):
                dist.destroy_process_group(group)
        if made_default and len(dist.distributed_c10d._world.pg_map) == 1:  # pyright: ignore[reportPrivateUsage]
            dist.destroy_process_group()

    return mesh, close


@contextmanager
def _on_loopback() -> Iterator[None]:
    before = os.environ.get(_INTERFACE)
    os.environ.setdefault(_INTERFACE, "lo")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_INTERFACE]


# Direct collectives for FSDP over gloo: each rank sends only what the receiver needs. gloo's own
# reduce-scatter is an all-reduce of the whole tensor, and its all-gather copies received data once
# more. With two ranks and 25 million parameters, gloo's reduce-scatter and all-gather take 100 and
# 85 ms of processor time per rank; these take 29 and 25 ms.


def use_direct_collectives(model: nn.Module) -> None:
    """Make all FSDP units use the direct collectives, if the ranks use gloo."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_DirectAllGather())  # pyright: ignore[reportArgumentType]
            module.set_custom_reduce_scatter(_DirectReduceScatter())  # pyright: ignore[reportArgumentType]


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _DirectAllGather(_Allocates):
    """FSDP's `AllGather`: concatenates the parts of all ranks in rank order. The input may be a
    view of this rank's part of the output."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        assert not async_op  # FSDP sets async_op only if a user calls `unshard(async_op=True)`
        rank, places = group.rank(), output_tensor.chunk(group.size())
        if places[rank].data_ptr() != input_tensor.data_ptr():
            places[rank].copy_(input_tensor)
        others = [other for other in range(group.size()) if other != rank]
        sends = [dist.P2POp(dist.isend, input_tensor, group=group, group_peer=other) for other in others]
        receives = [
            dist.P2POp(dist.irecv, places[other], group=group, group_peer=other) for other in others
        ]
        for work in dist.batch_isend_irecv(sends + receives) if others else ():
            work.wait()


class _DirectReduceScatter(_Allocates):
    """FSDP's `ReduceScatter`: the sum or mean of all ranks' tensors, added in rank order."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        assert not async_op and op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        reduce = torch.mean if op == dist.ReduceOp.AVG else torch.sum
        reduce(parts.view(group.size(), -1), 0, out=output_tensor)


# Checkpoint names: map each tensor of the model to one or more tensors of the checkpoint.
# `transformers` knows how to split and rename tensors when it saves a model. Weft runs that code
# once on meta tensors, with copies turned into views. The strides of each result then show its box:
#
#     layers.0.mlp.experts.gate_up_proj (8, 28, 16), box [3:4, 0:14, 0:16]
#         -> all of layers.0.block_sparse_moe.experts.3.w1.weight (14, 16)
#
# Tensors that need arithmetic (joined parts, interleaved rows) keep the name that they have in the
# model. Receivers that load with `transformers` know that name; vLLM rejects it in an error that
# names it.


@dataclass(frozen=True)
class _Stored:  # a tensor of the checkpoint, as a box of a tensor of the model
    name: str
    shape: tuple[int, ...]
    box: Box
    """Box within the model's tensor; never empty."""
    dims: tuple[int | None, ...]
    """Maps each dimension of this tensor to one of the model's tensor; None for a dimension of size
    1 that the model's tensor lacks."""

    views: dict[
        tuple[Box, tuple[int, ...]], tuple[Box, tuple[int, ...], tuple[int, ...], int] | None
    ] = field(default_factory=dict, compare=False, repr=False)
    """Cached views, by the box and strides of a part of the model's tensor."""

    def part(self, held: TensorPart) -> TensorPart:
        """Return the overlap with a part of the model's tensor: a view, or an empty tensor."""
        strides = held.tensor.stride()
        if (key := (held.box, strides)) not in self.views:
            self.views[key] = self._view(held.box, strides)
        if (view := self.views[key]) is None:
            empty = Box.full((0,) * len(self.shape))
            return TensorPart(
                self.name, self.shape, empty, held.tensor.new_empty(empty.shape), held.dtype
            )
        box, extents, strides, offset = view
        tensor = held.tensor.as_strided(extents, strides, held.tensor.storage_offset() + offset)
        return TensorPart(self.name, self.shape, box, tensor, held.dtype)

    def _view(
        self, held: Box, strides: tuple[int, ...]
    ) -> tuple[Box, tuple[int, ...], tuple[int, ...], int] | None:
        common = self.box.intersection(held)
        if common is None:
            return None
        starts = tuple(
            0 if dim is None else common.starts[dim] - self.box.starts[dim] for dim in self.dims
        )
        extents = tuple(1 if dim is None else common.shape[dim] for dim in self.dims)
        stops = tuple(start + extent for start, extent in zip(starts, extents, strict=True))
        shift = sum(
            (a - b) * stride for a, b, stride in zip(common.starts, held.starts, strides, strict=True)
        )
        own = tuple(0 if dim is None else strides[dim] for dim in self.dims)
        return Box(starts, stops), extents, own, shift


class CheckpointNames:
    """The names and boxes of a model's tensors in its checkpoint. `causal_lm` has the conversions
    that loaded it. Reads only names, shapes and dtypes of `tensors`."""

    def __init__(self, causal_lm: Any, tensors: Mapping[str, Tensor]) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        fakes = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in tensors.items()}
        with torch.no_grad(), _Views():
            stored = revert_weight_conversion(causal_lm, fakes)
        of_storage = {fake.untyped_storage()._cdata: name for name, fake in fakes.items()}
        self._stored: dict[str, list[_Stored]] = {name: [] for name in fakes}
        for name, view in stored.items():
            source = of_storage.get(view.untyped_storage()._cdata)
            if source is not None and (found := _located(name, view, tuple(fakes[source].shape))):
                self._stored[source].append(found)
        for name, fake in fakes.items():
            found = self._stored[name]
            if not found or sum(each.box.numel for each in found) != fake.numel():
                shape = tuple(fake.shape)
                self._stored[name] = [_Stored(name, shape, Box.full(shape), tuple(range(len(shape))))]

    def stored_names(self, name: str) -> list[str]:
        return [stored.name for stored in self._stored[name]]

    def parts(self, held: TensorPart) -> Iterator[TensorPart]:
        """Split a part of a model's tensor into views of it: parts of checkpoint tensors, some of
        them empty."""
        return (stored.part(held) for stored in self._stored[held.name])


class _Views(TorchDispatchMode):
    """Turns copies into views, where a view can have the result's shape."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.clone.default:
            return aten.alias.default(args[0])
        if func in (aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default):
            try:
                return func(*args, **(kwargs or {}))
            except RuntimeError:  # a `reshape` that must copy
                return args[0].new_empty(args[1])
        return func(*args, **(kwargs or {}))


def _located(name: str, view: Tensor, shape: tuple[int, ...]) -> _Stored | None:
    """Return the box that `view` covers in the contiguous tensor `name` of this `shape`, or None if
    it is no box."""
    if not view.numel():
        return None
    strides, offset = contiguous_strides(shape), int(view.storage_offset())
    long = {stride: dim for dim, stride in enumerate(strides) if shape[dim] > 1}
    dims = tuple(
        long.get(stride) if extent > 1 else None
        for extent, stride in zip(view.shape, view.stride(), strict=True)
    )
    used = [dim for dim in dims if dim is not None]
    starts: list[int] = []
    stops: list[int] = []
    for dim, stride in enumerate(strides):
        starts.append(offset // stride)
        offset %= stride
        stops.append(starts[-1] + (view.shape[dims.index(dim)] if dim in used else 1))
    box = Box(tuple(starts), tuple(stops))
    if (
        len(set(used)) < len(used)
        or box.numel != view.numel()
        or box.intersection(Box.full(shape)) != box
    ):
        return None
    return _Stored(name, tuple(view.shape), box, dims)
