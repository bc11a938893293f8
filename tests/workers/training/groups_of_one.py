"""A process with process groups of one rank, next to process groups of another library (vLLM).

It trains one model after another with them.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from weft.workers.training.sharding import mesh_of_one

CPU = torch.device("cpu")


sys.path.insert(0, str(Path(__file__).parents[1]))


def main(model: str) -> None:
    variables = dict(os.environ)
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    theirs = dist.new_group([0])
    mesh_of_one(CPU)[1]()
    dist.all_reduce(torch.ones(1), group=theirs)
    train_one_after_the_other(model)
    assert dist.is_initialized()
    dist.destroy_process_group()

    (_, close_first), (second, close_second) = mesh_of_one(CPU), mesh_of_one(CPU)
    close_first()
    close_first()
    dist.all_reduce(torch.ones(1), group=second["dp"].get_group())
    close_second()
    dist.destroy_process_group()

    _, close_ours = mesh_of_one(CPU)
    dist.destroy_process_group()  # another library destroys its groups
    close_ours()
    _, close_last = mesh_of_one(CPU)
    close_last()
    assert not dist.is_initialized() and dict(os.environ) == variables


def train_one_after_the_other(model: str) -> None:
    from training_rows import make_rows

    from weft.algorithms.policy_loss import PolicyLoss
    from weft.workers.actor import ActorConfig, ActorWorker

    for _ in range(2):
        worker = ActorWorker(ActorConfig(model=model, offload="everything"))
        worker.update(make_rows(5), loss=PolicyLoss(old="old_logprobs"))
        worker.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
