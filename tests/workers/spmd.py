"""One rank of a training group. Tests start several of them.

It takes one step on its share of the rows. Every rank writes its results, rank 0 also the full
gradient.
"""

import json
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import torch
from ranks import rendezvous

from weft.algorithms.aggregation import sequence_mean
from weft.algorithms.kl import KlPenalty
from weft.algorithms.loss import Loss
from weft.algorithms.policy_loss import PolicyLoss
from weft.dataflow.batch import Batch
from weft.dataflow.metrics import merge
from weft.resharding.incoming import IncomingWeights
from weft.resharding.publisher import WeightPublisher
from weft.resharding.weights import whole
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.critic import CriticWorker
from weft.workers.training.engine import TrainingEngine
from weft.workers.worker import Context

LOSS = PolicyLoss(aggregation=sequence_mean, kl=KlPenalty(coefficient=0.1), old="old_logprobs")


def take_over(engine: TrainingEngine, weights: dict[str, torch.Tensor]) -> None:
    """Load these full tensors into an engine, as if they had been published."""
    publisher = WeightPublisher()
    try:
        with IncomingWeights(publisher.publish(whole(weights), 1)) as incoming:
            assert engine.receive_weights(incoming) == publisher.finish()
    finally:
        publisher.close()


def one_step(
    worker: ActorWorker | CriticWorker,
    rows: Batch,
    loss: Loss = LOSS,
    parts: list[list[int]] | None = None,
) -> tuple[dict, dict]:
    """Return (gradient by name, metrics) of one update; `parts` holds row numbers per call."""
    gradient = {}
    engine = cast(Any, worker.engine)

    def keep(*_: object) -> None:
        for name, parameter in engine.model.causal_lm.named_parameters():
            if parameter.grad is None:  # with an adapter, the base model is frozen
                continue
            full = (
                parameter.grad.full_tensor()
                if hasattr(parameter.grad, "full_tensor")
                else parameter.grad
            )
            gradient[name] = full.clone()

    hook = engine.optimizer.register_step_pre_hook(keep)
    *first, last = parts or [list(range(len(rows)))]
    said = [worker.update(rows.take(part), loss=loss, last=False) for part in first]
    metrics = merge([*said, worker.update(rows.take(last), loss=loss)])
    hook.remove()
    return gradient, {name: metric.value for name, metric in metrics.items()} | {"_metrics": metrics}


def main(path: Path, rank: int) -> None:
    case = json.loads(path.read_text())
    torch.set_num_threads(1)
    folder = Path(case["folder"])
    rows = Batch(pa.ipc.open_file(folder / "rows.arrow").get_batch(0))
    context = Context("actor", rank, len(case["shares"]), rendezvous(folder, rank))
    worker = ActorWorker(ActorConfig(**case["config"]), context)
    share = rows.take(case["shares"][rank])
    logprobs = (
        worker.logprobs(share)["old_logprobs"].to_pylist() if "old_logprobs" not in share else None
    )
    # Translate row numbers to positions in this rank's share. Parts on other ranks become empty.
    parts = [[k for k, row in enumerate(case["shares"][rank]) if row in part] for part in case["parts"]]
    gradient, metrics = one_step(worker, share, parts=parts or None)
    engine = cast(Any, worker.engine)
    batch = engine._rows(share, ())
    plan, _ = engine._plan(batch)
    weights = {name: tensor.clone() for name, tensor in worker.engine.named_tensors()}
    worker.save(folder / "saved")
    published = worker.publish_weights(1)
    assert len(published.ranks) == 1
    take_over(worker.engine, weights)
    again = {name: tensor.clone() for name, tensor in worker.engine.named_tensors()}
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    after = worker.logprobs(share, into="after")["after"].to_pylist()
    result = {
        "gradient": gradient,
        "metrics": metrics,
        "microbatches": [len(part) for part in plan],
        "tokens": sum(len(batch.inputs(part)[0]) for part in plan if len(part)),
        "weights": weights,
        "logprobs": logprobs,
        "after": dict(zip(case["shares"][rank], after, strict=True)),
        "coordinates": worker.coordinates,
    }
    torch.save(result, folder / f"rank{rank}.pt")
    worker.close()
