"""Synchronous runs balance and order generation by forecasts, and stay reproducible."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killed_simulations import Dying, KilledError, SavedActor
from simulated_runs import Actor, Rollout, apart, costs
from toy import ToyReward, prompts, toy_evaluation, toy_grpo

from weft.controllers.driver import Driver, Evaluation
from weft.controllers.recovery.checkpoints import CheckpointConfig
from weft.controllers.schedule import Asynchronous, Pipelined, Synchronous, Training
from weft.controllers.simulation.backend import Simulated
from weft.controllers.simulation.costs import LogNormal
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.check import check_log
from weft.dataflow.column import EXPECTED_TOKENS
from weft.dataflow.errors import UserError
from weft.dataflow.graph import group
from weft.dataflow.metric_names import untimed
from weft.dataflow.metrics import Metrics
from weft.dataflow.operation import Shape
from weft.dataflow.runs.files import BUFFER, LOG
from weft.dataflow.runs.log import LogReader
from weft.workers.dispatch import Dispatch
from weft.workers.worker import remote


class Ordered(Rollout):
    """A rollout that starts the longest expected responses first."""

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        shape=Shape.EXPAND,
        interruptible=True,
        reads=("prompt_ids",),
        may_read=(EXPECTED_TOKENS,),
        writes=("response_ids", "response_logprobs", "response_versions"),
    )
    def generate(self, prompts: Batch, *, n: int = 2) -> Iterator[tuple[Batch, Metrics]]:
        yield from super().generate(prompts, n=n)


class InOrder(Synchronous):
    """Synchronous training without forecasts."""

    @property
    def longest_first(self) -> bool:
        return False


def driver_of(
    root: Path, schedule: Training, backend: Simulated, ranks: int, *, number: int = 8, **settings: Any
) -> Driver:
    slots: int = settings.pop("slots", 2)
    made: dict[str, Any] = {
        "rollout": group(Ordered, max_num_seqs=slots),
        "reward": group(ToyReward),
        "actor": group(SavedActor if "checkpoint" in settings else Actor),
    }
    made["rollout"].follows(made["actor"])
    evaluation = Evaluation(
        toy_evaluation(prompts(3, "held_out"), rollout=made["rollout"], reward=made["reward"]), every=1
    )
    return Driver(
        toy_grpo(prompts(number), n=2, **made),
        schedule=schedule,
        evaluations=[evaluation] * settings.pop("evaluate", False),
        placement=apart(ranks, 1),
        backend=backend,
        root=root,
        progress=False,
        **{"record_every": 0, **settings},
    )


def finished(driver: Driver) -> Driver:
    with driver:
        driver.run()
    return driver


def generation_s(driver: Driver, of: str = "train") -> list[float]:
    """Return the seconds of each call that generates for a graph."""
    timeline = [c for c in driver.directory.timeline if c["node"] == "rollout.generate"]
    return [call["end_s"] - call["start_s"] for call in timeline if call["graph"] == of]


def issued(driver: Driver) -> list[int]:
    """Return the positions of all training prompts, in order."""
    log = LogReader(driver.directory.path / BUFFER / LOG)
    issues = [r["positions"] for r in log if r["do"] == "issue" and r["graph"] == "train"]
    return [position for positions in issues for position in positions]


LENGTHS = ((1, 1), (1, 1), (1, 1), (9, 9))


def test_the_longest_responses_of_the_earlier_epoch_start_first(tmp_path: Path):
    schedule = Synchronous(steps=2, prompts_per_step=4, shuffle=False)
    driver = finished(driver_of(tmp_path, schedule, Simulated(costs(LENGTHS)), 1, number=4))
    # In the first epoch each prompt starts one response, because nothing is known: prompts 0 and 1,
    # then 2 and 3; after another token of prompt 3, its second response. In the second epoch both
    # long responses start at once, with six others after them.
    assert generation_s(driver) == pytest.approx([1 + 1 + 9 + 1 - 1 + 1, 9 + 3])
    in_order = InOrder(steps=2, prompts_per_step=4, shuffle=False)
    before = finished(driver_of(tmp_path, in_order, Simulated(costs(LENGTHS)), 1, number=4))
    assert generation_s(before) == pytest.approx([3 + 9, 3 + 9])


def test_replicas_get_shares_of_equal_expected_length(tmp_path: Path):
    lengths = ((8, 8), (1, 1), (1, 1), (8, 8))
    schedule = Synchronous(steps=2, prompts_per_step=4, shuffle=False)
    driver = finished(driver_of(tmp_path, schedule, Simulated(costs(lengths)), 2, number=4, slots=1))
    # By prompt tokens, prompts 0 and 3 of 2 and 3 tokens would share a replica.
    assert generation_s(driver)[1] == pytest.approx(18.0)


def test_the_error_of_the_forecast_is_a_metric(tmp_path: Path):
    lengths = ((2, 4), (10, 10))
    schedule = Synchronous(steps=2, prompts_per_step=2, shuffle=False)
    driver = finished(driver_of(tmp_path, schedule, Simulated(costs(lengths)), 1, number=2))
    rows = driver.directory.metrics
    assert rows[1].get("rollout/forecast_error") is None
    assert rows[2]["rollout/forecast_error"] == pytest.approx((1 + 1) / 26)


@pytest.mark.parametrize(
    "schedule",
    [Pipelined(steps=3, prompts_per_step=4), Asynchronous(steps=3, prompts_per_step=4)],
    ids=["pipelined", "asynchronous"],
)
def test_schedules_that_do_not_wait_for_all_responses_make_no_forecasts(
    tmp_path: Path, schedule: Training
):
    driver = finished(driver_of(tmp_path, schedule, Simulated(costs(LENGTHS)), 1))
    assert not any(row.get("rollout/forecast_error") for row in driver.directory.metrics)


@pytest.mark.parametrize(("share", "most"), [(0.0, 1.01), (0.7, 0.96)])
def test_longest_first_is_not_slower_whether_prompts_tell_lengths_or_not(
    tmp_path: Path, share: float, most: float
):
    lengths = LogNormal(mean=20, max_tokens=200, prompt_share=share)
    seconds: dict[type, float] = {Synchronous: 0.0, InOrder: 0.0}
    for seed in range(3):
        for kind in seconds:
            schedule = kind(steps=8, prompts_per_step=32)
            backend = Simulated(costs(lengths, ((1, 0.015), (8, 0.025))))
            driver = driver_of(tmp_path, schedule, backend, 4, number=64, slots=8, seed=seed)
            seconds[kind] += sum(generation_s(finished(driver)))
    assert seconds[Synchronous] < most * seconds[InOrder]


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_killed_run_has_the_forecasts_and_thus_the_batches_of_an_unbroken_one(
    tmp_path: Path, rounds: int
):
    schedule = Synchronous(steps=10, prompts_per_step=4, rounds=rounds)
    checkpoint = CheckpointConfig(every=1)
    chance = random.Random(0)
    lengths = tuple(tuple(chance.randint(1, 40) for _ in range(2)) for _ in range(8))

    def life(name: str, life: int, replies: int | None) -> Driver:
        root = tmp_path / name
        backend = Dying(costs(lengths), root, life, replies)
        driver = driver_of(
            *(root, schedule, backend, 2),
            evaluate=True,
            checkpoint=checkpoint,
            name="run",
            resume="latest",
        )
        return finished(driver)

    whole = life("whole", 0, None)
    kills = [chance.randint(40, 90) for _ in range(3)]
    for number, replies in enumerate(kills):
        with pytest.raises(KilledError):
            life("killed", number, replies)
    killed = life("killed", len(kills), None)
    assert [untimed(row) for row in killed.directory.metrics] == [
        untimed(row) for row in whole.directory.metrics
    ]
    for of in ("train", "eval"):
        assert generation_s(killed, of) == pytest.approx(generation_s(whole, of))
    assert issued(killed) == issued(whole)
    assert not check_log(killed.directory.path / "buffer").violations


def test_rounds_train_on_every_response_once_an_epoch_in_shorter_steps(tmp_path: Path):
    lengths = LogNormal(mean=20, max_tokens=200, prompt_share=0.9)
    runs: dict[int, Driver] = {}
    for rounds in (1, 4):
        schedule = Synchronous(steps=12, prompts_per_step=8, rounds=rounds)
        runs[rounds] = finished(
            driver_of(tmp_path, schedule, Simulated(costs(lengths)), 2, number=32, slots=16)
        )
    epochs = {rounds: np.array(issued(run)).reshape(3, 32) for rounds, run in runs.items()}
    for epoch in range(3):
        assert sorted(epochs[1][epoch]) == sorted(epochs[4][epoch]) == list(range(32))
    assert (epochs[1][0] == epochs[4][0]).all(), "nothing is known in the first epoch"
    # The lengths of the simulator depend on prompt and epoch alone, so all of them are the same.
    tokens = {
        rounds: [row["rollout/tokens"] for row in run.directory.metrics[1:]]
        for rounds, run in runs.items()
    }
    totals = {rounds: np.array(own).reshape(3, 4).sum(1).tolist() for rounds, own in tokens.items()}
    assert totals[1] == totals[4]
    assert tokens[4][4:8] == sorted(tokens[4][4:8]) and tokens[1][4:8] != sorted(tokens[1][4:8])
    assert sum(generation_s(runs[4])[4:]) < 0.8 * sum(generation_s(runs[1])[4:])


@pytest.mark.parametrize("then", [Synchronous, Asynchronous])
@pytest.mark.parametrize("replies", [90, 105])
def test_a_run_that_resumes_without_rows_issues_the_rest_of_its_round(
    tmp_path: Path, replies: int, then: type[Synchronous | Asynchronous]
):
    lengths = tuple((7 * k % 16 + 1,) * 2 for k in range(16))

    in_rounds = Synchronous(steps=12, prompts_per_step=4, rounds=4)

    def life(
        name: str, life: int, replies: int | None, resume: str, schedule: Any = in_rounds
    ) -> Driver:
        driver = driver_of(
            tmp_path / name,
            schedule,
            Dying(costs(lengths), tmp_path / name, life, replies),
            1,
            number=16,
            checkpoint=CheckpointConfig(every=1),
            name="run",
            resume=resume,
        )
        return finished(driver)

    whole = issued(life("whole", 0, None, "none"))
    with pytest.raises(KilledError):
        life("cut", 0, replies, "none")
    schedule = in_rounds if then is Synchronous else then(steps=12, prompts_per_step=4)
    rest = issued(life("cut", 1, None, "weights", schedule))
    of_round = len(rest) % 16
    assert 0 < len(rest) < len(whole) and of_round, "it was killed within a round"
    number = len(rest) if then is Synchronous else of_round  # only the latter sorts further rounds
    assert rest[:number] == whole[-len(rest) :][:number]


def test_rounds_of_more_prompts_than_there_are_are_refused(tmp_path: Path):
    schedule = Synchronous(steps=12, prompts_per_step=4, rounds=4)
    with pytest.raises(
        UserError, match=r"the 16 prompts of 4 steps, and the source has 15, .* rounds=3"
    ):
        driver_of(tmp_path, schedule, Simulated(costs(((1,),) * 15)), 1, number=15)


def test_rounds_that_would_not_end_are_refused():
    with pytest.raises(UserError, match=r"rounds=8 does not divide steps=100, .* take steps=104"):
        Synchronous(rounds=8)
