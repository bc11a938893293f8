"""Runs that move unfinished responses between replicas: nothing is lost or made twice, whatever the
moves and deaths."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_ranks import CheckingActor, CountingRollout, RandomRanks, counting_model
from simulated_runs import Actor, Rollout, apart, costs
from toy import ToyLoss, ToyReward, prompts, toy_evaluation, toy_grpo

from weft.controllers.backends.backend import Backend
from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.driver import Driver, Evaluation
from weft.controllers.loop import migration
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.schedule import Synchronous
from weft.controllers.simulation.backend import Simulated
from weft.controllers.simulation.costs import LogNormal
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.check import check_log
from weft.dataflow.column import BEGUN_NUMBER, EXPECTED_TOKENS, MADE_BEFORE
from weft.dataflow.graph import group
from weft.dataflow.metrics import Metrics
from weft.dataflow.operation import Shape
from weft.dataflow.runs.files import BUFFER, LOG
from weft.dataflow.runs.log import LogReader
from weft.workers.dispatch import Dispatch
from weft.workers.worker import remote

PROMPTS, SAMPLES, STEPS = 6, 3, 4


@pytest.fixture(autouse=True)
def short_responses_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "MIN_TOKENS", 2)


def counted_run(
    root: Path,
    backend: Backend,
    *,
    ranks: int = 3,
    slots: int = 4,
    migrate: bool = True,
    step_s: float = 0.0,
) -> tuple[Driver, list[tuple[int, int]]]:
    """Train a few steps. Return the driver, and the rows that the actor was trained on."""
    model = counting_model(root / "model")
    made: dict[str, Any] = {
        "rollout": group(
            CountingRollout,
            name="rollout",
            model=model,
            max_context=256,
            max_num_seqs=slots,
            step_s=step_s,
        ),
        "reward": group(ToyReward),
        "actor": group(CheckingActor, name="actor"),
    }
    made["rollout"].follows(made["actor"])
    schedule = Synchronous(steps=STEPS, prompts_per_step=PROMPTS, migrate=migrate)
    with Driver(
        toy_grpo(prompts(2 * PROMPTS), n=SAMPLES, loss=ToyLoss(), **made),
        schedule=schedule,
        placement={
            "rollout": Place(ResourcePool("generating", cpus=1), ranks),
            "actor": Place(ResourcePool("training", cpus=1)),
        },
        backend=backend,
        root=root,
        name="run",
        progress=False,
        record_every=0,
        stop_on=(),
    ) as driver:
        driver.run()
        trained = driver.call(made["actor"], "rows_trained")[0]
    assert not check_log(root / "run" / BUFFER).violations
    return driver, trained


def num_moved(driver: Driver) -> float:
    return sum(row.get("rollout/moved_responses") or 0 for row in driver.directory.metrics)


def assert_whole(trained: list[tuple[int, int]]) -> None:
    """Each group was trained on once, with all of its samples."""
    assert len(trained) == len(set(trained)) == STEPS * PROMPTS * SAMPLES
    groups, numbers = np.unique([group for group, _ in trained], return_counts=True)
    assert len(groups) == STEPS * PROMPTS and set(numbers.tolist()) == {SAMPLES}


@pytest.mark.parametrize("seed", range(4))
def test_moved_responses_are_trained_on_once_with_all_tokens_of_one_version(tmp_path: Path, seed: int):
    backend = RandomRanks(random.Random(seed))
    driver, trained = counted_run(tmp_path, backend)
    assert_whole(trained)
    # The run may end before the last call, whose metrics are then missing.
    assert 0 < num_moved(driver) <= backend.moved


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_or_made_twice_if_ranks_die_while_responses_move(tmp_path: Path, seed: int):
    backend = RandomRanks(random.Random(seed), kills=2)
    driver, trained = counted_run(tmp_path, backend)
    assert_whole(trained)
    assert driver.directory.metrics[-1]["replaced_workers"] == 2


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_lost_or_made_twice_in_random_runs(tmp_path: Path, seed: int):
    chance = random.Random(seed)
    backend = RandomRanks(chance, kills=chance.randint(0, 2))
    ranks, slots = chance.randint(1, 6), chance.randint(1, 8)
    _, trained = counted_run(tmp_path, backend, ranks=ranks, slots=slots)
    assert_whole(trained)


def test_no_response_moves_unless_the_schedule_asks_for_it(tmp_path: Path):
    driver, trained = counted_run(tmp_path, RandomRanks(random.Random(0)), migrate=False)
    assert_whole(trained)
    assert not num_moved(driver)


@pytest.mark.thorough
@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_responses_move_between_processes(tmp_path: Path):
    driver, trained = counted_run(tmp_path, RayBackend(), step_s=0.02)
    assert_whole(trained)
    assert num_moved(driver)


# On the simulator


class Moving(Rollout):
    """A rollout whose responses may move. The runs are simulated, so its methods are never called."""

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        shape=Shape.EXPAND,
        interruptible=True,
        reads=("prompt_ids",),
        may_read=(MADE_BEFORE, EXPECTED_TOKENS, BEGUN_NUMBER),
        writes=("response_ids", "response_logprobs", "response_versions"),
    )
    def generate(self, prompts: Batch, *, n: int = 2) -> Iterator[tuple[Batch, Metrics]]: ...

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def hand_over(self, parts: int = 2, min_tokens: int = 0) -> None: ...


def simulated_run(
    root: Path, *, migrate: bool, ranks: int, slots: int, step_s: Any, lengths: Any
) -> Any:
    made: dict[str, Any] = {
        "rollout": group(Moving, max_num_seqs=slots),
        "reward": group(ToyReward),
        "actor": group(Actor),
    }
    made["rollout"].follows(made["actor"])
    evaluation = Evaluation(
        toy_evaluation(prompts(3, "held_out"), rollout=made["rollout"], reward=made["reward"]), every=1
    )
    with Driver(
        toy_grpo(prompts(8), n=4, **made),
        schedule=Synchronous(steps=3, prompts_per_step=8, migrate=migrate, shuffle=False),
        evaluations=[evaluation],
        placement=apart(ranks, 1),
        backend=Simulated(costs(lengths, step_s)),
        root=root,
        name=f"migrate-{migrate}",
        progress=False,
        record_every=0,
    ) as driver:
        driver.run()
    assert not check_log(driver.directory.path / BUFFER).violations
    return driver


def generated(driver: Driver) -> tuple[list[float], list[list[int]]]:
    """Return the seconds of each call that generates, and the sorted lengths of its responses."""
    calls = [c for c in driver.directory.timeline if c["node"] == "rollout.generate"]
    lengths: dict[int, list[int]] = {}
    for record in LogReader(driver.directory.path / BUFFER / LOG):
        if record["do"] == "publish" and record.get("parents"):
            lengths.setdefault(record["lease"], []).extend(record["tokens"])
    return [call["end_s"] - call["start_s"] for call in calls], [sorted(lengths[k]) for k in lengths]


def test_the_last_busy_replica_gives_half_of_its_responses_to_the_idle_one(tmp_path: Path):
    # A step of B responses takes B / 100 seconds. One replica has the only long responses, four.
    lengths = ((201,) * 4, *((1,) * 4,) * 7)
    step_s = ((0, 0.0001), (16, 0.16))
    runs = {
        migrate: simulated_run(
            tmp_path, migrate=migrate, ranks=2, slots=16, step_s=step_s, lengths=lengths
        )
        for migrate in (False, True)
    }
    before, whole = generated(runs[False])
    after, found = generated(runs[True])
    assert sorted(map(sorted, found)) == sorted(map(sorted, whole)), "the same responses"
    assert max(before) == pytest.approx(0.16 + 200 * 0.04, rel=0.01)
    assert max(after) == pytest.approx(0.16 + 16 * 0.04 + 184 * 0.02, rel=0.05)


@pytest.mark.parametrize("seed", range(10))
def test_moves_on_the_simulator_make_each_response_once(tmp_path: Path, seed: int):
    chance = random.Random(seed)
    settings: dict[str, Any] = {
        "ranks": chance.randint(1, 5),
        "slots": chance.randint(1, 9),
        "step_s": ((0, 0.5), (8, chance.choice([0.5, 4.0]))),
        "lengths": LogNormal(mean=20, max_tokens=200, prompt_share=chance.choice([0.0, 0.7])),
    }
    runs = [simulated_run(tmp_path, migrate=migrate, **settings) for migrate in (False, True)]
    whole, found = (sorted(map(sorted, generated(run)[1])) for run in runs)
    assert found == whole
