"""ActorWorker and ReferenceWorker: updates, metrics, and published weights."""

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from spmd import take_over
from transformers import AutoModelForCausalLM

from weft.algorithms.policy_loss import NegativeLogLikelihood, PolicyLoss
from weft.algorithms.sampling import Sampling
from weft.algorithms.surrogates import sequence_ratio
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError, WeightSyncError
from weft.dataflow.source import TableSource
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.generation.engine import GenerationRequest, generate
from weft.workers.generation.transformers_engine import TransformersEngine
from weft.workers.reference import ReferenceConfig, ReferenceWorker
from weft.workers.worker import Context

NO_ROWS = TableSource("no rows", pa.table({"x": []}))


LOSS = PolicyLoss(old="old_logprobs")


def actor(model: Path, **settings: Any) -> ActorWorker:
    return ActorWorker(ActorConfig(model=str(model), **{"learning_rate": 1e-3, **settings}))


def values(metrics: Any) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


def as_generated(worker: ActorWorker, rows: Batch, version: int = 0) -> Batch:
    """Return the rows as if these weights had sampled them."""
    scored = worker.logprobs(rows, into="response_logprobs")
    logprobs, cu_seqlens = scored.ragged_numpy("response_logprobs")
    return scored.with_columns(response_versions=(np.full(len(logprobs), version), cu_seqlens))


def test_it_learns_its_training_data(tiny_model: Path, rows: Batch):
    worker = actor(tiny_model, learning_rate=3e-3)
    losses = [values(worker.update(rows, loss=NegativeLogLikelihood()))["loss"] for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]
    assert worker.version == 30


def test_a_step_moves_probability_towards_positive_advantages(tiny_model: Path, rows: Batch):
    worker = actor(tiny_model)
    rows = as_generated(worker, rows)
    before, _ = rows.ragged_numpy("response_logprobs")
    metrics = values(worker.update(rows, loss=PolicyLoss()))
    after, _ = worker.logprobs(rows, into="after").ragged_numpy("after")
    trained = rows.ragged_numpy("response_mask")[0].astype(bool)
    gain = ((after - before) * rows.ragged_numpy("advantages")[0])[trained]
    assert gain.mean() > 0
    assert metrics["loss"] == pytest.approx(
        -rows.ragged_numpy("advantages")[0][trained].mean(), abs=1e-5
    )  # all ratios are 1
    assert (
        metrics["clip_fraction"] == 0
        and metrics["tokens"] == trained.sum()
        and metrics["skipped_steps"] == 0
    )


def test_the_gap_to_the_generator_is_measured_before_the_update(tiny_model: Path, rows: Batch):
    worker = actor(tiny_model)
    rows = as_generated(worker, rows)
    fresh = values(worker.update(rows, epochs=2, minibatches=2))
    assert fresh["max_logprob_gap"] < 1e-5 and fresh["mean_logprob_gap"] < 1e-6
    assert fresh["max_staleness"] == 0 and fresh["mean_staleness"] == 0
    stale = values(worker.update(rows))
    assert stale["mean_logprob_gap"] > 1e-3 and stale["max_logprob_gap"] > 1e-2
    assert stale["max_staleness"] == 1 and stale["mean_staleness"] == 1


def test_the_gap_in_bfloat16_is_smaller_than_its_rounding(tiny_model: Path):
    engine = TransformersEngine(str(tiny_model), dtype="bfloat16")
    prompts = np.random.default_rng(0).integers(3, 97, (24, 5))
    requests = [GenerationRequest(number, prompt, seed=number) for number, prompt in enumerate(prompts)]
    said = [each for some in generate(engine, requests, Sampling(max_tokens=12)) for each in some]
    rows = Batch.of(
        prompt_ids=[prompts[each.request_id] for each in said],
        response_ids=[each.token_ids for each in said],
        response_mask=[np.ones(len(each.token_ids), np.uint8) for each in said],
        response_logprobs=[each.logprobs for each in said],
        advantages=[np.ones(len(each.token_ids), np.float32) for each in said],
    )
    gaps = {
        dtype: values(actor(tiny_model, dtype=dtype).update(rows))["mean_logprob_gap"]
        for dtype in ("float32", "bfloat16")
    }
    assert 0 < gaps["bfloat16"] < gaps["float32"] < 0.05


def test_entropies_come_with_log_probabilities_and_are_those_of_the_distributions(
    tiny_model: Path, rows: Batch
):
    rows = rows.with_columns(temperature=np.full(len(rows), 0.7, np.float32))
    worker = actor(tiny_model, microbatch_tokens=60)
    scored = worker.logprobs(rows, entropies=True, collisions=True)
    assert scored["old_logprobs"] == worker.logprobs(rows)["old_logprobs"]
    alone = worker.logprobs(rows, collisions=True)
    assert alone["log_collisions"] == scored["log_collisions"] and "entropies" not in alone
    model = AutoModelForCausalLM.from_pretrained(tiny_model).double()
    columns = (scored[name].to_pylist() for name in ("entropies", "log_collisions"))
    for row, entropies, collisions in zip(rows.to_rows(), *columns, strict=True):
        ids, length = [*row["prompt_ids"], *row["response_ids"]], len(row["response_ids"])
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, len(ids) - length - 1 : -1] / 0.7
        plain = torch.distributions.Categorical(logits=logits)
        assert entropies == pytest.approx(plain.entropy().tolist(), abs=1e-4)
        same = (2 * plain.logits).logsumexp(-1)  # the log-probability that two samples are equal
        assert collisions == pytest.approx(same.tolist(), abs=1e-4)


@pytest.mark.parametrize("general", [False, True], ids=["linear head", "any head"])
@pytest.mark.parametrize("loss", [LOSS, NegativeLogLikelihood()], ids=["policy", "supervised"])
def test_the_entropy_of_the_policy_is_watched(tiny_model: Path, rows: Batch, general: bool, loss: Any):
    worker, model = (
        actor(tiny_model, microbatch_tokens=60),
        AutoModelForCausalLM.from_pretrained(tiny_model).double(),
    )
    if general:
        worker.engine.model.head_form = None  # pyright: ignore[reportAttributeAccessIssue]
    entropies, ends = [], rows.ragged_numpy("response_ids")[1]
    mask = torch.from_numpy(rows.ragged_numpy("response_mask")[0] > 0)
    for k, row in enumerate(rows.to_rows()):
        ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
        logits = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1] / row["temperature"]
        entropies += (
            torch.distributions.Categorical(logits=logits)
            .entropy()[mask[ends[k] : ends[k + 1]]]
            .tolist()
        )
    metrics = values(worker.update(rows, loss=loss))
    assert metrics["entropy"] == pytest.approx(np.mean(entropies), rel=1e-5)


def test_rows_without_a_generator_have_no_gap_and_no_staleness(tiny_model: Path, rows: Batch):
    metrics = actor(tiny_model).update(rows, loss=LOSS)
    assert not {"mean_logprob_gap", "max_logprob_gap", "mean_staleness", "max_staleness"} & set(metrics)


def test_epochs_and_minibatches_are_optimizer_steps_of_one_version(tiny_model: Path, rows: Batch):
    worker = actor(tiny_model)
    metrics = worker.update(rows, loss=LOSS, epochs=2, minibatches=3)
    trained = int(rows.ragged_numpy("response_mask")[0].sum())
    assert worker.version == 1 and worker.engine.steps == 6  # pyright: ignore[reportAttributeAccessIssue]
    assert values(metrics)["tokens"] == 2 * trained


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_skipped_and_counted(tiny_model: Path, rows: Batch, poison: float):
    worker = actor(tiny_model)
    # create moments, which would move the weights even without a gradient
    worker.update(rows, loss=LOSS)
    weights = {name: tensor.clone() for name, tensor in worker.engine.named_tensors()}
    advantages, cu_seqlens = rows.ragged_numpy("advantages")
    poisoned = advantages.copy()
    poisoned[rows.ragged_numpy("response_mask")[0].argmax()] = poison
    metrics = values(worker.update(rows.with_columns(advantages=(poisoned, cu_seqlens)), loss=LOSS))
    assert metrics["skipped_steps"] == 1 and "grad_norm" not in metrics
    assert all(torch.equal(tensor, weights[name]) for name, tensor in worker.engine.named_tensors())
    healthy = values(worker.update(rows, loss=LOSS))
    assert healthy["skipped_steps"] == 0 and math.isfinite(healthy["loss"])


def test_masked_values_change_nothing(tiny_model: Path, rows: Batch):
    masked = rows.ragged_numpy("response_mask")[0] == 0
    results = []
    for poison in (0.0, float("nan")):
        worker = actor(tiny_model)
        columns = {}
        for name in ("advantages", "old_logprobs"):
            content, cu_seqlens = rows.ragged_numpy(name)
            columns[name] = (np.where(masked, np.float32(poison), content), cu_seqlens)
        results.append(values(worker.update(rows.with_columns(**columns), loss=LOSS)))
    assert results[0] == results[1]


def test_rows_without_a_token_to_train_on_move_nothing(tiny_model: Path, rows: Batch):
    worker = actor(tiny_model)
    before = {name: tensor.clone() for name, tensor in worker.engine.named_tensors()}
    mask, cu_seqlens = rows.ragged_numpy("response_mask")
    metrics = values(
        worker.update(rows.with_columns(response_mask=(np.zeros_like(mask), cu_seqlens)), loss=LOSS)
    )
    assert metrics["skipped_steps"] == 1 and metrics["tokens"] == 0
    nothing = values(worker.update(rows.slice(0, 0), loss=LOSS))
    assert nothing["skipped_steps"] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in worker.engine.named_tensors())


def test_an_empty_response_has_no_logprobs_and_costs_nothing(tiny_model: Path):
    batch = Batch.of(
        prompt_ids=[[1, 2], [3], [4]], response_ids=[[], [5, 6], []], advantages=[[], [1.0, 1.0], []]
    )
    scored = actor(tiny_model).logprobs(batch)["old_logprobs"].to_pylist()
    assert [len(row) for row in scored] == [0, 2, 0]
    assert actor(tiny_model).logprobs(batch.slice(0, 1))["old_logprobs"].to_pylist() == [[]]


def test_a_saved_policy_loads_with_transformers_and_with_an_actor(
    tiny_model: Path, rows: Batch, tmp_path: Path
):
    worker = actor(tiny_model)
    worker.update(rows, loss=LOSS)
    for _ in range(2):  # the second save replaces the first
        worker.save(tmp_path / "policy")
    assert {p.name for p in (tmp_path / "policy").iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert (
        loaded.config.attention_dropout == 0.1
    )  # the engine disables dropout for training, and does not save that
    weights = dict(worker.engine.named_tensors())
    assert all(torch.equal(parameter, weights[name]) for name, parameter in loaded.named_parameters())
    mine, theirs = worker.logprobs(rows, into="x"), actor(tmp_path / "policy").logprobs(rows, into="x")
    assert mine == theirs


def test_a_reference_follows_the_actor(tiny_model: Path, rows: Batch):
    worker, reference = actor(tiny_model), ReferenceWorker(ReferenceConfig(model=str(tiny_model)))
    worker.update(rows, loss=LOSS)
    weights = worker.publish_weights(version=worker.version)
    assert weights is not None and weights.version == 1
    mine = worker.logprobs(rows, into="x")
    assert reference.logprobs(rows, into="x") != mine
    checksum = reference.receive_weights(weights)
    given = worker.finish_publishing(version=1)
    assert given is not None and given.checksum == checksum
    assert given.num_bytes == sum(tensor.nbytes for _, tensor in worker.engine.named_tensors())
    assert reference.version == 1 and reference.logprobs(rows, into="x") == mine
    worker.close()


def test_a_receiver_that_was_lost_is_named_in_the_log(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
):
    from weft.resharding.incoming import IncomingWeights

    worker = actor(tiny_model)
    IncomingWeights(worker.publish_weights(version=1).to("rollout[3]")).close()
    deadline = time.monotonic() + 30
    while not worker._publisher.lost and time.monotonic() < deadline:
        time.sleep(0.01)
    assert worker.finish_publishing(version=1).checksum is None
    assert "weights: rollout[3] is gone" in capsys.readouterr().err
    worker.close()


def test_with_deltas_the_share_of_changed_elements_is_a_metric(
    tiny_model: Path, rows: Batch, monkeypatch: pytest.MonkeyPatch
):
    from weft.resharding import sources

    monkeypatch.setattr(sources, "this_machine", lambda: "another machine")
    alone = Context("actor", address="127.0.0.1")
    worker = ActorWorker(
        ActorConfig(model=str(tiny_model), transport="deltas", learning_rate=1e-2), alone
    )
    reference = ReferenceWorker(ReferenceConfig(model=str(tiny_model)), Context("reference"))
    shares: list[float] = []
    for version in range(3):
        taken = reference.receive_weights(worker.publish_weights(version=version))
        assert worker.finish_publishing(version=version).checksum == taken
        metrics = worker.update(rows, loss=LOSS)
        shares += [metrics["changed_share"].value] if "changed_share" in metrics else []
    assert len(shares) == 2 and all(
        0.5 < share <= 1 for share in shares
    )  # in float32 nearly every weight changes
    worker.close()


def test_unsupported_settings_with_a_vllm_backend_are_refused():
    with pytest.raises(
        UserError, match=r"transport=\"vllm:sharded_rdt\" is not supported.*take \"nccl\""
    ):
        ActorConfig(model="m", transport="vllm:sharded_rdt")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"no setting 'deltas' .*; set transport=\"deltas\""):
        ActorConfig(model="m", deltas="auto")  # pyright: ignore[reportCallIssue]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.vllm
def test_a_vllm_backend_without_a_gpu_suggests_an_alternative(tiny_model: Path):
    actor = ActorWorker(ActorConfig(model=tiny_model, transport="vllm:ipc"))
    with pytest.raises(
        WeightSyncError,
        match=r'transport="vllm:ipc" moves weights from GPU to GPU, and torch finds none',
    ):
        actor.publish_weights(1)
    actor.close()


def test_weights_of_another_model_are_refused(tiny_model: Path):
    reference = ReferenceWorker(ReferenceConfig(model=str(tiny_model)))
    tensors = dict(actor(tiny_model).engine.named_tensors())
    name = "model.norm.weight"
    with pytest.raises(
        WeightSyncError, match="'head' was published, but the model has no tensor of that name"
    ):
        take_over(reference.engine, {**tensors, "head": tensors[name]})
    with pytest.raises(
        WeightSyncError,
        match=r"'model.norm.weight' has the shape \(3,\) in the trainer, and \(64,\) in the receiver",
    ):
        take_over(reference.engine, {**tensors, name: torch.zeros(3)})
    with pytest.raises(
        WeightSyncError, match=r"'model.norm.weight' is needed by the receiver, and the trainer has none"
    ):
        take_over(reference.engine, {n: t for n, t in tensors.items() if n != name})


def check(config: ActorConfig, **arguments: Any) -> None:
    node = SimpleNamespace(
        name="actor.update", arguments=arguments, reads=("advantages", "response_logprobs")
    )
    ActorWorker.check(config, [node], NO_ROWS)  # pyright: ignore[reportArgumentType]


def test_mistakes_are_found_before_any_process_starts(tiny_model: Path):
    config = ActorConfig(model=str(tiny_model))
    check(config, loss=PolicyLoss(), epochs=1, minibatches=4)
    with pytest.raises(UserError, match=r"loss is|make a value of it: PolicyLoss\(\)"):
        check(config, loss=PolicyLoss)
    with pytest.raises(UserError, match="loss must be a Loss such as PolicyLoss"):
        check(config, loss="ppo")
    with pytest.raises(UserError, match="minibatches must be an integer of at least 1, not 0"):
        check(config, minibatches=0)
    check(config, loss=PolicyLoss(ratio=sequence_ratio))
    with pytest.raises(
        UserError,
        match=r"several optimizer steps \(epochs=1, minibatches=4\).*samples = old_logprobs\(samples, actor=actor\)",
    ):
        check(config, loss=PolicyLoss(ratio=sequence_ratio), minibatches=4)
    with pytest.raises(UserError, match="no such folder"):
        check(ActorConfig(model=str(tiny_model.with_name("tinny"))))
    with pytest.raises(
        UserError, match=r"tensor_parallel=4 does not divide the model's num_key_value_heads \(2\)"
    ):
        check(ActorConfig(model=str(tiny_model), tensor_parallel=4))
    with pytest.raises(UserError, match="did you mean 'learning_rate'"):
        ActorConfig(model="x", learning_rat=1)  # pyright: ignore[reportCallIssue]
