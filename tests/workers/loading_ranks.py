"""One rank of a group that loads several models, and compares its shards with `transformers`."""

import json
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from ranks import rendezvous
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.training.agreement import find_agreement
from weft.workers.training.response_model import ResponseModel
from weft.workers.training.sharding import full_tensor
from weft.workers.worker import Context


def loaded(folder: str) -> Any:
    """Load the complete model with `transformers` in float32."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


def held_bytes(engine: Any) -> int:
    """Return the bytes of the rank's shards in float32."""
    tensors = engine.model.causal_lm.parameters()
    return 4 * sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in tensors)


def check_alike(engine: Any, folder: str) -> None:
    """Check that parameters and buffers equal `transformers` bit by bit.

    Also check that rows may share passes in the same way.
    """
    model, expected = engine.model.causal_lm, loaded(folder)
    theirs = dict(expected.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(theirs)
    for name, parameter in model.named_parameters():
        assert torch.equal(full_tensor(parameter), theirs[name]), name
    buffers = dict(expected.named_buffers())
    assert buffers.keys() == dict(model.named_buffers()).keys()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    response = engine.model
    agreement = find_agreement(ResponseModel(expected))
    assert (response.packs, response.head_form) == (agreement.packs, agreement.head_form)
    assert model.config.get_text_config()._attn_implementation == agreement.attention


def check_published(engine: Any, folder: str) -> None:
    """Check that the published boxes equal the files, and together cover them."""
    stored = {
        name: tensor
        for file in Path(folder).glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    given = torch.tensor(0)
    for part in engine.published_parts():
        given += part.box.numel
        assert torch.equal(part.tensor, stored[part.name][part.box.slices].float()), part.name
    dist.all_reduce(given)
    assert given == sum(tensor.numel() for tensor in stored.values())


def main(folder: Path, rank: int) -> None:
    case: dict[str, Any] = json.loads((folder / "case.json").read_text())
    torch.set_num_threads(1)
    for number, settings in enumerate(case["models"]):
        context = Context("actor", rank, case["ranks"], rendezvous(folder, rank, f"rendezvous{number}"))
        worker = ActorWorker(ActorConfig(**settings), context)
        engine = cast(Any, worker.engine)
        check_alike(engine, settings["model"])
        check_published(engine, settings["model"])
        # A rank reads as many elements as it holds. In the file they may have half the size.
        stored = torch.finfo(getattr(torch, case["dtypes"][number])).bits // 8
        read_whole = case["converts"][number]
        assert read_whole or engine.bytes_read == held_bytes(engine) * stored // 4
        worker.close()
