"""A failed start cleans up, so that the same run can be started again."""

from pathlib import Path
from typing import Any

import pytest
from toy import ToyActor, ToyReward, ToyRollout, prompts, toy_grpo

from weft.controllers.driver import Driver
from weft.controllers.schedule import Synchronous
from weft.dataflow.errors import UserError, WeightSyncError
from weft.dataflow.graph import group
from weft.dataflow.runs.lock import RunLock, epochs

begun: list[str] = []
closed: list[str] = []


class ClosedRollout(ToyRollout):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        begun.append(self.context.name)

    def close(self) -> None:
        closed.append(self.context.name)


class ClosedActor(ToyActor):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        begun.append(self.context.name)

    def close(self) -> None:
        closed.append(self.context.name)


class UnmadeRollout(ToyRollout):
    """Fails on construction. It follows the actor, so it is constructed second."""

    def __init__(self, *args: Any) -> None:
        raise UserError("the judge has no key")


def started(root: Path, rollout_class: Any = ClosedRollout, **settings: Any) -> Driver:
    rollout, actor = group(rollout_class, name="rollout", **settings), group(ClosedActor, name="actor")
    rollout.follows(actor)
    graph = toy_grpo(prompts(4), rollout=rollout, reward=group(ToyReward, name="reward"), actor=actor)
    schedule = Synchronous(steps=1, prompts_per_step=4)
    return Driver(graph, schedule=schedule, root=root, name="run", resume="latest", progress=False)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"rollout_class": UnmadeRollout}, UserError("the judge has no key")),
        ({"garble": True}, WeightSyncError("checksum")),
    ],
    ids=["a worker cannot be made", "the first weights do not arrive"],
)
def test_a_failed_start_is_cleaned_up(tmp_path: Path, wrong: dict[str, Any], error: Exception):
    begun.clear()
    closed.clear()
    driver = started(tmp_path, **wrong)
    with pytest.raises(type(error), match=str(error)), driver:
        pytest.fail("it is not started")
    assert "actor" in begun and sorted(closed) == sorted(begun) and driver.buffer is None
    lock = RunLock.take(tmp_path / "run", after=max(epochs(tmp_path / "run"), default=0))
    lock.release()
    with started(tmp_path) as again:
        assert [row["step"] for row in again.run()] == [0, 1]
