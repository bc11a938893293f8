"""Time of a step, from costs: those of the simulation that a script asks for, or those fitted to the timeline of an earlier run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...dataflow.graph import TRAIN
from ...dataflow.metric_names import FUNCTIONS
from ...workers.training.microbatch_plan import OptimizerSteps
from ..run_spec import RunSpec
from ..schedule import Synchronous
from ..simulation.bound import bound
from ..simulation.costs import CostModel, Generation
from .sizes import StepSizes

BESIDE = ("publish_weights", "receive_weights", "onload", "offload")
"""Calls beside the graph that a step has, each once."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of training, without what the driver takes, and without evaluations and checkpoints."""

    seconds: float
    nodes: Mapping[str, float]
    """Node, or group and method beside the graph -> seconds; empty where only the whole is known."""
    of: str
    """Where the costs are from."""
    at_best: bool
    """No schedule beats it: everything overlaps that can."""


def step_time(spec: RunSpec, sizes: StepSizes, costs: CostModel, of: str) -> StepTime:
    """The time of a step.

    Args:
        spec: the run.
        sizes: of a step.
        costs: of its calls; what they do not mention takes no time.
        of: where they are from.
    """
    graph, places = spec.graphs[TRAIN], spec.placement
    if any(isinstance(cost, Generation) for cost in costs.nodes.values()):
        placed = {name: place for name, place in places.items() if name == FUNCTIONS or name in graph.handles}
        found = bound(costs, graph, placed, prompts_per_step=sizes.prompts)
        return StepTime(found.seconds, {}, of, at_best=True)
    nodes: dict[str, float] = {}
    for node in graph.nodes:
        group = node.group or FUNCTIONS
        config: Any = spec.handles[group].config
        ranks = 1 if spec.backend.in_process else places[group].ranks
        replicas = max(1, ranks // costs.replica_ranks(group, config))
        level = node.level if node.makes_level is None else node.makes_level
        rows = sizes.rows_of_level[level] / replicas
        nodes[node.name] = costs.linear(node.name).seconds(rows, rows * sizes.tokens(level), OptimizerSteps.of(node))
    beside = (f"{group}.{method}" for group in spec.handles for method in BESIDE)
    nodes |= {name: costs.linear(name).fixed_s for name in beside if name in costs.nodes}
    nodes = {name: seconds for name, seconds in nodes.items() if seconds}
    if isinstance(spec.schedule, Synchronous):
        return StepTime(sum(nodes.values()), nodes, of, at_best=False)
    pools: dict[str, float] = {}
    for name, seconds in nodes.items():
        group = name.partition(".")[0]
        pool = places[group if group in places else FUNCTIONS].pool.name
        pools[pool] = pools.get(pool, 0.0) + seconds
    return StepTime(max(pools.values(), default=0.0), nodes, of, at_best=True)
