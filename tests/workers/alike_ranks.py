"""One of two tensor-parallel ranks with replicated tensors to compare."""

from pathlib import Path

import torch
import torch.distributed as dist
from ranks import rendezvous
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from weft.dataflow.errors import RunError
from weft.workers.training.sharding import check_alike


def main(folder: Path, rank: int) -> None:
    store = rendezvous(folder, rank).join("alike", rank, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    split = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh["tp"], [Shard(0)])
    norm, steps = torch.linspace(1, 2, 100), torch.tensor(3.0)
    state = {"norm": norm, "split": split, "steps": steps}
    check_alike(state, mesh["tp"])

    norm[7] += 1e-6 * rank
    check_alike(state, mesh["tp"])
    assert torch.equal(norm, torch.linspace(1, 2, 100)), (
        "copies that rounding moved apart are the first rank's"
    )

    norm[7] += 0.5 * rank
    try:
        check_alike(state, mesh["tp"])
    except RunError as error:
        assert "tensor-parallel rank 1 holds another 'norm' than rank 0 (off by 0.5)" in str(error)
    else:
        raise AssertionError("ranks hold different norms, and nothing was said")
    dist.destroy_process_group()
