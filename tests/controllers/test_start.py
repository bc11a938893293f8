"""A start that fails undoes what it began, so that the same run can be started again."""

from pathlib import Path
from typing import Any

import pytest
from toy import ToyActor, ToyReward, ToyRollout, prompts, toy_grpo

from weft.controllers.driver import Driver
from weft.controllers.run_lock import RunLock, epochs
from weft.controllers.schedule import Synchronous
from weft.dataflow.errors import UserError, WeightSyncError
from weft.dataflow.handle import group

closed: list[str] = []


class ClosedRollout(ToyRollout):
    def close(self) -> None:
        closed.append(self.context.name)


class UnmadeReward(ToyReward):
    def __init__(self, *args: Any) -> None:
        raise UserError("the judge has no key")


def started(root: Path, reward: Any = ToyReward, **settings: Any) -> Driver:
    rollout, actor = group(ClosedRollout, name="rollout", **settings), group(ToyActor, name="actor")
    rollout.follows(actor)
    graph = toy_grpo(prompts(4), rollout=rollout, reward=group(reward, name="reward"), actor=actor)
    schedule = Synchronous(steps=1, prompts_per_step=4)
    return Driver(graph, schedule=schedule, root=root, name="run", resume="latest", progress=False)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [({"reward": UnmadeReward}, UserError("the judge has no key")), ({"garble": True}, WeightSyncError("checksum"))],
    ids=["a worker cannot be made", "the first weights do not arrive"],
)
def test_what_a_start_that_fails_has_begun_is_ended(tmp_path: Path, wrong: dict[str, Any], error: Exception):
    closed.clear()
    driver = started(tmp_path, **wrong)
    with pytest.raises(type(error), match=str(error)), driver:
        pytest.fail("it is not started")
    assert closed == ["rollout"] and driver.buffer is None
    lock = RunLock.take(tmp_path / "run", after=max(epochs(tmp_path / "run"), default=0))
    lock.release()
    with started(tmp_path) as again:
        assert [row["step"] for row in again.run()] == [0, 1]
