"""One rank that shares the layers of several models in turn, and takes a step with each."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from ranks import rendezvous
from spmd import one_step

from weft.dataflow.batch import Batch
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.worker import Context


def main(folder: Path, rank: int) -> None:
    case = json.loads((folder / "case.json").read_text())
    cases: dict[str, dict[str, Any]] = case["configs"]
    torch.set_num_threads(1)
    rows = Batch(pa.ipc.open_file(folder / "rows.arrow").get_batch(0))
    found = {}
    for name, config in cases.items():
        context = Context("actor", rank, case["ranks"], rendezvous(folder, rank, name.replace(" ", "-")))
        worker = ActorWorker(ActorConfig(**config), context)
        try:
            mine = rows.take(
                list(range(worker.coordinates.dp, len(rows), case["ranks"] // case["replica"]))
            )
            said = worker.logprobs(mine, into="said")["said"].to_pylist()
            gradient, _ = one_step(worker, mine)
            after = worker.logprobs(mine, into="said")["said"].to_pylist()
            worker.save_checkpoint(folder / f"step-{name}")
            assert worker.checkpoint_written(wait=True)
            worker.load_checkpoint(folder / f"step-{name}")
            assert worker.logprobs(mine, into="said")["said"].to_pylist() == after
            worker.save(folder / f"saved-{name}")
            parts = [
                (part.name, part.shape, part.box, part.tensor.clone())
                for part in worker.engine.published_parts()
            ]
            found[name] = {"said": said, "gradient": gradient, "after": after, "parts": parts}
        finally:
            worker.close()
    torch.save(found, folder / f"rank{rank}.pt")
