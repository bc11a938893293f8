"""A rank with environments that dies or hangs is replaced, and its episodes are played again. With real
deaths on Ray."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from toy import ToyActor, ToyLoss

from weft.algorithms.sampling import Sampling
from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.driver import Driver
from weft.controllers.schedule import Synchronous
from weft.dataflow.graph import group
from weft.dataflow.source import TableSource
from weft.dataflow.tracing import graph
from weft.workers.environment import EnvWorker
from weft.workers.rollout import RolloutWorker

pytestmark = [pytest.mark.ray, pytest.mark.thorough, pytest.mark.usefixtures("cluster")]


class Walk:
    """Environments of three steps. The first process ends or hangs in its fourth step."""

    def __init__(self, width: int, how: str, folder: Path) -> None:
        self.width, self.how, self.folder = width, how, folder
        self.turns = self.steps = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[list[str], dict[str, Any]]:
        self.turns = 0
        return [f"board {row['board']}" for row in options["rows"]], {}

    def step(self, actions: Sequence[str]) -> tuple[Any, ...]:
        self.turns, self.steps = self.turns + 1, self.steps + 1
        if self.steps == 4 and not (self.folder / "failed").exists():
            (self.folder / "failed").touch()
            while self.how == "hangs":
                pass
            os._exit(9)
        ended = [self.turns == 3] * self.width
        return ["on"] * self.width, [1.0] * self.width, ended, [False] * self.width, {}


@graph
def play(prompts: Any, *, rollout: Any, env: Any, actor: Any) -> Any:
    samples = rollout.interact(prompts, env=env, n=2, sampling=Sampling(max_tokens=2))
    return actor.update(samples, loss=ToyLoss(column="reward"))


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_rank_with_environments_is_replaced(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    tiny = pytest.importorskip("tiny_qwen3")
    template = pytest.importorskip("tiny_agents").TEMPLATE
    tiny.make_model(tmp_path / "model", ["board 1", "on"], chat_template=template)
    make = partial(Walk, how=how, folder=tmp_path)
    rollout = group(RolloutWorker, model=tmp_path / "model", engine="transformers", max_context=128)
    env = group(EnvWorker, name="env", make=make, num_envs=2, deadline_s=10.0)
    boards = TableSource("boards", pa.table({"board": [1, 2, 3, 4]}))
    with Driver(
        play(boards, rollout=rollout, env=env, actor=group(ToyActor, name="actor")),
        schedule=Synchronous(steps=2, prompts_per_step=2),
        backend=RayBackend(),
        root=tmp_path,
        name="run",
        progress=False,
    ) as driver:
        metrics = driver.run()
    assert [row["actor/rows"] for row in metrics[1:]] == [4, 4]
    # The metrics of a call that is lost are lost too; its repetition makes only missing episodes.
    told = [row for row in metrics[1:] if "rollout/reward" in row]
    assert told and all(row["rollout/reward"] == row["rollout/turns"] == 3.0 for row in told)
    assert all(row["rollout/dropped_episodes"] == 0 for row in metrics[1:])
    assert metrics[-1]["replaced_workers"] == 1
    log = (tmp_path / "run" / "logs" / "env_0.log").read_text()
    assert (" in step\n" in log) == (how == "hangs")
