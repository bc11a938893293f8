"""Several held-out sets in one run, each on a separate schedule, and the best checkpoint by any of
them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saved_runs import SCHEDULES, Killed, SavingActor
from saved_runs import run as saved_run
from toy import ToyLoss, ToyReward, ToyRollout, odd_prompts, prompts, toy_evaluation, toy_grpo
from toy_runs import drive, handles, training

from weft.algorithms.evaluation import score_prompts
from weft.controllers.driver import Driver, Evaluation
from weft.controllers.recovery.checkpoints import (
    CheckpointConfig,
    CheckpointFolder,
    RunState,
    complete_checkpoints,
    step_of,
)
from weft.controllers.schedule import Asynchronous, Synchronous, Training
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.check import check_log
from weft.dataflow.column import FINAL_ANSWER
from weft.dataflow.errors import UserError, WorkerError
from weft.dataflow.graph import group
from weft.dataflow.metric_names import undeclared
from weft.dataflow.metrics import Mean, Metrics
from weft.dataflow.runs.alerts import read_alerts
from weft.dataflow.runs.directory import RunDirectory
from weft.dataflow.runs.log import Position
from weft.dataflow.tracing import graph
from weft.workers.dispatch import Dispatch
from weft.workers.worker import remote


def steps_with(metrics: list[dict[str, float]], name: str) -> list[int]:
    return [int(row["step"]) for row in metrics if name in row]


@pytest.mark.parametrize(
    "schedule",
    [
        Synchronous(steps=7, prompts_per_step=2),
        Asynchronous(steps=7, prompts_per_step=2, max_staleness=1),
    ],
    ids=["synchronous", "asynchronous"],
)
def test_each_held_out_set_has_its_own_schedule(tmp_path: Path, schedule: Training):
    made = handles()
    own = {name: made[name] for name in ("rollout", "reward")}
    evaluations = [
        Evaluation(toy_evaluation(prompts(2, "easy"), **own), every=3, name="easy"),
        Evaluation(
            toy_evaluation(prompts(3, "hard"), **own), every=2, name="hard", at_start=False, at_end=False
        ),
        Evaluation(toy_evaluation(prompts(4, "ends"), **own), every=0, name="ends"),
    ]
    with drive(
        toy_grpo(prompts(8), **made), tmp_path, schedule=schedule, evaluations=evaluations
    ) as driver:
        metrics = driver.run()
    assert steps_with(metrics, "easy/reward/mean") == [0, 3, 6, 7]
    assert steps_with(metrics, "hard/reward/mean") == [2, 4, 6]
    assert steps_with(metrics, "ends/reward/mean") == [0, 7]


def test_an_evaluation_that_never_happens_is_refused():
    with pytest.raises(UserError, match="never evaluates anything"):
        Evaluation(training(), every=0, at_start=False, at_end=False)
    with pytest.raises(UserError, match="every must be an integer of at least 0"):
        Evaluation(training(), every=-1)


@graph
def three_answers(rows: Any, *, rollout: Any, reward: Any) -> Any:
    """Score three responses per prompt, of 1, 2 and 3 tokens; the reward is the length."""
    return score_prompts(reward.score(rollout.generate(rows, n=3)), n=3, k=(1, 3), solved=3.0)


def test_pass_at_k_and_its_interval_are_written_with_the_step(tmp_path: Path):
    made = handles()
    held_out = three_answers(prompts(4, "held_out"), rollout=made["rollout"], reward=made["reward"])
    evaluations = [Evaluation(held_out, every=1, name="sums")]
    with drive(toy_grpo(prompts(8), **made), tmp_path, steps=2, evaluations=evaluations) as driver:
        metrics = driver.run()
    for row in metrics:
        assert row["sums/avg@3"] == row["sums/avg@3_low"] == row["sums/avg@3_high"] == 2.0
        assert (
            row["sums/pass@1"] == pytest.approx(1 / 3)
            and row["sums/pass@3"] == 1.0
            and row["sums/prompts"] == 4
        )
        assert row["sums/pass@3_low"] == pytest.approx(0.5101, abs=1e-4) and row[
            "sums/pass@3_high"
        ] == pytest.approx(1), "Wilson's"
    assert undeclared(name for row in metrics for name in row if name.startswith("sums/")) == []


@graph
def half_dropped(rows: Any, *, rollout: Any, reward: Any) -> Any:
    return score_prompts(odd_prompts(reward.score(rollout.generate(rows, n=2))), n=2, k=(1,), solved=2.0)


@pytest.mark.parametrize("kind", [Synchronous, Asynchronous])
def test_prompts_without_a_scored_response_are_counted_and_shown(
    kind: type[Training], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    made = handles()
    held_out = half_dropped(prompts(8, "held_out"), rollout=made["rollout"], reward=made["reward"])
    schedule, evaluations = (
        kind(steps=2, prompts_per_step=2),
        [Evaluation(held_out, every=1, name="sums")],
    )
    settings: Any = {"schedule": schedule, "evaluations": evaluations, "root": tmp_path, "name": "run"}
    with Driver(toy_grpo(prompts(8), **made), progress="plain", **settings) as driver:
        metrics = driver.run()
    assert all((row["sums/prompts_lost"], row["sums/prompts_asked"]) == (4, 8) for row in metrics)
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sums ")]
    assert len(shown) == 3 and all(
        "; 4 of 8 prompts: the others have no scored response" in line for line in shown
    )


class Voter(ToyReward):
    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=("response_ids",), writes=(str(FINAL_ANSWER),))
    def final_answers(self, samples: Batch) -> Batch:
        return samples.with_columns(**{str(FINAL_ANSWER): ["7"] * len(samples)})


@graph
def voted(rows: Any, *, rollout: Any, reward: Any, votes: bool) -> Any:
    samples = reward.score(rollout.generate(rows, n=2))
    return score_prompts(reward.final_answers(samples) if votes else samples, n=2, k=(2,))


@pytest.mark.parametrize("schedule", SCHEDULES[::2], ids=["synchronous", "asynchronous"])
def test_a_run_of_a_version_without_votes_is_resumed_without_them(
    schedule: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def evaluated(
        root: Path, *, votes: bool, kill_at: int = -1, **settings: Any
    ) -> list[dict[str, float]]:
        made = handles(follow=False) | {"reward": group(Voter), "actor": group(SavingActor)}
        made["rollout"].follows(made["actor"])
        own = {name: made[name] for name in ("rollout", "reward")}

        def stop(metrics: Mapping[str, float]) -> bool:
            if metrics["step"] == kill_at:
                raise Killed
            return False

        training = toy_grpo(prompts(10), **made)
        evaluations = [Evaluation(voted(prompts(2, "held_out"), **own, votes=votes), every=2)]
        given: Any = {"evaluations": evaluations, "checkpoint": CheckpointConfig(every=2), "stop": stop}
        given |= {"schedule": schedule, "root": root, "progress": "plain", "name": "run", "stop_on": ()}
        with Driver(training, **given, **settings) as driver:
            return driver.run()

    with pytest.raises(Killed):
        evaluated(tmp_path, votes=False, kill_at=5)
    metrics = evaluated(tmp_path, votes=True, resume="latest")
    assert "the evaluation 'eval' continues without reward.final_answers" in capsys.readouterr().out
    assert steps_with(metrics, "eval/pass@2") == [0, 2, 4, 6, 8, 9]
    assert steps_with(metrics, "eval/maj@2") == []
    assert not check_log(tmp_path / "run" / "buffer").violations
    evaluated(tmp_path / "new", votes=True)
    assert "continues without" not in capsys.readouterr().out


# The best checkpoint


def state(step: int) -> RunState:
    return RunState(step, 0, 0.0, {}, Position())


def kept(folder: CheckpointFolder) -> list[int]:
    return sorted(step_of(path) for path in complete_checkpoints(folder.path))


def test_the_best_is_never_pruned_even_where_its_evaluation_comes_late(tmp_path: Path):
    score = {1: 0.1, 2: 0.2, 3: 0.9, 4: 0.3, 5: 0.4, 6: 0.5, 7: 0.6, 8: 0.7}
    directory = RunDirectory.create(tmp_path, "run")
    known: dict[int, float] = {}
    folder = CheckpointFolder(directory, CheckpointConfig(every=1, keep=1, best="eval/pass@1"))
    values: Mapping[str, Mapping[int, float]] = {"eval/pass@1": known}
    for step in score:
        if step > 2:
            known[step - 2] = score[step - 2]  # evaluated two steps later
        folder.make_unfinished(state(step))
        folder.complete(step, lambda name: values.get(name, {}), lambda: None)
        assert step < 4 or 3 in kept(folder), (
            "it is there until it is known, and then because it is the best"
        )
    assert kept(folder) == [3, 7, 8]
    best = folder.best(lambda name: values.get(name, {}))
    assert best is not None and str(best) == f"{folder.path / 'step_000003'} (eval/pass@1 0.9)"
    assert directory.lock is not None
    directory.lock.release()


def test_the_best_checkpoint_is_named_at_the_end_and_on_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    checkpoint = CheckpointConfig(every=1, keep=1, best="time_s")  # always the latest
    with pytest.raises(Killed):
        saved_run(tmp_path, SCHEDULES[0], checkpoint=checkpoint, kill_at=5, progress="plain")
    assert "best checkpoint" not in capsys.readouterr().out
    saved_run(tmp_path, SCHEDULES[0], checkpoint=checkpoint, resume="latest", progress="plain")
    said = capsys.readouterr().out
    assert re.search(r"the best checkpoint so far is \S+/step_00000[345] \(time_s [\d.]+\)", said)
    assert re.search(r"best checkpoint: +\S+/step_000009 \(time_s [\d.]+\)", said)


class Learner(SavingActor):
    """An actor that fails in one update, once."""

    fails_at = -1

    def update(
        self, samples: Batch, *, loss: ToyLoss = ToyLoss(), epochs: int = 1, last: bool = True
    ) -> Metrics:
        if self.version + 1 == Learner.fails_at:
            Learner.fails_at = -1
            raise Killed
        return super().update(samples, loss=loss, epochs=epochs, last=last)


GOODNESS = {0: 0.0, 2: 0.1, 4: 0.9, 6: 0.3, 8: 0.2, 9: 0.5}


class Judge(ToyReward):
    """Scores a response by the version of the weights that wrote it."""

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP, reads=("response_ids", "response_versions"), writes=("reward",)
    )
    def score(self, samples: Batch) -> tuple[Batch, Metrics]:
        versions = samples["response_versions"].to_pylist()
        reward = np.array([GOODNESS.get(v[0], 0.0) for v in versions], np.float32)
        return samples.with_columns(reward=reward), {"mean": Mean(float(reward.sum()), len(samples))}


def judged(root: Path, **settings: Any) -> list[dict[str, float]]:
    """Run nine steps with an evaluation every two, and nothing that ends the run early."""
    rollout, reward, actor = (
        group(ToyRollout, name="rollout"),
        group(Judge, name="reward"),
        group(Learner, name="actor"),
    )
    rollout.follows(actor)
    graph = toy_grpo(prompts(10), rollout=rollout, reward=reward, actor=actor)
    held_out = toy_evaluation(prompts(2, "held_out"), rollout=rollout, reward=reward)
    evaluations, schedule = [Evaluation(held_out, every=2)], Synchronous(steps=9, prompts_per_step=3)
    with drive(
        graph, root, schedule=schedule, evaluations=evaluations, stop_on=(), **settings
    ) as driver:
        return driver.run()


def test_each_evaluated_step_has_a_checkpoint_and_the_best_is_kept(tmp_path: Path):
    judged(tmp_path, checkpoint=CheckpointConfig(keep=1, best="eval/reward/mean"))
    steps = sorted(step_of(path) for path in complete_checkpoints(tmp_path / "run" / "checkpoints"))
    assert steps == [4, 9], "the best, though nothing but its evaluation asked for it, and the last"


@pytest.mark.thorough
def test_a_run_that_fails_during_an_evaluation_resumes_unchanged(tmp_path: Path):
    expected = judged(tmp_path / "whole", checkpoint=CheckpointConfig(every=1))
    Learner.fails_at = 5  # during the evaluation of step 4
    with pytest.raises(WorkerError, match="Killed"):
        judged(tmp_path / "ended", checkpoint=CheckpointConfig(every=1))
    again = judged(tmp_path / "ended", checkpoint=CheckpointConfig(every=1), resume="latest")
    assert [row.get("eval/reward/mean") for row in again] == [
        row.get("eval/reward/mean") for row in expected
    ]
    assert [row["eval/reward/mean"] for row in again if "eval/reward/mean" in row] == pytest.approx(
        [*GOODNESS.values()]
    )
    assert not check_log(tmp_path / "ended" / "run" / "buffer").violations


def test_a_best_checkpoint_by_a_metric_of_each_step_says_which_steps(tmp_path: Path):
    with pytest.raises(UserError, match=r"measured at each step; set every="):
        saved_run(tmp_path, SCHEDULES[0], checkpoint=CheckpointConfig(best="time_s"))


def test_a_best_metric_that_the_run_does_not_have_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="no evaluation or worker group 'evla'; did you mean 'eval'"):
        saved_run(tmp_path, SCHEDULES[0], checkpoint=CheckpointConfig(every=1, best="evla/reward/mean"))


def test_a_best_metric_missing_from_evaluations_is_reported_once(tmp_path: Path):
    saved_run(tmp_path, SCHEDULES[0], checkpoint=CheckpointConfig(every=2, best="eval/reward/men"))
    said = [alert.text for alert in read_alerts(tmp_path / "run") if alert.name == "mistake"]
    assert len(said) == 1 and "did you mean 'eval/reward/mean'" in said[0]
