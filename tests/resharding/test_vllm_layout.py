"""Recorded vLLM layouts: writing slices by them gives the bits of vLLM's loaders, on each rank.

No test needs an engine: vLLM's model classes are built as a rank of a group would build them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from vllm_models import (
    EXPERTS,
    MODELS,
    TOY,
    Ranks,
    Tensors,
    Toy,
    assert_equal,
    first,
    make_model,
    numbered,
    parameters_of,
    record,
    saved,
    slices_of,
    writer_of,
)

from weft.dataflow.errors import UserError
from weft.resharding.formulas import Parallelism, Parameter, PipelineStages, nodes_of, three_dimensional
from weft.resharding.weights import Box, Layout, ReshardPlan
from weft.workers.actor import ActorConfig, ActorWorker

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("group")]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_slices_leave_the_bits_that_vllms_own_loaders_leave(
    ranks: Ranks, tmp_path: Path, name: str, size: int
):
    kind, settings = MODELS[name]
    tensors = numbered(saved(make_model(kind, **settings), tmp_path))
    layouts = []
    for rank in range(size):
        plain = ranks.build(tmp_path, rank, size)
        own = {
            key: tensor.clone() for key, tensor in tensors.items()
        }  # some loaders set their input to zero
        plain.load_weights(own.items())  # pyright: ignore[reportCallIssue]
        model = ranks.build(tmp_path, rank, size)
        recording = record(model, tensors)
        assert all(
            torch.all(parameter == -1) for parameter in model.parameters()
        )  # recording changed nothing
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


@pytest.mark.parametrize("name", ["tied", "Llama"])
def test_pipeline_stages_publish_the_weights_that_vllm_needs(ranks: Ranks, tmp_path: Path, name: str):
    kind, settings = MODELS[name]
    tensors = numbered(saved(make_model(kind, **settings | {"num_hidden_layers": 3}), tmp_path))
    tied = "lm_head.weight" not in tensors
    numbers = {n: int(n.split(".")[2]) if ".layers." in n else 2 * ("embed" not in n) for n in tensors}
    parameters = [
        Parameter(n, tuple(t.shape), None, numbers[n], 2 if tied and "embed" in n else None)
        for n, t in tensors.items()
    ]
    stages = PipelineStages(2, (1, 1, 1, 0))  # stage 0 has layers 0 and 2, stage 1 has layer 1
    source = three_dimensional(parameters, Parallelism(pp=2), nodes_of(2), "float32", stages=stages)
    engines = [ranks.build(tmp_path, rank, 2) for rank in range(2)]
    recordings = [record(engine, tensors) for engine in engines]
    plan = ReshardPlan(source, Layout.of_ranks([recording.layout for recording in recordings]))
    for rank, engine in enumerate(engines):
        copies = list(plan.received_by(rank))
        assert {copy.source for n, copy in copies if ".layers.1." in n} == {1}
        assert {copy.source for n, copy in copies if ".layers.1." not in n} == {0}
        writer_of(engine, recordings[rank]).apply(
            [(n, copy.box, tensors[n][copy.box.slices]) for n, copy in copies]
        )
        plain = ranks.build(tmp_path, rank, 2)
        plain.load_weights({key: tensor.clone() for key, tensor in tensors.items()}.items())  # pyright: ignore[reportCallIssue]
        assert_equal(parameters_of(engine), parameters_of(plain))


def test_a_rank_reads_exactly_the_tensors_of_its_model(ranks: Ranks, tmp_path: Path):
    kind, settings = MODELS["one key head"]
    tensors = numbered(saved(make_model(kind, **settings), tmp_path))
    recording = record(ranks.build(tmp_path, 1, 2), tensors)
    held = recording.layout.tensors
    attention = "model.layers.0.self_attn."
    ((query,),) = held[attention + "q_proj.weight"].pieces
    ((key,),) = held[attention + "k_proj.weight"].pieces
    assert (query.box, key.box) == (
        Box((64, 0), (128, 128)),
        Box((0, 0), (32, 128)),
    )  # both ranks have the one key head
    assert query.memory == key.memory == attention + "qkv_proj.weight"
    assert query.view and key.view
    assert (query.view.offset, key.view.offset, key.view.strides) == (0, 64 * 128, (128, 1))
    ((rows,),) = held["model.embed_tokens.weight"].pieces
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
    assert len(recording.layout.tensors[experts + "gate_up_proj"].pieces[0]) == 8
    writer_of(model, recording).apply(slices_of(recording.layout, in_memory))
    assert_equal(parameters_of(model), parameters_of(plain))
    up = dict(model.named_parameters())[experts + "routed_experts.w13_weight"][3, 32:]
    assert torch.equal(
        up, fused[3, 64 + 32 : 128]
    )  # the second rank's rows of the last expert's up projection


def test_mixtral_is_known_by_the_checkpoints_names_alone(ranks: Ranks, tmp_path: Path):
    source = make_model("Mixtral", **EXPERTS)
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in saved(source, tmp_path)
    in_memory = {name: parameter.data for name, parameter in source.named_parameters()}
    with pytest.raises(
        UserError, match=r"MixtralForCausalLM cannot load tensor 'model\.layers\.0\.mlp\..*'"
    ):
        record(ranks.build(tmp_path), in_memory)


@pytest.mark.parametrize("name", ["Mixtral", "experts"])
def test_published_experts_load_to_the_same_bits_as_their_checkpoint(
    ranks: Ranks, tmp_path: Path, name: str
):
    kind, settings = MODELS[name]
    tensors = saved(make_model(kind, **settings), tmp_path)
    trainer = ActorWorker(ActorConfig(model=str(tmp_path))).engine
    held = {parameter.data_ptr() for parameter in trainer.model.parameters()}  # pyright: ignore[reportAttributeAccessIssue]
    given = {part.name: part.tensor for part in trainer.published_parts()}
    assert given.keys() == tensors.keys()
    assert {tensor.untyped_storage().data_ptr() for tensor in given.values()} <= held  # zero copies
    for rank in range(2):
        plain, model = ranks.build(tmp_path, rank, 2), ranks.build(tmp_path, rank, 2)
        plain.load_weights(tensors.items())  # pyright: ignore[reportCallIssue]
        recording = record(model, given)
        writer_of(model, recording).apply(slices_of(recording.layout, given))
        assert_equal(parameters_of(model), parameters_of(plain))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "lacks weights for vLLM's parameters: model.norm.weight"),
        (
            {"model.layers.1.self_attn.k_proj.weight": None},
            r"qkv_proj.weight'.* lands in Box\(\[128:192, 0:128\]\)",
        ),
        ({"model.layers.7.mlp.up_proj.weight": torch.zeros(1)}, "model.layers.7"),
        (
            {"model.norm.weight": torch.zeros(5)},
            r"cannot load tensor 'model.norm.weight' of shape \(5,\)",
        ),
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


# Unusual loaders


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (
            lambda weight, a: weight.copy_(a.double()),
            "tensor 'a': vLLM's loader creates a new tensor from it with aten._to_copy",
        ),
        (lambda weight, a: weight.copy_(a * 2), "tensor 'a'.* with aten.mul"),
        (lambda weight, a: weight.copy_(torch.cat([a[2:], a[:2]])), "tensor 'a', 'a'.* with aten.cat"),
        (lambda weight, a: weight.copy_(a[torch.tensor([3, 2, 1, 0])]), "tensor 'a'.* with aten.index"),
        (lambda weight, a: weight.copy_(a.view(torch.int32)), "tensor 'a'.* with aten.view.dtype"),
        (lambda weight, a: weight.fill_(a[0, 0].item()), "tensor 'a'.* with aten._local_scalar_dense"),
        (lambda weight, a: weight.add_(a), "parameter 'first.weight': its loader writes with aten.add_"),
        (
            lambda weight, a: torch.add(a, a, out=weight),
            "parameter 'first.weight': its loader writes with aten.add.out",
        ),
        (
            lambda weight, a: torch.ops.aten._foreach_copy_([weight], [a]),
            "'first.weight': its loader writes with aten._foreach",
        ),
        (
            lambda weight, a: weight.copy_(torch.ones(4, 6)),
            "parameter 'first.weight': its loader copies from a tensor that is not in the checkpoint",
        ),
        (
            lambda weight, a: weight.copy_(a[:1]),
            r"'a' cannot be recorded into 'first.weight': .*\(1, 6\) into \(4, 6\)",
        ),
        (
            lambda weight, a: weight[:3].copy_(a[:3]),
            r"'first.weight': no tensor .* lands in Box\(\[3:4, 0:6\]\)",
        ),
        (
            lambda weight, a: (weight.copy_(a), weight[1:3].copy_(a[:2])),
            r"'first.weight': Box\(\[1:3, 0:6\]\) is loaded twice",
        ),
        (
            lambda weight, a: (weight.copy_(a), weight[0].zero_()),
            "'first.weight': its loader fills with 0 over tensor 'a'",
        ),
        (
            lambda weight, a: weight.view(-1)[:4].copy_(a.view(-1)[4:8]),
            "'a' cannot be recorded .* wraps around",
        ),
        (lambda weight, a: (a[:1].zero_(), weight.copy_(a)), "tensor 'a'.* with aten.zero_"),
        (lambda weight, a: (weight.copy_(a), a.zero_()), "tensor 'a'.* with aten.zero_"),
        (lambda weight, a: weight.copy_(a.clone().add_(1)), "tensor 'a'.* with aten.add_"),
        (
            lambda weight, a: weight.view(-1).copy_(a.t().contiguous().view(-1)),
            "cannot load tensor .*: view size is not compatible",
        ),
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
        lambda toy, tensors: [
            layer.weight.data.copy_(tensors["a"]) for layer in (toy.first, toy.second)
        ],
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
