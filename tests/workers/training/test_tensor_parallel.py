"""Layers of many models over two ranks, by the plans of `transformers`: the same log-probabilities, gradients and weights as on one."""

import json
from pathlib import Path
from typing import Any

import families
import family_ranks
import pyarrow as pa
import pytest
import spmd
import torch
from ranks import run_processes
from safetensors.torch import load_file
from training_rows import make_rows
from transformers import CONFIG_MAPPING

from weft.dataflow.errors import UserError
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.training.tensor_parallel_plan import TensorParallelPlan, check_tensor_parallel

SHARED = (
    "Qwen2", "Qwen3", "Qwen3 MoE", "Llama 3 rope", "Mistral", "Mixtral", "Gemma", "Gemma 2", "Gemma 3", "Phi-3", "OLMo 2", "GPT-OSS",
)  # fmt: skip
ADAPTED = ("Qwen3", "Mixtral", "Phi-3", "OLMo 2")
"""With an adapter as well."""
ROWS = make_rows(9)
CASES = [*SHARED, *(f"{name} with LoRA" for name in ADAPTED)]


def config_of(folder: Path, name: str, **settings: Any) -> dict[str, Any]:
    adapted = name.endswith(" with LoRA")
    lora = {"lora": {"rank": 3, "alpha": 6}} if adapted else {}
    return {
        "model": str(folder / name.removesuffix(" with LoRA")),
        "learning_rate": 1e-3,
        "max_grad_norm": None,
        **lora,
        **settings,
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a folder for each model, and what one rank computes of each."""
    folder = tmp_path_factory.mktemp("families")
    for name in SHARED:
        kind, settings = families.FAMILIES[name]
        model = families.amplify(families.make(kind, {"vocab_size": 98, **settings}))
        model.save_pretrained(folder / name)
        (folder / name / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def alone(models: Path) -> dict[str, Any]:
    """What one rank computes of each model: log-probabilities before and after a step, and its gradient."""
    found = {}
    for name in CASES:
        worker = ActorWorker(ActorConfig(**config_of(models, name)))
        said = worker.logprobs(ROWS, into="said")["said"].to_pylist()
        gradient, _ = spmd.one_step(worker, ROWS)
        found[name] = {
            "said": said,
            "gradient": gradient,
            "after": worker.logprobs(ROWS, into="said")["said"].to_pylist(),
        }
    return found


def run_ranks(models: Path, folder: Path, ranks: int, names: list[str], **settings: Any) -> list[dict[str, Any]]:
    """What each rank found, by model."""
    with pa.ipc.new_file(folder / "rows.arrow", ROWS.record.schema) as file:
        file.write_batch(ROWS.record)
    configs = {name: config_of(models, name, tensor_parallel=2, **settings) for name in names}
    (folder / "case.json").write_text(json.dumps({"ranks": ranks, "configs": configs}))
    run_processes(family_ranks.main, folder, ranks)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


def check(folder: Path, name: str, ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    replicas = len(ranks) // 2
    norm = torch.stack([g.norm() for g in expected["gradient"].values()]).norm()
    for number, rank in enumerate(ranks):
        found = rank[name]
        for when, tolerance in (("said", 2e-5), ("after", 2e-3)):
            for mine, theirs in zip(found[when], expected[when][number // 2 :: replicas], strict=True):
                assert mine == pytest.approx(theirs, abs=tolerance, rel=tolerance)
        assert found["gradient"].keys() == expected["gradient"].keys()
        for parameter, gradient in expected["gradient"].items():
            assert (found["gradient"][parameter] - gradient).norm() / norm < 1e-5, parameter
    if "LoRA" in name:
        return
    saved = load_file(folder / f"saved-{name}" / "model.safetensors")
    given = dict.fromkeys(saved, 0)
    for rank in ranks:
        for tensor_name, shape, box, tensor in rank[name]["parts"]:
            assert saved[tensor_name].shape == torch.Size(shape)
            assert torch.equal(saved[tensor_name][box.slices], tensor)
            given[tensor_name] += tensor.numel()
    assert given == {tensor_name: tensor.numel() for tensor_name, tensor in saved.items()}


@pytest.fixture(scope="module")
def two(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, run_ranks(models, folder, 2, CASES)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_share_the_layers_of_a_model(alone: dict[str, Any], two: Any, name: str):
    check(two[0], name, two[1], alone[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"gather": "layerwise"}, {"offload": "everything"}, {"activation_checkpointing": True}]
)
def test_two_replicas_of_two_ranks(models: Path, alone: dict[str, Any], tmp_path: Path, settings: dict[str, Any]):
    ranks = run_ranks(models, tmp_path, 4, CASES, **settings)
    for name in CASES:
        check(tmp_path, name, ranks, alone[name])


REFUSED = {
    "GPT-2": "transformers has no plan for models of type 'gpt2'",
    "Llama 4": "their plan asks for",
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_whose_plan_cannot_be_carried_out_are_refused(name: str):
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
def test_what_ranks_cannot_share_evenly_is_refused(kind: str, settings: dict[str, Any], said: str):
    sizes: dict[str, Any] = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 64,
        "num_local_experts": 8,
    }
    with pytest.raises(UserError, match=said):
        check_tensor_parallel("m", CONFIG_MAPPING[kind](**{**sizes, **settings}), 4)
    check_tensor_parallel("m", CONFIG_MAPPING[kind](**sizes), 4)
    check_tensor_parallel("m", CONFIG_MAPPING["phi3"](**{**sizes, "num_key_value_heads": 1}), 4)  # gathers its heads


def test_a_plan_leaves_out_what_is_inside_of_experts():
    shared = {"layers.*.experts": "moe_tp_experts", "layers.*.experts.up": "packed_colwise", "layers.*.up": "colwise"}
    plan = TensorParallelPlan.of(shared, {"layers.*.experts": "ep_dispatch_experts"})
    assert not plan.unknown and plan.shares_experts and not plan.shares_heads
    assert [plan.style_of(f"layers.3.{name}") for name in ("experts", "experts.up", "up", "down")] == [
        "moe_tp_experts", None, "colwise", None,
    ]  # fmt: skip
