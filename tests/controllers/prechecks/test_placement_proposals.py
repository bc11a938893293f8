"""Proposed placements against simulations of every placement, and placement files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from simulated_runs import apart, costs, groups
from toy import prompts, toy_grpo

import weft
from weft.commands.placements import simulated_s
from weft.controllers.driver import Driver
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.placement_file import chosen_placement, read_placement, write_placement
from weft.controllers.planner.options import Strategy
from weft.controllers.prechecks.dry_run import planning
from weft.controllers.prechecks.placement_proposals import EqualNodes, Proposal, node_seconds, propose
from weft.controllers.run_spec import RunSpec
from weft.controllers.schedule import Training
from weft.controllers.simulation.backend import Simulated
from weft.controllers.simulation.costs import CostModel, Generation, LinearCost
from weft.dataflow.errors import Planned, UserError

MODEL = CostModel(
    nodes={
        "rollout.generate": Generation(lengths=((4,),), decode_step_s=0.5),
        "reward.score": LinearCost(per_row_s=0.25),
        "actor.update": LinearCost(fixed_s=2.0, per_row_s=0.75),
    }
)
"""With two responses at once, a replica generates 16 responses in 16 s."""
CPUS = EqualNodes(1, 4, has_gpus=False, where="four CPUs")


def spec_of(schedule: Training, model: CostModel = MODEL, *, gpus: int = 0, **sizes: Any) -> RunSpec:
    """Return a run whose rollout and actor have places: on CPUs, or on a pool of this many GPUs."""
    graph = toy_grpo(prompts(40), n=2, **groups(**{"max_num_seqs": 2, **sizes}))
    with planning() as made, pytest.raises(Planned):
        placement = apart(sizes.get("rollout", 1), 1)
        if gpus:
            placement = {name: Place(ResourcePool(name, gpus=gpus), gpus) for name in placement}
        Driver(graph, schedule=schedule, backend=Simulated(model), placement=placement)
    assert made.spec is not None
    return made.spec


def synchronous() -> weft.Synchronous:
    return weft.Synchronous(steps=20, prompts_per_step=8)


def proposals(spec: RunSpec, *, simulated: bool = False, **changed: Any) -> list[Proposal]:
    about: dict[str, Any] = {"cluster": CPUS, "seconds": node_seconds(spec, MODEL), **changed}
    simulate = partial(simulated_s, spec, MODEL) if simulated else None
    return propose(spec, about.pop("cluster"), simulate=simulate, **about)


def sizes_of(placement: Mapping[str, Place]) -> dict[str, tuple[str, int]]:
    return {name: (place.pool.name, place.ranks) for name, place in placement.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("max_staleness", [None, 1])
def test_the_best_proposal_is_the_fastest_of_all_placements(max_staleness: int | None):
    schedule = synchronous()
    if max_staleness is not None:
        schedule = weft.Asynchronous(steps=20, prompts_per_step=8, max_staleness=max_staleness)
    spec = spec_of(schedule)
    shared = ResourcePool("shared", cpus=4)
    every = [apart(rollout, 4 - rollout) for rollout in (1, 2, 3)]
    every += [{"rollout": Place(shared, 4), "actor": Place(shared, 4)}] if max_staleness is None else []
    best = min(simulated_s(spec, MODEL, placement) for placement in every)
    found = proposals(spec, simulated=True)
    assert found[0].seconds == pytest.approx(best)
    assert simulated_s(spec, MODEL, found[0].placement) == found[0].seconds
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)


def test_synchronous_steps_share_all_devices_and_asynchronous_ones_split_them():
    spec = spec_of(synchronous())
    found = proposals(spec)
    assert sizes_of(found[0].placement) == {
        "rollout": ("rollout+actor", 4),
        "actor": ("rollout+actor", 4),
    }
    # 4 rows on each of 4 ranks: twice 2 s for two responses, and 2 + 4 x 0.75 s
    assert found[0].reason == "rollout.generate 4 s + actor.update 5 s; devices busy 100%"
    assert found[0].seconds == found[0].estimate_s == 9
    # The simulator adds 16 rewards on another CPU.
    assert simulated_s(spec, MODEL, found[0].placement) == pytest.approx(9 + 16 * 0.25)
    stale = spec_of(weft.Asynchronous(steps=20, prompts_per_step=8, max_staleness=1))
    assert [len({p.pool.name for p in each.placement.values()}) for each in proposals(stale)] == [2]


def test_generation_lasts_until_the_longest_response_of_a_replica():
    model = costs(((3, 5), (2, 7)), 1.0)
    spec = spec_of(weft.Synchronous(steps=20, prompts_per_step=2), model, max_num_seqs=256)
    node = next(node for node in spec.graphs["train"].nodes if node.name == "rollout.generate")
    seconds = node_seconds(spec, model)
    assert seconds(node, Strategy(dp=1)) == 7
    # One response at a time: 7 + 3 and 5 + 2 decode steps.
    alone = spec_of(weft.Synchronous(steps=20, prompts_per_step=2), model, max_num_seqs=1)
    assert node_seconds(alone, model)(node, Strategy(dp=2)) == 10
    assert seconds(node, Strategy(tp=2)) == float("inf")  # unmeasured


def test_devices_move_between_sets_while_the_simulation_gets_faster():
    spec = spec_of(weft.Asynchronous(steps=20, prompts_per_step=8, max_staleness=1))

    def simulate(placement: Mapping[str, Place]) -> float:
        return float(placement["actor"].ranks)

    cpus = EqualNodes(1, 8, has_gpus=False)
    [found] = propose(spec, cpus, seconds=node_seconds(spec, MODEL), simulate=simulate)
    assert (found.seconds, found.placement["rollout"].ranks) == (1.0, 7)
    assert found.estimate_s == 2 + 16 * 0.75


def test_replicas_of_several_ranks_stay_whole():
    spec = spec_of(synchronous(), rollout=2)
    for each in proposals(spec):
        assert each.placement["rollout"].ranks % 2 == 0


def test_groups_that_do_not_fit_together_get_their_own_devices():
    def group_bytes(group: str, strategy: Strategy) -> tuple[float, float]:
        return (4.0, 8.0) if group == "actor" else (6.0, 1.0)

    spec = spec_of(synchronous(), gpus=1)
    gpus = EqualNodes(1, 4, device_bytes=12.0)
    found = proposals(spec, cluster=gpus, group_bytes=group_bytes)
    assert [len({p.pool.name for p in each.placement.values()}) for each in found] == [2]
    assert all(place.pool.gpus == place.ranks for place in found[0].placement.values())
    with pytest.raises(UserError, match="no placement of rollout, actor fits on 4 devices of 11 bytes"):
        proposals(spec, cluster=EqualNodes(1, 4, device_bytes=11.0), group_bytes=group_bytes)


def test_sets_get_whole_nodes_of_a_cluster():
    spec = spec_of(weft.Asynchronous(steps=20, prompts_per_step=8, max_staleness=1), gpus=2)
    [found] = proposals(spec, cluster=EqualNodes(4, 2, where="4 nodes of 2 GPUs"))
    pools = {place.pool.name: place.pool for place in found.placement.values()}
    assert sum(pool.gpus for pool in pools.values()) == 8
    assert all(pool.nodes and pool.gpus == 2 * pool.nodes for pool in pools.values())


def test_a_run_that_allows_no_placement_is_refused():
    spec = spec_of(weft.Asynchronous(steps=20, prompts_per_step=8, max_staleness=1))
    with pytest.raises(UserError, match="the run allows none of the placements on one CPU: "):
        proposals(spec, cluster=EqualNodes(1, 1, has_gpus=False, where="one CPU"))


# Placement files


def test_a_placement_file_gives_the_places_that_were_written(tmp_path: Path):
    spec = spec_of(synchronous())
    file = tmp_path / "plan.json"
    for each in proposals(spec):
        write_placement(file, each.placement, {"machine": "four CPUs"})
        assert read_placement(file) == each.placement
    nodes = {"actor": Place(ResourcePool("train", gpus=16, nodes=2), 16)}
    write_placement(file, nodes, {})
    assert read_placement(file) == nodes


def test_drivers_take_the_chosen_placement(tmp_path: Path):
    file = tmp_path / "plan.json"
    write_placement(file, apart(3, 2), {})
    with chosen_placement(file):
        spec = spec_of(synchronous())
    assert sizes_of(spec.placement) == {
        **sizes_of(apart(3, 2)),
        **{
            name: (f"{name}'s own", 1)
            for name in ("reward", "functions", "recorder")
            if name in spec.placement
        },
    }
    assert sizes_of(spec_of(synchronous()).placement)["rollout"] == ("generating", 1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "this is not a placement file"),
        ("{", "this is not a placement file"),
        ('{"pools": {}, "groups": {"actor": {"pool": "a", "ranks": 1}}}', "KeyError"),
        (
            '{"pools": {"a": {"gpus": 3}}, "groups": {"actor": {"pool": "a", "ranks": 2}}}',
            "2 ranks do not",
        ),
        ('{"pools": {"a": {"gpu": 3}}, "groups": {}}', "did you mean 'gpus'"),
    ],
)
def test_damaged_placement_files_are_named(text: str, problem: str, tmp_path: Path):
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(UserError, match=problem) as error:
        read_placement(file)
    assert str(error.value).startswith(f"--placement {file}: ")
    with pytest.raises(UserError, match="there is no such file"):
        read_placement(tmp_path / "other.json")
