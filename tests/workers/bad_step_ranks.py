"""One rank of a training group with bad steps. Tests start several of them.

For each update it reports the metrics, any change of the state, and the error.
"""

import json
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import torch
from ranks import rendezvous

from weft.algorithms.policy_loss import PolicyLoss
from weft.dataflow.batch import Batch
from weft.dataflow.errors import DivergedError
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.worker import Context

LOSS = PolicyLoss(old="old_logprobs")


def state(worker: ActorWorker) -> dict[str, torch.Tensor]:
    """Return this rank's shard of the training state: parameters, moments, and step counts."""
    tensors = cast(Any, worker.engine).state()
    return {n: (t.to_local() if hasattr(t, "to_local") else t).clone() for n, t in tensors.items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def main(path: Path, rank: int) -> None:
    case = json.loads(path.read_text())
    torch.set_num_threads(1)
    folder = Path(case["folder"])
    context = Context("actor", rank, case["ranks"], rendezvous(folder, rank), run_dir=folder)
    worker = ActorWorker(ActorConfig(**case["config"]), context)
    replicas, dp = case["ranks"] // worker.config.tensor_parallel, worker.coordinates.dp
    said = []
    with pa.ipc.open_file(folder / "rows.arrow") as file:
        steps = [Batch(file.get_batch(i)) for i in range(file.num_record_batches)]
    for rows in steps:
        before, own = state(worker), rows.take(range(dp, len(rows), replicas))
        ended = ""
        metrics: dict[str, Any] = {}
        try:
            worker.update(own.slice(0, 2), loss=LOSS, last=False)
            metrics = dict(worker.update(own.slice(2, len(own) - 2), loss=LOSS))
        except DivergedError as error:
            ended = str(error)
        values = {name: metric.value for name, metric in metrics.items()}
        said.append({"metrics": values, "unchanged": equal(state(worker), before), "ended": ended})
    (folder / f"rank{rank}.json").write_text(json.dumps(said))
    worker.close()
