"""Weft's GRPO steps for `gpu.py`, with the settings of `weft.train` on GPUs.

python benchmarks/gpu/gpu_steps.py FOLDER SETTINGS      # SETTINGS is JSON; writes FOLDER/weft.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parents[1] / each) for each in ("", "steps")]
from turns import WARM_UP, CountedSteps
from weft_steps import grpo_by_turns  # pyright: ignore[reportMissingImports]
from workloads import Workload

import weft
from weft.controllers.node_layout import THIS_MACHINE, Nodes, machine_cpus, machine_gpus
from weft.controllers.program import Program
from weft.controllers.train import shared_devices


def main(
    folder: Path,
    workload: Mapping[str, Any],
    gpus: int,
    steps: int,
    lora: int | None,
    actor: Mapping[str, Any],
    rollout: Mapping[str, Any],
) -> None:
    work = Workload.of(workload)
    groups = ("rollout", "actor")
    if gpus:
        cpus = max(1, machine_cpus() * gpus // machine_gpus())
        shared = shared_devices(Program(), groups, Nodes([(cpus, gpus)], THIS_MACHINE))
        placement = shared.run["placement"]
        actor, rollout = {**shared.trained, **actor}, {**shared.rollout, **shared.model, **rollout}
    else:
        place = weft.Place(weft.ResourcePool("cores", cpus=machine_cpus()), ranks=1)
        placement = dict.fromkeys(groups, place)
    adapter = {} if lora is None else {"lora": weft.Lora(rank=lora)}
    trained: Any = {"model": str(folder / "model"), "learning_rate": 1e-8, **adapter, **actor}
    generating: Any = {"model": str(folder / "model"), "max_context": work.context, **rollout}
    turns = CountedSteps(WARM_UP + steps)
    grpo_by_turns(
        turns,
        folder,
        work,
        weft.group(weft.ActorWorker, **trained),
        weft.group(weft.RolloutWorker, **generating),
        placement,
        {"gpus": gpus},
    )
    (folder / "weft.json").write_text(json.dumps(turns.said[1 + WARM_UP :]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), **json.loads(sys.argv[2]))
