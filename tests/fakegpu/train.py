"""Train a model of full size on the fake GPU, and print the device memory and copies of each phase.

Environment variables: MODEL (`tiny`, or a size of `SIZES`), SETTINGS (JSON, settings of `ActorConfig`),
RANKS (of which this process is the first), ROWS, PROMPT and RESPONSE (tokens of each row), LIMIT_MIB (of
memory that torch may use).
"""

import ctypes
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "generate"))
from gpu_tables import Shape
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from weft.algorithms.policy_loss import PolicyLoss
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.workers.actor import ActorConfig
from weft.workers.training import fsdp
from weft.workers.training.agreement import Agreement
from weft.workers.training.head_logprobs import HeadForm
from weft.workers.training.packed_attention import VARLEN
from weft.workers.training.sharding import local_part
from weft.workers.worker import Context

SIZES = {
    "tiny": Shape("Qwen2", 128, 256, 4, 4, 2, 1024, tied=True),
    "Qwen3-8B": Shape("Qwen3", 4096, 12288, 36, 32, 8, 151936),
}
COUNTERS = ("shim_syncs", "shim_d2h", "shim_h2d")

shim = ctypes.CDLL(os.environ["SHIM"])


class NoWeights:
    bytes_read, conversions = 0, ()

    def read_box(self, name: str, box: Any) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.bfloat16).expand(box.shape)


class Attentions(TorchDispatchMode):
    """Counts computations of attention, without results that activation checkpointing has kept."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.torch_attn._varlen_attn.default
        return func(*args, **(kwargs or {}))


def join(ranks: int) -> Any:
    """Return a mesh whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    return init_device_mesh("cuda", (ranks, 1), mesh_dim_names=("dp", "tp"))


def make_engine(model: str, ranks: int, settings: dict[str, Any]) -> fsdp.FsdpEngine:
    """Make an engine whose checks do not read numbers, because the fake GPU has none."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(SIZES[model].settings()))
    found: Any = fsdp
    found.find_agreement = lambda *_, **__: Agreement(True, True, VARLEN, HeadForm(), ())
    found.open_stored = lambda *_, **__: NoWeights()
    found.gradient_norm = lambda *_, **__: 0.5
    if ranks > 1:
        found.join_mesh = lambda *_: join(ranks)
    config = ActorConfig(model=str(folder), dtype="bfloat16", **settings)
    context = Context(name="actor", world_size=ranks, devices=("0",))
    return fsdp.FsdpEngine(config, context, config)


def make_rows(number: int, prompt: int, response: int) -> Batch:
    rng = np.random.default_rng(0)
    return Batch.of(
        sample_id=list(range(number)),
        group_id=[i // 8 for i in range(number)],
        prompt_ids=[[3 + i // 8] * prompt for i in range(number)],
        response_ids=[rng.integers(3, 200, response).tolist() for _ in range(number)],
        advantages=[[1.0] * response] * number,
        response_logprobs=[[-1.0] * response] * number,
    )


def main() -> None:
    given = os.environ
    ranks = int(given.get("RANKS", "1"))
    rows = make_rows(*(int(given[name]) for name in ("ROWS", "PROMPT", "RESPONSE")))
    if limit := given.get("LIMIT_MIB"):
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((int(limit) << 20) / total)
    phases: list[dict[str, Any]] = []

    def run(phase: str, work: Callable[[], object]) -> Any:
        before = {name: ctypes.c_long.in_dll(shim, name).value for name in COUNTERS}
        torch.cuda.reset_peak_memory_stats()
        result = work()
        counted = {
            name.removeprefix("shim_"): ctypes.c_long.in_dll(shim, name).value - n
            for name, n in before.items()
        }
        peak, held = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        reserved = torch.cuda.max_memory_reserved()
        phases.append({"phase": phase, "peak": peak, "held": held, "reserved": reserved, **counted})
        return result

    engine = run("make", lambda: make_engine(given["MODEL"], ranks, json.loads(given["SETTINGS"])))
    microbatches: list[int] = []
    forward = engine._forward
    engine._forward = lambda rows, part, **of: (
        microbatches.append(len(part)),
        forward(rows, part, **of),
    )[1]
    attentions = Attentions()
    for _ in range(2):
        microbatches.clear()
        run("accumulate", lambda: engine.accumulate(rows, PolicyLoss(), last=True))
        run("apply", engine.apply)
    microbatches.clear()
    with attentions:
        engine.accumulate(rows, PolicyLoss(), last=True)
    engine.optimizer.zero_grad()
    before = digests(engine)
    places: list[list[int]] = []
    for _ in range(2):
        run("offload", engine.offload)
        places.append([tensor.data_ptr() for tensor in tensors(engine).values()])
        run("onload", engine.onload)
    found = {
        "phases": phases,
        "microbatches": len(microbatches),
        "attentions": attentions.number,
        "on_device": sum(part.nbytes for part in tensors(engine).values()),
        "frozen": sum(local_part(p).nbytes for p in engine.model.parameters() if not p.requires_grad),
        "unchanged": digests(engine) == before,
        "same_places": places[0] == places[1],
    }
    print(json.dumps(found))


def tensors(engine: fsdp.FsdpEngine) -> dict[str, torch.Tensor]:
    """Return the local parts of all tensors that take turns on the device."""
    held = {**dict(engine.model.named_parameters()), **dict(engine.model.named_buffers())}
    assert engine.optimizer is not None
    held |= engine.optimizer.held()
    return {name: local_part(tensor) for name, tensor in held.items()}


def digests(engine: fsdp.FsdpEngine) -> list[str]:
    """Return digests of these tensors; empty for full-size models, whose copies are skipped."""
    if "SHIM_SKIP" in os.environ:
        return []
    parts = (tensor.detach().cpu().contiguous() for tensor in tensors(engine).values())
    return [
        hashlib.sha256(part.view(torch.uint8).numpy().tobytes()).hexdigest() for part in map(flat, parts)
    ]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(json.dumps({"error": str(error)}))
