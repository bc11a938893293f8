"""One rank of a training group that stops and resumes. Tests start several of them.

It checks its own state, and leaves checkpoints for the tests; rank 0 also leaves the full tensors.
"""

import errno
import itertools
import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from ranks import rendezvous

from weft.algorithms.policy_loss import PolicyLoss
from weft.dataflow.batch import Batch
from weft.dataflow.runs.files import Disk
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.training.fsdp import FsdpEngine
from weft.workers.worker import Context

LOSS = PolicyLoss(old="old_logprobs")
SETTINGS = {
    "learning_rate": 1e-3,
    "warmup_steps": 2,
    "decay": ("linear", 6),
    "weight_decay": 0.1,
}


class FullDisk(Disk):
    """A disk with room for this many bytes per file."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, descriptor: int, data: bytes) -> None:
        if len(data) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(descriptor, data)


def actor(
    model: Path, context: Context = Context(), disk: Disk | None = None, **settings: Any
) -> ActorWorker:
    engine = partial(FsdpEngine, disk=disk)
    return ActorWorker(ActorConfig(model=str(model), engine=engine, **{**SETTINGS, **settings}), context)


def engine_of(worker: ActorWorker) -> Any:
    """Untyped, for attributes that only FsdpEngine has: steps and learning rate schedule."""
    return worker.engine


def train(worker: ActorWorker, steps: list[Batch], **how: Any) -> None:
    """Update the policy on each batch; of n replicas, each takes every n-th row."""
    replicas = worker.context.world_size // worker.config.tensor_parallel
    for rows in steps:
        worker.update(rows.take(np.arange(worker.coordinates.dp, len(rows), replicas)), loss=LOSS, **how)


def state(worker: ActorWorker) -> dict[str, torch.Tensor]:
    """Return this rank's shard of the training state."""
    tensors = cast(Any, worker.engine).state()
    return {n: (t.to_local() if hasattr(t, "to_local") else t).clone() for n, t in tensors.items()}


def full(worker: ActorWorker) -> dict[str, torch.Tensor]:
    """Return the complete training state."""
    tensors = cast(Any, worker.engine).state()
    return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for n, t in tensors.items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def draw() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def contexts(folder: Path, rank: int, ranks: int) -> Iterator[Context]:
    for number in itertools.count():
        yield Context("actor", rank, ranks, rendezvous(folder, rank, f"rendezvous-{number}"))


def main(path: Path, rank: int) -> None:
    case = json.loads(path.read_text())
    torch.set_num_threads(1)
    folder, model = Path(case["folder"]), Path(case["model"])
    groups = contexts(folder, rank, case["ranks"])
    with pa.ipc.open_file(folder / "rows.arrow") as file:
        steps = [Batch(file.get_batch(i)) for i in range(file.num_record_batches)]
    results: dict[str, dict[str, torch.Tensor]] = {}

    for name, settings in case["settings"].items():
        worker = actor(model, next(groups), **settings)
        train(worker, steps[:3])
        seed(rank)
        assert worker.save_checkpoint(folder / name) > 0
        results[f"{name}, model"] = {n: t.clone() for n, t in worker.engine.named_tensors()}
        drawn = draw()
        train(worker, steps[3:])
        assert worker.checkpoint_written(wait=True)
        never_stopped = state(worker)
        results[f"{name}, never stopped"] = full(worker)
        worker.close()

        worker = actor(model, next(groups), **settings)
        seed(17)
        worker.load_checkpoint(folder / name)
        assert worker.version == 3 and draw() == drawn
        train(worker, steps[3:])
        assert equal(state(worker), never_stopped), name
        worker.close()

    for name, (checkpoint, settings) in case["restores"].items():
        worker = actor(model, next(groups), **settings)
        worker.load_checkpoint(checkpoint)
        train(worker, steps[3:])
        results[name] = full(worker)
        worker.close()

    last = case["ranks"] - 1
    worker = actor(model, next(groups), disk=FullDisk(1000) if rank == last else None)
    worker.save_checkpoint(folder / "full")
    try:
        worker.checkpoint_written(wait=True)
    except (OSError, RuntimeError) as error:
        expected = (
            "the disk is full: "
            if rank == last
            else f"rank {last} could not write its part: No space left"
        )
        assert expected in str(error)
    else:
        raise AssertionError("a disk of one rank was full, and nothing was said")
    worker.close()
    if rank == 0:
        torch.save(results, folder / "results.pt")
