"""Placement: which pool of devices each worker group runs on.

Groups on one pool take turns on its devices. Groups on different pools run at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..dataflow.errors import UserError, nearest
from ..dataflow.graph import Handle
from ..dataflow.operation import names_arguments


def ranks_of_a_replica(config: object) -> int:
    """Return the number of ranks that together hold one copy of a group's model."""
    return getattr(config, "replica_ranks", None) or getattr(config, "tensor_parallel", 1)


@names_arguments
@dataclass(frozen=True, init=False, repr=False)
class ResourcePool:
    """CPUs and GPUs for worker groups, spread evenly over nodes.

    >>> ResourcePool("everything", cpus=2)
    ResourcePool('everything', cpus=2)
    >>> ResourcePool("train", nodes=16, gpus_per_node=8)
    ResourcePool('train', cpus=128, gpus=128, nodes=16)

    Args:
        name: Name of the pool, unique in a placement.
        cpus: Total number of CPUs; by default one per GPU, or one per node without GPUs.
        gpus: Total number of GPUs.
        nodes: Number of nodes; by default as few as possible, or as many as the pool in `beside`
            has.
        cpus_per_node: Alternative to `cpus`.
        gpus_per_node: Alternative to `gpus`.
        beside: Name of another pool. This pool gets separate devices on the same nodes.

    Raises:
        UserError: An argument is wrong. The message names the argument and its rule.
    """

    name: str
    cpus: int
    gpus: int
    nodes: int | None
    """None lets the cluster decide."""
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
        given |= {"cpus_per_node": cpus_per_node, "gpus_per_node": gpus_per_node}
        for field, value in given.items():
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise UserError(f"{who}: {field} is a whole number, not {value!r}")
        if nodes is not None and nodes < 1:
            raise UserError(f"{who} needs at least one node, not nodes={nodes}")
        if beside == name:
            raise UserError(f"{who} cannot share nodes with itself: beside=... names another pool")
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
            # The dataclass is frozen, and its constructor's arguments differ from its fields.
            object.__setattr__(self, field, value)

    def __repr__(self) -> str:
        said = {"gpus": self.gpus or None, "nodes": self.nodes, "beside": self.beside}
        more = "".join(f", {name}={value!r}" for name, value in said.items() if value is not None)
        return f"ResourcePool({self.name!r}, cpus={self.cpus}{more})"


def _in_all(who: str, kind: str, total: int | None, each: int | None, nodes: int | None) -> int | None:
    if each is not None and nodes is None:
        raise UserError(
            f"{who}: {kind}_per_node={each} needs the number of nodes; give nodes=... as well, or {kind}=... in total"
        )
    if each is not None and total is not None:
        raise UserError(
            f"{who}: {kind}={total} and {kind}_per_node={each} set the same number; leave one of them out"
        )
    if each is not None and nodes is not None:
        return each * nodes
    if total is not None and nodes is not None and total % nodes:
        raise UserError(
            f"{who}: {kind}={total} is not a multiple of nodes={nodes}; the nearest multiple is "
            f"{max(1, round(total / nodes)) * nodes}"
        )
    return total


@names_arguments
@dataclass(frozen=True)
class Place:
    """The pool that a group runs on, and its number of ranks.

    Ranks get equal shares of the pool's CPUs and GPUs.

    A group with `min_ranks` is elastic. A run can start with `min_ranks` ranks, and more join when
    the cluster has room. If a rank is lost, for example with a spot instance, only its unfinished
    rows are computed again. Weft reserves each rank separately, on any node with room. The ranks
    must be independent: a rollout, a reward, or a worker class that is `replaceable`.

    >>> Place(ResourcePool("spot", gpus=16), ranks=16, min_ranks=4).is_elastic
    True

    Args:
        pool: An elastic group cannot share its pool.
        ranks: Number of ranks; for an elastic group, the maximum.
        min_ranks: Number of ranks that an elastic group needs; None for other groups.

    Raises:
        UserError: The numbers do not fit the pool or each other.
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
        # nodes=ranks is allowed, because the layout of nodes sets it.
        if pool.beside is not None or pool.nodes not in (None, ranks):
            given = f"beside={pool.beside!r}" if pool.beside is not None else f"nodes={pool.nodes}"
            raise UserError(
                f"{who} cannot have {given}, because each of its {ranks} ranks runs on any node with room; leave it out"
            )

    @property
    def is_elastic(self) -> bool:
        return self.min_ranks is not None

    @property
    def threads(self) -> int:
        """Compute threads of each rank."""
        return max(1, self.pool.cpus // self.ranks)

    @property
    def gpus(self) -> int:
        return self.pool.gpus // self.ranks


OWN = "'s own"
"""Suffix of the pool's name for a group that is not in the placement."""

Placement = Mapping[str, Place]
"""Group name -> place. Other groups run as one rank on a free CPU, or on the CPUs of idle
groups."""


def resolve(placement: Placement | None, groups: Mapping[str, object]) -> dict[str, Place]:
    """Return group name -> place for every group.

    A group without a place gets one rank on a separate pool.

    Raises:
        UserError: The placement names an unknown group, two pools share a name, or a pool cannot
            share the nodes of another (see `check_beside`).
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
    for name, place in placement.items():
        pool = place.pool
        others = [
            n for n, p in placement.items() if n != name and pool.name in (p.pool.name, p.pool.beside)
        ]
        if place.is_elastic and others:
            raise UserError(
                f"group {name!r} has min_ranks={place.min_ranks}, but shares pool {pool.name!r} with {', '.join(map(repr, others))}; "
                "give the elastic group a separate pool"
            )


def check_elastic(placement: Placement, groups: Mapping[str, Handle]) -> None:
    """Check that the ranks of elastic groups are independent of each other.

    Raises:
        UserError: Some are not. The message names the group, and the groups that can be elastic.
    """
    for name, place in placement.items():
        if place.is_elastic and name in groups and not groups[name].worker_class.replaceable:
            able = [n for n, handle in groups.items() if handle.worker_class.replaceable]
            raise UserError(
                f"group {name!r} has min_ranks={place.min_ranks}, but the ranks of a {groups[name].worker_class.__name__} compute together "
                f"and cannot come and go; leave min_ranks out (groups that can have it: {', '.join(able) or 'none'})"
            )


def is_own(pool: ResourcePool) -> bool:
    return pool.name.endswith(OWN)


def check_beside(pools: Mapping[str, ResourcePool]) -> None:
    """Check `beside` of all pools.

    Raises:
        UserError: `beside` names an unknown pool, pools share nodes in a circle, or a
            pool has more nodes than the pool whose nodes it shares.
    """
    for pool in pools.values():
        if pool.beside is not None and pool.beside not in pools:
            raise UserError(
                f"resource pool {pool.name!r} shares nodes with {pool.beside!r}, but no group is placed on a pool of that name"
                f"{nearest(pool.beside, pools)} (pools: {', '.join(pools)})"
            )
    for pool in pools.values():
        # Follow `beside` from pool to pool; a name seen twice is a circle.
        seen = [pool.name]
        while (beside := pools[seen[-1]].beside) is not None:
            if beside in seen:
                circle = " beside ".join(map(repr, [*seen[seen.index(beside) :], beside]))
                raise UserError(
                    f"resource pools share nodes in a circle: {circle}; leave out one beside=..."
                )
            seen.append(beside)
    for pool in pools.values():
        other = pools[pool.beside] if pool.beside is not None else pool
        if pool.nodes and other.nodes and pool.nodes > other.nodes:
            raise UserError(
                f"resource pool {pool.name!r} has nodes={pool.nodes}, more than the {other.nodes} nodes of {other.name!r}, which it shares"
            )
