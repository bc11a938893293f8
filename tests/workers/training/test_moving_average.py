"""A moving reference is the exact average of the versions that arrived, on any number of ranks, and
continues from a checkpoint with the same bits."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from average_ranks import average, held, main, receive, reference
from checkpoint_ranks import equal
from ranks import run_processes
from safetensors.torch import load_file

import weft
from weft.algorithms.policy_loss import PolicyLoss
from weft.algorithms.preference import dpo
from weft.controllers.prechecks.checks import check_graphs
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError, WeightSyncError
from weft.dataflow.source import TableSource
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.reference import MovingReferenceConfig, MovingReferenceWorker
from weft.workers.training.lora import Lora
from weft.workers.training.moving_average import MovingAverage

Tensors = dict[str, torch.Tensor]


def drawn(like: Tensors, number: int, scale: float = 0.02) -> list[Tensors]:
    """Return versions of these weights, each a random step from the one before."""
    chance, versions = torch.Generator().manual_seed(3), [like]
    for _ in range(number):
        step = {n: scale * torch.randn(t.shape, generator=chance) for n, t in like.items()}
        versions.append({n: (t.float() + step[n]).to(t.dtype) for n, t in versions[-1].items()})
    return versions[1:]


def in_float64(first: Tensors, versions: list[Tensors], mix: float) -> Tensors:
    """Compute the average as a weighted sum of all versions, in float64."""
    shares = [mix * (1 - mix) ** (len(versions) - k) for k in range(1, len(versions) + 1)]
    total = {n: (1 - mix) ** len(versions) * t.double() for n, t in first.items()}
    for share, version in zip(shares, versions, strict=True):
        total = {n: t + share * version[n].double() for n, t in total.items()}
    return total


@pytest.mark.parametrize("mix", [0.01, 0.3, 1.0])
def test_an_average_is_the_weighted_sum_of_its_versions(mix: float):
    first = {"head": torch.linspace(-1, 1, 33)}
    versions = drawn(first, 60)
    weights = {n: t.clone() for n, t in first.items()}
    average = MovingAverage(weights, mix)
    for number, version in enumerate(versions, 1):
        weights["head"].copy_(version["head"])
        average.add(weights, number)
    expected = in_float64(first, versions, mix)["head"]
    assert float((weights["head"].double() - expected).abs().max()) < 1e-6
    assert mix < 1 or torch.equal(weights["head"], versions[-1]["head"])


def test_integers_are_replaced_and_not_averaged():
    weights = {"head": torch.zeros(1), "calls": torch.tensor([3])}
    average = MovingAverage(weights, 0.5)
    weights |= {"head": torch.ones(1), "calls": torch.tensor([7])}
    average.add(weights, 1)
    assert [t.tolist() for t in average.state(weights).values()] == [[0.5], [7]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_worker_averages_what_arrives_in_float32(tiny_model: Path, rows: Batch, dtype: str):
    worker = reference(tiny_model, dtype=dtype, mix=0.01)
    first = held(worker)
    before = worker.logprobs(rows, into="x")
    versions = drawn(first, 5)
    for number, version in enumerate(versions, 1):
        receive(worker, version, number)
    expected, found = in_float64(first, versions, 0.01), average(worker)
    assert all(float((found[n].double() - t).abs().max()) < 1e-6 for n, t in expected.items())
    rounded = {n: t.to(getattr(torch, dtype)) for n, t in found.items()}
    assert equal(held(worker), rounded), "it computes with the average"
    assert worker.logprobs(rows, into="x") != before
    worker.close()


def test_a_version_counts_once_and_a_failed_transfer_not_at_all(tiny_model: Path):
    worker = reference(tiny_model)
    first = held(worker)
    one, two = drawn(first, 2)
    receive(worker, one, 1)
    with pytest.raises(WeightSyncError, match="has no tensor of that name"):
        receive(worker, {**two, "unknown": torch.zeros(1)}, 2)
    receive(worker, two, 2)
    expected = average(worker)
    receive(worker, two, 2)  # again, after a restart of the driver
    assert equal(average(worker), expected) and equal(held(worker), expected)
    plain = in_float64(first, [one, two], 0.3)
    assert all(float((expected[n].double() - t).abs().max()) < 1e-6 for n, t in plain.items())
    worker.close()


def saved(worker: MovingReferenceWorker, folder: Path) -> Path:
    worker.save_checkpoint(folder)
    assert worker.checkpoint_written(wait=True)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_average_continues_from_a_checkpoint_with_the_same_bits(
    tiny_model: Path, tmp_path: Path, dtype: str
):
    worker = reference(tiny_model, dtype=dtype)
    one, two, three = drawn(held(worker), 3)
    receive(worker, one, 4)
    receive(worker, two, 8)
    folder = saved(worker, tmp_path / "reference")
    before = held(worker)
    receive(worker, three, 12)
    again = reference(tiny_model, dtype=dtype)
    again.load_checkpoint(folder)
    assert again.version == 8 and equal(held(again), before)
    receive(again, three, 12)
    assert equal(average(again), average(worker)) and equal(held(again), held(worker))
    stored = load_file(folder / "model" / "model.safetensors")
    assert all(torch.equal(stored[n], t) for n, t in before.items() if n in stored) and len(stored) > 10
    worker.close()
    again.close()


@pytest.mark.thorough
def test_ranks_and_tensor_parallel_ranks_have_the_same_average(tiny_model: Path, tmp_path: Path):
    worker = reference(tiny_model)
    versions = drawn(held(worker), 3)
    for number, version in enumerate(versions[:2], 1):
        receive(worker, version, number)
    folder = saved(worker, tmp_path / "alone")
    receive(worker, versions[2], 3)
    expected = average(worker)
    worker.close()
    torch.save(versions, tmp_path / "versions.pt")
    settings: dict[str, Any] = {"two": {}, "tensor parallel": {"tensor_parallel": 2}}
    case = {"folder": str(tmp_path), "model": str(tiny_model), "ranks": 2, "settings": settings}
    (tmp_path / "case.json").write_text(json.dumps({**case, "from": str(folder)}))
    run_processes(main, tmp_path / "case.json", 2)
    results = torch.load(tmp_path / "results.pt")
    assert set(results) == {name + how for name in settings for how in ("", ", resumed")}
    assert all(equal(found, expected) for found in results.values())
    for name in settings:  # a checkpoint of two ranks continues on one
        worker = reference(tiny_model)
        worker.load_checkpoint(tmp_path / name)
        receive(worker, versions[2], 3)
        assert equal(average(worker), expected)
        worker.close()


def test_an_actor_with_an_adapter_moves_its_reference_by_merged_weights(tiny_model: Path, rows: Batch):
    config = ActorConfig(model=str(tiny_model), lora=Lora(rank=4), learning_rate=1e-2)
    actor, moving = ActorWorker(config), reference(tiny_model)
    first = held(moving)
    actor.update(rows, loss=PolicyLoss(old="old_logprobs"))
    actor.update(rows, loss=PolicyLoss(old="old_logprobs"))
    merged = {name: tensor.clone() for name, tensor in actor.engine.named_tensors()}
    moving.receive_weights(actor.publish_weights(version=actor.version))
    actor.finish_publishing(version=actor.version)
    expected, found = in_float64(first, [merged], 0.3), average(moving)
    assert all(float((found[n].double() - t).abs().max()) < 1e-6 for n, t in expected.items())
    assert any(not torch.equal(found[n], first[n]) for n in first)
    actor.close()
    moving.close()


NO_ROWS = TableSource("no rows", pa.table({"x": []}))


def test_settings_that_keep_no_average_are_refused(tiny_model: Path):
    def made(*_: object, **__: object) -> Any: ...

    config = MovingReferenceConfig(model=str(tiny_model), mix=0.5, engine=made)
    with pytest.raises(UserError, match=r"mix=0.5: engine=.*keeps no moving average"):
        MovingReferenceWorker.check(config, [], NO_ROWS)
    for mix in (0.0, 1.5):
        with pytest.raises(UserError, match="mix"):
            MovingReferenceConfig(model="m", mix=mix)


def test_a_moving_reference_that_follows_no_group_is_refused(tiny_model: Path):
    actor = weft.group(weft.ActorWorker, model=str(tiny_model))
    moving = weft.group(weft.MovingReferenceWorker, model=str(tiny_model), mix=0.5)
    pairs = TableSource(
        "pairs",
        pa.table({"prompt_ids": [[1]], "chosen_ids": [[2]], "rejected_ids": [[3]]}),
    )
    graph = dpo(pairs, actor=actor, reference=moving)
    with pytest.raises(
        UserError, match=r"'reference' is a MovingReferenceWorker, .*add reference\.follows"
    ):
        check_graphs([graph])
    moving.follows(actor, every=2)
    check_graphs([graph])
