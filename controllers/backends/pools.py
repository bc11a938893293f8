"""Resource pools on a Ray cluster. Pools that share nodes form one Ray placement group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...dataflow.errors import UserError
from ..node_layout import Bundle, bundles
from ..own_groups import RECORDER
from ..placement import Place, ResourcePool, is_own
from .backend import Setup

WAIT_S = 30.0
"""[s] Default time limit for reserving the pools of a placement."""
OWN_POOL_TIMEOUT_S = 1.0
"""[s] Longest wait for a free CPU for a group without a place."""
TELL_S = (3.0, 60.0)
"""[s] Initial and longest time between two progress lines. The time doubles after each line."""
LOOK_S = 0.2
"""[s] Interval between checks for room for the ranks of an elastic group."""
PROBE_TIMEOUT_S = 120.0
"""[s] Longest wait for a process to report the GPUs of a bundle."""
GROWS = "For a cluster that grows, wait longer: RayBackend(wait_s=...)"


@dataclass(frozen=True)
class _ReservedPart:
    """The part of a pool on one node."""

    strategy: Any
    node: str = ""
    """Ray's id of the node; empty if the pool had no room there when the run started."""
    address: str = ""
    gpus: Sequence[str] = ()
    """The part's GPUs, as in `CUDA_VISIBLE_DEVICES` on the node."""
    bundle_gpus: int = 0
    """Number of GPUs in the bundle, which pools may share."""
    first_gpu: int = 0
    """Index of the pool's first GPU in the bundle."""
    own_gpus: int = 0
    """Number of the pool's GPUs in the bundle."""

    def find_gpus(self) -> Any:
        """Return a promise of the part's GPUs, which change if Ray moves a lost node's bundle."""
        import ray

        held: Any = ray.remote(_gpus_from)
        options = held.options(num_gpus=self.bundle_gpus, num_cpus=0, scheduling_strategy=self.strategy)
        return options.remote(self.first_gpu, self.own_gpus)


@dataclass(frozen=True)
class ReservedPool:
    parts: Sequence[_ReservedPart]
    """One part for each node of the pool."""
    cpus: int
    """Number of CPUs that Ray counts for the pool; 0 for a guest on another pool's node."""


class Reservations:
    def __init__(self, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._groups: list[Any] = []
        self._pools: dict[str, ReservedPool] = {}
        self._by_rank: dict[str, list[Any]] = {}
        """Pool of an elastic group -> a placement group for each rank."""

    def __getitem__(self, name: str) -> ReservedPool:
        return self._pools[name]

    def reserve(self, setup: Setup) -> None:
        """Reserve the pools of a placement. Wait for the pools whose size the user set.

        A group without a place gets a free CPU, on the node of the group whose weights it follows.
        If no CPU is free, the group becomes a guest on another pool's node, and works while that
        pool's groups are idle.

        Raises:
            UserError: A pool whose size the user set was not free in time.
        """
        elastic = {p.pool.name: p for p in setup.placement.values() if p.is_elastic}
        pools = {p.pool.name: p.pool for p in setup.placement.values() if not p.is_elastic}
        own = [name for name, pool in pools.items() if is_own(pool)]
        # If the user sized no pool, wait for the first, which can then host the others as guests.
        sized = [name for name in pools if name not in own] or own[:1]
        self._reserve([pools[name] for name in sized], self._wait_s, tell=setup.tell)
        if missing := [name for name in sized if name not in self._pools]:
            raise UserError(
                f"{', '.join(_in_words(pools[name]) for name in missing)} did not get the requested devices within {self._wait_s:.0f} s; "
                f"{_in_stock()}. {GROWS}"
            )
        leaders = {
            setup.placement[e.follower].pool.name: setup.placement[e.leader].pool.name
            for e in setup.follows
        }
        for place in elastic.values():
            self._reserve_by_rank(place, setup.tell)
        near = {
            name: self._pools[leaders[name]].parts[0].node
            for name in own
            if leaders.get(name) in self._pools
        }
        self._keep_recorder_here(setup)
        self._reserve([pools[n] for n in own if n not in self._pools], OWN_POOL_TIMEOUT_S, near=near)
        reserved = self._pools.keys() & pools.keys()
        largest = max(reserved, key=lambda name: (name not in own, pools[name].cpus))
        for name in own:
            host = self._pools.get(leaders.get(name, largest), self._pools[largest]).parts[0]
            guest = _ReservedPart(host.strategy, host.node, host.address)
            self._pools.setdefault(name, ReservedPool([guest], cpus=0))

    def room(self, name: str) -> dict[int, str]:
        """Return rank -> Ray's id of its node, for an elastic group's ranks that have room now."""
        import ray

        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        tables: Mapping[str, Mapping[str, Any]] = ray.util.placement_group_table()
        found: dict[int, str] = {}
        for rank, group in enumerate(self._by_rank.get(name, ())):
            table = tables.get(group.id.hex(), {})
            node = table.get("bundles_to_node_id", {}).get(0, "")
            if table.get("state") == "CREATED" and node in alive:
                found[rank] = node
        return found

    def _keep_recorder_here(self, setup: Setup) -> None:
        """Place the recorder on the driver's node, because it writes into the run's directory."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        pool = setup.placement[RECORDER].pool if RECORDER in setup.placement else None
        if pool is not None and is_own(pool) and sum(node["Alive"] for node in ray.nodes()) > 1:
            here = ray.get_runtime_context().get_node_id()
            strategy = NodeAffinitySchedulingStrategy(here, soft=False)
            guest = _ReservedPart(strategy, here, _addresses()[here])
            self._pools.setdefault(pool.name, ReservedPool([guest], cpus=0))

    def remove(self) -> None:
        import ray

        for group in [*self._groups, *(group for groups in self._by_rank.values() for group in groups)]:
            ray.util.remove_placement_group(group)

    def _reserve_by_rank(self, place: Place, tell: Callable[[str], None]) -> None:
        """Request room for each rank separately, so that Ray's autoscaler sees all requests. Wait
        until `min_ranks` ranks have room."""
        import ray

        pool, least = place.pool, place.min_ranks or 0
        each = bundles([pool])[pool.name]
        groups = self._by_rank[pool.name] = [_ask([bundle], None) for bundle in each]
        began = told = time.monotonic()
        pauses = _pauses()
        pause_s = next(pauses)
        while (ranks := len(self.room(pool.name))) < least:
            now = time.monotonic()
            has = f"{ranks} of at least {least} ranks on resource pool {pool.name!r}"
            if now - began > self._wait_s:
                needs = f"each needs {each[0].cpus} CPUs, {each[0].gpus} GPUs"
                raise UserError(
                    f"there was room for {has} after {self._wait_s:.0f} s ({needs}); {_in_stock()}. {GROWS}"
                )
            if now - told >= pause_s:
                pause_s, told = next(pauses), now
                left_s = began + self._wait_s - now
                tell(f"there is room for {has}, waiting {left_s:.0f} s at most; {_in_stock()}")
            time.sleep(LOOK_S)
        time.sleep(LOOK_S)  # other ranks may get room at the same time
        there, addresses, parts = self.room(pool.name), _addresses(), list[_ReservedPart]()
        for rank, (group, bundle) in enumerate(zip(groups, each, strict=True)):
            part = _part_of(group, 0, there.get(rank, ""), bundle, addresses)
            gpus = (
                ray.get(part.find_gpus(), timeout=PROBE_TIMEOUT_S) if part.node and bundle.gpus else ()
            )
            parts.append(replace(part, gpus=gpus))
        self._pools[pool.name] = ReservedPool(parts, pool.cpus)

    def _reserve(
        self,
        pools: Sequence[ResourcePool],
        timeout_s: float,
        *,
        tell: Callable[[str], None] = lambda line: None,
        near: Mapping[str, str] = {},
    ) -> None:
        """Reserve the pools that become free within `timeout_s`. `near` maps some pools to Ray's id
        of the node that they must be on."""
        import ray

        asked = [(family, _ask(family, near.get(name))) for name, family in bundles(pools).items()]
        deadline, pauses = time.monotonic() + timeout_s, _pauses()
        pause_s = next(pauses)
        for family, group in asked:
            while not group.wait(min(pause_s, max(0.0, deadline - time.monotonic()))):
                pause_s, left_s = next(pauses), deadline - time.monotonic()
                if left_s <= 0:
                    ray.util.remove_placement_group(group)
                    break
                names = {name for bundle in family for name in bundle.first_gpu}
                waiting = ", ".join(_in_words(pool) for pool in pools if pool.name in names)
                tell(f"waiting for {waiting}, {left_s:.0f} s at most; {_in_stock()}")
            else:
                self._groups.append(group)
                self._share_out(group, family, {pool.name: pool for pool in pools})

    def _share_out(
        self, group: Any, family: Sequence[Bundle], pools: Mapping[str, ResourcePool]
    ) -> None:
        import ray

        nodes: Mapping[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
        addresses = _addresses()
        whole = [_part_of(group, i, nodes[i], bundle, addresses) for i, bundle in enumerate(family)]
        asked = [part.find_gpus() if part.bundle_gpus else None for part in whole]
        gpus = [ray.get(one, timeout=PROBE_TIMEOUT_S) if one else [] for one in asked]
        for name in family[0].first_gpu:
            each = pools[name].gpus // (pools[name].nodes or 1)
            parts = [
                replace(whole[i], gpus=gpus[i][start : start + each], first_gpu=start, own_gpus=each)
                for i, start in enumerate(bundle.first_gpu.get(name) for bundle in family)
                if start is not None
            ]
            self._pools[name] = ReservedPool(parts, pools[name].cpus)


def _part_of(
    group: Any, index: int, node: str, bundle: Bundle, addresses: Mapping[str, str]
) -> _ReservedPart:
    """Return the part that is a whole bundle. `node` is empty if the bundle has no room."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    address = addresses.get(node, "")
    return _ReservedPart(strategy, node, address, (), bundle.gpus, 0, own_gpus=bundle.gpus)


def _addresses() -> dict[str, str]:
    """Return Ray's node id -> address, for all nodes."""
    import ray

    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}


def _pauses() -> Iterator[float]:
    """[s] Yield the times between two progress lines."""
    pause_s, longest_s = TELL_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, longest_s)


def _ask(family: Sequence[Bundle], node: str | None) -> Any:
    """Request a placement group of bundles, each on a different node."""
    import ray

    wanted = [{"CPU": float(b.cpus), **({"GPU": float(b.gpus)} if b.gpus else {})} for b in family]
    selector: Any = [{"ray.io/node-id": node}] if node else None
    strategy = "STRICT_PACK" if len(family) == 1 else "STRICT_SPREAD"
    return ray.util.placement_group(wanted, strategy=strategy, bundle_label_selector=selector)


def _gpus_from(first: int, number: int) -> list[str]:
    """Return some GPUs of the bundle. Only a process inside the bundle can read their ids."""
    import ray

    held = [str(gpu) for gpu in ray.get_gpu_ids()]
    return sorted(held, key=lambda gpu: (int(gpu) if gpu.isdigit() else 0, gpu))[first : first + number]


def _in_words(pool: ResourcePool) -> str:
    nodes = pool.nodes or 1
    has = f"{pool.cpus // nodes} CPUs" + (f", {pool.gpus // nodes} GPUs" if pool.gpus else "")
    where = "one node" if nodes == 1 else f"each of {nodes} nodes"
    return f"resource pool {pool.name!r} ({has} on {where})"


def _in_stock() -> str:
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    free: Mapping[str, float] = ray.available_resources()
    said = [
        f"{sum(node.get(kind, 0) for node in alive):.0f} {kind}s ({free.get(kind, 0):.0f} free)"
        for kind in ("CPU", "GPU")
    ]
    return f"the cluster has {len(alive)} node{'s' * (len(alive) != 1)} with {' and '.join(said)}"
