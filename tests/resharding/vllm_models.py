"""Tiny models in `transformers` and in a vLLM rank, and how tests record and write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from weft.resharding.weights import Box, Layout, Where
from weft.workers.generation.vllm_settings import VllmSettings

if TYPE_CHECKING:
    from weft.resharding.vllm_writer import _RecordedLayout

Tensors = dict[str, torch.Tensor]
Slices = list[tuple[str, Box, torch.Tensor]]

SIZES = {
    "vocab_size": 100,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


def make_model(kind: str, **settings: Any) -> Any:
    """Return a tiny `transformers` model with random weights."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | settings)
    return getattr(transformers, f"{kind}ForCausalLM")(config).float()


def saved(model: Any, folder: Path) -> Tensors:
    """Save a model, and return its tensors by checkpoint name."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def numbered(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return tensors of these shapes with unique bits per element: its global index, as float
    bits."""
    found, start = {}, 1
    for name, tensor in tensors.items():
        stop = start + tensor.numel()
        found[name] = torch.arange(start, stop, dtype=torch.int32).view(torch.float32).view(tensor.shape)
        start = stop
    return found


def described(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }


def slices_of(layout: Layout, tensors: Mapping[str, torch.Tensor], *, rows: int = 1 << 30) -> Slices:
    """Return the slices of a rank, each element once, in boxes of at most this many rows."""
    found: Slices = []
    for name, held in layout.tensors.items():
        boxes: list[Box] = []
        for piece in held.pieces[0]:
            new = [piece.box]
            for box in boxes:
                new = [part for each in new for part in each.minus(box)]
            boxes += new
        for box in boxes:
            steps = range(box.starts[0], box.stops[0], rows) if box.starts else [0]
            for start in steps:
                stops = (min(start + rows, box.stops[0]), *box.stops[1:]) if box.starts else ()
                part = Box((start, *box.starts[1:]), stops) if box.starts else box
                found.append((name, part, tensors[name][part.slices]))
    return found


MODELS = {
    "tied": (
        "Qwen2",
        {"vocab_size": 40, "tie_word_embeddings": True},
    ),  # the last of four ranks has padding only
    "biases": ("Qwen2", {"tie_word_embeddings": False}),
    "norms of heads": ("Qwen3", {}),
    "Llama": ("Llama", {"tie_word_embeddings": False}),
    "one key head": ("Qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "experts": ("Qwen3Moe", EXPERTS),
    "Mixtral": ("Mixtral", EXPERTS),
    "odd experts": (
        "Qwen3Moe",
        EXPERTS | {"moe_intermediate_size": 48},
    ),  # vLLM's CPU kernel pads them
    "transposed experts": (
        "GptOss",
        EXPERTS | {"intermediate_size": 128, "num_key_value_heads": 4, "sliding_window": 16},
    ),
    "vocabulary": (
        "Qwen2",
        {
            "vocab_size": 151_937,
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "head_dim": 8,
            "tie_word_embeddings": True,
        },
    ),
}


class Ranks:
    """Builds vLLM's model like a rank of a tensor-parallel group, without the group.

    As on a GPU, loading repacks nothing, so that tests can read the loaded values.
    """

    def __init__(self, group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
            UnquantizedFusedMoEMethod,
        )
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        for method in (UnquantizedFusedMoEMethod, UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            monkeypatch.setattr(method, "process_weights_after_loading", lambda method, layer: None)
        self._group, self._monkeypatch = group, monkeypatch

    def build(self, folder: Path, rank: int = 0, size: int = 1) -> torch.nn.Module:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader.utils import initialize_model

        arguments = VllmSettings(kv_cache_gib=0.05).engine_arguments(
            str(folder), max_context=None, dtype="float32", seed=0, free_share=None
        )
        self._monkeypatch.setattr(self._group, "world_size", size)
        self._monkeypatch.setattr(self._group, "rank_in_group", rank)
        model = initialize_model(EngineArgs(**arguments).create_engine_config())
        for parameter in model.parameters():
            parameter.data.fill_(-1)  # a value that no loader writes
        return model


def record(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> _RecordedLayout:
    from weft.resharding.vllm_writer import record_layout

    return record_layout(model, described(tensors), Where())


def writer_of(model: torch.nn.Module, recording: _RecordedLayout) -> Any:
    from weft.resharding.vllm_writer import WeightWriter

    return WeightWriter(model, SimpleNamespace(dtype=torch.float32), recording)


def parameters_of(model: torch.nn.Module) -> Tensors:
    return {name: parameter.data.clone() for name, parameter in model.named_parameters()}


def assert_equal(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    assert not [name for name in wanted if not torch.equal(found[name], wanted[name])]


class Toy(torch.nn.Module):
    """Two layers with a weight (4, 6), and a loader from the test."""

    def __init__(self, load: Callable[[Toy, Tensors], object]) -> None:
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 4, bias=False), torch.nn.Linear(6, 4, bias=False)
        self.requires_grad_(False)
        self._load = load
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._load(self, dict(weights))


def first(load: Callable[[torch.Tensor, torch.Tensor], object]) -> Callable[[Toy, Tensors], object]:
    """Return a loader that passes "a" and the first layer to `load`, and copies "b" to the second
    layer."""

    def loader(toy: Toy, tensors: Tensors) -> None:
        load(toy.first.weight.data, tensors["a"])
        toy.second.weight.data.copy_(tensors["b"])

    return loader


TOY = numbered({"a": torch.zeros(4, 6), "b": torch.zeros(4, 6)})
