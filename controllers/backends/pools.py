"""Resource pools on a Ray cluster: each is a placement group of one bundle."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...dataflow.errors import UserError
from ..placement import ResourcePool, is_own
from .backend import START_TIMEOUT_S, Setup

POOL_TIMEOUT_S = 30.0
"""Longest wait for the pools of a placement, which others on the cluster may hold."""
OWN_POOL_TIMEOUT_S = 1.0
"""Longest wait for a CPU of its own for a group without a place."""


@dataclass(frozen=True)
class ReservedPool:
    """A resource pool that the cluster has reserved."""

    strategy: Any
    """Schedules an actor into it."""
    gpus: Sequence[str]
    """Its devices, as `CUDA_VISIBLE_DEVICES` names them on its node."""
    cpus: int
    """CPUs that Ray counts as taken by the pool; 0 if its groups are guests on another pool's node."""


class Reservations:
    """The pools that a run has reserved."""

    def __init__(self) -> None:
        self._groups: list[Any] = []
        """Placement groups of Ray."""
        self._pools: dict[str, ReservedPool] = {}

    def __getitem__(self, name: str) -> ReservedPool:
        return self._pools[name]

    def reserve(self, setup: Setup) -> None:
        """Reserve the pools of a placement. Those that a user sized are waited for. A group without a place gets a CPU of its own where
        one is free; else it is a guest on another pool's node and works while that pool's groups are idle.

        Raises:
            UserError: a pool that the user sized was not free in time.
        """
        pools = {p.pool.name: p.pool for p in setup.placement.values()}
        own = [name for name, pool in pools.items() if is_own(pool)]
        sized = [name for name in pools if name not in own] or own[:1]
        self._reserve({name: pools[name] for name in sized}, POOL_TIMEOUT_S)
        if missing := [name for name in sized if name not in self._pools]:
            import ray

            raise UserError(
                f"{', '.join(f'resource pool {name!r} ({pools[name]})' for name in missing)} did not get what it asks for on one node "
                f"within {POOL_TIMEOUT_S:.0f} s; the cluster has {ray.available_resources()} to give"
            )
        self._reserve({n: pools[n] for n in own if n not in self._pools}, OWN_POOL_TIMEOUT_S)
        largest = max(self._pools, key=lambda name: pools[name].cpus)
        for name in own:
            leader = next((e.leader for e in setup.follows if setup.placement[e.follower].pool.name == name), None)
            host = setup.placement[leader].pool.name if leader else largest
            guest = replace(self._pools.get(host, self._pools[largest]), gpus=(), cpus=0)
            self._pools.setdefault(name, guest)

    def release(self) -> None:
        import ray

        for group in self._groups:
            ray.util.remove_placement_group(group)

    def _reserve(self, pools: Mapping[str, ResourcePool], timeout_s: float) -> None:
        """Reserve those of the pools that are free in time, and take the requests for the others back."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        asked = {name: ray.util.placement_group([_devices(p)], strategy="STRICT_PACK") for name, p in pools.items()}
        deadline = time.monotonic() + timeout_s
        for name, group in asked.items():
            if not group.wait(max(0.0, deadline - time.monotonic())):
                ray.util.remove_placement_group(group)
                continue
            self._groups.append(group)
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
            gpus: list[str] = []
            if pools[name].gpus:  # only a process that holds the GPUs can tell which they are
                held = ray.remote(_gpu_ids).options(num_gpus=pools[name].gpus, num_cpus=0, scheduling_strategy=strategy)
                gpus = ray.get(held.remote(), timeout=START_TIMEOUT_S)
            self._pools[name] = ReservedPool(strategy, gpus, pools[name].cpus)


def _devices(pool: ResourcePool) -> dict[str, float]:
    return {"CPU": pool.cpus, **({"GPU": pool.gpus} if pool.gpus else {})}


def _gpu_ids() -> list[str]:
    """The devices of the pool in whose bundle this runs."""
    import ray

    return [str(i) for i in ray.get_gpu_ids()]
