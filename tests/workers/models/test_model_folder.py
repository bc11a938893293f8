"""Settings of models in any format, and models that are refused by name before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from weft.dataflow.errors import UserError
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.generation.engine import Sampling
from weft.workers.models.model_folder import causal_lm_types, read_stop_tokens
from weft.workers.rollout import RolloutWorker
from weft.workers.rollout_config import RolloutConfig

TEXT = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}


def folder_with(folder: Path, **settings: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def source(*lengths: int) -> Any:
    table = pa.table({"prompt_ids": pa.array([[7] * n for n in lengths], pa.list_(pa.int32()))})
    return SimpleNamespace(name="train.parquet", table=table, columns=("prompt_ids",))


def check(model: Path, **settings: Any) -> None:
    node: Any = SimpleNamespace(name="generate", arguments={"sampling": Sampling(max_tokens=50)})
    RolloutWorker.check(RolloutConfig(model=model, **settings), [node], source(20))


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "gemma3", "text_config": {**TEXT, "max_position_embeddings": 64}},
        {"model_type": "gpt2", "n_embd": 64, "n_head": 2, "n_positions": 64},
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_the_context_is_found_in_any_setting_of_a_model(
    tmp_path: Path, settings: dict[str, Any], engine: str
):
    with pytest.raises(UserError, match="together more than the context of 64"):
        check(folder_with(tmp_path, **settings), engine=engine)


def test_a_context_that_is_left_to_defaults_bounds_nothing_before_the_start(tmp_path: Path):
    model = folder_with(tmp_path, model_type="gemma3", text_config=TEXT)
    check(model)
    with pytest.raises(
        UserError, match=r"together more than the context of 60 .* or raise max_context$"
    ):
        check(model, max_context=60)


def test_the_defaults_of_transformers_are_taken_when_a_worker_starts(tmp_path: Path):
    from weft.workers.rollout_config import context_at_start

    assert context_at_start(folder_with(tmp_path, model_type="gemma3", text_config=TEXT)) == 131_072
    with pytest.raises(UserError, match=r"has no longest context .* set max_context"):
        context_at_start(folder_with(tmp_path, model_type="bloom"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "clip"}, "transformers has no causal language model of type 'clip'"),
        (
            {"model_type": "qwen_2"},
            "transformers has no causal language model of type 'qwen_2'; did you mean 'qwen2'",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"]},
            "transformers has no causal language model of type None",
        ),
        (
            {"model_type": "bart", "is_encoder_decoder": True},
            "models of type 'bart' have an encoder",
        ),
        (
            {"model_type": "qwen2", "quantization_config": {"quant_method": "awq"}},
            r"its weights are quantised \(awq\)",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], message: str
):
    model = folder_with(tmp_path, **TEXT, **settings)
    with pytest.raises(UserError, match=rf"model '{model}' cannot be trained: {message}"):
        ActorWorker.check(ActorConfig(model=model), [], source())


def test_a_model_that_sees_is_trained_on_text(tmp_path: Path):
    model = folder_with(tmp_path, model_type="gemma3", text_config=TEXT | {"num_key_value_heads": 1})
    ActorWorker.check(ActorConfig(model=model), [], source(3))


def test_types_of_causal_language_models_are_those_of_transformers():
    assert causal_lm_types() == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_checks_of_training_import_no_torch_and_no_transformers(tmp_path: Path):
    model = folder_with(tmp_path, model_type="qwen2", vocab_size=9, **TEXT)
    program = (
        "import sys, types, pyarrow as pa\n"
        "from weft.workers.reference import ReferenceConfig, ReferenceWorker\n"
        "source = types.SimpleNamespace(name='s', columns=(), table=pa.table({}))\n"
        f"ReferenceWorker.check(ReferenceConfig(model={str(model)!r}), [], source)\n"
        "assert not {'torch', 'vllm', 'transformers', 'ray'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("hidden_size", "64", "not a number of at least 1"),
        ("vocab_size", [97], "not a number of at least 1"),
        ("vocab_size", 0, "not a number of at least 1"),
        ("num_hidden_layers", True, "not a number of at least 1"),
        ("max_position_embeddings", "64", "not an integer"),
        ("num_attention_heads", {"a": 1}, "not an integer"),
        ("head_dim", "8", "not an integer"),
        ("layer_types", 5, "not a list"),
        ("model_type", ["qwen2"], "not text"),
        ("text_config", "x", "not an object"),
        ("eos_token_id", {"a": 2}, "not an integer, or a list of them"),
    ],
)
def test_a_setting_of_the_wrong_type_is_named_with_its_file(
    tmp_path: Path, name: str, value: Any, kind: str
):
    settings = {"model_type": "qwen2", **TEXT, "vocab_size": 97, name: value}
    folder = folder_with(tmp_path, **settings)
    for refuse in (
        lambda: check(folder),
        lambda: ActorWorker.check(ActorConfig(model=folder), [], source(20)),
    ):
        with pytest.raises(UserError) as refused:
            refuse()
        assert f"{name} in {folder / 'config.json'} is {value!r}, {kind}; correct it" in str(
            refused.value
        )


@pytest.mark.parametrize("kind", ["nested", "a list"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_settings_that_are_no_object_of_bounded_depth_are_refused_by_name(
    tmp_path: Path, name: str, kind: str
):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text('{"a":' * 100_000 if kind == "nested" else "[]")
    with pytest.raises(UserError, match=f"model '{tmp_path}': .*{name}"):
        read_stop_tokens(tmp_path)
