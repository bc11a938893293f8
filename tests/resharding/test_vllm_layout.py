"""vLLM's layout as recorded, and slices written by it: the same bits as vLLM's own loaders leave, for each rank.

Most tests need no engine: vLLM's model classes are built as a rank of a group would build them.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from weft.dataflow.errors import UserError, WeightSyncError
from weft.resharding.box import Box
from weft.resharding.layout import Layout, RankLayout, Where
from weft.workers.generation.vllm_settings import VllmSettings

if TYPE_CHECKING:
    from weft.resharding.vllm_layout import Recording

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
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def make_model(kind: str, **settings: Any) -> Any:
    """A tiny model of `transformers`, with random weights."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | settings)
    return getattr(transformers, f"{kind}ForCausalLM")(config).float()


def saved(model: Any, folder: Path) -> Tensors:
    """Save a model, and read its tensors as the checkpoint names them."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def numbered(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Tensors of these shapes, in which each element has bits of its own: its number over all tensors, as a float's bits."""
    found, start = {}, 1
    for name, tensor in tensors.items():
        stop = start + tensor.numel()
        found[name] = torch.arange(start, stop, dtype=torch.int32).view(torch.float32).view(tensor.shape)
        start = stop
    return found


def described(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()}


def slices_of(layout: RankLayout, tensors: Mapping[str, torch.Tensor], *, rows: int = 1 << 30) -> Slices:
    """What a rank holds, each element once, in boxes of at most so many rows."""
    found: Slices = []
    for name, held in layout.tensors.items():
        boxes: list[Box] = []
        for piece in held.pieces:
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


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[Any]:
    """vLLM's group of tensor-parallel ranks, of one rank: that of an engine in this process, if there is one."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    set_num_threads = torch.set_num_threads
    from torch._C._distributed_c10d import HashStore
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    own = not parallel_state.model_parallel_is_initialized()
    if own:
        with set_current_vllm_config(VllmConfig()):
            store = HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            parallel_state.init_distributed_environment(1, 0, local_rank=0, backend="gloo")
            parallel_state.initialize_model_parallel(1)
    without_experts = (
        parallel_state._EP is None
    )  # an engine of a dense model in this process has made no group for experts
    if without_experts:
        parallel_state._EP = parallel_state.get_tp_group()
    yield parallel_state.get_tp_group()
    if without_experts:
        parallel_state._EP = None
    if own:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    torch.set_num_threads = set_num_threads


class Ranks:
    """Builds vLLM's model as one rank of a tensor-parallel group does, without the group. Nothing is repacked after loading, as
    on a GPU, so that the loaded values can be looked at."""

    def __init__(self, group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
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
            parameter.data.fill_(-1)  # no loader leaves that behind
        return model


@pytest.fixture
def ranks(group: Any, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(group, monkeypatch)


def record(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Recording:
    from weft.resharding.vllm_layout import record_layout

    return record_layout(model, described(tensors), Where())


def writer_of(model: torch.nn.Module, recording: Recording) -> Any:
    from weft.resharding.vllm_writer import WeightWriter

    return WeightWriter(model, SimpleNamespace(dtype=torch.float32), recording)


def parameters_of(model: torch.nn.Module) -> Tensors:
    return {name: parameter.data.clone() for name, parameter in model.named_parameters()}


def assert_equal(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    assert not [name for name in wanted if not torch.equal(found[name], wanted[name])]


MODELS = {
    "tied": ("Qwen2", {"vocab_size": 40, "tie_word_embeddings": True}),  # the last of four ranks has padding alone
    "biases": ("Qwen2", {"tie_word_embeddings": False}),
    "norms of heads": ("Qwen3", {}),
    "Llama": ("Llama", {"tie_word_embeddings": False}),
    "one key head": ("Qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "experts": ("Qwen3Moe", EXPERTS),
    "Mixtral": ("Mixtral", EXPERTS),
    "odd experts": ("Qwen3Moe", EXPERTS | {"moe_intermediate_size": 48}),  # vLLM's kernel on CPU pads them
    "vocabulary": (
        "Qwen2",
        {"vocab_size": 151_937, "num_hidden_layers": 1, "hidden_size": 32, "head_dim": 8, "tie_word_embeddings": True},
    ),
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_slices_leave_the_bits_that_vllms_own_loaders_leave(ranks: Ranks, tmp_path: Path, name: str, size: int):
    kind, settings = MODELS[name]
    tensors = numbered(saved(make_model(kind, **settings), tmp_path))
    layouts = []
    for rank in range(size):
        plain = ranks.build(tmp_path, rank, size)
        plain.load_weights(tensors.items())  # pyright: ignore[reportCallIssue]
        model = ranks.build(tmp_path, rank, size)
        recording = record(model, tensors)
        assert all(torch.all(parameter == -1) for parameter in model.parameters())  # recording changed nothing
        slices = slices_of(recording.layout, tensors, rows=64 if name != "vocabulary" else 50_000)
        random.Random(0).shuffle(slices)
        writer = writer_of(model, recording)
        writer.apply(slices)
        assert_equal(parameters_of(model), parameters_of(plain))
        for parameter in model.parameters():
            parameter.data.fill_(-1)
        writer.stage(slices)
        assert all(torch.all(parameter == -1) for parameter in model.parameters()), (
            "what is staged lies beside the model"
        )
        writer.apply_staged()
        assert_equal(parameters_of(model), parameters_of(plain))
        layouts.append(recording.layout)
    layout = Layout.of_ranks(layouts)
    assert layout.tensors.keys() == tensors.keys()
    for tensor in layout.tensors.values():  # together, the ranks hold every element
        left = [Box.full(tensor.shape)]
        for box in {box for boxes in tensor.boxes for box in boxes}:
            left = [part for each in left for part in each.minus(box)]
        assert not left


def test_what_a_rank_takes_is_what_the_model_needs(ranks: Ranks, tmp_path: Path):
    kind, settings = MODELS["one key head"]
    tensors = numbered(saved(make_model(kind, **settings), tmp_path))
    recording = record(ranks.build(tmp_path, 1, 2), tensors)
    held = recording.layout.tensors
    attention = "model.layers.0.self_attn."
    (query,), (key,) = held[attention + "q_proj.weight"].pieces, held[attention + "k_proj.weight"].pieces
    assert (query.box, key.box) == (
        Box((64, 0), (128, 128)),
        Box((0, 0), (32, 128)),
    )  # both ranks have the one key head
    assert query.place and key.place and query.place.memory == key.place.memory == attention + "qkv_proj.weight"
    assert (query.place.offset, key.place.offset, key.place.strides) == (0, 64 * 128, (128, 1))
    (rows,) = held["model.embed_tokens.weight"].pieces
    assert rows.box == Box((64, 0), (100, 128))
    (padding,) = recording.fills
    assert (padding.memory, padding.view.offset, padding.view.shape) == (
        "model.embed_tokens.weight",
        36 * 128,
        (28, 128),
    )
    assert recording.unused == ()


def test_experts_are_known_by_the_checkpoints_names_and_by_those_in_memory(ranks: Ranks, tmp_path: Path):
    source = make_model("Qwen3Moe", **EXPERTS)
    tensors = saved(source, tmp_path)
    experts = "model.layers.0.mlp.experts."
    assert experts + "3.gate_proj.weight" in tensors
    in_memory = numbered({name: parameter.data for name, parameter in source.named_parameters()})
    fused = in_memory[experts + "gate_up_proj"]
    assert fused.shape == (4, 128, 128)
    plain, model = ranks.build(tmp_path, 1, 2), ranks.build(tmp_path, 1, 2)
    plain.load_weights(in_memory.items())  # pyright: ignore[reportCallIssue]
    recording = record(model, in_memory)
    assert len(recording.layout.tensors[experts + "gate_up_proj"].pieces) == 8
    writer_of(model, recording).apply(slices_of(recording.layout, in_memory))
    assert_equal(parameters_of(model), parameters_of(plain))
    up = dict(model.named_parameters())[experts + "routed_experts.w13_weight"][3, 32:]
    assert torch.equal(up, fused[3, 64 + 32 : 128])  # of the up projection of the last expert, the second rank's rows


def test_mixtral_is_known_by_the_checkpoints_names_alone(ranks: Ranks, tmp_path: Path):
    source = make_model("Mixtral", **EXPERTS)
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in saved(source, tmp_path)
    in_memory = {name: parameter.data for name, parameter in source.named_parameters()}
    with pytest.raises(UserError, match=r"MixtralForCausalLM cannot load tensor 'model\.layers\.0\.mlp\..*'"):
        record(ranks.build(tmp_path), in_memory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "lacks what vLLM needs for: model.norm.weight"),
        ({"model.layers.1.self_attn.k_proj.weight": None}, r"qkv_proj.weight'.* lands in Box\(\[128:192, 0:128\]\)"),
        ({"model.layers.7.mlp.up_proj.weight": torch.zeros(1)}, "model.layers.7"),
        ({"model.norm.weight": torch.zeros(5)}, r"cannot load tensor 'model.norm.weight' of shape \(5,\)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    ranks: Ranks, tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
):
    tensors = numbered(saved(make_model("Qwen2", tie_word_embeddings=False), tmp_path))
    wrong = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    model = ranks.build(tmp_path)
    with pytest.raises(UserError, match=message):
        record(model, wrong)
    assert all(torch.all(parameter == -1) for parameter in model.parameters())
    assert record(model, tensors).layout.tensors.keys() == tensors.keys()


# Loaders that do something else


class Toy(torch.nn.Module):
    """Two layers of a weight (4, 6), with a loader that a test brings."""

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
    """A loader that does something with "a" and the first layer, and copies "b" to the second."""

    def loader(toy: Toy, tensors: Tensors) -> None:
        load(toy.first.weight.data, tensors["a"])
        toy.second.weight.data.copy_(tensors["b"])

    return loader


TOY = numbered({"a": torch.zeros(4, 6), "b": torch.zeros(4, 6)})


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (
            lambda weight, a: weight.copy_(a.double()),
            "tensor 'a': vLLM's loader makes a new tensor of it by aten._to_copy",
        ),
        (lambda weight, a: weight.copy_(a * 2), "tensor 'a'.* by aten.mul"),
        (lambda weight, a: weight.copy_(torch.cat([a[2:], a[:2]])), "tensor 'a', 'a'.* by aten.cat"),
        (lambda weight, a: weight.copy_(a[torch.tensor([3, 2, 1, 0])]), "tensor 'a'.* by aten.index"),
        (lambda weight, a: weight.copy_(a.view(torch.int32)), "tensor 'a'.* by aten.view.dtype"),
        (lambda weight, a: weight.fill_(a[0, 0].item()), "tensor 'a'.* by aten._local_scalar_dense"),
        (lambda weight, a: weight.add_(a), "parameter 'first.weight': its loader writes by aten.add_"),
        (lambda weight, a: torch.add(a, a, out=weight), "parameter 'first.weight': its loader writes by aten.add.out"),
        (
            lambda weight, a: torch.ops.aten._foreach_copy_([weight], [a]),
            "'first.weight': its loader writes by aten._foreach",
        ),
        (
            lambda weight, a: weight.copy_(torch.ones(4, 6)),
            "parameter 'first.weight': its loader copies what is no part",
        ),
        (
            lambda weight, a: weight.copy_(a[:1]),
            r"'a' cannot be recorded into 'first.weight': .*\(1, 6\) into \(4, 6\)",
        ),
        (lambda weight, a: weight[:3].copy_(a[:3]), r"'first.weight': no tensor .* lands in Box\(\[3:4, 0:6\]\)"),
        (
            lambda weight, a: (weight.copy_(a), weight[1:3].copy_(a[:2])),
            r"'first.weight': Box\(\[1:3, 0:6\]\) is loaded twice",
        ),
        (
            lambda weight, a: (weight.copy_(a), weight[0].zero_()),
            "'first.weight': its loader fills with 0 over tensor 'a'",
        ),
        (lambda weight, a: weight.view(-1)[:4].copy_(a.view(-1)[4:8]), "'a' cannot be recorded .* wraps around"),
    ],
)
def test_a_loader_that_computes_is_refused_by_tensor_and_operation(
    load: Callable[[torch.Tensor, torch.Tensor], object], message: str
):
    toy = Toy(first(load))
    before = parameters_of(toy)
    with pytest.raises(UserError, match=message):
        record(toy, TOY)
    assert_equal(parameters_of(toy), before)


@pytest.mark.parametrize(
    "load",
    [
        first(lambda weight, a: weight.copy_(a)),
        first(lambda weight, a: (weight[:, :4].copy_(a[:, :4].t()), weight[:, 4:].copy_(a[:, 4:]))),
        first(lambda weight, a: [weight[0::2].copy_(a[:2]), weight[1::2].copy_(a[2:])]),
        first(lambda weight, a: (weight.fill_(7), weight[:, 2:].copy_(a[:, :4]))),
        first(lambda weight, a: (weight[:2].copy_(a[2:]), weight[2:].fill_(3), weight[2:].zero_())),
        first(lambda weight, a: (weight.copy_(a), weight.copy_(a))),
        first(lambda weight, a: weight.view(2, 2, 6).copy_(a.view(2, 2, 6).transpose(0, 1))),
        lambda toy, tensors: [layer.weight.data.copy_(tensors["a"]) for layer in (toy.first, toy.second)],
    ],
)
def test_any_loader_that_copies_and_fills_is_recorded(load: Callable[[Toy, Tensors], object]):
    plain, toy = Toy(load), Toy(load)
    plain.load_weights(TOY.items())
    recording = record(toy, TOY)
    writer_of(toy, recording).apply(slices_of(recording.layout, TOY, rows=1))
    assert_equal(parameters_of(toy), parameters_of(plain))


def test_a_parameter_that_is_two_must_come_once():
    def load(toy: Toy, tensors: Tensors) -> None:
        toy.first.weight.data.copy_(tensors["a"])
        toy.second.weight.data.copy_(tensors["b"])

    toy = Toy(load)
    toy.second.weight = toy.first.weight
    with pytest.raises(UserError, match=r"'first\.weight' and 'second\.weight' are one parameter"):
        record(toy, TOY)


# What goes wrong while slices come

A = TOY["a"]
WHOLE = Box.full((4, 6))


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([("a", WHOLE, A.bfloat16())], "tensor 'a' came as bfloat16, and vLLM holds it as float32"),
        ([("aa", WHOLE, A)], "tensor 'aa': this rank holds nothing of it"),
        ([("a", WHOLE, A[:3])], r"tensor 'a' of shape \(4, 6\): \(3, 6\) elements came for Box\(\[0:4, 0:6\]\)"),
        ([("a", Box((0, 0), (2, 6)), A[:2]), ("a", WHOLE, A)], r"'a': elements of Box\(\[0:4, 0:6\]\) came twice"),
        (
            [("a", Box((0, 0), (5, 6)), torch.zeros(5, 6))],
            r"'a': Box\(\[4:5, 0:6\]\) was sent to a rank that holds nothing",
        ),
        ([("a", Box((1, 0), (4, 6)), A[1:])], r"weights are missing: 'a' Box\(\[0:1, 0:6\]\), 'b' Box"),
    ],
)
def test_a_wrong_slice_is_refused_and_the_model_keeps_its_weights(slices: Slices, message: str):
    from weft.resharding.vllm_writer import ModelState

    toy = Toy(first(lambda weight, a: weight.copy_(a)))
    before = parameters_of(toy)
    writer = writer_of(toy, record(toy, TOY))
    with pytest.raises(WeightSyncError, match=message):
        writer.apply(slices)
    assert writer.state is ModelState.WHOLE
    assert_equal(parameters_of(toy), before)


def test_a_bias_is_written_at_once_and_makes_a_model_of_two_versions():
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from weft.resharding.vllm_writer import ModelState

    def load(toy: Toy, tensors: Tensors) -> None:
        toy.first.weight.data.copy_(tensors["a"])
        toy.second.weight.data.copy_(tensors["b"])
        toy.first.bias.data.copy_(tensors["bias"])

    toy, tensors = Toy(load), TOY | {"bias": torch.ones(4)}
    toy.first.bias = torch.nn.Parameter(torch.zeros(4), requires_grad=False)  # vLLM gives a bias no loading format
    record_metadata_for_reloading(toy)
    writer = writer_of(toy, record(toy, tensors))
    assert torch.equal(toy.first.bias, torch.zeros(4))
    weight = toy.first.weight.clone()
    with pytest.raises(WeightSyncError, match="weights are missing: 'a'"):
        writer.apply([("bias", Box((0,), (4,)), tensors["bias"])])
    assert writer.state is ModelState.PARTIAL
    assert torch.equal(toy.first.bias, torch.ones(4)) and torch.equal(toy.first.weight, weight)


def test_one_layer_at_a_time_has_memory_besides_the_models_own(ranks: Ranks, tmp_path: Path):
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    kind, settings = MODELS["experts"]
    tensors = numbered(saved(make_model(kind, **settings), tmp_path))
    model = ranks.build(tmp_path, 1, 2)
    recording = record(model, dict(reversed(tensors.items())))  # in whatever order the checkpoint has them
    most = 0

    def watched() -> Iterator[tuple[str, Box, torch.Tensor]]:
        nonlocal most
        for entry in slices_of(recording.layout, tensors, rows=16):
            yield entry
            waiting = [layer for layer in model.modules() if get_layerwise_info(layer).can_load()]
            most = max(most, sum(any(not p.is_meta for p in layer.parameters(recurse=False)) for layer in waiting))

    writer_of(model, recording).apply(watched())
    assert most == 1


def test_a_model_of_two_versions_says_so_until_everything_has_come():
    from weft.resharding.vllm_writer import ModelState

    toy = Toy(first(lambda weight, a: weight.copy_(a)))
    recording = record(toy, TOY)
    writer = writer_of(toy, recording)
    slices = slices_of(recording.layout, TOY)

    def broken() -> Iterator[tuple[str, Box, torch.Tensor]]:
        yield slices[0]
        assert writer.state is ModelState.WRITING
        with pytest.raises(WeightSyncError, match="under way"):
            writer.begin()
        raise ConnectionError("the sender is gone")

    with pytest.raises(ConnectionError):
        writer.apply(broken())
    assert writer.state is ModelState.PARTIAL
    with pytest.raises(WeightSyncError, match="'b' came outside of an update"):
        writer.write(*slices[1])
    with pytest.raises(WeightSyncError, match="missing"):
        writer.apply([])
    assert writer.state is ModelState.PARTIAL  # nothing came, and it is still of two versions
    writer.apply(slices)
    assert writer.state is ModelState.WHOLE
    assert_equal(parameters_of(toy), {"first.weight": TOY["a"], "second.weight": TOY["b"]})


# In an engine, where vLLM repacks what it has loaded


def check_engine(folder: Path, tensors: Tensors, *, size: int = 1) -> None:
    """Record, write other weights, and compare what is generated with what it is after vLLM's own loading of them."""
    import numpy as np

    from weft.algorithms.sampling import Sampling
    from weft.workers.generation.engine import GenerationRequest
    from weft.workers.generation.vllm_engine import VllmEngine

    settings = VllmSettings(max_num_seqs=8, kv_cache_gib=0.05, tensor_parallel=size)
    engine = VllmEngine(str(folder), settings)

    def generated() -> list[tuple[list[int], list[float]]]:
        requests = [GenerationRequest(row, np.arange(3, 9 + row).astype(np.int32), seed=row) for row in range(4)]
        found = [each for part in engine.generate(requests, Sampling(max_tokens=16, ignore_stop=True)) for each in part]
        return [(each.token_ids.tolist(), each.logprobs.tolist()) for each in sorted(found, key=lambda x: x.request_id)]

    # vLLM calls both in each of its ranks, with the rank's worker.
    def recorded(worker: Any) -> RankLayout:
        from weft.resharding.vllm_layout import record_layout
        from weft.resharding.vllm_writer import WeightWriter

        model = worker.model_runner.model
        recording = record_layout(model, described(tensors))
        worker.weft_writer = WeightWriter(model, worker.vllm_config.model_config, recording)
        worker.weft_layout = recording.layout
        return recording.layout

    def written(worker: Any, factor: float) -> None:
        worker.weft_writer.apply(slices_of(worker.weft_layout, {name: factor * each for name, each in tensors.items()}))

    def reloaded(worker: Any, factor: float) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        from weft.resharding.vllm_writer import experts_packed_anew, process_tied

        model = worker.model_runner.model
        with experts_packed_anew(model.modules()):
            initialize_layerwise_reload(model)
            model.load_weights((name, factor * each) for name, each in tensors.items())
            finalize_layerwise_reload(model, worker.vllm_config.model_config)
            process_tied(model)

    try:
        first = generated()
        layouts = engine._engine.collective_rpc(recorded)  # pyright: ignore[reportArgumentType]
        assert len(layouts) == size and generated() == first
        engine._engine.collective_rpc(written, args=(0.9,))  # pyright: ignore[reportArgumentType]
        other = generated()
        assert other != first
        engine._engine.collective_rpc(written, args=(1.0,))  # pyright: ignore[reportArgumentType]
        assert generated() == first  # what updates leave is what the start has left
        engine._engine.collective_rpc(reloaded, args=(0.9,))  # pyright: ignore[reportArgumentType]
        assert generated() == other
    finally:
        engine.close()


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("odd experts", 1),
        pytest.param("one key head", 2, marks=pytest.mark.slow),
        pytest.param("Mixtral", 2, marks=pytest.mark.slow),
    ],
)
def test_an_engine_generates_the_same_after_recording_and_after_each_update(tmp_path: Path, name: str, size: int):
    program = """
        import sys
        from pathlib import Path
        import cloudpickle
        import test_vllm_layout as t

        if __name__ == "__main__":
            cloudpickle.register_pickle_by_value(t)
            folder, (kind, settings) = Path(sys.argv[1]), t.MODELS[sys.argv[2]]
            t.check_engine(folder, t.saved(t.make_model(kind, **settings), folder), size=int(sys.argv[3]))
            print("done", flush=True)
    """
    # A program of its own: vLLM's ranks are processes, and start from a main module that they can import.
    file = tmp_path / "engine.py"
    file.write_text(textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, str(file), str(tmp_path), name, str(size)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-3000:]
