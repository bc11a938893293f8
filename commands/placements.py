"""`weft plan --search`: proposals of placements for a script's run, and a file with the best one."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..dataflow.errors import UserError
from .command_line import Answer

if TYPE_CHECKING:
    from ..controllers.placement import Place
    from ..controllers.prechecks.placement_proposals import EqualNodes, GroupBytes, Proposal
    from ..controllers.run_spec import RunSpec
    from ..controllers.simulation.costs import CostModel

SIMULATED_ROWS = 10_000
"""Rows of a simulation, whose steps are at least 3 and at most 20."""


def search(spec: RunSpec, machine: tuple[int, int, int] | None, like: Path | None, out: Path) -> Answer:
    """Search placements of a planned run, and write the best one.

    Args:
        machine: nodes, GPUs of each, and bytes of each GPU; None for this machine.
        like: directory of an earlier run, for the costs of calls.
        out: the file to write.
    """
    from ..controllers.placement_file import OPTION, write_placement
    from ..controllers.prechecks.placement_proposals import node_seconds, propose

    cluster, costs = _cluster(machine), _costs(spec, like)

    found = propose(
        spec,
        cluster,
        seconds=node_seconds(spec, costs),
        simulate=partial(simulated_s, spec, costs) if _can_simulate(spec, costs) else None,
        group_bytes=_group_bytes(spec, cluster),
    )
    of = str(like) if like is not None else "the script's simulation"
    about = {"machine": cluster.where, "costs": of, "predicted_step_s": found[0].seconds}
    write_placement(out, found[0].placement, about)
    told = {"file": str(out), "machine": cluster.where, "costs": of}
    proposals = [
        {"seconds": each.seconds, "groups": _groups(each), "reason": each.reason} for each in found
    ]
    use = f"best placement written to {out}; use it with {OPTION} {out}"
    return Answer({**told, "placements": proposals}, "\n".join([*_lines(found, cluster), use]))


def _cluster(machine: tuple[int, int, int] | None) -> EqualNodes:
    from ..controllers.prechecks.placement_proposals import EqualNodes
    from ..controllers.prechecks.plan import ROOM, this_machine

    if machine is not None:
        nodes, gpus, gpu_bytes = machine
        where = f"{nodes} nodes of {gpus} GPUs" if nodes > 1 else f"{gpus} GPUs"
        return EqualNodes(nodes, gpus, ROOM * gpu_bytes, where=where)
    here = this_machine()
    if here.gpus:
        return EqualNodes(1, here.gpus, ROOM * here.gpu_bytes or math.inf)
    return EqualNodes(1, here.cpus, has_gpus=False, where=f"the {here.cpus} CPUs of this machine")


def _costs(spec: RunSpec, like: Path | None) -> CostModel:
    from ..controllers.simulation.backend import Simulated
    from ..controllers.simulation.costs import calibrate

    if like is not None:
        return calibrate(like)
    if isinstance(spec.backend, Simulated):
        return spec.backend.costs
    raise UserError(
        "--search needs the costs of calls: name an earlier run with --like RUN, or give the script the backend Simulated(costs)"
    )


def _can_simulate(spec: RunSpec, costs: CostModel) -> bool:
    """Whether the costs have the lengths of responses, which a timeline lacks."""
    from ..controllers.simulation.costs import Generation
    from ..dataflow.column import RESPONSE_VERSIONS
    from ..dataflow.graph import TRAIN

    generating = [n.name for n in spec.graphs[TRAIN].nodes if str(RESPONSE_VERSIONS) in n.writes]
    return all(isinstance(costs.nodes.get(name), Generation) for name in generating)


def _group_bytes(spec: RunSpec, cluster: EqualNodes) -> GroupBytes:
    from ..controllers.placement import Place, ResourcePool
    from ..controllers.planner.options import Strategy
    from ..controllers.prechecks.plan_memory import group_memory
    from ..controllers.prechecks.plan_sizes import step_sizes
    from ..dataflow.graph import TRAIN

    sizes = step_sizes(spec.graphs[TRAIN], spec.schedule.prompts_per_step)
    known: dict[tuple[str, int], tuple[float, float]] = {}

    def group_bytes(group: str, strategy: Strategy) -> tuple[float, float]:
        if not cluster.has_gpus or math.isinf(cluster.device_bytes):
            return 0.0, 0.0
        if (group, strategy.gpus) not in known:
            nodes = max(1, strategy.gpus // cluster.devices)
            nodes = nodes if strategy.gpus % nodes == 0 else None
            place = Place(ResourcePool("searched", gpus=strategy.gpus, nodes=nodes), strategy.gpus)
            placed, gpu_bytes = (
                replace(spec, placement={**spec.placement, group: place}),
                round(cluster.device_bytes),
            )
            memory = group_memory(placed, group, spec.handles[group], place, sizes, gpu_bytes)
            known[group, strategy.gpus] = memory.idle, memory.device - memory.idle
        return known[group, strategy.gpus]

    return group_bytes


def simulated_s(spec: RunSpec, costs: CostModel, placement: Mapping[str, Place]) -> float:
    """Return the mean seconds of a step after the first, by the driver on the simulator."""
    from ..controllers.driver import Driver
    from ..controllers.prechecks.plan_sizes import step_sizes
    from ..controllers.simulation.backend import Simulated
    from ..dataflow.graph import TRAIN

    graph = spec.graphs[TRAIN]
    rows = step_sizes(graph, spec.schedule.prompts_per_step).rows
    steps = min(20, max(3, SIMULATED_ROWS // max(1, rows)))
    # Costs of groups that only evaluations use have no group in this run.
    names = {*graph.handles, *spec.placement}
    own = {n: cost for n, cost in costs.nodes.items() if "." not in n or n.partition(".")[0] in names}
    changed = {"steps": steps, "rounds": 1}
    changed = {name: value for name, value in changed.items() if hasattr(spec.schedule, name)}
    with tempfile.TemporaryDirectory(prefix="weft-search-") as folder:
        driver = Driver(
            graph,
            schedule=spec.schedule.model_copy(update=changed),
            placement=placement,
            backend=Simulated(costs.model_copy(update={"nodes": own})),
            root=folder,
            name="simulated",
            seed=spec.seed,
            record_every=0,
            progress=False,
            stop_on=(),
        )
        with driver:
            metrics = driver.run()
    ends = {row["step"]: row["time_s"] for row in metrics}
    return (ends[steps] - ends[1]) / (steps - 1)


def _groups(proposal: Proposal) -> dict[str, dict[str, Any]]:
    return {
        name: {"pool": place.pool.name, "ranks": place.ranks}
        for name, place in proposal.placement.items()
    }


def _lines(found: Sequence[Proposal], cluster: EqualNodes) -> list[str]:
    how = "single calls" if found[0].simulated_s is None else "the simulator"
    lines = [f"PLACEMENTS on {cluster.where}, fastest first by {how}"]
    for number, each in enumerate(found, 1):
        pools = {place.pool.name: place.ranks for place in each.placement.values()}
        placed = ", ".join(f"{name} on {ranks}" for name, ranks in pools.items())
        slower = f" ({each.seconds / found[0].seconds:.2f} times the best)" if number > 1 else ""
        lines.append(f"  {number}. {each.seconds:.4g} s a step{slower}: {placed}")
        lines.append(f"     {each.reason}")
    return lines
