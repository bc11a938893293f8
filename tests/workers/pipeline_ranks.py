"""One rank of `examples/pipeline_engine.py`: two updates with a checkpoint in between, all
recorded."""

import json
import sys
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import torch
from ranks import rendezvous
from spmd import LOSS

from weft.dataflow.batch import Batch
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.worker import Context

sys.path.append(str(Path(__file__).parents[2] / "examples"))


def watched(worker: ActorWorker, parameters: Any) -> list[dict[str, torch.Tensor]]:
    """Record the gradients of the next optimizer steps."""
    seen: list[dict[str, torch.Tensor]] = []

    def keep(*_: object) -> None:
        seen.append({name: p.grad.clone() for name, p in parameters() if p.grad is not None})

    cast(Any, worker.engine).optimizer.register_step_pre_hook(keep)
    return seen


def played(worker: ActorWorker, rows: Batch, folder: Path, parameters: Any) -> dict[str, Any]:
    before = worker.logprobs(rows, entropies=True)
    seen = watched(worker, parameters)
    metrics = worker.update(rows, loss=LOSS)
    worker.save_checkpoint(folder / "checkpoint")
    assert worker.checkpoint_written(wait=True)
    losses = worker.engine.losses(rows, LOSS)
    worker.update(rows, loss=LOSS)
    twice = worker.logprobs(rows, into="after")["after"].to_pylist()
    worker.load_checkpoint(folder / "checkpoint")
    assert worker.version == 1
    worker.update(rows, loss=LOSS)
    again = worker.logprobs(rows, into="after")["after"].to_pylist()
    assert again == twice, "a step from a checkpoint is the step that was taken"
    worker.save(folder / "saved")
    given = worker.publish_weights(2)
    published = {part.name: part.tensor.clone() for part in worker.engine.published_parts()}
    return {
        "logprobs": before["old_logprobs"].to_pylist(),
        "entropies": before["entropies"].to_pylist(),
        "after": twice,
        "gradients": seen[:2],
        "metrics": {name: metric.value for name, metric in metrics.items()},
        "losses": losses.tolist(),
        "published": published,
        "ranks": len(given.ranks),
        "coordinates": worker.coordinates,
        "weights": {name: tensor.clone() for name, tensor in worker.engine.named_tensors()},
    }


def main(path: Path, rank: int) -> None:
    from pipeline_engine import PipelineEngine  # pyright: ignore[reportMissingImports]

    case = json.loads(path.read_text())
    torch.set_num_threads(1)
    folder = Path(case["folder"])
    rows = Batch(pa.ipc.open_file(folder / "rows.arrow").get_batch(0))
    ranks = case["ranks"]
    context = Context("actor", rank, ranks, rendezvous(folder, rank) if ranks > 1 else None)
    config = ActorConfig(engine=PipelineEngine, pipeline_parallel=ranks, **case["config"])
    worker = ActorWorker(config, context)
    engine = cast(Any, worker.engine)
    torch.save(played(worker, rows, folder, engine.parameters.items), folder / f"rank{rank}.pt")
    worker.close()
