"""Placement: where worker groups run. Groups on the same pool are colocated and take turns; groups on different
pools run at the same time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..dataflow.arguments import names_arguments
from ..dataflow.errors import UserError, nearest


@names_arguments
@dataclass(frozen=True)
class ResourcePool:
    """A set of devices that stay together.

    >>> ResourcePool("everything", cpus=2)
    ResourcePool(name='everything', cpus=2, gpus=0)
    """

    name: str = "pool"
    cpus: int = 1
    gpus: int = 0

    def __post_init__(self) -> None:
        if self.cpus < 1 or self.gpus < 0:
            raise UserError(
                f"resource pool {self.name!r} needs at least one CPU and no negative GPUs, not cpus={self.cpus}, gpus={self.gpus}"
            )


@names_arguments
@dataclass(frozen=True)
class Place:
    """Where one group runs: how many ranks on which pool. Each rank gets an equal share of the pool's CPUs and GPUs."""

    pool: ResourcePool
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise UserError(f"a group on pool {self.pool.name!r} needs at least one rank, not {self.ranks}")
        if self.pool.gpus and self.pool.gpus % self.ranks:
            raise UserError(
                f"{self.ranks} ranks do not divide the {self.pool.gpus} GPUs of pool {self.pool.name!r} evenly"
            )

    @property
    def threads(self) -> int:
        """Compute threads of each rank."""
        return max(1, self.pool.cpus // self.ranks)

    @property
    def gpus(self) -> int:
        """GPUs of each rank."""
        return self.pool.gpus // self.ranks


OWN = "'s own"
"""Ends the name of the pool of a group that no placement mentions."""

Placement = Mapping[str, Place]
"""Group name -> place. A group that is not mentioned runs as one rank on a CPU that is free, or else beside others that are idle."""


def resolve(placement: Placement | None, groups: Mapping[str, object]) -> dict[str, Place]:
    """A place for every group.

    Args:
        placement: as the user gave it.
        groups: names of the groups of a run.

    Returns:
        Group -> its place. A group that the placement does not mention gets one rank on a pool of its own.

    Raises:
        UserError: when the placement names a group that the graphs do not have, or two pools share a name.
    """
    given = dict(placement or {})
    for name in given:
        if name not in groups:
            raise UserError(
                f"the placement names a group {name!r}, which no graph has{nearest(name, groups)} (groups: {', '.join(groups)})"
            )
    by_name: dict[str, ResourcePool] = {}
    for place in given.values():
        if by_name.setdefault(place.pool.name, place.pool) != place.pool:
            raise UserError(f"two resource pools are called {place.pool.name!r}")
    return {name: given.get(name) or Place(ResourcePool(f"{name}{OWN}")) for name in groups}


def is_own(pool: ResourcePool) -> bool:
    """Whether a pool was made for a group that the placement does not mention."""
    return pool.name.endswith(OWN)


def require_nodes(placement: Mapping[str, Place], nodes: Sequence[tuple[int, int]], where: str) -> None:
    """Refuse a placement that asks for more CPUs or GPUs than there are, or for a pool that no node can hold.

    Only pools that the user sized count: a group without a place takes what is left, or works where others are idle.

    Args:
        placement: group -> its pool and ranks.
        nodes: CPUs and GPUs of each.
        where: names the machine or cluster in messages.

    Raises:
        UserError: naming the pools, what they ask for, and what there is.
    """
    pools = {p.pool.name: p.pool for p in placement.values() if not is_own(p.pool)}
    for kind, wanted, available in (
        ("CPUs", {p.name: p.cpus for p in pools.values()}, [cpus for cpus, _ in nodes]),
        ("GPUs", {p.name: p.gpus for p in pools.values()}, [gpus for _, gpus in nodes]),
    ):
        if sum(wanted.values()) > sum(available):
            sizes = ", ".join(f"{name}: {number}" for name, number in wanted.items())
            raise UserError(
                f"the placement asks for {sum(wanted.values())} {kind} ({sizes}), but {where} has {sum(available)}; "
                "make a pool smaller or let groups share one"
            )
    for pool in pools.values():
        if not any(pool.cpus <= cpus and pool.gpus <= gpus for cpus, gpus in nodes):
            raise UserError(
                f"resource pool {pool.name!r} asks for {pool.cpus} CPUs and {pool.gpus} GPUs on one node, but no node of {where} has "
                f"both (CPUs and GPUs of its nodes: {', '.join(f'{c} and {g}' for c, g in sorted(set(nodes), reverse=True))})"
            )


def machine_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_gpus() -> int:
    """NVIDIA GPUs that this process may use, found without loading CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return present if visible is None else min(present, len([d for d in visible.split(",") if d.strip()]))
