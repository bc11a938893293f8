"""Ranks read only their slices of a model, bit-identical to `transformers`; bad files are named."""

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import loading_ranks
import numpy as np
import pytest
import torch
from families import FAMILIES, make, make_family
from ranks import run_processes
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from weft.dataflow.errors import UserError
from weft.resharding.weights import Box
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.critic import CriticConfig, CriticWorker
from weft.workers.models.weight_files import weight_files
from weft.workers.training import fsdp as loading
from weft.workers.training import stored_weights
from weft.workers.training.agreement import find_agreement
from weft.workers.training.safetensors_files import open_tensors
from weft.workers.training.stored_weights import StoredWeights, _CompleteWeights, open_stored

QUICK = ("Qwen2", "Mixtral", "DiffLlama", "Gemma 3 that sees", "GPT-2", "Phi-3 longrope")
FILE = "model.safetensors"


def save(model: Any, folder: Path, **settings: Any) -> Path:
    model.save_pretrained(folder, **settings)
    return folder


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Add, replace or (None) remove tensors of a model's file; a double underscore means a dot."""
    stored = load_file(folder / FILE) | {
        name.replace("__", "."): tensor for name, tensor in tensors.items()
    }
    save_file(
        {n: t.contiguous() for n, t in stored.items() if t is not None}, folder / FILE, {"format": "pt"}
    )


def load(folder: Path) -> Any:
    return ActorWorker(ActorConfig(model=str(folder))).engine


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(make("llama", {}), tmp_path / "llama")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FAMILIES]
)
def test_one_rank_equals_transformers(tmp_path: Path, name: str):
    folder = save(make_family(name), tmp_path / "model")
    loading_ranks.check_alike(load(folder), str(folder))


def run_ranks(folder: Path, ranks: int, tensor_parallel: int) -> None:
    kinds = {"llama": (torch.bfloat16, {}), "qwen2": (torch.float32, {"tie_word_embeddings": True})}
    if tensor_parallel == 1:
        kinds["mixtral"] = (torch.float32, FAMILIES["Mixtral"][1])
    models = [
        {"model": str(save(make(kind, settings).to(dtype), folder / kind, max_shard_size="20KB"))}
        for kind, (dtype, settings) in kinds.items()
    ]
    case = {
        "ranks": ranks,
        "models": [model | {"tensor_parallel": tensor_parallel} for model in models],
        "dtypes": [str(dtype).removeprefix("torch.") for dtype, _ in kinds.values()],
        "converts": [kind == "mixtral" for kind in kinds],
    }
    (folder / "case.json").write_text(json.dumps(case))
    run_processes(loading_ranks.main, folder, ranks)


@pytest.mark.thorough
def test_each_of_two_ranks_reads_only_its_shard(tmp_path: Path):
    run_ranks(tmp_path, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(2, 2), (4, 2), (3, 1)])
def test_ranks_that_share_layers_read_only_their_shards(
    tmp_path: Path, ranks: int, tensor_parallel: int
):
    run_ranks(tmp_path, ranks, tensor_parallel)


def test_fused_experts_are_made_of_the_experts_that_the_file_holds(tmp_path: Path):
    folder = save(make_family("Mixtral"), tmp_path / "model")
    keys = open_tensors(folder / FILE)
    assert any(".experts.3." in key for key in keys), "transformers saves each expert by itself"
    engine = load(folder)
    assert engine.bytes_read == sum(stored.nbytes for stored in keys.values())


def test_a_tied_model_may_be_stored_by_either_name_or_by_both(tmp_path: Path):
    folder = save(make("qwen2", {"tie_word_embeddings": True}), tmp_path / "model")
    weight = load_file(folder / FILE)["model.embed_tokens.weight"]
    for both in (True, False):
        change(
            folder, lm_head__weight=weight, model__embed_tokens__weight=weight.clone() if both else None
        )
        loading_ranks.check_alike(load(folder), str(folder))
    change(folder, model__embed_tokens__weight=weight + 1)
    with pytest.raises(
        UserError,
        match=r"'lm_head.weight' and 'model.embed_tokens.weight' .* two tensors that differ",
    ):
        load(folder)


def test_a_backbone_that_was_saved_alone_is_found_without_its_prefix(tmp_path: Path):
    folder = save(make("qwen2", {"tie_word_embeddings": True}), tmp_path / "model")
    alone = save(AutoModel.from_pretrained(folder), tmp_path / "alone")
    assert "embed_tokens.weight" in load_file(alone / FILE)
    loading_ranks.check_alike(load(alone), str(alone))


def test_files_with_unaligned_tensors_are_read(llama: Path):
    content = (llama / FILE).read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].rstrip() + b" " * 3
    (llama / FILE).write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    loading_ranks.check_alike(load(llama), str(llama))


def test_a_box_of_a_stored_tensor_is_read_alone(tmp_path: Path):
    whole = torch.arange(24.0).view(2, 3, 4).to(torch.bfloat16)
    save_file({"x": whole, "scalar": torch.tensor(2.0), "none": torch.empty(0, 3)}, tmp_path / FILE)
    stored = open_tensors(tmp_path / FILE)
    box = stored["x"].read_box(Box((1, 0, 1), (2, 2, 4)))
    assert torch.equal(box, whole[1:2, 0:2, 1:4])
    assert box.untyped_storage().nbytes() == 2 * 2 * 3
    assert stored["x"].read_box(Box((0, 3, 0), (2, 3, 4))).shape == (2, 0, 4)
    assert stored["scalar"].read_box(Box((), ())).item() == 2.0
    assert stored["none"].read_box(Box((0, 0), (0, 3))).shape == (0, 3)


WRONG: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "missing": ({"model__norm__weight": None}, "its files have no 'model.norm.weight'$"),
    "unexpected": (
        {"model__norms__weight": torch.ones(32), "model__norm__weight": None},
        "its files hold 'model.norms.weight', which LlamaForCausalLM does not have; did you mean 'model.norm.weight'",
    ),
    "another shape": (
        {"model__norm__weight": torch.ones(31)},
        r"'model.norm.weight' has shape \[31\] in the files, but \[32\] by config.json",
    ),
    "a reward model": ({"score__weight": torch.ones(1, 32)}, "'score.weight'.* not of a policy"),
}


@pytest.mark.parametrize("what", WRONG)
def test_files_that_do_not_fit_the_model_are_refused_by_name(llama: Path, what: str):
    tensors, message = WRONG[what]
    change(llama, **tensors)
    with pytest.raises(UserError, match=message):
        load(llama)


def test_files_that_are_lacking_or_damaged_are_refused_by_name(tmp_path: Path):
    folder = save(make("llama", {}), tmp_path / "model", max_shard_size="20KB")
    lacking = folder / "model-00002-of-00005.safetensors"
    content = lacking.read_bytes()
    lacking.write_bytes(content[:-1])
    with pytest.raises(
        UserError,
        match=f"model '{folder}': .*{lacking.name} is {len(content) - 1} bytes, not {len(content)}",
    ):
        load(folder)
    lacking.unlink()
    with pytest.raises(UserError, match=f"names {lacking.name}, which is missing"):
        load(folder)


def test_a_folder_removed_while_a_rank_opens_its_files_is_named(
    llama: Path, monkeypatch: pytest.MonkeyPatch
):
    def found_and_gone(model: Any, folder: Path) -> list[Path]:
        files = weight_files(model, folder)
        shutil.rmtree(folder)
        return files

    monkeypatch.setattr(stored_weights, "weight_files", found_and_gone)
    with pytest.raises(
        UserError, match=rf"model '{llama}': {llama / FILE} cannot be read \(No such file"
    ):
        load(llama)


def test_without_safetensors_each_rank_loads_the_complete_model_with_a_notice(
    llama: Path, capfd: pytest.CaptureFixture[str]
):
    torch.save(load_file(llama / FILE), llama / "pytorch_model.bin")
    (llama / FILE).unlink()
    engine = load(llama)
    assert (
        "each rank loads the complete model, because there are no safetensors files"
        in capfd.readouterr().err
    )
    loading_ranks.check_alike(engine, str(llama))


def test_a_critic_of_a_policy_takes_all_but_its_head(llama: Path):
    engine: Any = CriticWorker(CriticConfig(model=str(llama))).engine
    stored = load_file(llama / FILE)
    held = dict(engine.model.causal_lm.named_parameters())
    assert held.keys() == (stored.keys() - {"lm_head.weight"}) | {"score.weight"}
    assert all(torch.equal(held[name], stored[name]) for name in held if name != "score.weight")


@pytest.mark.parametrize("kind", [StoredWeights, _CompleteWeights])
def test_loading_buffers_are_freed_before_the_comparison_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type
):
    folder = save(
        make_family("Mixtral"), tmp_path / "model"
    )  # experts are assembled from several tensors, which are kept for the next one
    if kind is _CompleteWeights:
        torch.save(load_file(folder / FILE), folder / "pytorch_model.bin")
        (folder / FILE).unlink()
    read: list[Any] = []
    alive: list[Any] = []

    def opened(*args: Any, **settings: Any) -> Any:
        weights = open_stored(*args, **settings)
        read.append(weakref.ref(weights))
        assert isinstance(weights, kind)
        return weights

    def find(*args: Any, **settings: Any) -> Any:
        alive.extend(one() for one in read)
        return find_agreement(*args, **settings)

    monkeypatch.setattr(loading, "open_stored", opened)
    monkeypatch.setattr(loading, "find_agreement", find)
    load(folder)
    assert alive == [None]


class DrawingConfig(LlamaConfig):
    model_type = "weft-draws-on-the-host"


class DrawingLlama(LlamaForCausalLM):
    """A model whose constructor makes tensors from numpy arrays, which device contexts do not
    affect."""

    config_class = DrawingConfig

    def __init__(self, config: DrawingConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.scale = torch.nn.Parameter(
                torch.from_numpy(np.random.default_rng().random(3, np.float32))
            )
            layer.register_buffer(
                "offset", torch.from_numpy(np.random.default_rng().random(3, np.float32))
            )
            layer.register_buffer(
                "powers", torch.from_numpy(np.array([1, 2, 4], np.float32)), persistent=False
            )


def test_values_that_a_constructor_draws_on_the_host_come_from_the_file(tmp_path: Path):
    AutoConfig.register(DrawingConfig.model_type, DrawingConfig, exist_ok=True)
    AutoModelForCausalLM.register(DrawingConfig, DrawingLlama, exist_ok=True)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "vocab_size": 97,
    }
    made = DrawingLlama(DrawingConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    model = load(save(made, tmp_path / "model")).model.causal_lm
    layers: Any = made.model.layers
    for own, theirs in zip(model.model.layers, layers, strict=True):
        assert torch.equal(own.scale, theirs.scale) and torch.equal(own.offset, theirs.offset)
        assert own.powers.tolist() == [1, 2, 4]


class ForgettingLlama(DrawingLlama):
    """A model with a buffer that only its constructor computes. On the meta device it has no
    values."""

    def __init__(self, config: DrawingConfig) -> None:
        super().__init__(config)
        self.model.register_buffer("slopes", torch.arange(1.0, 4.0), persistent=False)


def test_a_buffer_that_nothing_computes_is_refused_by_name(tmp_path: Path):
    AutoConfig.register(DrawingConfig.model_type, DrawingConfig, exist_ok=True)
    AutoModelForCausalLM.register(DrawingConfig, ForgettingLlama, exist_ok=True)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "vocab_size": 97,
    }
    made = ForgettingLlama(DrawingConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    with pytest.raises(
        UserError, match=r"no file holds its buffer 'model.slopes', and transformers does not compute"
    ):
        load(save(made, tmp_path / "model"))
