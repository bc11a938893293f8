"""A run whose first steps have no signal ends, says why, and can be resumed."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from saved_runs import SavingActor
from toy import SlowRollout, ToyConfig, ToyReward, prompts

from weft.algorithms.advantages import group_advantages
from weft.algorithms.grpo import drop_zero_variance
from weft.controllers.driver import Driver
from weft.controllers.launch import launch
from weft.controllers.recovery.checkpoints import CheckpointConfig
from weft.controllers.reports.symptoms import Watch
from weft.controllers.run_spec import Evaluation
from weft.controllers.schedule import Asynchronous, Pipelined, Synchronous, Training
from weft.dataflow.batch import Batch
from weft.dataflow.config import Config
from weft.dataflow.errors import NoSignalError, StalledError
from weft.dataflow.graph import Graph, group
from weft.dataflow.metrics import Mean, Metrics, Std
from weft.dataflow.tracing import graph
from weft.workers.dispatch import Dispatch
from weft.workers.worker import remote


class PatientConfig(ToyConfig):
    equal_for: int = 1000
    """Number of calls with equal rewards."""


class PatientReward(ToyReward):
    """Gives equal rewards for the first calls, and different ones afterwards."""

    Config = PatientConfig
    calls = 0

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=("response_ids", "answer"), writes=("reward",))
    def score(self, samples: Batch) -> tuple[Batch, Metrics]:
        self.calls += 1
        rewards = [
            0.25 if self.calls <= self.config.equal_for else float(k) for k in range(len(samples))
        ]
        return samples.with_columns(reward=rewards), {
            "mean": Mean(sum(rewards), len(rewards)),
            "std": Std.of(rewards),
        }


@graph
def training(prompts: Any, *, rollout: Any, reward: Any, actor: Any) -> Any:
    return actor.update(group_advantages(reward.score(rollout.generate(prompts, n=2))))


@graph
def held_out(prompts: Any, *, rollout: Any, reward: Any) -> Any:
    return reward.score(rollout.generate(prompts, n=1))


def run(
    root: Path,
    schedule: Training,
    algorithm: Callable[..., Graph] = training,
    *,
    equal_for: int = 1000,
    **settings: Any,
) -> list[dict[str, float]]:
    rollout, actor = group(SlowRollout, name="rollout"), group(SavingActor, name="actor")
    reward, judge = (
        group(PatientReward, name="reward", equal_for=equal_for),
        group(ToyReward, name="judge"),
    )
    rollout.follows(actor)
    with Driver(
        algorithm(prompts(12), rollout=rollout, reward=reward, actor=actor),
        schedule=schedule,
        evaluations=[Evaluation(held_out(prompts(2), rollout=rollout, reward=judge), every=1)],
        root=root,
        name="run",
        progress="plain",
        **settings,
    ) as driver:
        return driver.run()


@pytest.mark.parametrize("kind", [Synchronous, Pipelined, Asynchronous])
def test_a_run_without_signal_ends_with_a_sample_and_can_be_resumed(
    kind: type[Training], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    schedule, saving = kind(steps=20, prompts_per_step=3), CheckpointConfig(every=10)
    with pytest.raises(NoSignalError) as refused:
        run(tmp_path, schedule, checkpoint=saving)
    said = str(refused.value)
    assert (
        "steps the rewards within every group are equal (all are 0.25), so that all advantages are 0"
        in said
    )
    assert "sample of step" in said and "reward 0.25" in said
    assert "Driver(stop_on=...)" in said and "explain=True" in said, "advice for Driver and weft.train"
    assert "no signal 100%" in capsys.readouterr().out
    reached = int(next((tmp_path / "run" / "checkpoints").glob("step_*")).name.removeprefix("step_"))
    assert 2 <= reached <= 4, "the asynchronous run may be a little ahead"
    metrics = run(tmp_path, schedule, checkpoint=saving, resume="latest", stop_on=())
    assert [row["step"] for row in metrics] == [float(step) for step in range(21)]


@graph
def filtered(prompts: Any, *, rollout: Any, reward: Any, actor: Any) -> Any:
    samples: Any = drop_zero_variance(reward.score(rollout.generate(prompts, n=2)))
    return actor.update(group_advantages(samples))


@pytest.mark.parametrize("kind", [Synchronous, Pipelined, Asynchronous])
def test_a_filter_that_drops_every_group_of_two_steps_ends_the_run_with_the_rewards(
    kind: type[Training], tmp_path: Path
):
    schedule = kind(steps=20, prompts_per_step=3)
    with pytest.raises(
        NoSignalError, match=r"first \d+ groups are equal \(mean 0.25, std 0\), and a filter drops such"
    ):
        run(tmp_path, schedule, filtered)
    with pytest.raises(StalledError, match="drop_zero_variance"):
        run(tmp_path / "told", schedule, filtered, stop_on=())


def test_groups_that_pass_the_filter_after_the_first_ones_are_enough(tmp_path: Path):
    assert len(run(tmp_path, Synchronous(steps=4, prompts_per_step=3), filtered, equal_for=1)) == 5


def test_signal_in_the_second_step_is_enough(tmp_path: Path):
    assert len(run(tmp_path, Synchronous(steps=4, prompts_per_step=3), equal_for=1)) == 5


@pytest.mark.thorough
def test_a_run_resumed_without_a_fix_is_ended_again(tmp_path: Path):
    schedule, saving = Synchronous(steps=20, prompts_per_step=3), CheckpointConfig(every=10)
    for steps in ("2", "3"):
        with pytest.raises(NoSignalError, match=f"first {steps} steps"):
            run(tmp_path, schedule, checkpoint=saving, resume="latest")
    assert len(run(tmp_path, schedule, equal_for=0, checkpoint=saving, resume="latest")) == 21


def test_a_script_ends_with_the_exit_code_of_a_mistake_of_its_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    class Settings(Config):
        pass

    def main(settings: Settings) -> None:
        run(tmp_path, Synchronous(steps=2, prompts_per_step=3), record_every=0)

    assert launch(main, []) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: in each of the first 2 steps") and "sample of" not in errors, (
        "none was recorded"
    )


def judged(shares: Iterable[float | None]) -> list[int]:
    """Return the steps after which a run with such shares of groups without signal ends.

    A share of None means that the step did not measure it.
    """
    watch, ended = Watch(), []
    for step, share in enumerate(shares):
        row = {"step": float(step)} | ({} if share is None else {"groups_without_signal": share})
        ended += [step for seen in watch.see(row) if seen.symptom.name == "no_signal"]
    return ended


def test_only_a_run_that_never_had_signal_is_judged():
    assert judged([None, 1, 1]) == [2]
    assert judged([None, None, 1, None, 1]) == [4], "an asynchronous step may measure none"
    assert judged([None, 1, 0.9, 1, 1]) == []
    assert judged([None, *[None] * 20]) == [], "DPO, SFT and PPO have no groups"
    assert judged([None, *[None] * 10, 1, 1, 1]) == [], "too late to say so of its start"
    watch = Watch()
    row = {"eval/groups_without_signal": 1.0}
    assert not any(watch.see({"step": float(step), **row}) for step in range(5))
