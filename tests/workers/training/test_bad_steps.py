"""Bad steps are skipped and counted, and their rows kept; too many in a row end training."""

import json
import math
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from bad_step_ranks import LOSS, equal, main, state
from ranks import run_processes
from safetensors.torch import load_file

import weft
from weft.algorithms.advantages import group_advantages, group_centred
from weft.algorithms.aggregation import sequence_mean
from weft.algorithms.kl import KlPenalty
from weft.algorithms.loss import PackedRows
from weft.algorithms.policy_loss import PolicyLoss
from weft.dataflow.batch import Batch
from weft.dataflow.errors import DivergedError, UserError, WorkerError
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.worker import Context


def actor(model: Path, run_dir: Path | None = None, **settings: Any) -> ActorWorker:
    config = ActorConfig(model=str(model), **{"learning_rate": 1e-3, **settings})
    return ActorWorker(config, Context("actor", run_dir=run_dir))


def poisoned(rows: Batch, row: int, value: float = math.nan) -> Batch:
    """Replace one advantage of a row, so that the loss becomes nan or infinite."""
    advantages, cu_seqlens = rows.ragged_numpy("advantages")
    trained = np.flatnonzero(rows.ragged_numpy("response_mask")[0])
    changed = advantages.copy()
    changed[trained[trained >= cu_seqlens[row]][0]] = value
    return rows.with_columns(advantages=(changed, cu_seqlens))


def without_tokens(rows: Batch) -> Batch:
    mask, cu_seqlens = rows.ragged_numpy("response_mask")
    return rows.with_columns(response_mask=(np.zeros_like(mask), cu_seqlens))


def values(metrics: Any) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


def kept(run_dir: Path) -> dict[str, pa.Table]:
    files = sorted((run_dir / "skipped" / "actor").iterdir()) if (run_dir / "skipped").exists() else []
    return {file.name: pa.ipc.open_file(file).read_all() for file in files}


def losses_of(table: pa.Table) -> np.ndarray:
    return table["loss"].to_numpy()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_step_that_is_not_finite_changes_no_bit_and_leaves_its_rows(
    tiny_model: Path, rows: Batch, tmp_path: Path, value: float
):
    worker = actor(tiny_model, tmp_path, microbatch_tokens=40)
    # create moments, which would move the weights even without a gradient
    worker.update(rows, loss=LOSS)
    before, steps = state(worker), worker.engine.steps  # pyright: ignore[reportAttributeAccessIssue]
    bad = poisoned(rows, 7, value)
    metrics = values(worker.update(bad, loss=LOSS))
    assert metrics["bad_steps"] == metrics["skipped_steps"] == 1 and "learning_rate" not in metrics
    assert equal(state(worker), before) and worker.engine.steps == steps  # pyright: ignore[reportAttributeAccessIssue]
    ((name, table),) = kept(tmp_path).items()
    assert name == "update_000002_rank_0.arrow"
    assert (
        Batch(table.combine_chunks().to_batches()[0]).select(bad.columns).to_rows()[8:]
        == bad.to_rows()[8:]
    )
    assert table.column_names == [*bad.columns, "loss"]
    assert np.flatnonzero(~np.isfinite(losses_of(table))).tolist() == [7]
    healthy = values(worker.update(rows, loss=LOSS))
    assert healthy["bad_steps"] == healthy["skipped_steps"] == 0 and not equal(state(worker), before)
    assert len(kept(tmp_path)) == 1


def test_a_step_with_a_gradient_above_the_limit_is_skipped_and_its_norm_reported(
    tiny_model: Path, rows: Batch, tmp_path: Path
):
    free = values(actor(tiny_model).update(rows, loss=LOSS))
    norm = free["grad_norm"]
    assert norm > 0.01
    at_limit = actor(tiny_model, tmp_path, skip_above_grad_norm=norm)
    assert values(at_limit.update(rows, loss=LOSS)) == free and not kept(tmp_path)
    worker = actor(tiny_model, tmp_path, skip_above_grad_norm=0.999 * norm, max_grad_norm=0.1 * norm)
    before = state(worker)
    metrics = values(worker.update(rows, loss=LOSS))
    assert metrics["grad_norm"] == norm and metrics["loss"] == free["loss"]
    assert metrics["bad_steps"] == metrics["skipped_steps"] == 1 and "learning_rate" not in metrics
    assert equal(state(worker), before)
    assert kept(tmp_path)["update_000001_rank_0.arrow"]["sample_id"].to_pylist() == list(range(23))


@pytest.mark.parametrize(
    "loss",
    [
        LOSS,
        PolicyLoss(
            old="old_logprobs",
            aggregation=sequence_mean,
            kl=KlPenalty(coefficient=0.1),
            entropy_coefficient=0.01,
        ),
    ],
)
def test_the_losses_of_the_rows_add_up_to_that_of_the_step(
    tiny_model: Path, rows: Batch, tmp_path: Path, loss: PolicyLoss
):
    worker = actor(tiny_model, tmp_path, skip_above_grad_norm=1e-9, microbatch_tokens=60)
    metrics, mask = (
        values(worker.update(rows, loss=loss)),
        torch.tensor(rows.ragged_numpy("response_mask")[0]),
    )
    own = losses_of(kept(tmp_path)["update_000001_rank_0.arrow"])
    assert own.dtype == np.float32 and np.ptp(own) > 0.1
    assert own.sum() / loss.count(
        PackedRows.of(rows.lengths("response_ids"), response_mask=mask)
    ) == pytest.approx(metrics["loss"], rel=1e-4)


def test_the_rows_of_all_parts_belong_to_the_step(tiny_model: Path, rows: Batch, tmp_path: Path):
    worker = actor(tiny_model, tmp_path)
    unmasked = Batch(rows.slice(8, 15).record.drop_columns(["response_mask"]))
    for _ in range(2):  # the second step must not see the first
        worker.update(poisoned(rows, 3).slice(0, 8), loss=LOSS, last=False)
        assert values(worker.update(unmasked, loss=LOSS))["bad_steps"] == 1
    first, second = kept(tmp_path).values()
    assert first["sample_id"].to_pylist() == second["sample_id"].to_pylist() == list(range(23))
    assert first["response_mask"].null_count == 15
    assert np.flatnonzero(~np.isfinite(losses_of(first))).tolist() == [3]


@pytest.mark.parametrize("good", [True, False])
def test_rows_are_held_no_longer_than_their_step(
    tiny_model: Path, rows: Batch, tmp_path: Path, good: bool
):
    worker = actor(tiny_model, tmp_path)
    first, last = (rows if good else poisoned(rows, 0)).take(range(9)), rows.take(range(9, 23))
    records = [weakref.ref(part.record) for part in (first, last)]
    worker.update(first, loss=LOSS, last=False)
    del first
    assert records[0]() is not None, "until the step is over it may prove bad"
    worker.update(last, loss=LOSS)
    del last
    assert [record() for record in records] == [None, None]
    assert len(kept(tmp_path)) == (0 if good else 1)


def test_each_step_of_an_update_leaves_its_own_rows(tiny_model: Path, rows: Batch, tmp_path: Path):
    worker = actor(tiny_model, tmp_path, stop_after_bad_steps=10)
    metrics = values(worker.update(poisoned(rows, 5), loss=LOSS, epochs=2, minibatches=3))
    assert metrics["bad_steps"] == metrics["skipped_steps"] == 2 and worker.version == 1
    assert worker.engine.steps == 4  # pyright: ignore[reportAttributeAccessIssue]
    files = kept(tmp_path)
    numbers = [int(name.split("_")[3]) for name in files]
    assert list(files) == [f"update_000001_step_{n}_rank_0.arrow" for n in numbers]
    assert 1 <= numbers[0] <= 3 < numbers[1] <= 6
    for table in files.values():
        assert len(table) in (7, 8)
        assert table.filter(~np.isfinite(losses_of(table)))["sample_id"].to_pylist() == [5]


def test_too_many_bad_steps_in_a_row_end_training_with_the_reason(
    tiny_model: Path, rows: Batch, tmp_path: Path
):
    worker = actor(tiny_model, tmp_path, skip_above_grad_norm=100)
    worker.update(rows, loss=LOSS)
    before = state(worker)
    worker.update(poisoned(rows, 4), loss=LOSS)
    large = rows.with_columns(
        advantages=(1e4 * rows.ragged_numpy("advantages")[0], rows.ragged_numpy("advantages")[1])
    )
    norm = values(worker.update(large, loss=LOSS))["grad_norm"]
    with pytest.raises(DivergedError) as caught:
        worker.update(poisoned(poisoned(rows, 2, math.inf), 6, -math.inf), loss=LOSS)
    assert str(caught.value).splitlines() == [
        "3 bad optimizer steps in a row (stop_after_bad_steps=3):",
        "  update 2: the loss is nan; on this rank it comes from samples 4",
        f"  update 3: the norm of the gradient is {norm:.4g}, above skip_above_grad_norm=100",
        "  update 4: the loss is nan; on this rank it comes from samples 2, 6",
        "  None of them was applied: the current weights, also in later checkpoints, are those from before "
        f"the bad steps; their rows are in {tmp_path / 'skipped' / 'actor'}",
    ]
    assert caught.value.sample_ids == (2, 6)
    assert equal(state(worker), before) and len(kept(tmp_path)) == 3


def test_a_good_step_begins_the_count_again_and_one_without_tokens_does_not(
    tiny_model: Path, rows: Batch
):
    worker, bad = actor(tiny_model, stop_after_bad_steps=2), poisoned(rows, 0)
    for _ in range(3):
        assert values(worker.update(bad, loss=LOSS))["bad_steps"] == 1
        assert values(worker.update(rows, loss=LOSS))["bad_steps"] == 0
    worker.update(bad, loss=LOSS)
    empty = values(worker.update(without_tokens(rows), loss=LOSS))
    assert empty["skipped_steps"] == 1 and empty["bad_steps"] == 0
    with pytest.raises(
        DivergedError, match=r"2 bad .*\n  update 7.*\n  update 9.*\n.* not kept, without a run"
    ):
        worker.update(bad, loss=LOSS)


def test_without_a_run_directory_nothing_is_written(
    tiny_model: Path, rows: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert values(actor(tiny_model).update(poisoned(rows, 0), loss=LOSS))["bad_steps"] == 1
    assert not list(tmp_path.iterdir())


def test_bad_steps_before_a_checkpoint_count_after_it(tiny_model: Path, rows: Batch, tmp_path: Path):
    worker = actor(tiny_model, tmp_path)
    worker.update(rows, loss=LOSS)
    before = state(worker)
    for row in (1, 2):
        worker.update(poisoned(rows, row), loss=LOSS)
    worker.save_checkpoint(tmp_path / "checkpoint")
    assert worker.checkpoint_written(wait=True)
    again = actor(tiny_model, tmp_path)
    again.update(rows, loss=LOSS, last=False)  # a step after the checkpoint
    again.load_checkpoint(tmp_path / "checkpoint")
    assert equal(state(again), before) and again.version == 3
    with pytest.raises(DivergedError, match=r"update 2: .*\n  update 3: .*\n  update 4: "):
        again.update(poisoned(rows, 3), loss=LOSS)
    assert [len(table) for table in kept(tmp_path).values()] == [23, 23, 23]


def test_limits_that_nothing_could_keep_to_are_refused():
    with pytest.raises(UserError, match="skip_above_grad_norm"):
        ActorConfig(model="m", skip_above_grad_norm=0.0)
    with pytest.raises(UserError, match="stop_after_bad_steps"):
        ActorConfig(model="m", stop_after_bad_steps=0)


# Several ranks


def run_ranks(
    folder: Path, model: Path, steps: Sequence[Batch], ranks: int, **settings: Any
) -> list[list[dict]]:
    """Return the reports of each of `ranks` processes, per update."""
    with pa.ipc.new_file(folder / "rows.arrow", steps[0].record.schema) as file:
        for rows in steps:
            file.write_batch(rows.record)
    config = {"model": str(model), "learning_rate": 1e-3, **settings}
    (folder / "case.json").write_text(
        json.dumps({"folder": str(folder), "ranks": ranks, "config": config})
    )
    run_processes(main, folder / "case.json", ranks)
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(ranks)]


LAYOUTS = {
    "two replicas": (2, {}),
    "two replicas, layer by layer": (2, {"gather": "layerwise", "microbatch_tokens": 60}),
    "tensor parallel": (2, {"tensor_parallel": 2}),
    "two replicas of two": (4, {"tensor_parallel": 2}),
}
every_layout = pytest.mark.parametrize(
    "layout",
    ["two replicas", *(pytest.param(name, marks=pytest.mark.slow) for name in list(LAYOUTS)[1:])],
)


@pytest.mark.thorough
@every_layout
def test_all_ranks_skip_together_and_each_replica_keeps_its_rows(
    tiny_model: Path, rows: Batch, tmp_path: Path, layout: str
):
    num_ranks, settings = LAYOUTS[layout]
    degree = settings.get("tensor_parallel", 1)
    replicas = num_ranks // degree
    large = rows.with_columns(
        advantages=(1e4 * rows.ragged_numpy("advantages")[0], rows.ragged_numpy("advantages")[1])
    )
    steps = [rows, poisoned(rows, 1), large, rows, poisoned(rows, 2, math.inf), poisoned(rows, 17)]
    settings = {**settings, "skip_above_grad_norm": 100, "stop_after_bad_steps": 2}
    ranks = run_ranks(tmp_path, tiny_model, [steps[k] for k in (0, 1, 3, 2, 5)], num_ranks, **settings)
    for said in ranks:
        assert [update["unchanged"] for update in said] == [False, True, False, True, True]
        assert [bool(update["ended"]) for update in said] == [False, False, False, False, True]
        assert "update 4: the norm of the gradient is " in said[4]["ended"]
        assert "update 5: the loss is nan" in said[4]["ended"]
        assert ("samples 17" in said[4]["ended"]) == (
            said is ranks[-1] or replicas == 1 or ranks.index(said) >= degree
        )
    first_of_replica = [said for number, said in enumerate(ranks) if number % degree == 0]
    for update, bad in enumerate([0, 1, 0, 1]):
        assert sum(said[update]["metrics"]["bad_steps"] for said in first_of_replica) == bad
    norms = {said[3]["metrics"]["grad_norm"] for said in ranks}
    assert len(norms) == 1 and norms.pop() > 100
    files = kept(tmp_path)
    assert sorted(files) == [
        f"update_{u:06d}_rank_{d * degree}.arrow" for u in (2, 4, 5) for d in range(replicas)
    ]
    for update, at_fault in ((2, [1]), (4, []), (5, [17])):
        tables = [files[f"update_{update:06d}_rank_{d * degree}.arrow"] for d in range(replicas)]
        for replica, table in enumerate(tables):
            assert table["sample_id"].to_pylist() == list(range(replica, 23, replicas))
        whole = pa.concat_tables(tables)
        assert whole.filter(~np.isfinite(losses_of(whole)))["sample_id"].to_pylist() == at_fault


# A whole run


@weft.node(reads=("response_ids", "base"), writes=("reward",))
def log_reward(samples: Batch) -> Batch:
    """A reward with a missing case: log(0)."""
    with np.errstate(divide="ignore"):
        chosen = [ids[0] for ids in samples["response_ids"].to_pylist()]
        return samples.with_columns(reward=np.log(samples.numpy("base")) + chosen)


@weft.graph
def mistaken(prompts, *, rollout, actor):
    samples = log_reward(rollout.generate(prompts, n=4, sampling=weft.Sampling(max_tokens=6)))
    return actor.update(group_advantages(samples, estimator=group_centred))


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", [weft.Synchronous, weft.Pipelined])
def test_a_run_with_bad_steps_ends_and_names_the_file_of_their_rows(
    tiny_model: Path, tmp_path: Path, schedule: Any
):
    bases = [
        1.0,
        2.0,
        1.0,
        1.0,
        1.0,
        0.0,
        0.0,
        3.0,
        1.0,
        0.0,
        1.0,
        1.0,
    ]  # two prompts per step: steps 3, 4 and 5 are bad
    prompts = weft.TableSource(
        "prompts", pa.table({"prompt_ids": [[k + 3, 5] for k in range(12)], "base": bases})
    )
    for resume in ("none", "latest"):
        learner = weft.group(weft.ActorWorker, model=str(tiny_model), learning_rate=1e-2)
        rollout = weft.group(weft.RolloutWorker, model=str(tiny_model), engine="transformers")
        rollout.follows(learner)
        driver = weft.Driver(
            mistaken(prompts, rollout=rollout, actor=learner),
            schedule=schedule(steps=6, prompts_per_step=2, shuffle=False),
            checkpoint=weft.CheckpointConfig(every=1, keep=10),
            backend=weft.Local(),
            root=tmp_path,
            name="run",
            resume=resume,
            progress=False,
        )
        with driver, pytest.raises(WorkerError) as caught:
            driver.run()
        text, run = str(caught.value), tmp_path / "run"
        assert (
            "node 'actor.update', samples " in text
            and "DivergedError: 3 bad optimizer steps in a row" in text
        )
        assert (
            "\n  update 3: the loss is nan" in text
            and f"their rows are in {run / 'skipped' / 'actor'}" in text
        )
        assert [row["actor/bad_steps"] for row in driver.directory.metrics[1:]] == [0, 0, 1, 1]
        files = kept(run)
        assert list(files) == [f"update_{update:06d}_rank_0.arrow" for update in (3, 4, 5)]
        for rows, position in zip(files.values(), (5, 6, 9), strict=True):
            assert len(rows) == 8 and {"sample_id", "group_id", "advantages"} <= set(rows.column_names)
            at_fault = rows.filter(~np.isfinite(losses_of(rows)))
            assert [ids[0] - 3 for ids in at_fault["prompt_ids"].to_pylist()] == [position] * 4
            assert len(set(at_fault["group_id"].to_pylist())) == 1
    one, two, three = (
        load_file(run / "checkpoints" / f"step_{n:06d}" / "actor" / "model" / "model.safetensors")
        for n in (1, 2, 3)
    )
    assert not equal(one, two) and equal(two, three)
