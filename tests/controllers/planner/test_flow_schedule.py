"""Flow schedules against RLinf's and AsyncFlow's results, and against brute force."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.controllers.planner.flow_schedule import (
    Alone,
    FlowSchedule,
    InTurns,
    SideBySide,
    Stage,
    flow_schedule,
    pipelined_s,
    split_gpus,
    streamed_s,
)
from weft.dataflow.errors import UserError

sys.path.insert(0, str(Path(__file__).parent))
from search_cases import CASES


def seconds_of(costs: dict[str, dict[str, float]]) -> Callable[[Stage, int, int], float]:
    def seconds(stage: Stage, gpus: int, items: int) -> float:
        cost = costs["_".join(stage)]
        return cost["fixed"] + cost["per_item"] * items / min(gpus, cost["most_gpus"])

    return seconds


def as_lists(found: FlowSchedule) -> list[Any]:
    match found:
        case Alone():
            return ["_".join(found.stage), found.gpus, found.items]
        case InTurns():
            return ["turns", as_lists(found.first), as_lists(found.second)]
        case SideBySide():
            return ["side by side", found.items, as_lists(found.first), as_lists(found.second)]


@pytest.mark.parametrize("name", CASES["rlinf_search"])
def test_the_best_schedule_is_rlinfs(name: str):
    case = CASES["rlinf_search"][name]
    seconds = seconds_of(case["seconds"])
    given = {"gpus": case["gpus"], "items": case["items"], "switch_s": case["switch"]}
    found = flow_schedule([(a, b) for a, b in case["edges"]], seconds=seconds, **given)
    assert found.seconds == pytest.approx(case["best"], abs=1e-6)
    assert as_lists(found) == case["how"]
    in_turns = sum(seconds((stage,), case["gpus"], case["items"]) for stage in case["seconds"])
    in_turns += case["switch"] * (len(case["seconds"]) - 1)
    assert in_turns == pytest.approx(case["all_in_turns"], abs=1e-6)


def test_nodes_in_a_circle_are_one_stage():
    case = CASES["rlinf_search"]["embodied, environment and generator as one by their cycle"]
    edges = [("simulate", "generate"), ("generate", "simulate"), ("generate", "actor")]
    found = flow_schedule(edges, gpus=8, items=8, switch_s=1, seconds=seconds_of(case["seconds"]))
    assert found.seconds == pytest.approx(case["best"])
    assert str(found) == "simulate + generate (8 GPUs, 8 items), then actor (8 GPUs, 8 items)"


@pytest.mark.parametrize("case", CASES["rlinf_pipeline"])
def test_a_pipeline_is_a_flow_shop(case: dict[str, Any]):
    assert pipelined_s(case["stages"], case["items"]) == case["seconds"]


@pytest.mark.parametrize("case", [each for each in CASES["rlinf_embodied"] if each["parts"] > 1])
def test_environments_in_parts_alternate_with_the_policy(case: dict[str, Any]):
    stages = case["simulate_s"], case["generate_s"]
    assert pipelined_s(stages, case["steps"] * case["parts"]) == pytest.approx(case["seconds"])


def test_stages_side_by_side_get_multiples_of_the_step():
    costs = {name: {"fixed": 0.1, "per_item": 4, "most_gpus": 99} for name in ("a", "b")}
    given: dict[str, Any] = {"gpus": 8, "items": 8, "switch_s": 9, "seconds": seconds_of(costs)}
    found = flow_schedule([("a", "b")], step=4, **given)
    assert as_lists(found) == ["side by side", 1, ["a", 4, 1], ["b", 4, 1]]


def test_a_flow_that_fits_nowhere_or_has_no_nodes_is_refused():
    with pytest.raises(UserError, match="no schedule of 4 items fits on 2 GPUs"):
        flow_schedule([("a", "b")], gpus=2, items=4, seconds=lambda stage, gpus, items: math.inf)
    with pytest.raises(UserError, match="at least one node"):
        flow_schedule([], gpus=2, items=4, seconds=lambda stage, gpus, items: 1.0)
    one = flow_schedule([], nodes=["a"], gpus=2, items=4, seconds=lambda stage, gpus, items: 1.0)
    assert str(one) == "a (2 GPUs, 4 items)"


# AsyncFlow


@pytest.mark.parametrize("case", CASES["asyncflow"])
def test_streamed_steps_take_asyncflows_seconds(case: dict[str, Any]):
    given = {name: case[name] for name in ("chunks", "steps", "lag")}
    assert streamed_s(case["tasks"], **given) == pytest.approx(case["seconds"])


@pytest.mark.parametrize("case", CASES["asyncflow_split"])
def test_gpus_are_split_as_by_asyncflow(case: dict[str, Any]):
    given = {"rollout_gpu_s": case["rollout"], "train_gpu_s": case["train"], "lag": case["lag"]}
    found = split_gpus(case["gpus"], chunks=case["chunks"], **given)
    assert (found.rollout_gpus, found.train_gpus) == (case["rollout_gpus"], case["train_gpus"])
    assert (found.seconds, found.in_turns_s) == (case["seconds"], case["together_in_turns"])


@pytest.mark.parametrize("case", CASES["distserve"])
def test_prefill_and_decode_are_split_like_generation_and_training(case: dict[str, Any]):
    decode = case["decode_s"] / case["slots"]
    found = split_gpus(case["gpus"], rollout_gpu_s=case["prefill_s"], train_gpu_s=decode, lag=1)
    assert (1 / found.seconds, found.rollout_gpus) == (case["goodput"], case["prefill_gpus"])


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_split_lasts_as_long_as_a_late_step_of_a_stream(lag: int):
    found = split_gpus(12, rollout_gpu_s=50, train_gpu_s=31, lag=lag, chunks=6)
    stages = 50 / found.rollout_gpus, 31 / found.train_gpus
    late, later = (streamed_s(stages, chunks=6, steps=steps, lag=lag) for steps in (40, 41))
    assert later - late == pytest.approx(found.seconds)


def test_one_gpu_cannot_be_split():
    with pytest.raises(UserError, match="gpus=1 cannot be split"):
        split_gpus(1, rollout_gpu_s=1, train_gpu_s=1, lag=1)


# Brute force: every tree of cuts, without a table of results


def every_second(
    stages: frozenset[str], edges: set[tuple[str, str]], gpus: int, items: int, seconds: Any
) -> Iterator[float]:
    if len(stages) == 1:
        yield seconds(tuple(stages), gpus, items)
        return
    for size in range(1, len(stages)):
        for chosen in itertools.combinations(sorted(stages), size):
            before, after = frozenset(chosen), stages - set(chosen)
            if any(a in after and b in before for a, b in edges):
                continue
            for first in every_second(before, edges, gpus, items, seconds):
                for second in every_second(after, edges, gpus, items, seconds):
                    yield first + 1.5 + second
            for portion in (k for k in range(1, items + 1) if items % k == 0):
                for own in range(1, gpus):
                    for first in every_second(before, edges, own, portion, seconds):
                        for second in every_second(after, edges, gpus - own, portion, seconds):
                            slowest = max(first, second)
                            yield first + second + (items // portion - 1) * slowest


@pytest.mark.parametrize("seed", range(50))
def test_the_search_equals_brute_force_in_random_small_spaces(seed: int):
    chance = random.Random(seed)
    names = "abc"[: chance.randint(2, 3)]
    edges = {pair for pair in itertools.combinations(names, 2) if chance.random() < 0.7}
    costs = {
        name: {
            "fixed": chance.random(),
            "per_item": chance.randint(1, 9),
            "most_gpus": chance.randint(1, 3),
        }
        for name in names
    }
    gpus, items, seconds = chance.randint(2, 3), chance.choice((1, 2, 4)), seconds_of(costs)
    found = flow_schedule(
        edges, nodes=list(names), gpus=gpus, items=items, switch_s=1.5, seconds=seconds
    )
    wanted = min(every_second(frozenset(names), edges, gpus, items, seconds))
    assert found.seconds == pytest.approx(wanted, rel=1e-12)
