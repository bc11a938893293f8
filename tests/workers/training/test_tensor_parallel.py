"""Tensor parallelism over two ranks, by `transformers` plans: the same results as on one rank."""

from pathlib import Path
from typing import Any

import families
import pytest
from family_cases import asked_of, check, on_one_rank, run_ranks, write_models
from transformers import CONFIG_MAPPING

from weft.dataflow.errors import UserError
from weft.workers.training.tensor_parallel_plan import TensorParallelPlan, check_tensor_parallel

SHARED = (
    "Qwen2", "Qwen3", "Qwen3 MoE", "Llama 3 rope", "Mistral", "Mixtral", "Gemma", "Gemma 2", "Gemma 3", "Phi-3", "OLMo 2", "GPT-OSS",
)  # fmt: skip
ADAPTED = ("Qwen3", "Mixtral", "Phi-3", "OLMo 2")
"""Also tested with an adapter."""
CASES = [*SHARED, *(f"{name} with LoRA" for name in ADAPTED)]
QUICK = (
    "Qwen2",
    "Qwen3 MoE",
    "Gemma 3",
    "Phi-3",
    "OLMo 2",
    "GPT-OSS",
    "Mixtral with LoRA",
    "Phi-3 with LoRA",
)
"""Each style of plan, and each kind of heads, experts and norms, once."""


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> list[str]:
    return asked_of(request, CASES, QUICK)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, asked: list[str]) -> Path:
    return write_models(tmp_path_factory.mktemp("families"), asked)


@pytest.fixture(scope="module")
def alone(models: Path, asked: list[str]) -> dict[str, Any]:
    return on_one_rank(models, asked)


@pytest.fixture(scope="module")
def two(
    models: Path, asked: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, run_ranks(models, folder, 2, asked, tensor_parallel=2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_two_ranks_share_the_layers_of_a_model(alone: dict[str, Any], two: Any, name: str):
    check(two[0], name, two[1], alone[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"gather": "layerwise"}, {"offload": "everything"}, {"activation_checkpointing": True}]
)
def test_two_replicas_of_two_ranks(
    models: Path, alone: dict[str, Any], tmp_path: Path, settings: dict[str, Any]
):
    ranks = run_ranks(models, tmp_path, 4, CASES, tensor_parallel=2, **settings)
    for name in CASES:
        check(tmp_path, name, ranks, alone[name])


REFUSED = {
    "GPT-2": "transformers has no plan for models of type 'gpt2'",
    "Llama 4": "their plan asks for",
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_with_an_unusable_plan_are_refused(name: str):
    kind, settings = families.FAMILIES[name]
    with pytest.raises(UserError, match=REFUSED[name]):
        check_tensor_parallel("m", CONFIG_MAPPING[kind](**settings).get_text_config(), 2)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (
            "qwen3",
            {"num_key_value_heads": 2},
            r"tensor_parallel=4 does not divide the model's num_key_value_heads \(2\)",
        ),
        ("qwen3", {"intermediate_size": 90}, r"does not divide the model's intermediate_size \(90\)"),
        ("mixtral", {"num_local_experts": 6}, r"does not divide the model's num_local_experts \(6\)"),
        ("gpt_oss", {"num_local_experts": 6}, r"does not divide the model's num_local_experts \(6\)"),
    ],
)
def test_models_that_do_not_divide_evenly_are_refused(kind: str, settings: dict[str, Any], said: str):
    sizes: dict[str, Any] = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 64,
        "num_local_experts": 8,
    }
    with pytest.raises(UserError, match=said):
        check_tensor_parallel("m", CONFIG_MAPPING[kind](**{**sizes, **settings}), 4)
    check_tensor_parallel("m", CONFIG_MAPPING[kind](**sizes), 4)
    check_tensor_parallel(
        "m", CONFIG_MAPPING["phi3"](**{**sizes, "num_key_value_heads": 1}), 4
    )  # gathers its heads


def test_a_plan_leaves_out_modules_inside_experts():
    shared = {
        "layers.*.experts": "moe_tp_experts",
        "layers.*.experts.up": "packed_colwise",
        "layers.*.up": "colwise",
    }
    plan = TensorParallelPlan.of_model(shared, {"layers.*.experts": "ep_dispatch_experts"})
    assert not plan.unknown and plan.shares_experts and not plan.shares_heads
    assert [plan.style_of(f"layers.3.{name}") for name in ("experts", "experts.up", "up", "down")] == [
        "moe_tp_experts", None, "colwise", None,
    ]  # fmt: skip
