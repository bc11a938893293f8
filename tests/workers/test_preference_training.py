"""Preference losses on the real engine: the step is that of the pairs, however they are cut, ordered, padded or spread."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from preference_ranks import steps

import weft
from weft.algorithms.preference import dpo, preference_accuracy, reference_of_pairs
from weft.algorithms.preference_loss import PreferenceLoss
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.dataflow.graph import TableSource
from weft.dataflow.handle import group
from weft.dataflow.metrics import merge
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.dispatch import Coordinates, Dispatch, RowSizes
from weft.workers.reference import ReferenceWorker
from weft.workers.training import plan_microbatches

HERE = Path(__file__).parent


def actor(model: Path, **settings: Any) -> ActorWorker:
    return ActorWorker(ActorConfig(model=str(model), **{"learning_rate": 1e-3, "max_grad_norm": None, **settings}))


@pytest.fixture
def pairs(rows: Batch) -> Batch:
    """11 pairs whose rows stand apart from each other; of one pair a response is masked whole."""
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


def difference(gradient: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Of two gradients, relative to the norm of the second."""
    squares = sum(float((gradient[n].double() - other[n].double()).square().sum()) for n in other)
    return (squares / sum(float(g.double().square().sum()) for g in other.values())) ** 0.5


def check_same(found: dict[str, Any], whole: dict[str, Any]) -> None:
    for name, (gradient, metrics) in whole.items():
        assert difference(found[name][0], gradient) < 1e-6, name
        for metric, value in metrics.items():
            assert found[name][1][metric].value == pytest.approx(value.value, rel=1e-4, abs=1e-5), (name, metric)


def test_no_loss_depends_on_microbatches_order_or_parts(tiny_model: Path, pairs: Batch):
    whole = steps(actor(tiny_model, microbatch_tokens=100_000), pairs)
    assert whole["dpo"][1]["tokens"].value == whole["kto"][1]["tokens"].value > 0
    for tokens in (1, 60):
        check_same(steps(actor(tiny_model, microbatch_tokens=tokens), pairs), whole)
    order = np.random.default_rng(2).permutation(len(pairs))
    check_same(steps(actor(tiny_model, microbatch_tokens=60), pairs.take(order)), whole)
    groups = pairs.numpy("group_id")
    parts = [
        np.flatnonzero(np.isin(groups, some)).tolist()
        for some in ([100], [101, 107], [*range(102, 107), *range(108, 111)])
    ]
    check_same(steps(actor(tiny_model, microbatch_tokens=60), pairs, parts), whole)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_no_loss_depends_on_ranks(tiny_model: Path, pairs: Batch, tmp_path: Path, ranks: int):
    whole = steps(actor(tiny_model), pairs)
    sizes = RowSizes(pairs.lengths("response_ids"), pairs.numpy("group_id"), whole_groups=True)
    shares = Dispatch.SPLIT_BY_DP.distribute(sizes, [Coordinates(dp=r) for r in range(ranks)])
    if ranks == 3:  # one of them has nothing to do
        shares = [sorted([*(shares[0] or ()), *(shares[1] or ())]), [], shares[2]]
    with pa.ipc.new_file(tmp_path / "rows.arrow", pairs.record.schema) as file:
        file.write_batch(pairs.record)
    config = {"model": str(tiny_model), "learning_rate": 1e-3, "max_grad_norm": None, "microbatch_tokens": 60}
    (tmp_path / "case.json").write_text(json.dumps({"shares": shares, "config": config}))
    command = [sys.executable, str(HERE / "preference_ranks.py"), str(tmp_path)]
    programs = [subprocess.Popen([*command, str(r)], stderr=subprocess.PIPE, text=True) for r in range(ranks)]
    try:
        errors = [program.communicate(timeout=300)[1] for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert all(program.returncode == 0 for program in programs), "\n".join(errors)
    seen = [torch.load(tmp_path / f"rank{r}.pt", weights_only=False) for r in range(ranks)]
    check_same({name: (seen[0][name][0], merge(one[name][1] for one in seen)) for name in whole}, whole)


def test_padded_rows_give_the_same(tiny_model: Path, pairs: Batch):
    packed, padded = actor(tiny_model), actor(tiny_model)
    model = padded.engine.model  # pyright: ignore[reportAttributeAccessIssue]
    assert model.packs
    model.packs = False
    model.causal_lm.set_attn_implementation("sdpa")
    check_same(steps(padded, pairs), steps(packed, pairs))


def test_minibatches_keep_pairs_whole(tiny_model: Path, pairs: Batch):
    worker = actor(tiny_model)
    metrics = worker.update(pairs, loss=PreferenceLoss(), epochs=2, minibatches=5)  # half a pair would be an error
    assert worker.engine.steps == 10  # pyright: ignore[reportAttributeAccessIssue]
    mask, cu_seqlens = pairs.ragged_numpy("response_mask")
    trained = np.add.reduceat(mask, cu_seqlens[:-1]) > 0
    whole = 11 - len(set(pairs.numpy("group_id")[~trained]))  # the others have a response without a trained token
    assert 0 < whole < 11 and metrics["reward_margin"].weight == 2 * whole  # pyright: ignore[reportAttributeAccessIssue]


def test_a_pair_with_an_empty_response_is_left_out(tiny_model: Path):
    columns: dict[str, Any] = {"prompt_ids": [[1], [1], [2], [2]], "response_ids": [[3, 4], [], [5], [6]]}
    columns |= {"reference_logprobs": [[-4.0, -4.0], [], [-4.0], [-4.0]], "group_id": [1, 1, 2, 2]}
    batch = Batch.of(**columns, preferred=[1, 0, 1, 0])
    both, alone = (actor(tiny_model).update(rows, loss=PreferenceLoss()) for rows in (batch, batch.take([2, 3])))
    assert both["loss"].value == pytest.approx(alone["loss"].value, rel=1e-6)
    assert both["reward_margin"].weight == 1  # pyright: ignore[reportAttributeAccessIssue]
    assert both["reward_margin"].value == pytest.approx(alone["reward_margin"].value, rel=1e-5)


def test_a_group_that_is_no_pair_is_named(tiny_model: Path, pairs: Batch):
    with pytest.raises(UserError, match="group 103 has 1 rows, 1 of them preferred; a preference loss takes pairs"):
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


def test_a_run_learns_pairs_and_says_so(tmp_path: Path, tiny_model: Path):
    """DPO through the driver, with a reference computed once: held-out pairs come into the right order."""
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
    known = weft.precompute(reference_of_pairs(train, reference=reference), root=tmp_path, name="known", progress=False)
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
    assert metrics[1]["actor/reward_margin"] == pytest.approx(0, abs=1e-4), "the policy begins as its reference"
    assert metrics[1]["samples"] == 32 and metrics[-1]["actor/reward_margin"] > 0.05
    assert metrics[-1]["actor/loss"] < metrics[1]["actor/loss"]
    assert metrics[-1]["eval/weft.functions/preference_margin"] > metrics[0]["eval/weft.functions/preference_margin"]
