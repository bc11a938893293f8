"""Placement: where worker groups run. Groups on the same pool are colocated and take turns; groups on different
pools run at the same time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from ..dataflow.errors import UserError, nearest
from ..dataflow.graph import Handle
from ..dataflow.operation import names_arguments


def ranks_of_a_replica(config: object) -> int:
    """Ranks that hold one copy of a group's model together, and compute the same rows."""
    return getattr(config, "replica_ranks", None) or getattr(config, "tensor_parallel", 1)


@names_arguments
@dataclass(frozen=True, init=False, repr=False)
class ResourcePool:
    """Devices that stay together: equally many of each kind on every one of its nodes.

    >>> ResourcePool("everything", cpus=2)
    ResourcePool('everything', cpus=2)
    >>> ResourcePool("train", nodes=16, gpus_per_node=8)
    ResourcePool('train', cpus=128, gpus=128, nodes=16)

    Args:
        name: of the pool, unique in a placement.
        cpus: in all; default: one for each GPU, or else one for each node.
        gpus: in all.
        nodes: how many; default: as few as the cluster can do with (of a pool beside another: the other's).
        cpus_per_node: instead of `cpus`.
        gpus_per_node: instead of `gpus`.
        beside: name of a pool on whose nodes this one lies, too, with devices of its own.

    Raises:
        UserError: naming the argument and its rule.
    """

    name: str
    cpus: int
    """In all."""
    gpus: int
    """In all."""
    nodes: int | None
    """None: the cluster decides."""
    beside: str | None

    def __init__(
        self,
        name: str = "pool",
        cpus: int | None = None,
        gpus: int | None = None,
        *,
        nodes: int | None = None,
        cpus_per_node: int | None = None,
        gpus_per_node: int | None = None,
        beside: str | None = None,
    ) -> None:
        who = f"resource pool {name!r}"
        given = {"cpus": cpus, "gpus": gpus, "nodes": nodes}
        for field, value in {
            **given,
            "cpus_per_node": cpus_per_node,
            "gpus_per_node": gpus_per_node,
        }.items():
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise UserError(f"{who}: {field} is a whole number, not {value!r}")
        if nodes is not None and nodes < 1:
            raise UserError(f"{who} needs at least one node, not nodes={nodes}")
        if beside == name:
            raise UserError(f"{who} cannot lie beside itself: beside names another pool")
        all_gpus = _in_all(who, "gpus", gpus, gpus_per_node, nodes) or 0
        all_cpus = _in_all(who, "cpus", cpus, cpus_per_node, nodes)
        all_cpus = max(all_gpus, nodes or 1) if all_cpus is None else all_cpus
        if all_cpus < (nodes or 1) or all_gpus < 0:
            each = " on each of its nodes" if nodes and nodes > 1 else ""
            raise UserError(
                f"{who} needs at least one CPU{each} and no negative GPUs, not cpus={all_cpus}, gpus={all_gpus}"
            )
        values = {"name": name, "cpus": all_cpus, "gpus": all_gpus, "nodes": nodes, "beside": beside}
        for field, value in values.items():
            object.__setattr__(self, field, value)

    def __repr__(self) -> str:
        said = {"gpus": self.gpus or None, "nodes": self.nodes, "beside": self.beside}
        more = "".join(f", {name}={value!r}" for name, value in said.items() if value is not None)
        return f"ResourcePool({self.name!r}, cpus={self.cpus}{more})"


def _in_all(who: str, kind: str, total: int | None, each: int | None, nodes: int | None) -> int | None:
    """Devices of one kind in all, from what was said: a total, or a number for each node; None: nothing was said."""
    if each is not None and nodes is None:
        raise UserError(
            f"{who}: {kind}_per_node={each} is of each node; say nodes=..., too, or {kind}=... in all"
        )
    if each is not None and total is not None:
        raise UserError(
            f"{who}: {kind}={total} and {kind}_per_node={each} say the same twice; leave one of them out"
        )
    if each is not None and nodes is not None:
        return each * nodes
    if total is not None and nodes is not None and total % nodes:
        raise UserError(
            f"{who}: {kind}={total} do not divide over nodes={nodes} evenly; the nearest number that does is "
            f"{max(1, round(total / nodes)) * nodes}"
        )
    return total


@names_arguments
@dataclass(frozen=True)
class Place:
    """Where one group runs: how many ranks on which pool. Each rank gets an equal share of the pool's CPUs and GPUs.

    With `min_ranks` the group is elastic: its run starts as soon as so many ranks are up, others join when the cluster has room for
    them, and any of them may be lost (a spot instance, say), which costs the run the rows that it held. Each rank of such a group is a
    reservation of its own, wherever there is room. Only ranks that are independent of each other can come and go: those of a rollout,
    a reward, or another group whose worker class is `replaceable`.

    >>> Place(ResourcePool("spot", gpus=16), ranks=16, min_ranks=4).is_elastic
    True

    Args:
        pool: where it runs. An elastic group has one of its own.
        ranks: of the group; of an elastic one, the most that it can have.
        min_ranks: ranks below which an elastic group is waited for; default: the group is not elastic.

    Raises:
        UserError: the numbers do not fit the pool, or each other.
    """

    pool: ResourcePool
    ranks: int = 1
    min_ranks: int | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise UserError(
                f"a group on pool {self.pool.name!r} needs at least one rank, not {self.ranks}"
            )
        if self.pool.gpus and self.pool.gpus % self.ranks:
            raise UserError(
                f"{self.ranks} ranks do not divide the {self.pool.gpus} GPUs of pool {self.pool.name!r} evenly"
            )
        if self.pool.nodes and self.ranks % self.pool.nodes:
            right = max(1, round(self.ranks / self.pool.nodes)) * self.pool.nodes
            raise UserError(
                f"{self.ranks} ranks do not divide over the {self.pool.nodes} nodes of pool {self.pool.name!r} evenly; "
                f"the nearest number that does is {right}"
            )
        if self.min_ranks is not None:
            self._check_elastic()

    def _check_elastic(self) -> None:
        pool, least, ranks = self.pool, self.min_ranks, self.ranks
        who = f"an elastic group on pool {pool.name!r}"
        if not isinstance(least, int) or isinstance(least, bool) or not 1 <= least <= ranks:
            raise UserError(f"{who}: min_ranks is a whole number from 1 to ranks={ranks}, not {least!r}")
        if pool.cpus % ranks:
            right = max(1, round(pool.cpus / ranks)) * ranks
            raise UserError(
                f"{who}: {ranks} ranks do not divide its {pool.cpus} CPUs evenly; take cpus={right}, say"
            )
        if pool.beside is not None or pool.nodes not in (None, ranks):
            given = f"beside={pool.beside!r}" if pool.beside is not None else f"nodes={pool.nodes}"
            raise UserError(
                f"{who}: each of its {ranks} ranks goes wherever there is room, and {given} cannot hold; leave it out"
            )

    @property
    def is_elastic(self) -> bool:
        """Whether ranks of the group may come and go."""
        return self.min_ranks is not None

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
        UserError: when the placement names a group that the graphs do not have, two pools share a name, or a pool lies beside one that
            there is not, or in a circle.
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
    check_beside(by_name)
    _check_alone(given)
    return {name: given.get(name) or Place(ResourcePool(f"{name}{OWN}")) for name in groups}


def _check_alone(placement: Placement) -> None:
    """Check that elastic groups share their pools with nobody."""
    for name, place in placement.items():
        pool = place.pool
        others = [
            n for n, p in placement.items() if n != name and pool.name in (p.pool.name, p.pool.beside)
        ]
        if place.is_elastic and others:
            raise UserError(
                f"group {name!r} has min_ranks={place.min_ranks}, and its pool {pool.name!r} is used by {', '.join(map(repr, others))}, "
                "too: a group whose ranks come and go needs a pool of its own"
            )


def check_elastic(placement: Placement, groups: Mapping[str, Handle]) -> None:
    """Check that the ranks of elastic groups are independent of each other.

    Args:
        placement: group -> its place.
        groups: the handles of the groups, by name.

    Raises:
        UserError: naming the group, and those of the placement that can be elastic.
    """
    for name, place in placement.items():
        if place.is_elastic and name in groups and not groups[name].worker_class.replaceable:
            able = [n for n, handle in groups.items() if handle.worker_class.replaceable]
            raise UserError(
                f"group {name!r} has min_ranks={place.min_ranks}, but the ranks of a {groups[name].worker_class.__name__} compute together "
                f"and cannot come and go; leave min_ranks out (groups that can have it: {', '.join(able) or 'none'})"
            )


def is_own(pool: ResourcePool) -> bool:
    """Whether a pool was made for a group that the placement does not mention."""
    return pool.name.endswith(OWN)


def check_beside(pools: Mapping[str, ResourcePool]) -> None:
    """Check that pools which lie beside others can.

    Raises:
        UserError: there is no pool of that name, some go round in a circle, or one has more nodes than the one beside it.
    """
    for pool in pools.values():
        if pool.beside is not None and pool.beside not in pools:
            raise UserError(
                f"resource pool {pool.name!r} lies beside {pool.beside!r}, which no group of the placement is on"
                f"{nearest(pool.beside, pools)} (pools: {', '.join(pools)})"
            )
    for pool in pools.values():
        seen = [pool.name]
        while (beside := pools[seen[-1]].beside) is not None:
            if beside in seen:
                circle = " beside ".join(map(repr, [*seen[seen.index(beside) :], beside]))
                raise UserError(f"resource pools lie in a circle: {circle}; leave out one beside=...")
            seen.append(beside)
    for pool in pools.values():
        other = pools[pool.beside] if pool.beside is not None else pool
        if pool.nodes and other.nodes and pool.nodes > other.nodes:
            raise UserError(
                f"resource pool {pool.name!r} has nodes={pool.nodes} and lies beside {other.name!r}, which has only {other.nodes}"
            )


@dataclass(frozen=True)
class OtherMachine:
    """A machine that a run is planned for, and not this one."""

    gpus: int
    gpu_bytes: int
    """Of each."""

    @contextmanager
    def assumed(self) -> Iterator[None]:
        """As if this machine had these GPUs, and four CPUs for each, if it does not have more."""
        before = OTHER.set(self)
        try:
            yield
        finally:
            OTHER.reset(before)


OTHER: ContextVar[OtherMachine | None] = ContextVar("OTHER", default=None)
"""The machine that is planned for; None: this one."""


def machine_cpus() -> int:
    """CPUs that this process may use; of a machine that is planned for, at least four for each GPU."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cpus, 4 * other.gpus) if (other := OTHER.get()) is not None else cpus


def machine_gpus() -> int:
    """NVIDIA GPUs that this process may use, found without loading CUDA; or those of the machine that is planned for."""
    if (other := OTHER.get()) is not None:
        return other.gpus
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return present if visible is None else min(present, len([d for d in visible.split(",") if d.strip()]))
