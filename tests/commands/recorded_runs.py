"""Small real runs with toy workers in this process, for the tests of commands."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "controllers"))
from saved_runs import SavingActor  # pyright: ignore[reportMissingImports]
from toy import ToyReward, ToyRollout, prompts, toy_evaluation, toy_grpo  # pyright: ignore[reportMissingImports]

from weft.controllers.driver import Driver
from weft.controllers.recovery.checkpoints import CheckpointConfig
from weft.controllers.run_spec import Evaluation
from weft.controllers.schedule import Synchronous
from weft.dataflow.graph import group


def driver(
    root: Path,
    name: str,
    *,
    steps: int = 3,
    every: int = 0,
    rows: int = 8,
    seed: int = 0,
    stop: Callable[[Any], bool] | None = None,
    progress: Any = False,
    resume: str = "none",
    dashboard: bool = False,
) -> Driver:
    """Return a run, not started.

    Args:
        every: steps between checkpoints.
    """
    rollout, reward = group(ToyRollout), group(ToyReward)
    actor = group(SavingActor)
    rollout.follows(actor)
    training = toy_grpo(prompts(rows), rollout=rollout, reward=reward, actor=actor)
    held_out = toy_evaluation(prompts(2), rollout=rollout, reward=reward)
    return Driver(
        training,
        schedule=Synchronous(steps=steps, prompts_per_step=4),
        evaluations=[Evaluation(held_out, every=2)],
        checkpoint=CheckpointConfig(every=every),
        root=root,
        name=name,
        seed=seed,
        progress=progress,
        resume=resume,
        stop=stop,
        stop_on=(),
        dashboard=dashboard,
    )


def run(root: Path, name: str, **settings: Any) -> Path:
    with driver(root, name, **settings) as made:
        made.run()
    return root / name


class Live:
    """A run in another thread, until it is asked to stop."""

    def __init__(self, root: Path, name: str, **settings: Any) -> None:
        self.path = root / name
        self.code: object = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(root, name, settings))
        self._thread.start()
        assert self._begun.wait(60), "the run does not begin"

    def _run(self, root: Path, name: str, settings: dict[str, Any]) -> None:
        def begun(metrics: Any) -> bool:
            if metrics["step"] >= 1:
                self._begun.set()
            return False

        try:
            with driver(root, name, steps=100_000, stop=begun, **settings) as made:
                made.run()
            self.code = "returned"
        except SystemExit as left:
            self.code = left.code

    def join(self) -> object:
        """Wait for the end; return the exit code, or "returned" if the program would continue."""
        self._thread.join(60)
        assert not self._thread.is_alive(), "the run does not end"
        return self.code
