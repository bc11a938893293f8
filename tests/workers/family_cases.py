"""Many model families: results of one rank, and of several ranks that share layers or tokens."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import families
import family_ranks
import pyarrow as pa
import pytest
import spmd
import torch
from ranks import run_processes
from safetensors.torch import load_file
from training_rows import make_rows

from weft.dataflow.batch import Batch
from weft.workers.actor import ActorConfig, ActorWorker

ROWS = make_rows(9)


def config_of(folder: Path, name: str, **settings: Any) -> dict[str, Any]:
    adapted = name.endswith(" with LoRA")
    lora = {"lora": {"rank": 3, "alpha": 6}} if adapted else {}
    return {
        "model": str(folder / name.removesuffix(" with LoRA")),
        "learning_rate": 1e-3,
        "max_grad_norm": None,
        **lora,
        **settings,
    }


def asked_of(request: pytest.FixtureRequest, cases: list[str], quick: Sequence[str]) -> list[str]:
    """Return the cases to prepare: all if a slow test runs, otherwise the quick ones."""
    slow = any(
        item.path == request.path and item.get_closest_marker("slow") for item in request.session.items
    )
    return cases if slow else [*quick]


def write_models(folder: Path, names: Iterable[str]) -> Path:
    """Save each model in a subfolder; "with LoRA" cases share the folder of their base model."""
    for name in dict.fromkeys(name.removesuffix(" with LoRA") for name in names):
        kind, settings = families.FAMILIES[name]
        model = families.amplify(families.make(kind, {"vocab_size": 98, **settings}))
        model.save_pretrained(folder / name)
        (folder / name / "tokenizer.json").write_text("{}")
    return folder


def on_one_rank(
    models: Path, names: Iterable[str], rows: Batch = ROWS, **settings: Any
) -> dict[str, Any]:
    """Return what one rank computes per model: gradient, and logprobs before and after a step."""
    found = {}
    for name in names:
        worker = ActorWorker(ActorConfig(**config_of(models, name, **settings)))
        said = worker.logprobs(rows, into="said")["said"].to_pylist()
        gradient, _ = spmd.one_step(worker, rows)
        found[name] = {
            "said": said,
            "gradient": gradient,
            "after": worker.logprobs(rows, into="said")["said"].to_pylist(),
        }
    return found


def run_ranks(
    models: Path,
    folder: Path,
    ranks: int,
    names: Iterable[str],
    replica: int = 2,
    *,
    rows: Batch = ROWS,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Return the results of each rank per model. `replica` ranks compute the same rows."""
    with pa.ipc.new_file(folder / "rows.arrow", rows.record.schema) as file:
        file.write_batch(rows.record)
    configs = {name: config_of(models, name, **settings) for name in names}
    (folder / "case.json").write_text(
        json.dumps({"ranks": ranks, "replica": replica, "configs": configs})
    )
    run_processes(family_ranks.main, folder, ranks)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


def check(
    folder: Path, name: str, ranks: list[dict[str, Any]], expected: dict[str, Any], replica: int = 2
) -> None:
    """Check the results of the ranks against one rank, and the weights that they saved."""
    replicas = len(ranks) // replica
    norm = torch.stack([g.norm() for g in expected["gradient"].values()]).norm()
    for number, rank in enumerate(ranks):
        found = rank[name]
        for when, tolerance in (("said", 2e-5), ("after", 2e-3)):
            for mine, theirs in zip(
                found[when], expected[when][number // replica :: replicas], strict=True
            ):
                assert mine == pytest.approx(theirs, abs=tolerance, rel=tolerance)
        assert found["gradient"].keys() == expected["gradient"].keys()
        for parameter, gradient in expected["gradient"].items():
            assert (found["gradient"][parameter] - gradient).norm() / norm < 1e-5, parameter
    if "LoRA" in name:
        return
    saved = load_file(folder / f"saved-{name}" / "model.safetensors")
    given = dict.fromkeys(saved, 0)
    for rank in ranks:
        for tensor_name, shape, box, tensor in rank[name]["parts"]:
            assert saved[tensor_name].shape == torch.Size(shape)
            assert torch.equal(saved[tensor_name][box.slices], tensor)
            given[tensor_name] += tensor.numel()
    assert given == {tensor_name: tensor.numel() for tensor_name, tensor in saved.items()}
