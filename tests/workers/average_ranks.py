"""One rank of a reference that averages versions of the weights. Tests start several of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from checkpoint_ranks import contexts, full

from weft.resharding.publisher import WeightPublisher
from weft.resharding.weights import whole
from weft.workers.reference import MovingReferenceConfig, MovingReferenceWorker
from weft.workers.worker import Context


def reference(model: Path, context: Context = Context(), **settings: Any) -> MovingReferenceWorker:
    config = MovingReferenceConfig(**{"model": str(model), "mix": 0.3, **settings})
    return MovingReferenceWorker(config, context)


def receive(worker: MovingReferenceWorker, weights: Mapping[str, torch.Tensor], version: int) -> None:
    """Load full tensors as a published version."""
    publisher = WeightPublisher()
    try:
        published = publisher.publish(whole(dict(weights)), version)
        assert worker.receive_weights(published) == publisher.finish()
    finally:
        publisher.close()


def average(worker: MovingReferenceWorker) -> dict[str, torch.Tensor]:
    """Return the full average, without the prefix of a checkpoint's names."""
    return {name.removeprefix("model."): t for name, t in full(cast(Any, worker)).items()}


def held(worker: MovingReferenceWorker) -> dict[str, torch.Tensor]:
    """Return the full weights that the worker computes with."""
    return {name: tensor.clone() for name, tensor in worker.engine.named_tensors()}


def main(path: Path, rank: int) -> None:
    case = json.loads(path.read_text())
    torch.set_num_threads(1)
    folder, model = Path(case["folder"]), Path(case["model"])
    versions = torch.load(folder / "versions.pt")
    groups = contexts(folder, rank, case["ranks"])
    results: dict[str, Any] = {}
    for name, settings in case["settings"].items():
        worker = reference(model, next(groups), **settings)
        for version in (1, 2):
            receive(worker, versions[version - 1], version)
        worker.save_checkpoint(folder / name)
        assert worker.checkpoint_written(wait=True)
        receive(worker, versions[2], 3)
        results[name] = average(worker)
        worker.close()

        worker = reference(model, next(groups), **settings)
        worker.load_checkpoint(case["from"])
        assert worker.version == 2
        receive(worker, versions[2], 3)
        results[f"{name}, resumed"] = average(worker)
        worker.close()
    if rank == 0:
        torch.save(results, folder / "results.pt")
