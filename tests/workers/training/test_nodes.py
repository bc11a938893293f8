"""Hybrid sharding: each node holds a copy of the model, and nodes add up gradients once a step."""

import json
import math
from pathlib import Path
from typing import Any, cast

import node_ranks
import pyarrow as pa
import pytest
import torch
from ranks import run_processes
from safetensors.torch import load_file
from spmd import one_step

from weft import Lora
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.training.fsdp import _gathers_in_node
from weft.workers.training.memory import gathers_in_node
from weft.workers.worker import Context

SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "max_grad_norm": None, "microbatch_tokens": 60}


def run_nodes(model: Path, rows: Batch, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    with pa.ipc.new_file(folder / "rows.arrow", rows.record.schema) as file:
        file.write_batch(rows.record)
    shares = [list(range(rank, len(rows), node_ranks.RANKS)) for rank in range(node_ranks.RANKS)]
    config = {"model": str(model), "gather": "node", **SETTINGS, **settings}
    (folder / "case.json").write_text(
        json.dumps({"folder": str(folder), "shares": shares, "config": config})
    )
    run_processes(node_ranks.main, folder / "case.json", node_ranks.RANKS)
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(node_ranks.RANKS)]


def off(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    squares = sum(float((found[n].double() - expected[n].double()).square().sum()) for n in expected)
    return (squares / sum(float(t.double().square().sum()) for t in expected.values())) ** 0.5


def joined(ranks: list[dict[str, Any]], weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Assemble the published parts, and check that they cover each element once."""
    made = {name: torch.full(tensor.shape, torch.nan) for name, tensor in weights.items()}
    for name, box, part in (each for rank in ranks for each in rank["published"]):
        assert bool(made[name][box.slices].isnan().all())
        made[name][box.slices] = part
    return made


@pytest.mark.thorough
def test_a_step_over_two_nodes_is_the_step_of_one_rank(tiny_model: Path, rows: Batch, tmp_path: Path):
    ranks = run_nodes(tiny_model, rows, tmp_path)
    alone = ActorWorker(ActorConfig(model=str(tiny_model), **SETTINGS))
    gradient, metrics = one_step(alone, rows)
    weights = dict(alone.engine.named_tensors())
    for rank in ranks:
        assert off(rank["gradient"], gradient) < 1e-6
        assert rank["metrics"]["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)
        assert off(rank["weights"], weights) < 1e-6
        # One sum over the nodes for each FSDP unit and for the norm, whatever the number of
        # microbatches.
        assert rank["microbatches"] > 1 and rank["sums"] == rank["units"] + 1
        assert math.isnan(rank["norm"])
        assert set(rank["timeouts"]) == {2 * Context().deadline_s}
    assert all(rank["published"] for rank in ranks)  # the nodes share the work
    published = joined(ranks, ranks[0]["weights"])
    assert all(torch.equal(tensor, ranks[0]["weights"][name]) for name, tensor in published.items())
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.equal(tensor, ranks[0]["weights"][name]) for name, tensor in saved.items())
    # A checkpoint of two nodes continues on one rank.
    alone.load_checkpoint(tmp_path / "checkpoint")
    assert off(dict(alone.engine.named_tensors()), ranks[0]["weights"]) == 0
    alone.close()


@pytest.mark.thorough
def test_an_adapter_over_two_nodes_is_the_adapter_of_one_rank(
    tiny_model: Path, rows: Batch, tmp_path: Path
):
    lora = {"rank": 4, "published": "adapter"}
    ranks = run_nodes(tiny_model, rows, tmp_path, lora=lora)
    alone = ActorWorker(ActorConfig(model=str(tiny_model), lora=Lora(**lora), **SETTINGS))
    gradient, _ = one_step(alone, rows)
    assert all(off(rank["gradient"], gradient) < 1e-6 for rank in ranks)
    adapter = {part.name: part.tensor for part in alone.engine.published_parts()}
    assert off(joined(ranks, adapter), adapter) < 1e-6
    alone.close()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"gather": "layerwise"}, False),
        ({"gather": "once"}, False),
        ({"offload": "everything"}, False),
        ({"tensor_parallel": 16}, False),
    ],
)
def test_gpus_hold_a_copy_per_node_if_it_is_small(settings: dict[str, Any], expected: bool):
    config = ActorConfig(model="m", **settings)
    of_8b = {"frozen": 0, "trained": 8_200_000_000, "ranks": 32, "nodes": 4, "gpu_bytes": 80 << 30}
    assert gathers_in_node(config, **of_8b) is expected
    assert not gathers_in_node(config, **{**of_8b, "trained": 14_000_000_000})
    assert not gathers_in_node(config, **{**of_8b, "nodes": 1})
    assert not gathers_in_node(config, **{**of_8b, "gpu_bytes": 0})  # a CPU


def test_a_replica_over_several_nodes_cannot_be_on_one():
    config, context = (
        ActorConfig(model="m", gather="node", tensor_parallel=4),
        Context("actor", 0, 4, nodes=2),
    )
    with pytest.raises(UserError, match="a replica of 'actor' has 4 ranks, and a node has 2"):
        model = cast(Any, torch.nn.Linear(1, 1))
        _gathers_in_node(config, context, model, torch.device("cpu"), cast(Any, None))
