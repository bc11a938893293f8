"""One of three ranks that compare direct collectives with gloo's."""

from pathlib import Path

import torch
import torch.distributed as dist
from ranks import rendezvous

from weft.workers.training.sharding import _DirectAllGather, _DirectReduceScatter


def main(folder: Path, rank: int) -> None:
    dist.init_process_group(
        "gloo", store=rendezvous(folder, rank).join("all", rank, 3), rank=rank, world_size=3
    )
    group = dist.distributed_c10d._get_default_group()
    whole = torch.randn(3 * 5, generator=torch.Generator().manual_seed(rank))
    own = whole[:5].clone()

    gathered, expected = torch.zeros(15), torch.zeros(15)
    dist.all_gather_single(expected, own)
    _DirectAllGather()(gathered, own, group)
    assert torch.equal(gathered, expected)
    in_place = torch.zeros(15)
    place = in_place[5 * rank : 5 * rank + 5].copy_(own)  # the layout that FSDP uses
    _DirectAllGather()(in_place, place, group)
    assert torch.equal(in_place, expected)

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        reduced, expected = torch.zeros(5), torch.zeros(5)
        dist.reduce_scatter_single(expected, whole.clone(), op=op)
        _DirectReduceScatter()(reduced, whole, group, op)
        torch.testing.assert_close(reduced, expected)
    dist.destroy_process_group()
