"""One rank of a group that trains a vision model; some ranks have no rows with images."""

from pathlib import Path

import torch
from ranks import rendezvous
from seeing_model import make_rows
from spmd import one_step

from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.worker import Context

SHARES = [[0, 2, 3, 4], [1]]


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    context = Context("actor", rank, len(SHARES), rendezvous(folder, rank))
    config = ActorConfig(model=folder / "model", learning_rate=1e-3, max_grad_norm=None)
    worker = ActorWorker(config, context)
    gradient, _ = one_step(worker, make_rows().take(SHARES[rank]))
    torch.save(gradient, folder / f"rank{rank}.pt")
    worker.close()
