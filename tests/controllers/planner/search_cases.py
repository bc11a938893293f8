"""Published and brute-force results of planning papers (`search_cases.json`), and the costs that they
assume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from weft.controllers.planner.execution_plans import ModelCall, PlannedStep
from weft.controllers.planner.options import Mesh, Option, Strategy
from weft.controllers.planner.placement_search import PlacementSearch

CASES: dict[str, Any] = json.loads((Path(__file__).parent / "search_cases.json").read_text())

# HybridFlow

MODELS = CASES["hf_inputs"]["models"]


def hybridflow_search(node_gpus: int) -> PlacementSearch:
    return PlacementSearch(
        tuple(MODELS),
        seconds=hybridflow_seconds,
        held_bytes=hybridflow_bytes,
        node_gpus=node_gpus,
        gpu_bytes=CASES["hf_inputs"]["capacity"],
        pipelines=(1, 2, 4),
    )


def hybridflow_seconds(model: str, way: Strategy) -> list[float]:
    (pp, tp, dp), work, floor = way, MODELS[model]["work"], MODELS[model]["floor"]
    generate = work[0] / (dp * math.sqrt(pp * tp)) * (1 + 0.02 * (pp - 1))
    slower = (1 + 0.04 * math.log2(tp)) * (1 + (pp - 1) / 8)
    others = [each / (pp * tp * dp) * slower for each in work[1:]]
    return [own + least for own, least in zip([generate, *others], floor, strict=True)]


def hybridflow_bytes(model: str, way: Strategy) -> float:
    size, (pp, tp, dp) = MODELS[model]["bytes"], way
    trained = 2 * size / (pp * tp) + 6 * size / (pp * tp * dp)
    return size / (pp * tp) + trained * MODELS[model]["trained"]


# ReaLHF

TRAINED = ("atr", "ctr")
SPACES = {"grpo": "options", "ppo": "five_options"}
"""Graph -> its options among the inputs."""


def realhf_step(graph: str, options: str = "") -> PlannedStep:
    """Return the step of a graph. `options` names a list of options in the inputs."""
    given = CASES["real_inputs"]
    known = given["graphs"][graph]
    return PlannedStep(
        [
            ModelCall(name, known["model"][name], tuple(known["needs"][name]), name in TRAINED)
            for name in known["calls"]
        ],
        [Option(Mesh(*mesh), Strategy(*way)) for mesh, way in given[options or SPACES[graph]]],
        gpu_bytes=given["capacity"],
        seconds=realhf_seconds,
        held_bytes=realhf_bytes,
        move_s=lambda model, old, new: given["move_s"],
    )


def realhf_seconds(call: str, option: Option) -> float:
    work, (pp, tp, dp) = CASES["real_inputs"]["work"][call], option.strategy
    if call == "gen":
        return work / (dp * math.sqrt(pp * tp)) * (1 + 0.1 * (pp - 1))
    return work / option.mesh.gpus * (1 + 0.05 * math.log2(tp)) * (1 + (pp - 1) / (2 * pp))


def realhf_bytes(call: str, option: Option) -> float:
    pp, tp, dp = option.strategy
    return CASES["real_inputs"]["static"][call] / (pp * tp * (dp if call in TRAINED else 1))
