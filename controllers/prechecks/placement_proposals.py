"""Proposals of placements for a script's run: which worker groups share devices, and how many each set
of groups gets.

    best, *others = propose(spec, cluster, seconds=node_seconds(spec, costs), simulate=...)

`PlacementSearch` finds the best allocation of every set partition by the costs of single calls. The
caller simulates the best few, and the seconds of the simulation decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, TypeAlias

import numpy as np

from ...dataflow.errors import UserError
from ...dataflow.graph import TRAIN, Node
from ...workers.training.microbatch_plan import OptimizerSteps
from ..node_layout import Nodes, lay_out
from ..placement import Place, ResourcePool, is_own
from ..planner.options import Strategy
from ..planner.placement_search import FoundPlacement, PlacementSearch
from ..run_spec import RunSpec
from ..schedule import Synchronous
from ..simulation.costs import CostModel, Generation, batch_limit
from .checks import check_schedule
from .plan_sizes import StepSizes, step_sizes

NodeSeconds: TypeAlias = Callable[[Node, Strategy], float]
"""Returns the seconds of a node's calls in a step; infinite if its group cannot run so."""
GroupBytes: TypeAlias = Callable[[str, Strategy], tuple[float, float]]
"""Returns the bytes that a group keeps on each device, and its additional bytes there during its turn."""

CANDIDATES = 10
"""Number of set partitions to simulate, by the best estimates."""
IMPROVED = 2
"""Number of placements whose allocations are improved on the simulator."""


@dataclass(frozen=True)
class EqualNodes:
    """Nodes with equally many devices: GPUs, or CPUs where there are none."""

    nodes: int
    devices: int
    """Devices of each node."""
    device_bytes: float = math.inf
    """Usable memory of a device."""
    has_gpus: bool = True
    where: str = "the machine"
    """Name in messages."""


@dataclass(frozen=True)
class Proposal:
    placement: Mapping[str, Place]
    estimate_s: float
    """[s] Seconds of a step by the costs of single calls."""
    simulated_s: float | None
    """[s] The same by the simulator, or None without a simulation."""
    reason: str

    @property
    def seconds(self) -> float:
        return self.estimate_s if self.simulated_s is None else self.simulated_s


def propose(
    spec: RunSpec,
    cluster: EqualNodes,
    *,
    seconds: NodeSeconds,
    simulate: Callable[[Mapping[str, Place]], float] | None = None,
    group_bytes: GroupBytes = lambda group, strategy: (0.0, 0.0),
    number: int = 5,
) -> list[Proposal]:
    """Return the best placements, at most one for each set partition, fastest first.

    The search covers groups with a model, and groups that the script places on such devices. Other
    groups keep their place. The search leaves out placements that the driver refuses, for example
    shared pools under an asynchronous schedule.

    Args:
        spec: the run of the script.
        seconds: the costs of calls.
        simulate: returns the seconds of a step in a placement. Without it, the costs of single calls
            decide.
        group_bytes: the memory of a group.
        number: maximum number of placements to return.

    Raises:
        UserError: no placement fits or is allowed.
    """
    groups = _searched(spec, cluster)
    stages = _stages(spec, groups)

    def stage_s(group: str, strategy: Strategy) -> list[float]:
        own = [(stages[node.name], node) for node in spec.graphs[TRAIN].nodes if node.group == group]
        found = [0.0] * (1 + max(stages.values(), default=0))
        for stage, node in own:
            found[stage] += seconds(node, strategy)
        return found

    search = PlacementSearch(
        groups,
        seconds=stage_s,
        held_bytes=lambda group, strategy: group_bytes(group, strategy)[0],
        active_bytes=lambda group, strategy: group_bytes(group, strategy)[1],
        node_gpus=cluster.devices,
        gpu_bytes=cluster.device_bytes,
    )
    step = 1 if cluster.nodes == 1 else cluster.devices
    refused: list[str] = []

    def proposed(found: FoundPlacement | None) -> _Made | None:
        if found is None:
            return None
        placement = placement_of(found, cluster)
        try:
            _check(spec, placement, cluster)
        except UserError as error:
            refused.append(str(error))
            return None
        simulated_s = None if simulate is None else simulate(placement)
        reason = _reason(found, spec, stages, cluster)
        return found, Proposal(placement, found.seconds, simulated_s, reason)

    candidates = search.placements(cluster.nodes * cluster.devices, step)[:CANDIDATES]
    made = sorted(filter(None, map(proposed, candidates)), key=_seconds)
    if not made:
        raise UserError(f"the run allows none of the placements on {cluster.where}: {refused[0]}")
    # The estimate may give a set too many devices, so move some while that helps.
    for k in range(min(IMPROVED, len(made)) if simulate is not None else 0):
        while True:
            sets = made[k][0].sets
            partition = [tuple(each.strategies) for each in sets]
            splits = _neighbours([each.gpus for each in sets], step)
            others = filter(None, (proposed(search.best(partition, split)) for split in splits))
            best = min(others, key=_seconds, default=made[k])
            if _seconds(best) >= _seconds(made[k]):
                break
            made[k] = best
    return [each for _, each in sorted(made, key=_seconds)][:number]


_Made: TypeAlias = tuple[FoundPlacement, Proposal]


def _seconds(made: _Made) -> float:
    return made[1].seconds


def _neighbours(split: Sequence[int], step: int) -> Iterator[list[int]]:
    """Yield the allocations that move `step` devices from one set to another.

    >>> list(_neighbours([2, 1], 1))
    [[1, 2]]
    """
    for giver, taker in permutations(range(len(split)), 2):
        if split[giver] > step:
            moved = list(split)
            moved[giver] -= step
            moved[taker] += step
            yield moved


def _check(spec: RunSpec, placement: Mapping[str, Place], cluster: EqualNodes) -> None:
    """Raise a `UserError` if the nodes or the schedule do not allow the placement."""
    sizes = [(cluster.devices, cluster.devices * cluster.has_gpus)] * cluster.nodes
    handles = {name: spec.handles[name] for name in placement}
    lay_out(placement, handles, Nodes(sizes, cluster.where))
    check_schedule(replace(spec, placement={**spec.placement, **placement}))


def _searched(spec: RunSpec, cluster: EqualNodes) -> tuple[str, ...]:
    """Return the groups to place; all of the graph if none has a model or a place."""
    handles = spec.graphs[TRAIN].handles

    def is_placed(pool: ResourcePool) -> bool:
        return pool.gpus > 0 if cluster.has_gpus else not is_own(pool)

    found = [
        name
        for name, handle in handles.items()
        if getattr(handle.config, "model", None) is not None or is_placed(spec.placement[name].pool)
    ]
    return tuple(found or handles)


def _stages(spec: RunSpec, groups: tuple[str, ...]) -> dict[str, int]:
    """Return node -> its stage: calls of one stage may run at the same time. Under schedules that
    overlap generation and training, all calls may."""
    stages: dict[str, int] = {}
    placed = {node.name for node in spec.graphs[TRAIN].nodes if node.group in groups}
    for node in spec.graphs[TRAIN].nodes:
        stages[node.name] = max((stages[name] + (name in placed) for name in node.after), default=0)
    return stages if isinstance(spec.schedule, Synchronous) else dict.fromkeys(stages, 0)


def placement_of(found: FoundPlacement, cluster: EqualNodes) -> dict[str, Place]:
    """Return a pool for each set of models, with a rank on each device."""
    placement: dict[str, Place] = {}
    for each in found.sets:
        count = each.gpus
        nodes = count // cluster.devices if count % cluster.devices == 0 else None
        name = "+".join(each.strategies)
        pool = ResourcePool(name, cpus=count, gpus=count * cluster.has_gpus, nodes=nodes)
        placement |= {group: Place(pool, ranks=count) for group in each.strategies}
    return placement


def _reason(found: FoundPlacement, spec: RunSpec, stages: Mapping[str, int], cluster: EqualNodes) -> str:
    parts: list[str] = []
    for stage in range(len(found.sets[0].stage_s)):
        slowest = max(found.sets, key=lambda each: each.stage_s[stage])
        if slowest.stage_s[stage]:
            own = [
                node.name
                for node in spec.graphs[TRAIN].nodes
                if node.group in slowest.strategies and stages[node.name] == stage
            ]
            parts.append(f"{', '.join(own)} {slowest.stage_s[stage]:.3g} s")
    busy = sum(each.gpus * sum(each.stage_s) for each in found.sets)
    share = busy / (cluster.nodes * cluster.devices * found.seconds) if found.seconds else 0.0
    return f"{' + '.join(parts)}; devices busy {share:.0%}"


# Costs of calls from a cost model


def node_seconds(spec: RunSpec, costs: CostModel) -> NodeSeconds:
    """Return the seconds of calls by costs that were measured with the script's parallelism. Only
    the number of replicas may change."""
    sizes = step_sizes(spec.graphs[TRAIN], spec.schedule.prompts_per_step)

    def seconds(node: Node, strategy: Strategy) -> float:
        config: Any = spec.handles[str(node.group)].config
        ranks = costs.replica_ranks(str(node.group), config)
        stages = getattr(config, "pipeline_parallel", 1)
        if (strategy.pp, strategy.tp) != (stages, ranks // stages):
            return math.inf
        cost = costs.nodes.get(node.name)
        if isinstance(cost, Generation):
            lengths = _lengths(cost, sizes, spec.seed)
            prefill_s = sizes.prompts * sizes.prompt_tokens * cost.prefill_s / strategy.dp
            step_s = cost.seconds_by_batch(batch_limit(config))
            if spec.schedule.overlaps:  # full batches, because the next prompts follow
                token_s = float((step_s[1:] / np.arange(1, len(step_s))).min())
                return prefill_s + float(lengths.sum()) * token_s / strategy.dp
            return prefill_s + _decode_s(lengths[:: strategy.dp], step_s)
        level = node.level if node.makes_level is None else node.makes_level
        rows = sizes.rows_of_level[level] / strategy.dp
        steps = OptimizerSteps.of_node(node)
        return costs.linear(node.name).seconds(rows, rows * sizes.tokens(level), steps)

    return seconds


def _lengths(cost: Generation, sizes: StepSizes, seed: int) -> np.ndarray:
    """Return the lengths of a step's responses, longest first."""
    each = max(1, sizes.rows // max(1, sizes.prompts))
    drawn = [cost.draw_lengths((seed, prompt), prompt, each) for prompt in range(sizes.prompts)]
    return np.sort(np.concatenate(drawn))[::-1]


def _decode_s(lengths: np.ndarray, step_s: np.ndarray) -> float:
    """Return the seconds to decode responses, longest first, in one batch after the other. `step_s`:
    [s] of a decode step, by the number of responses from 0 to the largest batch."""
    seconds, limit = 0.0, len(step_s) - 1
    for first in range(0, len(lengths), limit):
        batch = lengths[first : first + limit]
        # The batch is smaller by one after each response, the shortest first.
        seconds += float((batch - np.append(batch[1:], 0)) @ step_s[1 : len(batch) + 1])
    return seconds
