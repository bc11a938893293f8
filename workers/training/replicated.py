"""Replicated tensors: norms, and embeddings and head where their rows cannot be shared evenly, with their moments, which all
tensor-parallel ranks hold alike.

They are never sent between ranks, and stay alike because each rank computes the same. If that ever failed, the ranks would hold different
models, and no loss would show it; so they are compared at each checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...dataflow.errors import RunError
from .sharding import local_part

_ROUNDING = 1e-3
"""Share of the largest element by which copies may differ, because kernels add in any order."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_alike(state: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
    """Check that the ranks of `mesh` hold equal replicated tensors. Collective; copies that differ by rounding become the first rank's.

    Raises:
        RunError: naming the tensor and the rank, on all of them.
    """
    alike = {name: local_part(tensor) for name, tensor in state.items() if not _is_split(tensor, mesh)}
    own = torch.stack([digest(tensor) for tensor in alike.values()])
    all_digests = [torch.empty_like(own) for _ in range(mesh.size())]
    dist.all_gather(all_digests, own, group=mesh.get_group())
    for name in differing(list(alike), all_digests):
        _align(name, alike[name], mesh)


def digest(tensor: Tensor) -> Tensor:
    """[2] int64: the sum of a tensor's bits as integers, and the bits of its norm.

    >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002])
    >>> bool((digest(one) == digest(one.clone())).all()), bool((digest(one) == digest(other)).all())
    (True, False)
    """
    tensor = tensor.detach().contiguous()
    norm = (
        torch.linalg.vector_norm(tensor, dtype=torch.float64) if tensor.is_floating_point() else tensor.sum().double()
    )
    return torch.stack([tensor.view(_BITS[tensor.element_size()]).sum(dtype=torch.int64), norm.view(torch.int64)])


def differing(names: Sequence[str], digests: Sequence[Tensor]) -> list[str]:
    """Names whose digests are not the same on all ranks.

    Args:
        digests: [names, 2] of each rank.

    >>> differing(["norm", "head"], [torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 5]])])
    ['head']
    """
    same = torch.stack([(other == digests[0]).all(-1) for other in digests]).all(0)
    return [name for name, equal in zip(names, same.tolist(), strict=True) if not equal]


def _is_split(tensor: Tensor, mesh: DeviceMesh) -> bool:
    """Whether each rank of `mesh` holds a part of its own."""
    if not isinstance(tensor, DTensor):
        return False
    names, along = tensor.device_mesh.mesh_dim_names or (), (mesh.mesh_dim_names or ("",))[0]
    return along in names and not tensor.placements[names.index(along)].is_replicate()


def _align(name: str, tensor: Tensor, mesh: DeviceMesh) -> None:
    """Take over the first rank's copy, if it is off by rounding alone."""
    theirs, group = tensor.clone(), mesh.get_group()
    dist.broadcast(theirs, group=group, group_src=0)
    allowed = _ROUNDING * float(theirs.abs().max()) if theirs.numel() else 0.0
    off = float((tensor.double() - theirs.double()).abs().nan_to_num(torch.inf).max()) if theirs.numel() else 0.0
    far = torch.zeros(mesh.size(), dtype=torch.float64, device=tensor.device)
    far[mesh.get_local_rank()] = off if off > allowed else 0.0
    dist.all_reduce(far, group=group)
    for rank, difference in enumerate(far.tolist()):
        if difference:
            raise RunError(
                f"tensor-parallel rank {rank} holds another {name!r} than rank 0 (off by {difference:.2g}), and all must hold the same: "
                "the run cannot go on with it; start again from an earlier checkpoint"
            )
    with torch.no_grad():
        tensor.copy_(theirs)
