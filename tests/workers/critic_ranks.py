"""One rank of a group of critics that takes a step with each head. Tests start several of them."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from ranks import rendezvous
from spmd import one_step

from weft.algorithms.loss import Loss
from weft.algorithms.reward_model import RewardLoss
from weft.algorithms.values import ValueLoss
from weft.dataflow.batch import Batch
from weft.workers.critic import CriticConfig, CriticWorker
from weft.workers.worker import Context

HEADS = ("values", "rewards")
LOSSES: dict[str, Loss] = {"values": ValueLoss(), "rewards": RewardLoss(centring=0.01)}


def main(folder: Path, rank: int) -> None:
    case: dict[str, Any] = json.loads((folder / "case.json").read_text())
    torch.set_num_threads(1)
    rows = Batch(pa.ipc.open_file(folder / "rows.arrow").get_batch(0)).take(case["shares"][rank])
    seen = {}
    for head in HEADS:
        context = Context(
            "critic", rank, len(case["shares"]), rendezvous(folder, rank, f"rendezvous-{head}")
        )
        worker = CriticWorker(CriticConfig(**case["config"], head=head), context)
        before, _ = worker.engine.values(rows)
        gradient, metrics = one_step(worker, rows, LOSSES[head])
        after, _ = worker.engine.values(rows)
        worker.save(folder / f"saved-{head}", merged=True)
        worker.save_checkpoint(folder / f"checkpoint-{head}")
        worker.checkpoint_written(wait=True)
        worker.update(rows, loss=LOSSES[head])
        worker.load_checkpoint(folder / f"checkpoint-{head}")
        restored, _ = worker.engine.values(rows)
        seen[head] = {
            "before": before,
            "gradient": gradient,
            "metrics": metrics,
            "after": after,
            "restored": restored,
        }
        worker.close()
    torch.save(seen, folder / f"rank{rank}.pt")
