"""MeshOfOne: a device mesh of this process alone, for what FSDP does on a single rank; it disturbs no process group of others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup

from ...dataflow.errors import UserError

_INTERFACE = "GLOO_SOCKET_IFNAME"


class MeshOfOne:
    """A mesh (dp, tp) of one rank on process groups of its own.

    torch has one default group for a process. Where another library (vLLM in the same process) has made it, its groups stay as they are,
    and where it has put groups beside ours, so does the default group, although it was made here.

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
            self._groups: list[ProcessGroup] = [cast(Any, dist.new_group([0], backend=backend)) for _ in ("dp", "tp")]
        self.mesh = DeviceMesh.from_group(self._groups, device.type, mesh=[[0]], mesh_dim_names=("dp", "tp"))

    def close(self) -> None:
        """Destroy what was made here, and is used by nobody else."""
        if dist.group.WORLD is not self._default or not dist.is_initialized():
            return  # somebody has destroyed all groups, ours among them
        for group in self._groups:
            with suppress(ValueError, RuntimeError):  # destroyed already
                dist.destroy_process_group(group)
        if self._made_default and len(dist.distributed_c10d._world.pg_map) == 1:  # pyright: ignore[reportPrivateUsage]
            dist.destroy_process_group()


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Groups that are made listen to this machine alone."""
    before = os.environ.get(_INTERFACE)
    os.environ.setdefault(_INTERFACE, "lo")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_INTERFACE]
