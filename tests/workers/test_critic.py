"""CriticWorker: outputs of its head, gradients independent of the batch split, and saved
weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from critic_ranks import HEADS, LOSSES, main, one_step
from ranks import run_processes
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from weft.algorithms.values import ValueLoss
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.dataflow.metrics import merge
from weft.workers.critic import CriticConfig, CriticWorker


def critic(model: Path, head: str = "values", **settings: Any) -> CriticWorker:
    made = {"learning_rate": 1e-3, "max_grad_norm": None, "head": head, **settings}
    return CriticWorker(CriticConfig(model=str(model), **made))


@pytest.fixture
def scored(rows: Batch) -> Batch:
    """22 rows in 11 pairs, with the columns that critics and reward models learn from."""
    rng = np.random.default_rng(3)
    rows = rows.slice(0, 22)
    _, cu_seqlens = rows.ragged_numpy("response_ids")
    number = int(cu_seqlens[-1])
    return rows.with_columns(
        values=(rng.normal(size=number).astype(np.float32), cu_seqlens),
        returns=(rng.normal(size=number).astype(np.float32), cu_seqlens),
        group_id=100 + np.arange(22) // 2,
        preferred=(np.arange(22) % 2 == 0).astype(np.uint8),
    )


def straight(worker: CriticWorker, rows: Batch, *, with_it: bool) -> list[np.ndarray]:
    """Compute the outputs with plain `transformers` in float64, row by row."""
    tensors = dict(worker.engine.named_tensors())
    head = tensors.pop("score.weight")
    model = AutoModelForCausalLM.from_pretrained(worker.config.model, dtype=torch.float64).eval()
    model.load_state_dict({name: tensor.double() for name, tensor in tensors.items()}, strict=False)
    out = []
    for row in rows.to_rows():
        with torch.no_grad():
            ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
            said = model.base_model(ids).last_hidden_state[0] @ head.double()[0]
        out.append(said[len(row["prompt_ids"]) - (not with_it) :][: len(row["response_ids"])].numpy())
    return out


def difference(gradient: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the difference of two gradients, relative to the norm of the second."""
    assert gradient.keys() == other.keys()
    squares = sum(float((gradient[n].double() - other[n].double()).square().sum()) for n in other)
    return (squares / sum(float(g.double().square().sum()) for g in other.values())) ** 0.5


def pad(worker: CriticWorker) -> CriticWorker:
    model: Any = worker.engine.model  # pyright: ignore[reportAttributeAccessIssue]
    assert model.packs
    model.packs = False
    model.causal_lm.set_attn_implementation("sdpa")
    return worker


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("head", HEADS)
def test_values_are_those_of_a_straight_forward_pass(
    tiny_model: Path, rows: Batch, head: str, packed: bool
):
    worker = critic(tiny_model, head, microbatch_tokens=50)
    worker = worker if packed else pad(worker)
    said, _ = worker.engine.values(rows)
    expected = straight(worker, rows, with_it=head == "rewards")
    assert np.abs(said - np.concatenate(expected)).max() < 1e-5
    assert 0.02 < said.std() < 0.5, "a new head is small, and not 0"
    if head == "rewards":
        assert worker.score(rows)["reward"].to_pylist() == pytest.approx(
            [row[-1] for row in expected], abs=1e-5
        )
    else:
        assert worker.values(rows).ragged_numpy("values")[0].tolist() == said.tolist()


def test_a_value_does_not_see_its_token_and_a_reward_does(tiny_model: Path):
    one, other = (Batch.of(prompt_ids=[[1, 2]], response_ids=[[3, token]]) for token in (4, 5))
    for head, sees in (("values", False), ("rewards", True)):
        worker = critic(tiny_model, head)
        (a, _), (b, _) = worker.engine.values(one), worker.engine.values(other)
        assert a[0] == pytest.approx(b[0], abs=1e-6) and (abs(a[1] - b[1]) > 1e-4) == sees


@pytest.mark.parametrize("head", HEADS)
def test_all_but_the_head_that_it_had_is_trained(tiny_model: Path, scored: Batch, head: str):
    whole, _ = one_step(critic(tiny_model, head), scored, LOSSES[head])
    assert (
        whole["score.weight"].norm() > 0
        and "model.embed_tokens.weight" in whole
        and "lm_head.weight" not in whole
    )
    again, _ = one_step(critic(tiny_model, head, activation_checkpointing=True), scored, LOSSES[head])
    assert difference(again, whole) < 1e-6


SPLITS = {
    "two ranks": ([[*range(8)], [*range(8, 22)]], {}),
    "two ranks, one without rows": (
        [[*range(22)], []],
        {"gather": "layerwise", "microbatch_tokens": 60},
    ),
    "tensor parallel": ([[*range(22)], [*range(22)]], {"tensor_parallel": 2}),
    "two ranks, an adapter": (
        [[*range(8)], [*range(8, 22)]],
        {"gather": "layerwise", "lora": {"rank": 4}},
    ),
}
IN_EVERY_TEST_RUN = ("two ranks, one without rows", "tensor parallel")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "split",
    [pytest.param(name, marks=() if name in IN_EVERY_TEST_RUN else pytest.mark.slow) for name in SPLITS],
)
def test_gradients_do_not_depend_on_the_ranks(
    tiny_model: Path, scored: Batch, tmp_path: Path, split: str
):
    shares, settings = SPLITS[split]
    with pa.ipc.new_file(tmp_path / "rows.arrow", scored.record.schema) as file:
        file.write_batch(scored.record)
    config = {"model": str(tiny_model), "learning_rate": 1e-3, "max_grad_norm": None, **settings}
    (tmp_path / "case.json").write_text(json.dumps({"shares": shares, "config": config}))
    run_processes(main, tmp_path, len(shares))
    ranks = [torch.load(tmp_path / f"rank{r}.pt", weights_only=False) for r in range(len(shares))]
    for head in HEADS:
        alone = critic(tiny_model, head, lora=settings.get("lora"))
        before = alone.engine.values(scored)[0]
        gradient, metrics = one_step(alone, scored, LOSSES[head])
        after = alone.engine.values(scored)[0]
        cu_seqlens = scored.ragged_numpy("response_ids")[1]
        for rank, share in zip(ranks, shares, strict=True):
            assert difference(rank[head]["gradient"], gradient) < 1e-6
            tokens = [k for row in share for k in range(cu_seqlens[row], cu_seqlens[row + 1])]
            assert np.abs(rank[head]["before"] - before[tokens]).max(initial=0) < 1e-5
            assert np.abs(rank[head]["after"] - after[tokens]).max(initial=0) < 2e-4
            assert np.array_equal(rank[head]["restored"], rank[head]["after"])
        collected = merge(r[head]["metrics"]["_metrics"] for r in ranks[: 1 if "tensor" in split else 2])
        for name, metric in collected.items():
            assert metric.value == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name
        saved = critic(tmp_path / f"saved-{head}", head)
        assert np.abs(saved.engine.values(scored)[0] - after).max() < 2e-4


def test_saved_critics_load_in_transformers_and_in_a_critic(
    tiny_model: Path, scored: Batch, tmp_path: Path
):
    worker = critic(tiny_model, "rewards")
    worker.update(scored, loss=LOSSES["rewards"])
    worker.save(tmp_path / "saved")
    expected = worker.score(scored)["reward"].to_pylist()
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    assert plain.num_labels == 1
    for row, reward in zip(scored.to_rows(), expected, strict=True):
        with torch.no_grad():
            logits = plain(torch.tensor([row["prompt_ids"] + row["response_ids"]])).logits
        assert logits.shape == (1, 1) and float(logits) == pytest.approx(reward, abs=1e-5)
    assert critic(tmp_path / "saved", "rewards").score(scored)["reward"].to_pylist() == expected
    heads = [dict(critic(tiny_model).engine.named_tensors())["score.weight"] for _ in range(2)]
    assert torch.equal(*heads), "a new head is that of the seed"


def test_a_critic_learns_returns_that_its_rows_tell(tiny_model: Path, scored: Batch):
    worker = critic(tiny_model, learning_rate=3e-3)
    losses = [worker.update(scored, loss=ValueLoss(clip=None))["loss"].value for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0] and worker.version == 40


def test_an_empty_response_has_no_reward(tiny_model: Path):
    rows = Batch.of(prompt_ids=[[1], [1]], response_ids=[[3, 4], []])
    first, second = critic(tiny_model, "rewards").score(rows)["reward"].to_pylist()
    assert np.isfinite(first) and np.isnan(second)


def test_a_head_of_several_numbers_is_refused(tiny_model: Path, tmp_path: Path):
    plain = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=2)
    plain.save_pretrained(tmp_path / "two")
    with pytest.raises(
        UserError, match=r"'score.weight' has shape \[2, 64\]; a scalar head has \[1, 64\]"
    ):
        critic(tmp_path / "two")
