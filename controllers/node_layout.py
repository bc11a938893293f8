"""Node layout: assigns the nodes and devices of a machine or cluster to pools and ranks.

    pool "train", 16 GPUs, nodes of 8      two bundles of 8 GPUs, each on a separate node
    Place(train, ranks=16)                 ranks 0-7 on the first node, 8-15 on the second, one GPU each
    pool "rollout", 4 GPUs, beside "a"     one bundle with the devices of both, first those for "a": they share a node

- A bundle is the part of a pool on one node, with the parts of pools that share this node. The
  bundles of a pool are on different nodes.
- Each node gets a block of consecutive ranks, so a replica's ranks share a node if they fit.
- A pool without `nodes` gets as few nodes as can hold it.
- The pool of an elastic group has one bundle for each rank. Weft reserves each separately, and
  several may be on one node.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ..dataflow.cgroups import usable_cpus
from ..dataflow.errors import UserError
from ..dataflow.graph import Handle, ParameterEdge
from .placement import Place, ResourcePool, is_own, ranks_of_a_replica

THIS_MACHINE = "this machine"


@dataclass(frozen=True)
class Nodes:
    sizes: Sequence[tuple[int, int]]
    """CPUs and GPUs of each node."""
    where: str
    """Name of the machine or cluster in messages."""
    grow: bool = False
    """Whether the cluster may grow, so that pools may exceed the present nodes."""

    @property
    def listed(self) -> str:
        return ", ".join(f"{c} and {g}" for c, g in sorted(set(self.sizes), reverse=True))

    def that_hold(self, cpus: int, gpus: int) -> int:
        return sum(cpus <= c and gpus <= g for c, g in self.sizes)

    def times(self, cpus: int, gpus: int) -> int:
        """Return how many bundles of this size fit.

        >>> Nodes([(8, 2), (8, 0), (1, 4)], "the cluster").times(2, 1)
        2
        """
        return sum(min(c // cpus, g // gpus if gpus else c) for c, g in self.sizes)


@dataclass(frozen=True)
class Bundle:
    """The devices on one node for pools that share nodes."""

    cpus: int
    gpus: int
    first_gpu: Mapping[str, int]
    """Pool -> index of its first GPU in the bundle. A pool with fewer nodes than the owner is only
    in some bundles."""


class _RankPosition(NamedTuple):
    node_rank: int
    """Index of the rank's node in the group, and of its bundle in the pool."""
    local_rank: int
    nodes: int


def position(place: Place, rank: int) -> _RankPosition:
    """Return the position of a rank of a group.

    >>> position(Place(ResourcePool("train", nodes=2, gpus_per_node=8), ranks=16), 11)
    _RankPosition(node_rank=1, local_rank=3, nodes=2)
    """
    nodes = place.pool.nodes or 1
    return _RankPosition(*divmod(rank, place.ranks // nodes), nodes)


def devices(place: Place, rank: int, gpus: Sequence[str]) -> tuple[str, ...]:
    """Return the GPUs that a rank sees. Rank i of groups with equally many ranks on a pool sees the
    same GPUs.

    Args:
        place: Place of its group.
        rank: Rank in the group.
        gpus: GPUs of the pool on the rank's node.

    >>> devices(Place(ResourcePool("train", nodes=2, gpus_per_node=4), ranks=4), 3, ["4", "5", "6", "7"])
    ('6', '7')
    """
    first = position(place, rank).local_rank * place.gpus
    return tuple(gpus[first : first + place.gpus])


def shares_gpus(placement: Mapping[str, Place], group: str) -> bool:
    """Whether the group's pool has GPUs and other groups use it as well."""
    pool = placement[group].pool
    return pool.gpus > 0 and sum(place.pool.name == pool.name for place in placement.values()) > 1


def start_turns(placement: Mapping[str, Place], follows: Iterable[ParameterEdge]) -> list[list[str]]:
    """Return the start order of groups: for each turn, the groups that start together.

    Groups on the same GPUs start in different turns, followers last, because an inference engine
    takes the memory that is left.

    >>> gpu, cpu = ResourcePool("gpu", gpus=1), ResourcePool("cpu")
    >>> places = {"rollout": Place(gpu), "actor": Place(gpu), "reward": Place(cpu), "recorder": Place(cpu)}
    >>> start_turns(places, [ParameterEdge("rollout", "actor", every=1)])
    [['actor', 'reward', 'recorder'], ['rollout']]
    """
    followers = {edge.follower for edge in follows}
    turns: list[list[str]] = []
    before: Counter[str] = Counter()
    for name in sorted(placement, key=lambda name: name in followers):
        pool = placement[name].pool
        number = before[pool.name] if pool.gpus else 0
        before[pool.name] += 1
        turns.extend([] for _ in range(number + 1 - len(turns)))
        turns[number].append(name)
    return turns


def bundles(pools: Iterable[ResourcePool]) -> dict[str, list[Bundle]]:
    """Return pool -> bundles to reserve. Pools beside another pool are in its bundles.

    >>> bundles([ResourcePool("a", gpus=2, nodes=1), ResourcePool("b", gpus=4, nodes=1, beside="a")])
    {'a': [Bundle(cpus=6, gpus=6, first_gpu={'a': 0, 'b': 2})]}
    """
    found: dict[str, list[Bundle]] = {}
    for name, family in _families(pools).items():
        made: list[Bundle] = []
        for number in range(family[0].nodes or 1):
            cpus, gpus, first = 0, 0, {}
            for pool in family:
                if number < (nodes := pool.nodes or 1):
                    first[pool.name] = gpus
                    cpus, gpus = cpus + pool.cpus // nodes, gpus + pool.gpus // nodes
            made.append(Bundle(cpus, gpus, first))
        found[name] = made
    return found


def lay_out(
    placement: Mapping[str, Place], handles: Mapping[str, Handle], nodes: Nodes
) -> dict[str, Place]:
    """Return the placement with a number of nodes for every pool. If it does not fit, raise a
    `UserError` with the requested and available devices."""
    placement = with_default_ranks(placement, handles, nodes)
    pools = {p.pool.name: p.pool for p in placement.values()}
    elastic = {place.pool.name: place for place in placement.values() if place.is_elastic}
    sized = [pool for pool in pools.values() if not is_own(pool) and pool.name not in elastic]
    if not nodes.grow:
        # The run can start with the minimum of elastic groups.
        _check_totals([*sized, *map(_least, elastic.values())], nodes)
    # A group without a place has one CPU for each rank, all on one node.
    laid_out = {name: replace(pool, nodes=1) for name, pool in pools.items() if is_own(pool)}
    laid_out |= {name: _by_rank(place, nodes) for name, place in elastic.items()}
    for family in _families(sized).values():
        on = [(name, place) for name, place in placement.items() if place.pool in family]
        blocks = [(place, _replica(handles[name], name, place)) for name, place in on if name in handles]
        laid_out |= {pool.name: pool for pool in _with_nodes(family, [p for _, p in on], blocks, nodes)}
    found = {name: replace(place, pool=laid_out[place.pool.name]) for name, place in placement.items()}
    for name, place in found.items():
        if name in handles:
            _check_replica(name, place, _replica(handles[name], name, place))
    return found


def with_default_ranks(
    placement: Mapping[str, Place], handles: Mapping[str, Handle], nodes: Nodes
) -> dict[str, Place]:
    """Give groups without a place several ranks, if their workers want that on nodes with GPUs."""
    cpus = max((cpus for cpus, gpus in nodes.sizes if gpus), default=0)
    found = dict(placement)
    for name, place in placement.items():
        if cpus and is_own(place.pool) and name in handles:
            handle = handles[name]
            ranks = handle.worker_class.default_ranks(handle.config, cpus)
            found[name] = Place(replace(place.pool, cpus=ranks), ranks)
    return found


def _families(pools: Iterable[ResourcePool]) -> dict[str, list[ResourcePool]]:
    """Return pool that owns nodes -> pools on these nodes, the owner first."""
    by_name = {pool.name: pool for pool in pools}
    found: dict[str, list[ResourcePool]] = {p.name: [p] for p in by_name.values() if p.beside is None}
    for pool in by_name.values():
        root = pool
        while root.beside is not None:
            root = by_name[root.beside]
        if root is not pool:
            found[root.name].append(pool)
    return found


def _least(place: Place) -> ResourcePool:
    ranks, least, pool = place.ranks, place.min_ranks or place.ranks, place.pool
    cpus, gpus = pool.cpus // ranks * least, pool.gpus // ranks * least
    return replace(pool, cpus=cpus, gpus=gpus, nodes=None, beside=None)


def _by_rank(place: Place, nodes: Nodes) -> ResourcePool:
    pool = replace(place.pool, nodes=place.ranks)
    one = bundles([pool])[pool.name][0]
    if not nodes.grow and (room := nodes.times(one.cpus, one.gpus)) < (place.min_ranks or 0):
        raise UserError(
            f"resource pool {pool.name!r} needs {one.cpus} CPUs and {one.gpus} GPUs for each of at least {place.min_ranks} ranks, but "
            f"{nodes.where} has room for {room} (CPUs and GPUs of its nodes: {nodes.listed}); lower min_ranks, or wait for the cluster to "
            "grow: RayBackend(wait_s=...)"
        )
    return pool


def _check_totals(pools: Sequence[ResourcePool], nodes: Nodes) -> None:
    for kind, wanted, available in (
        ("CPUs", {p.name: p.cpus for p in pools}, sum(cpus for cpus, _ in nodes.sizes)),
        ("GPUs", {p.name: p.gpus for p in pools}, sum(gpus for _, gpus in nodes.sizes)),
    ):
        if sum(wanted.values()) > available:
            sizes = ", ".join(f"{name}: {number}" for name, number in wanted.items())
            raise UserError(
                f"the placement asks for {sum(wanted.values())} {kind} ({sizes}), but {nodes.where} has {available}; "
                "make a pool smaller or let groups share one"
            )


def _with_nodes(
    family: Sequence[ResourcePool],
    places: Sequence[Place],
    blocks: Sequence[tuple[Place, int]],
    nodes: Nodes,
) -> list[ResourcePool]:
    """Fill in the number of nodes of pools that share nodes: the user's, or as few as possible."""
    root = family[0]
    inner = [pool for pool in family if pool.nodes is None]  # these get as many nodes as the root
    # The root's number of nodes must divide the devices and ranks of all these pools.
    sizes = [n for pool in inner for n in (pool.cpus, pool.gpus)]
    limit = math.gcd(*sizes, *(p.ranks for p in places if p.pool in inner))
    numbers = [root.nodes] if root.nodes else [n for n in range(1, limit + 1) if limit % n == 0]
    fits: list[ResourcePool] = []
    for number in numbers:
        # The user's number for the root may not divide the inner pools.
        if inner and limit % number:
            break
        made = [pool if pool.nodes else replace(pool, nodes=number) for pool in family]
        on_inner = [(place.ranks // number, size) for place, size in blocks if place.pool in inner]
        whole = all(_is_whole(ranks, size) for ranks, size in on_inner)
        if not whole or any((pool.nodes or 1) > number for pool in made):
            continue
        # Bundles differ if a pool has fewer nodes than the root; the largest one must fit.
        largest = max(bundles(made)[root.name], key=lambda bundle: (bundle.gpus, bundle.cpus))
        # A growing cluster may get such nodes later if the user gave their number.
        if nodes.that_hold(largest.cpus, largest.gpus) >= number or (nodes.grow and root.nodes):
            return made
        # Remember the first even layout for the error message.
        fits = fits or made
    raise _cannot_lie(family, places, fits, nodes)


def _cannot_lie(
    family: Sequence[ResourcePool], places: Sequence[Place], made: Sequence[ResourcePool], nodes: Nodes
) -> UserError:
    root, *beside = family
    others = ", ".join(repr(p.name) for p in beside)
    who = f"resource pool {root.name!r}" + (f" (with {others} beside it)" if beside else "")
    if not made:
        ranks = ", ".join(f"{place.ranks} ranks on {place.pool.name!r}" for place in places)
        sizes = ", ".join(f"{p.name}: {p.cpus} CPUs, {p.gpus} GPUs" for p in family)
        return UserError(
            f"{who} cannot be spread evenly over {root.nodes or 'any number of'} nodes ({sizes}; {ranks}): a pool without nodes=... "
            f"has as many as {root.name!r}, each with equally many CPUs, GPUs and ranks"
        )
    one, number = bundles(made)[root.name][0], made[0].nodes or 1
    where = "one node" if number == 1 else f"each of {number} nodes"
    ask = f"{one.cpus} CPUs and {one.gpus} GPUs on {where}"
    have = f"(CPUs and GPUs of its nodes: {nodes.listed})"
    if root.nodes and nodes.that_hold(one.cpus, one.gpus):
        few = nodes.that_hold(one.cpus, one.gpus)
        return UserError(f"{who} asks for {ask}, but only {few} of {nodes.where} can hold that {have}")
    way = "; for nodes that will join later, give the layout: nodes=..., gpus_per_node=..."
    return UserError(
        f"{who} asks for {ask}, but no node of {nodes.where} has both {have}{way if nodes.grow else ''}"
    )


def _replica(handle: Handle, name: str, place: Place) -> int:
    for setting in ("tensor_parallel", "sequence_parallel", "pipeline_parallel"):
        if place.ranks % (size := getattr(handle.config, setting, 1)):
            raise UserError(f"{setting}={size} does not divide the {place.ranks} ranks of {name!r}")
    if place.ranks % (size := ranks_of_a_replica(handle.config)):
        raise UserError(f"a replica of {name!r} has {size} ranks, which do not divide its {place.ranks}")
    return size


def _is_whole(ranks_per_node: int, replica: int) -> bool:
    return ranks_per_node % replica == 0 or replica % ranks_per_node == 0


def _check_replica(name: str, place: Place, replica: int) -> None:
    nodes = place.pool.nodes or 1
    each = place.ranks // nodes
    if not _is_whole(each, replica):
        raise UserError(
            f"a replica of {name!r} has {replica} ranks, but pool {place.pool.name!r} has {each} of them on each of its "
            f"{nodes} nodes, so some replicas would be split across nodes; choose a multiple or a divisor of {each} "
            "for tensor_parallel, sequence_parallel or pipeline_parallel"
        )


# The machine


class _OtherMachine(NamedTuple):
    gpus: int
    gpu_bytes: int
    """[bytes] Memory of each GPU."""


OTHER: ContextVar[_OtherMachine | None] = ContextVar("OTHER", default=None)
"""The machine to plan for; None for this machine."""


@contextmanager
def assumed_machine(gpus: int, gpu_bytes: int) -> Iterator[None]:
    """In the block, plan for a machine with these GPUs and at least four CPUs per GPU."""
    before = OTHER.set(_OtherMachine(gpus, gpu_bytes))
    try:
        yield
    finally:
        OTHER.reset(before)


def machine_cpus() -> int:
    """Return the CPUs that this process may use; for another machine, at least four per GPU."""
    cpus = usable_cpus()
    return max(cpus, 4 * other.gpus) if (other := OTHER.get()) is not None else cpus


def machine_gpus() -> int:
    """Return the number of NVIDIA GPUs that this process may use, without loading CUDA; for another
    machine, its number of GPUs."""
    if (other := OTHER.get()) is not None:
        return other.gpus
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return (
        present if visible is None else min(present, len([d for d in visible.split(",") if d.strip()]))
    )
