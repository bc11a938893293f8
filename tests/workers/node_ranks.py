"""One of four ranks on two pretended nodes, each of which holds a copy of the model."""

import json
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import spmd
import torch
import torch.distributed as dist
from ranks import rendezvous

from weft.dataflow.batch import Batch
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.training import sharding
from weft.workers.worker import Context

NODES, RANKS = 2, 4


def main(path: Path, rank: int) -> None:
    case = json.loads(path.read_text())
    torch.set_num_threads(1)
    folder = Path(case["folder"])
    rows = Batch(pa.ipc.open_file(folder / "rows.arrow").get_batch(0)).take(case["shares"][rank])
    node, local = divmod(rank, RANKS // NODES)
    context = Context(
        "actor", rank, RANKS, rendezvous(folder, rank), node_rank=node, local_rank=local, nodes=NODES
    )
    worker = ActorWorker(ActorConfig(**case["config"]), context)
    engine = cast(Any, worker.engine)
    sums = count_sums(engine.mesh[sharding.NODES].get_group())
    gradient, metrics = spmd.one_step(worker, rows)
    plan, _ = engine._plan(engine._rows(rows, ()))
    units = sum(1 for module in engine.model.modules() if isinstance(module, sharding.FSDPModule))
    found: dict[str, Any] = {"sums": len(sums), "units": units, "microbatches": len(plan)}
    found |= {"gradient": gradient, "metrics": metrics}
    found["weights"] = {name: tensor.clone() for name, tensor in engine.named_tensors()}
    found["published"] = [
        (part.name, part.box, part.tensor.clone()) for part in engine.published_parts()
    ]
    found["timeouts"] = [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for group in (
            cast(Any, dist.group.WORLD),
            *engine.mesh.get_all_groups(),
            engine.mesh["dp"].get_group(),
        )
    ]
    # A loss that is infinite on one rank makes the norm nan on all, also on other nodes.
    gradients = [tensor.grad for tensor in engine.model.parameters() if tensor.grad is not None]
    gradients = gradients or [tensor.detach() for tensor in engine.model.parameters()]
    found["norm"] = sharding.gradient_norm(gradients, also=0.0 * (torch.inf if rank == 0 else 1.0))
    worker.save_checkpoint(folder / "checkpoint")
    worker.checkpoint_written(wait=True)
    worker.save(folder / "saved")
    spmd.one_step(worker, rows)
    worker.load_checkpoint(folder / "checkpoint")
    restored = dict(engine.named_tensors())
    assert all(torch.equal(tensor, found["weights"][name]) for name, tensor in restored.items())
    torch.save(found, folder / f"rank{rank}.pt")
    worker.close()


def count_sums(group: Any) -> list[int]:
    """Return a list that gets an element for each sum over this process group."""
    found, all_reduce = list[int](), dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("group") is group:
            found.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    return found
