"""Ranks with sharded head rows, and the result of one rank with the complete head."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from weft.workers.kept_sets import KeptSets
from weft.workers.training.head_logprobs import HeadForm, head_logprobs, head_top_logprobs

CASES = {
    "plain": (HeadForm(), 29, False, False),
    "soft cap and bias": (HeadForm(softcap=3.0), 29, True, False),
    "ranks without rows": (HeadForm(0.5), 2, False, False),
    "kept sets": (HeadForm(), 29, False, True),
    "kept sets, soft cap and bias": (HeadForm(softcap=3.0), 29, True, True),
    "kept sets, ranks without rows": (HeadForm(0.5), 2, False, True),
}


def outputs(case: str, *, mesh: DeviceMesh | None) -> list[Tensor]:
    """Return log-probabilities, entropies, all gradients, and the likeliest tokens, gathered."""
    form, vocabulary, biased, truncated = CASES[case]
    torch.manual_seed(0)
    hidden, weight, bias, upstream = (
        torch.randn(*shape, dtype=torch.float64)
        for shape in ((7, 4), (vocabulary, 4), (vocabulary,), (2, 7))
    )
    # Two tokens per position; in the first one, both are the same.
    targets, temperatures = (
        torch.randint(vocabulary, (7, 2)),
        torch.linspace(0.5, 2, 7, dtype=torch.float64),
    )
    targets[0] = targets[0, 0]
    sets = None
    if truncated:  # one rank has the first tokens' sets, and all ranks have parts of the last
        few = torch.arange(vocabulary) < torch.arange(7)[:, None] * 5
        sets = KeptSets.of_mask(few.scatter(1, targets, True))
    leaves = [
        hidden,
        *(
            each if mesh is None else distribute_tensor(each, mesh, [Shard(0)])
            for each in (weight, bias)
        ),
    ]
    leaves = [leaf.requires_grad_() for leaf in leaves[: 2 + biased]]
    logprobs, entropies = head_logprobs(
        leaves[0],
        leaves[1],
        leaves[2] if biased else None,
        targets,
        temperatures,
        form,
        kept_sets=sets,
        entropy=True,
        collisions=True,
        chunk=3 * 8 * 10,
    )
    assert entropies is not None
    entropies, collisions = entropies.unbind(1)
    wanted = (logprobs * torch.stack([upstream[0], upstream[0] - 1], 1)).sum()
    gradients = torch.autograd.grad(wanted + (entropies * upstream[1]).sum(), leaves)
    top, ids = head_top_logprobs(
        leaves[0],
        leaves[1],
        leaves[2] if biased else None,
        2,
        temperatures,
        form,
        chunk=3 * 8 * 10,
    )
    return [
        each.full_tensor() if isinstance(each, DTensor) else each
        for each in (logprobs, entropies, collisions, *gradients, top, ids)
    ]


def main(folder: Path, rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    mesh = init_device_mesh("cpu", (3,))
    torch.save({case: outputs(case, mesh=mesh) for case in CASES}, folder / f"rank{rank}.pt")
    dist.destroy_process_group()
