"""Execution plans against ReaLHF's brute-force results, and against an independent simulation."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from weft.controllers.planner.execution_plans import ModelCall, PlannedStep
from weft.controllers.planner.options import Mesh, Option, Strategy
from weft.dataflow.errors import UserError

sys.path.insert(0, str(Path(__file__).parent))
from search_cases import CASES, SPACES, realhf_step


def plans(step: PlannedStep) -> list[Mapping[str, Option]]:
    names = [call.name for call in step.calls]
    chosen = itertools.product(step.options, repeat=len(names))
    return [dict(zip(names, each, strict=True)) for each in chosen]


def optimum(graph: str) -> float:
    step = realhf_step(graph)
    return min(found.seconds for plan in plans(step) if (found := step.of(plan)).fits)


@pytest.mark.thorough
def test_the_best_grpo_plan_is_realhfs():
    step, wanted = realhf_step("grpo"), CASES["real_brute"]["grpo"]
    found = [step.of(plan) for plan in plans(step)]
    fit = [each for each in found if each.fits]
    assert (len(found), len(fit)) == (wanted["plans"], wanted["that_fit"])
    best = min(fit, key=lambda each: each.seconds)
    assert best.seconds == pytest.approx(wanted["best"], abs=1e-6)
    plan = {call: [list(option.mesh), list(option.strategy)] for call, option in best.plan.items()}
    assert plan == wanted["plan"]


def test_megatrons_heuristic_has_realhfs_seconds():
    step, everywhere = realhf_step("grpo"), Option(Mesh(0, 8), Strategy(1, 8, 1))
    found = step.of({call.name: everywhere for call in step.calls})
    assert found.seconds == pytest.approx(CASES["real_brute"]["grpo_megatron_heuristic"], abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_every_seed_finds_the_best_grpo_plan(seed: int):
    found = realhf_step("grpo").search(seed)
    assert found.seconds == pytest.approx(CASES["real_mcmc"]["found"][str(seed)], abs=1e-6)
    assert found.fits


@pytest.mark.thorough
def test_every_seed_finds_the_best_ppo_plan():
    best = optimum("ppo")
    step = realhf_step("ppo")
    assert [step.search(seed).seconds for seed in range(5)] == [best] * 5


@pytest.mark.parametrize("graph", SPACES)
def test_equal_seeds_find_equal_plans(graph: str):
    assert realhf_step(graph).search(3).plan == realhf_step(graph).search(3).plan


# Hand-worked simulations

HALF, OTHER, ALL = Mesh(0, 1), Mesh(1, 1), Mesh(0, 2)
CALLS = (
    ModelCall("generate", "actor"),
    ModelCall("score", "reward", ("generate",)),
    ModelCall("update", "actor", ("score",), trains=True),
)


def a_step(calls: Sequence[ModelCall] = CALLS, gpu_bytes: float = 100.0) -> PlannedStep:
    seconds = {"generate": 4.0, "score": 2.0, "update": 6.0, "value": 3.0}
    return PlannedStep(
        calls,
        [Option(mesh, Strategy(dp=mesh.gpus)) for mesh in (HALF, OTHER, ALL)],
        gpu_bytes=gpu_bytes,
        seconds=lambda call, option: seconds[call] / option.mesh.gpus,
        held_bytes=lambda call, option: 8.0 / option.mesh.gpus,
        active_bytes=lambda call, option: 3.0 if call == "generate" else 0.0,
        move_s=lambda model, old, new: 0.5,
    )


def on(**meshes: Mesh) -> dict[str, Option]:
    return {name: Option(mesh, Strategy(dp=mesh.gpus)) for name, mesh in meshes.items()}


def test_calls_of_one_step_follow_each_other_and_steps_wait_for_the_update():
    assert a_step().of(on(generate=HALF, score=HALF, update=HALF)).seconds == 3 * 12


def test_weights_move_before_a_call_with_another_option():
    found = a_step().of(on(generate=HALF, score=HALF, update=OTHER))
    assert found.seconds == 3 * 12 + 5 * 0.5  # not before the first generation


def test_calls_on_overlapping_meshes_take_turns():
    calls = (*CALLS[:2], ModelCall("value", "critic", ("generate",)))
    apart = a_step(calls).of(on(generate=ALL, score=HALF, value=OTHER))
    # Nothing trains, so three generations of 2 s come first; scores and values then take turns.
    assert apart.seconds == 6 + 3 * 3
    # All on both GPUs: three generations, scores and values of 2 + 1 + 1.5 s.
    assert a_step(calls).of(on(generate=ALL, score=ALL, value=ALL)).seconds == 3 * 4.5


def test_a_model_counts_once_on_a_gpu_with_the_most_that_its_calls_hold():
    plan = on(generate=ALL, score=HALF, update=HALF)
    # GPU 0 holds 8 of the actor's update, 8 of the reward model, and 3 while it generates.
    assert a_step(gpu_bytes=19).of(plan).fits
    assert not a_step(gpu_bytes=18.9).of(plan).fits


def test_a_search_without_room_is_refused():
    with pytest.raises(UserError, match="no plan that fits in 5 bytes of each GPU"):
        a_step(gpu_bytes=5).search()


def test_mistakes_in_calls_and_plans_are_named():
    with pytest.raises(UserError, match="call 'score' needs 'generate', which does not come before it"):
        a_step(CALLS[1:])
    with pytest.raises(UserError, match="at least one call and one option"):
        a_step(())
    with pytest.raises(UserError, match="'update'"):
        a_step().of(on(generate=HALF, score=HALF))


# Brute force with an independent simulation, one GPU at a time


def simulated(
    calls: Sequence[ModelCall],
    plan: Mapping[str, Option],
    seconds: Callable[[str, Option], float],
    move_s: float,
) -> float:
    free, at, ends = [0.0] * 4, dict[str, Option](), dict[tuple[int, str], float]()
    trained = {call.model for call in calls if call.trains}
    last = {call.model: call.name for call in calls}
    open_calls = [(step, k) for step in range(3) for k in range(len(calls))]
    while open_calls:
        ready: list[tuple[float, int, int]] = []
        for step, k in open_calls:
            call = calls[k]
            before = [(step, name) for name in call.needs]
            if step and call.model in trained:
                before.append((step - 1, last[call.model]))
            if all(each in ends for each in before):
                ready.append((max((ends[each] for each in before), default=0.0), step, k))
        start, step, k = min(ready)
        open_calls.remove((step, k))
        call, option = calls[k], plan[calls[k].name]
        gpus = range(option.mesh.first, option.mesh.first + option.mesh.gpus)
        start = max([start, *(free[gpu] for gpu in gpus)])
        start += move_s * (at.get(call.model, option) != option)
        at[call.model] = option
        ends[step, call.name] = start + seconds(call.name, option)
        for gpu in gpus:
            free[gpu] = ends[step, call.name]
    return max(ends.values())


def fits(
    calls: Sequence[ModelCall], plan: Mapping[str, Option], held: Callable[[str, Option], float]
) -> bool:
    for gpu in range(4):
        most: dict[str, float] = {}
        for call in calls:
            mesh = plan[call.name].mesh
            if gpu in range(mesh.first, mesh.first + mesh.gpus):
                most[call.model] = max(most.get(call.model, 0.0), held(call.name, plan[call.name]))
        if sum(most.values()) > 10:
            return False
    return True


@pytest.mark.parametrize("seed", range(50))
def test_the_search_equals_brute_force_in_random_small_spaces(seed: int):
    chance = random.Random(seed)
    number = chance.randint(2, 4)
    models = ["actor", *chance.choices(("actor", "critic", "reward"), k=number - 1)]
    calls = [
        ModelCall(
            f"call{k}",
            model,
            tuple(f"call{other}" for other in range(k) if chance.random() < 0.6),
            trains=chance.random() < 0.4,
        )
        for k, model in enumerate(models)
    ]
    every = [Mesh(0, 1), Mesh(1, 1), Mesh(2, 1), Mesh(0, 2), Mesh(2, 2), Mesh(0, 4)]
    options = [
        Option(mesh, Strategy(tp=mesh.gpus) if chance.random() < 0.5 else Strategy(dp=mesh.gpus))
        for mesh in chance.sample(every, 4)
    ]
    drawn = {(call.name, option): chance.randint(1, 20) for call in calls for option in options}
    bytes_of = {(call.name, option): chance.randint(1, 6) for call in calls for option in options}
    step = PlannedStep(
        calls,
        options,
        gpu_bytes=10,
        seconds=lambda call, option: drawn[call, option],
        held_bytes=lambda call, option: bytes_of[call, option],
        move_s=lambda model, old, new: 1.0,
    )
    best = math.inf
    for plan in plans(step):
        found = step.of(plan)
        assert found.seconds == simulated(calls, plan, lambda *key: drawn[key], 1.0)
        assert found.fits == fits(calls, plan, lambda *key: bytes_of[key])
        best = min(best, found.seconds if found.fits else math.inf)
    assert step.search(seed).seconds == best
