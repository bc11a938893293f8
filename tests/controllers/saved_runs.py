"""Toy runs with checkpoints, in this process or as a program, for tests of checkpoints and
failures."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from toy import PartsActor, SlowRollout, ToyLoss, ToyReward, prompts, toy_evaluation, toy_grpo

from weft.controllers.driver import Driver, Evaluation
from weft.controllers.recovery.checkpoints import CheckpointConfig
from weft.controllers.schedule import Asynchronous, Pipelined, Synchronous, Training
from weft.dataflow.batch import Batch
from weft.dataflow.graph import group
from weft.dataflow.metrics import Metrics
from weft.workers.dispatch import Dispatch
from weft.workers.worker import remote

PROGRAM = Path(__file__).with_name("ended_run.py")


class SavingActor(PartsActor):
    """An actor whose weights are the list of everything it was trained on."""

    learnt: list[list[Any]]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.learnt = []

    def update(
        self, samples: Batch, *, loss: ToyLoss = ToyLoss(), epochs: int = 1, last: bool = True
    ) -> Metrics:
        ids = samples["response_ids"].to_pylist()
        self.learnt += [[number, ids[k]] for k, number in enumerate(samples["group_id"].to_pylist())]
        return super().update(samples, loss=loss, epochs=epochs, last=last)

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: Path) -> float:
        path.mkdir(parents=True, exist_ok=True)
        (path / f"rank_{self.context.rank}.json").write_text(json.dumps([self.version, self.learnt]))
        return 0.25

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool = False) -> bool:
        return True

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: Path) -> None:
        self.version, self.learnt = json.loads((path / f"rank_{self.context.rank}.json").read_text())

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def weights(self) -> list[list[Any]]:
        return self.learnt


class Killed(Exception):
    """Ends a run in the middle."""


SCHEDULES: list[Training] = [
    Synchronous(steps=9, prompts_per_step=3),
    Pipelined(steps=9, prompts_per_step=3),
    Asynchronous(steps=9, prompts_per_step=3, max_staleness=1),
    Asynchronous(steps=9, prompts_per_step=3, max_staleness=2, partial_rollouts="requeue"),
]


def run(
    root: Path,
    schedule: Training,
    *,
    kill_at: int | None = None,
    kill: Callable[[], NoReturn] | None = None,
    evaluate: bool = True,
    at_step: Callable[[Mapping[str, float]], None] = lambda metrics: None,
    **settings: Any,
) -> tuple[list[Any], list[dict[str, float]]]:
    rollout, actor = group(SlowRollout, name="rollout"), group(SavingActor, name="actor")
    reward = group(ToyReward, name="reward")
    rollout.follows(actor)

    def stop(metrics: Mapping[str, float]) -> bool:
        at_step(metrics)
        if kill_at is not None and metrics["step"] >= kill_at:
            if kill is not None:
                kill()
            raise Killed
        return False

    with Driver(
        toy_grpo(prompts(10), rollout=rollout, reward=reward, actor=actor),
        schedule=schedule,
        evaluations=[
            Evaluation(toy_evaluation(prompts(2, "held_out"), rollout=rollout, reward=reward), 2)
        ]
        * evaluate,
        checkpoint=settings.pop("checkpoint", CheckpointConfig(every=2)),
        root=root,
        progress=settings.pop("progress", False),
        stop=stop,
        **{"name": "run", **settings},
    ) as driver:
        metrics = driver.run()
        return driver.call(actor, "weights")[0], metrics


def trained(weights: list[Any]) -> list[int]:
    return sorted({group for group, _ in weights})


def begun(root: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), "--root", str(root), *more]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def wait_for_steps(process: subprocess.Popen[str], root: Path) -> None:
    deadline = time.monotonic() + 60
    log = root / "run" / "buffer" / "ledger.log"
    while not log.exists() or log.read_bytes().count(b'"key":"step"') < 3:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)
