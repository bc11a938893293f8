"""The costs of ReaLHF's settings against the numbers of its formulas."""

from typing import Any

import pytest

from weft.controllers.planner.options import Mesh, Option, Strategy


@pytest.fixture
def real_step(load: Any) -> Any:
    return load("planner/real_step")


def test_calls_in_a_pipeline_take_realhfs_seconds(real_step: Any):
    assert real_step.inference_s(3, pp=1) == 3
    assert real_step.inference_s(3, pp=4) == 21
    assert real_step.train_s(2, 4, 5, pp=1) == 11
    assert real_step.train_s(2, 4, 5, pp=2) == 6 * 5 + 5  # four microbatches through two stages
    assert real_step.generate_s(7, 0.5, 129, pp=1) == 71
    assert real_step.generate_s(7, 0.5, 129, pp=2) == 21 + 128


@pytest.mark.parametrize(
    ("way", "held"), [(Strategy(1, 8, 1), 20607664128), (Strategy(2, 4, 2), 12021137408)]
)
def test_a_trained_llama_holds_realhfs_bytes(real_step: Any, way: Strategy, held: int):
    assert real_step.LLAMAS["7B"].parameters == 6869221376
    option, setting = Option(Mesh(0, way.gpus), way), real_step.Setting("7B", 2)
    assert setting.held_bytes("actor update", option) == held
    assert setting.held_bytes("reference", option) == 4 * 6869221376 / (way.pp * way.tp)


def test_keys_and_values_of_all_responses_are_divided_over_the_gpus(real_step: Any):
    option, setting = Option(Mesh(0, 8), Strategy(1, 8, 1)), real_step.Setting("7B", 2)
    assert setting.active_bytes("generate", option) == 2 * 2 * 512 * 2048 * 4096 * 32 / 8
    assert setting.active_bytes("reward", option) == 0
