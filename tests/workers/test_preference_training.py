"""Preference losses on the real engine: pairs stay together, and a run learns them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import weft
from weft.algorithms.preference import dpo, preference_accuracy, reference_of_pairs
from weft.algorithms.preference_loss import PreferenceLoss
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.dataflow.graph import group
from weft.dataflow.metrics import Mean
from weft.dataflow.source import TableSource
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.reference import ReferenceWorker
from weft.workers.training.microbatch_plan import plan_microbatches


def actor(model: Path, **settings: Any) -> ActorWorker:
    return ActorWorker(
        ActorConfig(model=str(model), **{"learning_rate": 1e-3, "max_grad_norm": None, **settings})
    )


@pytest.fixture
def pairs(rows: Batch) -> Batch:
    """11 pairs, with the rows of a pair apart. In one pair, a response is fully masked."""
    rows = rows.slice(0, 22)
    mask, cu_seqlens = rows.ragged_numpy("response_mask")
    mask = mask.copy()
    mask[cu_seqlens[5] : cu_seqlens[6]] = 0
    order = np.random.default_rng(1).permutation(22)
    return rows.with_columns(
        group_id=100 + np.arange(22) // 2,
        preferred=(np.arange(22) % 2 == 0).astype(np.uint8),
        reference_point=np.full(22, 0.2, np.float32),
        response_mask=(mask, cu_seqlens),
    ).take(order)


def test_the_engine_computes_the_weights_of_wpo(tiny_model: Path, pairs: Batch):
    from transformers import AutoModelForCausalLM

    worker = actor(tiny_model)
    found = worker.update(pairs, loss=PreferenceLoss(on_policy=True))["policy_weight"]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    aligned: dict[int, list[float]] = {}
    for row in pairs.record.to_pylist():
        ids, first = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]]), len(row["prompt_ids"])
        with torch.no_grad():
            logits = model(ids).logits[0, first - 1 : -1] / row["temperature"]
        log_p = logits.log_softmax(-1)
        chosen = log_p.gather(1, ids[0, first:, None])[:, 0] - log_p.exp().square().sum(-1).log()
        mask = torch.tensor(row["response_mask"]) > 0
        if mask.any():
            aligned.setdefault(row["group_id"], []).append(chosen[mask].mean().item())
    weights = [min(1.0, math.exp(sum(both))) for both in aligned.values() if len(both) == 2]
    assert isinstance(found, Mean) and found.weight == len(weights) >= 9
    assert found.value == pytest.approx(sum(weights) / len(weights), rel=1e-4)
    assert 0.05 < found.value < 0.95
    worker.close()


def test_minibatches_keep_pairs_whole(tiny_model: Path, pairs: Batch):
    worker = actor(tiny_model)
    metrics = worker.update(
        pairs, loss=PreferenceLoss(), epochs=2, minibatches=5
    )  # half a pair would raise
    assert worker.engine.steps == 10  # pyright: ignore[reportAttributeAccessIssue]
    mask, cu_seqlens = pairs.ragged_numpy("response_mask")
    trained = np.add.reduceat(mask, cu_seqlens[:-1]) > 0
    whole = 11 - len(
        set(pairs.numpy("group_id")[~trained])
    )  # the other pairs have a response without trained tokens
    assert 0 < whole < 11 and metrics["reward_margin"].weight == 2 * whole  # pyright: ignore[reportAttributeAccessIssue]


def test_a_pair_with_an_empty_response_is_left_out(tiny_model: Path):
    columns: dict[str, Any] = {
        "prompt_ids": [[1], [1], [2], [2]],
        "response_ids": [[3, 4], [], [5], [6]],
    }
    columns |= {"reference_logprobs": [[-4.0, -4.0], [], [-4.0], [-4.0]], "group_id": [1, 1, 2, 2]}
    batch = Batch.of(**columns, preferred=[1, 0, 1, 0])
    both, alone = (
        actor(tiny_model).update(rows, loss=PreferenceLoss()) for rows in (batch, batch.take([2, 3]))
    )
    assert both["loss"].value == pytest.approx(alone["loss"].value, rel=1e-6)
    assert both["reward_margin"].weight == 1  # pyright: ignore[reportAttributeAccessIssue]
    assert both["reward_margin"].value == pytest.approx(alone["reward_margin"].value, rel=1e-5)


def test_a_group_that_is_no_pair_is_named(tiny_model: Path, pairs: Batch):
    with pytest.raises(
        UserError, match="group 103 has 1 rows, 1 of them preferred; a preference loss takes pairs"
    ):
        half = np.flatnonzero((pairs.numpy("group_id") != 103) | (pairs.numpy("preferred") == 1))
        actor(tiny_model).update(pairs.take(half), loss=PreferenceLoss())


def test_groups_are_never_cut():
    rng = np.random.default_rng(0)
    lengths, groups = rng.integers(1, 300, 1000), rng.integers(0, 300, 1000)
    for packed in (False, True):
        plan = plan_microbatches(lengths, 3000, packed=packed, groups=groups)
        assert sorted(np.concatenate(plan)) == list(range(1000))
        homes = [set(groups[part]) for part in plan]
        assert sum(map(len, homes)) == len(set.union(*homes))
        for part, home in zip(plan, homes, strict=True):
            tokens = lengths[part].sum() if packed else len(part) * lengths[part].max()
            assert tokens <= 3000 or len(home) == 1


def test_a_run_learns_pairs_and_reports_it(tmp_path: Path, tiny_model: Path):
    """Train DPO in the driver with a precomputed reference, and rank held-out pairs correctly."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 40, 4).tolist() for _ in range(64)]
    table = pa.table(
        {
            "prompt_ids": prompts,
            "chosen_ids": [[p[0], 1] for p in prompts],
            "rejected_ids": [[p[1], 1] for p in prompts],
        }
    )
    train, held_out = TableSource("train", table.slice(0, 48)), TableSource("held_out", table.slice(48))
    reference = group(ReferenceWorker, model=str(tiny_model))
    known = weft.precompute(
        reference_of_pairs(train, reference=reference), root=tmp_path, name="known", progress=False
    )
    actor = group(ActorWorker, model=str(tiny_model), learning_rate=3e-3)
    accuracy = preference_accuracy(held_out, actor=actor)
    with weft.Driver(
        dpo(known, actor=actor),
        schedule=weft.Pipelined(steps=24, prompts_per_step=16, groups_per_part=8),
        evaluations=[weft.Evaluation(accuracy, every=24)],
        root=tmp_path,
        name="run",
        progress=False,
    ) as driver:
        metrics = driver.run()
    assert metrics[1]["actor/reward_margin"] == pytest.approx(0, abs=1e-4), (
        "the policy begins as its reference"
    )
    assert metrics[1]["samples"] == 32 and metrics[-1]["actor/reward_margin"] > 0.05
    assert metrics[-1]["actor/loss"] < metrics[1]["actor/loss"]
    assert metrics[-1]["eval/preference_margin"] > metrics[0]["eval/preference_margin"]
