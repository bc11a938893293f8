"""Train full-size models for two steps, and print the peak of the device and of pinned host memory.

`ROWS` is a JSON list of rows of docs/gpu.md: {"model", "gpus", "gib", "tokens", "settings"}. Several
GPUs are one rank of a fake process group. With offload="everything", gradients are added up on the
host, which fills its memory; only rows with "whole" have a second microbatch then, and none has a
step of the optimizer. Needs SHIM_SKIP=1: device memory is reserved address space, and large copies
are skipped.
"""

import ctypes
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "generate"))
from gpu_tables import MODELS, PROMPT, RESPONSE
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import weft.workers.training.fsdp as fsdp
import weft.workers.training.head_logprobs as head_logprobs
from weft.algorithms.policy_loss import PolicyLoss
from weft.dataflow.batch import Batch
from weft.dataflow.byte_units import GIB
from weft.workers.actor import ActorConfig
from weft.workers.training.agreement import Agreement
from weft.workers.training.head_logprobs import HeadForm
from weft.workers.training.lora import Lora
from weft.workers.training.memory import head_chunk_bytes
from weft.workers.training.packed_attention import VARLEN
from weft.workers.worker import Context

shim = ctypes.CDLL(os.environ["SHIM"])
for name in ("shim_used", "shim_peak"):
    getattr(shim, name).restype = ctypes.c_long


class Zeros:
    """Weights without a file."""

    bytes_read, conversions = 0, ()

    def read_box(self, name: str, box: Any) -> torch.Tensor:
        return torch.zeros(()).expand(box.shape)


def join(gpus: int) -> Any:
    if gpus == 1:
        return None
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=gpus)
    return init_device_mesh("cuda", (gpus, 1), mesh_dim_names=("dp", "tp"))


class NoSnapshots:  # the fake process group has no gloo
    def __init__(self, *_: Any) -> None: ...

    def close(self) -> None: ...


pinned_at: set[int] = set()
"""Addresses of pinned tensors. The fake driver does not know which memory it has pinned."""


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Pin a tensor without filling its pages."""
    made = torch.empty_like(tensor, device="cpu", pin_memory=True)
    pinned_at.add(made.data_ptr())
    return made


def measure(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    settings = dict(row["settings"])
    if rank := settings.pop("rank", None):
        settings["lora"] = Lora(rank=rank)
    (folder / "config.json").write_text(json.dumps(MODELS[row["model"]].settings()))
    config = ActorConfig(
        model=str(folder), dtype="bfloat16", microbatch_tokens=row["tokens"], **settings
    )
    gpus, streams = row["gpus"], settings.get("offload") == "everything"
    fsdp.join_mesh = lambda *_: join(gpus)
    head_logprobs.chunk_bytes = lambda _: head_chunk_bytes(row["gib"] * GIB)
    if gpus > 1:
        fsdp.SnapshotWriter = NoSnapshots  # pyright: ignore[reportAttributeAccessIssue]
    context = Context(name="actor", rank=0, world_size=gpus, devices=("0",))
    began = time.process_time()
    torch.cuda.reset_peak_memory_stats()
    engine = fsdp.FsdpEngine(config, context, config)
    # Two microbatches, of rows with distinct prompts and equal lengths.
    each = row["tokens"] // (PROMPT + RESPONSE)
    number = each * (1 if streams and not row.get("whole") else 2)
    batch = Batch.of(
        sample_id=list(range(number)),
        group_id=list(range(number)),
        prompt_ids=[[3 + i] * PROMPT for i in range(number)],
        response_ids=[np.full(RESPONSE, 7).tolist()] * number,
        advantages=[[1.0] * RESPONSE] * number,
        response_logprobs=[[-1.0] * RESPONSE] * number,
    )
    for _ in range(1 if streams else 2):
        engine.accumulate(batch, PolicyLoss(), last=True)
        if not streams:  # on the host otherwise, where it would fill the memory
            engine.apply()
    found: dict[str, Any] = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }
    engine.offload()
    found["offloaded"] = torch.cuda.memory_reserved()
    host = torch.cuda.host_memory_stats()
    found["pinned"] = host["allocated_bytes.peak"]
    found["seconds"] = time.process_time() - began
    engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


def main() -> None:
    fsdp.find_agreement = lambda *_, **__: Agreement(True, True, VARLEN, HeadForm(), ())
    fsdp.open_stored = lambda *_, **__: Zeros()
    fsdp.gradient_norm = lambda *_, **__: 0.5
    torch.Tensor.pin_memory = pinned  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.is_pinned = lambda tensor: tensor.data_ptr() in pinned_at  # pyright: ignore
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for row in json.loads(os.environ["ROWS"]):
            try:
                made = measure(row, Path(folder))
            except torch.OutOfMemoryError as error:
                made = {"failed": str(error)[:300], "allocated": torch.cuda.max_memory_allocated()}
            gc.collect()
            torch.cuda.empty_cache()
            found.append({**row, **made})
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"rows": found}))


main()
