"""A critic with an adapter: only the adapter and the full scalar head are trained, saved and
loaded."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from critic_ranks import LOSSES
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.dataflow.source import TableSource
from weft.workers.critic import CriticConfig, CriticWorker
from weft.workers.training.lora import Lora

NO_ROWS = TableSource("no rows", pa.table({"x": []}))


KINDS = {
    "lora": Lora(rank=4, alpha=8),
    "dora": Lora(rank=4, targets=("q_proj", "mlp.down_proj"), dora=True),
}


def critic(model: Path, head: str, lora: Lora | None = KINDS["lora"], **settings: Any) -> CriticWorker:
    made = {"learning_rate": 1e-2, "max_grad_norm": None, "head": head, **settings}
    return CriticWorker(CriticConfig(model=str(model), lora=lora, **made))


@pytest.fixture
def scored(rows: Batch) -> Batch:
    """22 rows in 11 pairs, with the columns that critics and reward models learn from."""
    rng = np.random.default_rng(3)
    rows = rows.slice(0, 22)
    _, cu_seqlens = rows.ragged_numpy("response_ids")
    drawn = {
        name: rng.normal(size=int(cu_seqlens[-1])).astype(np.float32) for name in ("values", "returns")
    }
    return rows.with_columns(
        group_id=100 + np.arange(22) // 2,
        preferred=(np.arange(22) % 2 == 0).astype(np.uint8),
        **{name: (column, cu_seqlens) for name, column in drawn.items()},
    )


def parameters(worker: CriticWorker, *, trained: bool) -> dict[str, torch.Tensor]:
    named = worker.engine.model.causal_lm.named_parameters()  # pyright: ignore[reportAttributeAccessIssue]
    return {name: p.detach().clone() for name, p in named if p.requires_grad == trained}


def updated(worker: CriticWorker, rows: Batch, steps: int = 3) -> CriticWorker:
    for _ in range(steps):
        worker.update(rows, loss=LOSSES[worker.config.head])
    return worker


def straight(model: Any, rows: Batch, *, with_it: bool) -> np.ndarray:
    """Return the plain model's head output per response token, row by row."""
    out = []
    for row in rows.to_rows():
        with torch.no_grad():
            ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
            said = model.score(model.model(ids).last_hidden_state)[0, :, 0]
        out.append(said[len(row["prompt_ids"]) - (not with_it) :][: len(row["response_ids"])].numpy())
    return np.concatenate(out)


@pytest.mark.parametrize(("head", "kind"), [("values", "lora"), ("rewards", "dora")])
def test_the_adapter_and_the_head_move_and_nothing_else(
    tiny_model: Path, scored: Batch, head: str, kind: str
):
    worker = critic(tiny_model, head, KINDS[kind])
    still, before = parameters(worker, trained=False), parameters(worker, trained=True)
    assert {"score.weight"} == {name for name in before if "lora" not in name} and len(before) > 1
    first = worker.engine.values(scored)[0]
    assert np.abs(first - critic(tiny_model, head, None).engine.values(scored)[0]).max() < 1e-5, (
        "B begins as 0"
    )
    updated(worker, scored)
    after = parameters(worker, trained=False)
    assert after.keys() == still.keys() and all(
        torch.equal(after[name], tensor) for name, tensor in still.items()
    )
    assert all(
        not torch.equal(tensor, before[name])
        for name, tensor in parameters(worker, trained=True).items()
    )
    optimizer: Any = worker.engine.optimizer  # pyright: ignore[reportAttributeAccessIssue]
    assert len(optimizer.state) == len(before)
    assert np.abs(worker.engine.values(scored)[0] - first).max() > 1e-2


@pytest.mark.parametrize(("head", "kind"), [("values", "dora"), ("rewards", "lora")])
def test_saved_adapters_load_in_peft(
    tiny_model: Path, scored: Batch, tmp_path: Path, head: str, kind: str
):
    worker = updated(critic(tiny_model, head, KINDS[kind]), scored)
    worker.save(tmp_path / "adapter")
    worker.save(tmp_path / "merged", merged=True)
    said = worker.engine.values(scored)[0]
    base = AutoModelForSequenceClassification.from_pretrained(
        tiny_model, num_labels=1, dtype=torch.float32
    )
    loaded: Any = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    theirs = straight(loaded.merge_and_unload(), scored, with_it=head == "rewards")
    assert np.abs(theirs - said).max() < 1e-5
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    assert np.abs(straight(merged, scored, with_it=head == "rewards") - said).max() < 1e-5
    assert np.abs(critic(tmp_path / "merged", head, None).engine.values(scored)[0] - said).max() < 1e-5
    # `peft` writes the same names.
    again: Any = PeftModel.from_pretrained(base, tmp_path / "adapter")
    again.save_pretrained(tmp_path / "theirs")
    mine, written = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "theirs")
    )
    assert mine.keys() == written.keys() and all(
        torch.equal(mine[name], written[name]) for name in written
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resume_from_a_checkpoint_equals_an_uninterrupted_run(
    tiny_model: Path, scored: Batch, tmp_path: Path, dtype: str
):
    worker = updated(critic(tiny_model, "values", dtype=dtype), scored)
    assert {tensor.dtype for tensor in parameters(worker, trained=True).values()} == {torch.float32}
    assert {tensor.dtype for tensor in parameters(worker, trained=False).values()} == {
        getattr(torch, dtype)
    }
    worker.save_checkpoint(tmp_path / "step")
    assert worker.checkpoint_written(wait=True)
    worker.save(tmp_path / "saved")
    kept, saved = (
        {f.name: f.read_bytes() for f in (tmp_path / p).iterdir()} for p in ("step/model", "saved")
    )
    assert kept == saved
    updated(worker, scored)
    other = updated(critic(tiny_model, "values", dtype=dtype), scored, steps=1)
    other.load_checkpoint(tmp_path / "step")
    assert other.version == 3
    updated(other, scored)
    expected = parameters(worker, trained=True)
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in parameters(other, trained=True).items()
    )


def test_mistakes_are_found_before_any_process_starts(tiny_model: Path, tmp_path: Path):
    with pytest.raises(UserError, match="has no layer 'q_prj'; did you mean 'q_proj'"):
        CriticWorker.check(
            CriticConfig(model=str(tiny_model), lora=Lora(targets=("q_prj",))), [], NO_ROWS
        )
    folder = tmp_path / "trained"
    # this model has a scalar head, which no adapter may target
    critic(tiny_model, "values", None).save(folder)
    with pytest.raises(UserError, match="has no layer 'score'"):
        CriticWorker.check(CriticConfig(model=str(folder), lora=Lora(targets=("score",))), [], NO_ROWS)
