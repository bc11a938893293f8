"""Runs of the toy workers in this process."""

from pathlib import Path
from typing import Any

from toy import (
    ToyActor,
    ToyReward,
    ToyRollout,
    prompts,
    toy_grpo,
)

from weft.controllers.driver import Driver
from weft.controllers.schedule import Synchronous
from weft.dataflow.graph import Graph, group


def handles(*, rollout: dict[str, Any] | None = None, follow: bool = True) -> dict[str, Any]:
    made = {
        "rollout": group(ToyRollout, **(rollout or {})),
        "reward": group(ToyReward),
        "actor": group(ToyActor),
    }
    if follow:
        made["rollout"].follows(made["actor"])
    return made


def drive(
    graph: Graph, root: Path, *, steps: int = 3, prompts_per_step: int = 4, **settings: Any
) -> Driver:
    schedule = settings.pop("schedule", None) or Synchronous(
        steps=steps, prompts_per_step=prompts_per_step
    )
    return Driver(graph, schedule=schedule, root=root, progress=False, **{"name": "run", **settings})


def training(**settings: Any) -> Graph:
    return toy_grpo(prompts(8), **handles(**settings))
