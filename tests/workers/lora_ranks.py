"""One rank of a training group with an adapter. Tests start several of them.

It asks the base model first, takes two steps, stops and resumes. Rank 0 leaves the full tensors.
"""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from ranks import rendezvous

from weft.algorithms.policy_loss import PolicyLoss
from weft.dataflow.batch import Batch
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.worker import Context

LOSS = PolicyLoss(old="old_logprobs")


def main(folder: Path, rank: int) -> None:
    case: dict[str, Any] = json.loads((folder / "case.json").read_text())
    torch.set_num_threads(1)
    rows = Batch(pa.ipc.open_file(folder / "rows.arrow").get_batch(0))
    config = ActorConfig(**case["config"])
    worker = ActorWorker(config, Context("actor", rank, case["ranks"], rendezvous(folder, rank)))
    engine = cast(Any, worker.engine)
    replicas = case["ranks"] // config.tensor_parallel
    mine = np.arange(worker.coordinates.dp, len(rows), replicas)
    base = {
        n: local(p).clone() for n, p in engine.model.causal_lm.named_parameters() if not p.requires_grad
    }
    first = worker.logprobs(rows.take(mine), into="x", adapter=False)
    for _ in range(2):
        worker.update(rows.take(mine), loss=LOSS)
    after = {n: local(p) for n, p in engine.model.causal_lm.named_parameters() if not p.requires_grad}
    assert all(torch.equal(after[name], tensor) for name, tensor in base.items())
    assert worker.logprobs(rows.take(mine), into="x", adapter=False) == first
    worker.save_checkpoint(folder / "step")
    assert worker.checkpoint_written(wait=True)
    worker.save(folder / "saved")
    adapter = {name: tensor.clone() for name, tensor in engine.adapter_tensors()}
    published = {name: tensor.clone() for name, tensor in engine.named_tensors()}
    worker.update(rows.take(mine), loss=LOSS)
    once = {name: tensor.clone() for name, tensor in engine.adapter_tensors()}
    worker.load_checkpoint(folder / "step")
    worker.update(rows.take(mine), loss=LOSS)
    assert all(torch.equal(tensor, once[name]) for name, tensor in engine.adapter_tensors())
    off = dict(zip(mine.tolist(), first["x"].to_pylist(), strict=True))
    parts: list[Any] = [None] * case["ranks"]
    torch.distributed.all_gather_object(parts, off)
    if rank == 0:
        merged = {row: logprobs for part in parts for row, logprobs in part.items()}
        torch.save({"adapter": adapter, "published": published, "off": merged}, folder / "results.pt")
    worker.close()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
