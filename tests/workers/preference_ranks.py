"""One rank of a training group that takes a step with every preference loss, as a program: the tests start several of them.

python preference_ranks.py FOLDER RANK
"""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from spmd import one_step

from weft.algorithms.loss import Loss
from weft.algorithms.preference_loss import (
    DesirabilityLoss,
    Hinge,
    Logistic,
    LogLikelihood,
    LogOdds,
    LogRatio,
    PreferenceLoss,
    RobustLogistic,
    Squared,
)
from weft.dataflow.batch import Batch
from weft.dataflow.metrics import Metrics
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.worker import Context

LOSSES: dict[str, Loss] = {
    "dpo": PreferenceLoss(),
    "length-normalised dpo": PreferenceLoss(beta=2, score=LogRatio(per_token=True)),
    "cdpo": PreferenceLoss(comparison=Logistic(label_smoothing=0.1)),
    "robust": PreferenceLoss(comparison=RobustLogistic(label_smoothing=0.1)),
    "ipo": PreferenceLoss(beta=1, score=LogRatio(per_token=True), comparison=Squared(tau=0.1)),
    "hinge": PreferenceLoss(comparison=Hinge()),
    "simpo": PreferenceLoss(beta=2, score=LogLikelihood(per_token=True), margin=1),
    "orpo": PreferenceLoss(beta=1, score=LogOdds(), weight=0.1, likelihood=1),
    "rpo": PreferenceLoss(likelihood=1),
    "kto": DesirabilityLoss(desirable_weight=1.5),
}


def steps(worker: ActorWorker, rows: Batch, parts: list[list[int]] | None = None) -> dict[str, tuple[dict, Metrics]]:
    """(gradient by name, metrics) of one update with each loss, all from the same weights."""
    weights = {name: tensor.clone() for name, tensor in worker.engine.named_tensors()}
    found: dict[str, tuple[dict, Metrics]] = {}
    for name, loss in LOSSES.items():
        worker.engine.load(weights.items())
        gradient, metrics = one_step(worker, rows, loss, parts)
        found[name] = gradient, metrics["_metrics"]
    return found


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    case: dict[str, Any] = json.loads((folder / "case.json").read_text())
    torch.set_num_threads(1)
    rows = Batch(pa.ipc.open_file(folder / "rows.arrow").get_batch(0))
    context = Context("actor", rank, len(case["shares"]), f"file://{folder}/rendezvous")
    worker = ActorWorker(ActorConfig(**case["config"]), context)
    torch.save(steps(worker, rows.take(case["shares"][rank])), folder / f"rank{rank}.pt")
    worker.close()


if __name__ == "__main__":
    main()
