"""A trainer publishes weights with the names and shapes of the checkpoint, as views."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, make_family
from safetensors.torch import load_file
from torch import nn

from weft.resharding.incoming import IncomingWeights
from weft.resharding.publisher import WeightPublisher
from weft.resharding.weights import Box, TensorPart
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.generation.transformers_engine import TransformersEngine
from weft.workers.training.lora import Lora
from weft.workers.training.sharding import CheckpointNames

QUICK = ("Qwen2", "Mixtral", "GPT-2")
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
W1, W3 = (f"model.layers.0.block_sparse_moe.experts.2.{name}.weight" for name in ("w1", "w3"))


def saved(name: str, folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    make_family(name).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def trainer_of(folder: Path, **settings: Any) -> Any:
    return ActorWorker(ActorConfig(model=str(folder), **settings)).engine


def parts_of(names: CheckpointNames, name: str, tensor: torch.Tensor, box: Box) -> list[TensorPart]:
    """Return the checkpoint parts of a rank that holds only this box of a model tensor."""
    held = TensorPart(name, tuple(tensor.shape), box, tensor[box.slices].clone())
    return [part for part in names.parts(held) if part.box.numel]


def together(parts: list[TensorPart]) -> dict[str, torch.Tensor]:
    """Assemble full tensors from parts that hold each element once."""
    found = {part.name: torch.full(part.shape, torch.nan) for part in parts}
    for part in parts:
        assert found[part.name][part.box.slices].isnan().all()
        found[part.name][part.box.slices] = part.tensor
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FAMILIES]
)
def test_published_weights_equal_the_checkpoint(tmp_path: Path, name: str):
    stored = saved(name, tmp_path)
    given = list(trainer_of(tmp_path).published_parts())
    assert {part.name for part in given} == stored.keys() and len(given) == len(stored)
    for part in given:
        assert part.box == Box.full(tuple(stored[part.name].shape))
        assert torch.equal(part.tensor, stored[part.name].float())


def test_experts_are_given_by_the_names_of_the_checkpoint_when_an_adapter_is_merged(tmp_path: Path):
    stored = saved("Mixtral", tmp_path)
    given = list(trainer_of(tmp_path, lora=Lora(rank=2, published="merged")).published_parts())
    assert {part.name for part in given} == stored.keys()
    for part in given:
        assert torch.equal(part.tensor, stored[part.name])  # a new adapter changes nothing


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_however_a_fused_tensor_is_cut_over_ranks_its_parts_are_the_checkpoints(
    tmp_path: Path, dim: int
):
    stored = saved("Mixtral", tmp_path)
    engine = trainer_of(tmp_path)
    tensors = dict(engine.model.causal_lm.named_parameters())
    names, fused = CheckpointNames(engine.model.causal_lm, tensors), tensors[GATE_UP].detach()
    assert {W1, W3} < set(names.stored_names(GATE_UP)) and len(
        names.stored_names(GATE_UP)
    ) == 2 * fused.shape[0]
    cut = fused.shape[dim] // 2 + 1
    boxes = [Box.along(tuple(fused.shape), dim, *ends) for ends in ((0, cut), (cut, fused.shape[dim]))]
    found = together([part for box in boxes for part in parts_of(names, GATE_UP, fused, box)])
    assert found.keys() == set(names.stored_names(GATE_UP))
    for name, tensor in found.items():
        assert torch.equal(tensor, stored[name])


class Converted(nn.Module):
    """A model of one weight [4, 6]. Its checkpoint is the result of reversing these conversions."""

    base_model_prefix = ""

    def __init__(self, *operations: Any) -> None:
        from transformers.core_model_loading import WeightConverter

        super().__init__()
        self.config = None
        self.weight = nn.Parameter(torch.arange(24.0).view(4, 6))
        self._weight_conversions = [WeightConverter("stored", "weight", operations=list(operations))]

    def names(self) -> CheckpointNames:
        return CheckpointNames(self, {"weight": self.weight})


def test_a_transposed_tensor_is_published_as_a_view():
    from transformers.core_model_loading import Transpose

    model = Converted(Transpose(0, 1))
    box = Box((1, 2), (3, 6))
    (part,) = parts_of(model.names(), "weight", model.weight.detach(), box)
    assert (part.name, part.shape, part.box) == ("stored", (6, 4), Box((2, 1), (6, 3)))
    assert torch.equal(part.tensor, model.weight.detach().t()[2:6, 1:3])


def test_a_tensor_that_is_no_box_of_one_in_memory_keeps_its_name_in_memory():
    from transformers.core_model_loading import Interleave

    model = Converted(Interleave(0))
    assert model.names().stored_names("weight") == ["weight"]
    (part,) = parts_of(model.names(), "weight", model.weight.detach(), Box.full((4, 6)))
    assert torch.equal(part.tensor, model.weight.detach())


def test_transformers_models_load_the_weights_of_an_expert_trainer(tmp_path: Path):
    stored = saved("Mixtral", tmp_path / "new", seed=1)
    saved("Mixtral", tmp_path / "old")
    publisher = WeightPublisher()
    weights = publisher.publish(trainer_of(tmp_path / "new").published_parts(), 1)
    generator, reference = TransformersEngine(str(tmp_path / "old")), trainer_of(tmp_path / "old")
    checksum = generator.update_weights(weights)
    with IncomingWeights(weights) as incoming:
        assert reference.receive_weights(incoming) == checksum
    assert publisher.finish() == checksum
    publisher.close()
    generator.model.save_pretrained(tmp_path / "generator")
    for found in (
        load_file(tmp_path / "generator" / "model.safetensors"),
        together(list(reference.published_parts())),
    ):
        assert found.keys() == stored.keys()
        assert all(torch.equal(found[name], stored[name]) for name in stored)
