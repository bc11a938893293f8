"""Training on samples of a part of the vocabulary: probabilities are those over the kept sets."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import spmd
import torch
from family_cases import check, on_one_rank, run_ranks, write_models
from training_rows import make_groups, make_rows, with_kept_sets
from transformers import AutoModelForCausalLM

from weft.algorithms.loss import PackedRows
from weft.algorithms.policy_loss import NegativeLogLikelihood, PolicyLoss
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.reference import ReferenceConfig, ReferenceWorker
from weft.workers.training.fsdp import FsdpEngine

ROWS = with_kept_sets(make_rows(12))


def actor_of(folder: Path, **settings: Any) -> ActorWorker:
    config = {"model": str(folder), "learning_rate": 1e-3, "max_grad_norm": None, **settings}
    return ActorWorker(ActorConfig(**config))


def exact(folder: Path, rows: Batch) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return the model in float64, and the log-probabilities and entropies [T] of the responses with a
    gradient, token by token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    logprobs, entropies = [], []
    for row in rows.to_rows():
        ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
        logits = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1] / row["temperature"]
        left = row["kept_ids"]
        for own, sampled, count in zip(logits, row["response_ids"], row["kept_counts"], strict=True):
            listed, left = left[: abs(count)], left[abs(count) :]
            everything = range(len(own))
            kept = listed if count > 0 else [token for token in everything if token not in listed]
            log_p = own[kept].log_softmax(-1)
            logprobs.append(log_p[kept.index(sampled)])
            entropies.append(-(log_p.exp() * log_p).sum())
        assert not left
    return model, torch.stack(logprobs), torch.stack(entropies)


def test_logprobs_and_entropies_are_those_over_the_kept_sets(tiny_model: Path):
    worker = actor_of(tiny_model, microbatch_tokens=60)
    found = worker.logprobs(ROWS, entropies=True)
    _, logprobs, entropies = exact(tiny_model, ROWS)
    for column, expected in (("old_logprobs", logprobs), ("entropies", entropies)):
        torch.testing.assert_close(
            found.ragged(column)[0].double(), expected.detach(), rtol=1e-5, atol=1e-5
        )
    whole = worker.logprobs(ROWS.select([c for c in ROWS.columns if not c.startswith("kept")]))
    assert (whole.ragged("old_logprobs")[0].double() - logprobs.detach()).abs().max() > 1
    reference = ReferenceWorker(ReferenceConfig(model=str(tiny_model)))
    said = reference.logprobs(ROWS, into="said").ragged("said")[0]
    torch.testing.assert_close(said, found.ragged("old_logprobs")[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "loss", [NegativeLogLikelihood(), PolicyLoss(entropy_coefficient=0.3)], ids=["supervised", "policy"]
)
def test_the_gradient_is_that_of_the_probabilities_over_the_kept_sets(tiny_model: Path, loss: Any):
    worker = actor_of(tiny_model, microbatch_tokens=60)
    rows = ROWS.with_columns(response_logprobs=worker.logprobs(ROWS)["old_logprobs"])
    gradient, metrics = spmd.one_step(worker, rows, loss)
    model, logprobs, entropies = exact(tiny_model, ROWS)
    mask = rows.ragged("response_mask")[0].double()
    values = -logprobs
    if isinstance(loss, PolicyLoss):  # on policy, the ratio has the gradient of the log-probability
        values = -rows.ragged("advantages")[0].double() * logprobs - 0.3 * entropies
        assert metrics["max_logprob_gap"] < 1e-5 and metrics["mean_logprob_gap"] < 1e-6
    ((values * mask).sum() / mask.sum()).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    for name, own in gradient.items():
        assert (own.double() - expected[name]).norm() / norm < 1e-5


def test_shared_prompts_and_microbatches_change_no_kept_set(tiny_model: Path):
    rows = with_kept_sets(make_groups(2, 20, [9, 3, 12, 5]), seed=1)
    found: list[tuple[Any, Any]] = []
    for may_share, tokens in ((False, 5000), (True, 5000), (True, 50)):
        worker = actor_of(tiny_model, microbatch_tokens=tokens)
        engine: Any = worker.engine
        engine.model.shares_prompts = may_share
        batch = engine._rows(rows, ())
        assert (batch.same_prompt is not None) == may_share
        found.append(
            (worker.logprobs(rows, into="said").ragged("said")[0], spmd.one_step(worker, rows)[0])
        )
    (said, gradient), *others = found
    expected = exact(tiny_model, rows)[1].detach()
    torch.testing.assert_close(said.double(), expected, rtol=1e-5, atol=1e-5)
    norm = torch.stack([g.norm() for g in gradient.values()]).norm()
    for own, own_gradient in others:
        torch.testing.assert_close(own, said, rtol=1e-5, atol=1e-5)
        for name, each in gradient.items():
            assert (own_gradient[name] - each).norm() / norm < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("shared", ["tensor_parallel", "sequence_parallel"])
def test_ranks_that_share_a_vocabulary_or_tokens_take_the_same_step(shared: str, tmp_path: Path):
    """Gemma 2 caps its logits, and keeps its head in the embedding."""
    names, rows = ("Qwen2", "Gemma 2"), with_kept_sets(make_rows(9), vocabulary=98)
    models = write_models(tmp_path, names)
    alone = on_one_rank(models, names, rows)
    ranks = run_ranks(models, tmp_path, 2, names, rows=rows, **{shared: 2})
    for name in names:
        check(tmp_path, name, ranks, alone[name])


def test_kept_sets_of_whole_vocabularies_cost_nothing(tiny_model: Path):
    rows = make_rows(4)
    counts, cu_seqlens = rows.ragged_numpy("response_ids")
    none = (np.zeros(0, np.int32), np.zeros(len(rows) + 1, np.int32))
    empty = rows.with_columns(kept_counts=(np.zeros_like(counts), cu_seqlens), kept_ids=none)
    engine: Any = actor_of(tiny_model).engine
    assert engine._rows(empty, ()).kept_sets is None
    assert engine._rows(rows, ()).kept_sets is None


def test_tokens_of_a_teacher_are_compared_over_the_whole_vocabulary(tiny_model: Path):
    engine: Any = actor_of(tiny_model).engine
    values, cu_seqlens = ROWS.ragged_numpy("response_ids")
    teacher = {
        "teacher_ids": (values, cu_seqlens),
        "teacher_logprobs": (-np.ones(len(values)), cu_seqlens),
    }
    rows = engine._rows(ROWS.with_columns(**teacher), ["teacher_ids", "teacher_logprobs"])
    assert rows.kept_sets is None and engine._rows(ROWS, ()).kept_sets is not None


def changed(**columns: Any) -> Batch:
    return Batch.of(sample_id=[7, 8], prompt_ids=[[5], [6]], response_ids=[[3, 4], [9]], **columns)


@pytest.mark.parametrize(
    ("counts", "ids", "said"),
    [
        (
            [[1, 0], [1]],
            [[3], [8]],
            r"row with sample_id 8: token 0 of the response \(9\) is not in its kept",
        ),
        (
            [[0, -1], [0]],
            [[4], []],
            r"row with sample_id 7: token 1 of the response \(4\) is not in its kept",
        ),
        ([[1, 0], [1]], [[3, 4], [9]], "row with sample_id 7: column 'kept_ids' has 2 ids, .* counts 1"),
        (
            [[1], [1]],
            [[3], [9]],
            "sample_id 7: column 'kept_counts' has 1 values for a response of 2 tokens",
        ),
        ([[2, 0], [1]], [[3, 97], [9]], "column 'kept_ids' has token id 97; .* has ids 0 to 96"),
    ],
)
def test_kept_sets_that_do_not_fit_their_tokens_are_refused(
    tiny_model: Path, counts: Any, ids: Any, said: str
):
    engine: Any = actor_of(tiny_model).engine
    with pytest.raises(UserError, match=said):
        engine._rows(changed(kept_counts=counts, kept_ids=ids), ())


class OldEngine(FsdpEngine):
    reads_kept_sets = False


@pytest.mark.parametrize(
    "engine", [FsdpEngine, OldEngine, partial(OldEngine)], ids=["own", "old", "partial"]
)
def test_an_engine_that_ignores_kept_sets_is_refused_if_rows_have_them(tiny_model: Path, engine: Any):
    config = ActorConfig(model=str(tiny_model), engine=engine)
    node: Any = SimpleNamespace(name="actor.update", arguments={}, reads=("response_ids",))
    source: Any = SimpleNamespace(name="prompts", columns=(), table=None)
    ActorWorker.check(config, [node], source)
    node.reads = ("response_ids", "kept_counts", "kept_ids")
    if engine is FsdpEngine:
        ActorWorker.check(config, [node], source)
        return
    with pytest.raises(UserError, match=r"node 'actor\.update': .*OldEngine.* does not read kept sets"):
        ActorWorker.check(config, [node], source)


def test_a_loss_sees_no_kept_sets(tiny_model: Path):
    """They are a matter of the engine, not columns of `PackedRows`."""
    engine: Any = actor_of(tiny_model).engine
    rows = engine._rows(ROWS, ("advantages",)).packed()
    assert isinstance(rows, PackedRows) and "kept_ids" not in rows and "advantages" in rows
