"""Searches of the planner: whether they find the best plans, how long they take, and how much faster
their plans are than Megatron-LM's heuristic, in the model.

The small spaces with known optima come from the tests. The large ones are ReaLHF's PPO settings
with the costs of `real_step.py`, on meshes of at least 4 GPUs. The heuristic gives all calls all
GPUs: tensor parallelism within a node, and as few pipeline stages as fit.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from real_step import NODE_GPUS, Setting

from weft.controllers.planner.execution_plans import FoundPlan, PlannedStep
from weft.controllers.planner.options import Mesh, Option, Strategy

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "controllers" / "planner"))
SETTINGS = {
    f"{actor}{', long' if generated > 1024 else ''}": Setting(
        actor, nodes, batch=batch, generated=generated
    )
    for generated, batch in ((1024, 512), (7168, 128))
    for actor, nodes in (("7B", 2), ("13B", 4), ("34B", 8), ("70B", 16))
}
SEEDS = range(5)
T = TypeVar("T")


def measure() -> dict[str, Any]:
    from search_cases import MODELS, hybridflow_search  # pyright: ignore[reportMissingImports]

    seeds, seconds = _small_spaces()
    mapper, mapper_s = _timed(lambda: hybridflow_search(8).placements(gpus=128, step=8))
    alone = {len(found.sets): found.seconds for found in mapper}
    step = SETTINGS["34B"].step()
    plan, plan_s = _timed(lambda: step.search())
    others = [_alone(step), _heuristic(step, SETTINGS["34B"].nodes)]
    found = {name: _over_heuristic(setting) for name, setting in SETTINGS.items()}
    return {
        "real_seeds": f"{seeds} of {2 * len(SEEDS)}",
        "real_seed_s": round(seconds, 3),
        "search_s": [round(mapper_s, 2), round(plan_s, 2)],
        "search_options": [len(mapper), len(step.options)],
        "search_worse": sum(each.fits and each.seconds < plan.seconds for each in others)
        + sum(alone[number] < mapper[0].seconds for number in (1, len(MODELS))),
        "over_heuristic_small": [round(each, 3) for each in _over_heuristic_small()],
        "over_heuristic": {name: round(each, 3) for name, each in found.items()},
        "over_heuristic_mean": round(math.prod(found.values()) ** (1 / len(found)), 3),
    }


def _timed(function: Callable[[], T]) -> tuple[T, float]:
    """Return the result of a function and its seconds of processor time."""
    start = time.process_time()
    return function(), time.process_time() - start


def _small_spaces() -> tuple[int, float]:
    """Return how many seeds find the optimum of ReaLHF's GRPO and PPO spaces, and the seconds of the
    slowest search."""
    from search_cases import SPACES, realhf_step  # pyright: ignore[reportMissingImports]

    hits, slowest = 0, 0.0
    for graph in SPACES:
        step = realhf_step(graph)
        names = [call.name for call in step.calls]
        every = itertools.product(step.options, repeat=len(names))
        plans = (step.of(dict(zip(names, each, strict=True))) for each in every)
        best = min(found.seconds for found in plans if found.fits)
        for seed in SEEDS:
            found, seconds = _timed(lambda seed=seed, graph=graph: realhf_step(graph).search(seed))
            hits += math.isclose(found.seconds, best)
            slowest = max(slowest, seconds)
    return hits, slowest


def _over_heuristic_small() -> list[float]:
    from search_cases import SPACES, realhf_step  # pyright: ignore[reportMissingImports]

    found: list[float] = []
    for graph in SPACES:
        step = realhf_step(graph)
        # The heuristic's option may not be in the space of the search.
        wide = realhf_step(graph, "options")
        everywhere = Option(Mesh(0, 8), Strategy(1, 8, 1))
        heuristic = wide.of({call.name: everywhere for call in wide.calls})
        found.append(heuristic.seconds / step.search().seconds)
    return found


def _over_heuristic(setting: Setting) -> float:
    step = setting.step()
    return _heuristic(step, setting.nodes).seconds / step.search().seconds


def _heuristic(step: PlannedStep, nodes: int) -> FoundPlan:
    mesh = Mesh(0, nodes * NODE_GPUS)
    for stages in (number for number in range(1, nodes + 1) if nodes % number == 0):
        option = Option(mesh, Strategy(stages, NODE_GPUS, nodes // stages))
        if (found := step.of({call.name: option for call in step.calls})).fits:
            return found
    raise ValueError(f"Megatron-LM's heuristic does not fit on {nodes} nodes")


def _alone(step: PlannedStep) -> FoundPlan:
    """Return the plan with the fastest option of each call alone."""
    return step.of({call.name: step.fastest(call.name) for call in step.calls})
