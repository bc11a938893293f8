"""A follower with state, such as a moving reference, keeps it over a kill: it gets each due version once,
in order, and none at a start."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from saved_runs import SCHEDULES, Killed, SavingActor
from toy import ToyReward, ToyRollout, ToyTeacher, ToyWeights, prompts, toy_distillation

from weft.controllers.driver import Driver
from weft.controllers.recovery.checkpoints import CheckpointConfig
from weft.controllers.schedule import Training
from weft.dataflow.batch import Batch
from weft.dataflow.graph import group
from weft.dataflow.metrics import Max, Metrics
from weft.workers.dispatch import Dispatch
from weft.workers.worker import remote


class Averaging(ToyTeacher):
    """Adds up the versions that it receives, each once."""

    total = version = 0

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=("response_ids",), writes=("taught",))
    def teach(self, samples: Batch) -> tuple[Batch, Metrics]:
        return samples.with_columns(taught=[float(self.total)] * len(samples)), {
            "total": Max(float(self.total))
        }

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def receive_weights(self, weights: ToyWeights) -> str:
        self.total += weights.version * (weights.version != self.version)
        self.version = weights.version
        return weights.checksum

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: Path) -> float:
        path.mkdir(parents=True, exist_ok=True)
        (path / "state.json").write_text(json.dumps([self.total, self.version]))
        return 0.0

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool = False) -> bool:
        return True

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: Path) -> None:
        self.total, self.version = json.loads((path / "state.json").read_text())

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def state(self) -> list[int]:
        return [self.total, self.version]


def run(
    root: Path, schedule: Training, *, kill_at: int = -1, save_every: int = 2, **settings: Any
) -> tuple[list[int], list[dict[str, float]]]:
    rollout, actor = group(ToyRollout, name="rollout"), group(SavingActor, name="actor")
    reward, teacher = group(ToyReward, name="reward"), group(Averaging, name="teacher")
    rollout.follows(actor)
    teacher.follows(actor, every=3)

    def stop(metrics: Mapping[str, float]) -> bool:
        if metrics["step"] == kill_at:
            raise Killed
        return False

    with Driver(
        toy_distillation(prompts(10), rollout=rollout, reward=reward, teacher=teacher, actor=actor),
        schedule=schedule,
        checkpoint=CheckpointConfig(every=save_every),
        root=root,
        name="run",
        progress=False,
        stop=stop,
        stop_on=(),
        **settings,
    ) as driver:
        metrics = driver.run()
        return driver.call(teacher, "state")[0], metrics


@pytest.mark.parametrize("schedule", SCHEDULES[:3], ids=["synchronous", "pipelined", "asynchronous"])
@pytest.mark.parametrize(("kill_at", "save_every"), [(4, 1), (5, 2), (7, 3)])
def test_a_follower_with_state_gets_each_due_version_once(
    tmp_path: Path, schedule: Training, kill_at: int, save_every: int
):
    whole, unbroken = run(tmp_path / "whole", schedule)
    assert whole == [3 + 6 + 9, 9], "no version at the start, and every third one"
    with pytest.raises(Killed):
        run(tmp_path / "ended", schedule, kill_at=kill_at, save_every=save_every)
    state, metrics = run(tmp_path / "ended", schedule, save_every=save_every, resume="latest")
    assert state == whole
    if not schedule.overlaps:
        totals = [row["teacher/total"] for row in metrics[1:]]
        assert totals == [row["teacher/total"] for row in unbroken[1:]] == [0, 0, 0, 3, 3, 3, 9, 9, 9]
