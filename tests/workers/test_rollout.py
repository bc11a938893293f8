"""The rollout worker: responses as they finish, equal tokens on any rank, mistakes found early."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from weft.algorithms.sampling import Sampling
from weft.dataflow.batch import Batch
from weft.dataflow.errors import GenerationError, SampleError, UserError
from weft.dataflow.metrics import Metrics, Sum, merge
from weft.dataflow.operation import Shape, declaration_of
from weft.resharding.publisher import WeightPublisher
from weft.resharding.weights import whole
from weft.workers import rollout as rollouts
from weft.workers import rollout_config
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.generation.speculation import Speculation
from weft.workers.generation.transformers_engine import TransformersEngine
from weft.workers.models.model_folder import read_model_config, read_stop_tokens
from weft.workers.node_memory import NodeMemory
from weft.workers.rollout import RolloutWorker
from weft.workers.rollout_config import RolloutConfig
from weft.workers.worker import Children, Context, Unfinished


def prompts_of(lengths: list[int], *, first_id: int = 100) -> Batch:
    rng = np.random.default_rng(0)
    ids = np.arange(len(lengths)) + first_id
    return Batch.of(
        sample_id=ids,
        group_id=ids,
        parent_id=ids,
        prompt_ids=[rng.integers(3, 97, length) for length in lengths],
    )


@pytest.fixture
def worker(tiny_model: Path) -> RolloutWorker:
    return RolloutWorker(RolloutConfig(model=tiny_model, engine="transformers"), Context(seed=5))


Parts = Iterable[tuple[Children | Unfinished, Metrics] | None]


def said(parts: Parts) -> list[tuple[Children, Metrics]]:
    """Drop the yields without responses."""
    found: list[tuple[Children, Metrics]] = []
    for part in parts:
        if part is not None:
            children, metrics = part
            assert isinstance(children, Children)
            found.append((children, metrics))
    return found


def rows_of(parts: Parts) -> Batch:
    """Return the rows ordered by prompt and sample index."""
    children = [children for children, _ in said(parts)]
    rows, numbers = (
        Batch.concat([c.rows for c in children]),
        np.concatenate([c.numbers for c in children]),
    )
    return rows.take(np.lexsort((numbers, rows.numpy("parent_id"))).tolist())


def tokens(batch: Batch) -> dict[int, list[list[int]]]:
    """Return the responses by prompt, in row order."""
    found: dict[int, list[list[int]]] = {}
    for parent, ids in zip(
        batch.numpy("parent_id").tolist(), batch["response_ids"].to_pylist(), strict=True
    ):
        found.setdefault(parent, []).append(ids)
    return found


def test_generate_is_declared_as_an_expansion_of_prompts() -> None:
    declaration = declaration_of(RolloutWorker.generate)
    assert declaration is not None
    operation = declaration.called_with(
        {"sampling": Sampling(), "config": RolloutConfig(model="m"), "policy": None}
    )
    assert operation.shape is Shape.EXPAND and operation.reads == ("prompt_ids",)


def test_every_batch_comes_with_its_tokens_and_the_share_that_is_cut_off(worker: RolloutWorker) -> None:
    parts = said(worker.generate(prompts_of([3, 5]), n=4, sampling=Sampling(max_tokens=6)))
    metrics = merge(metrics for _, metrics in parts)
    batch = rows_of(parts)
    assert metrics["tokens"] == Sum(float(batch.lengths("response_ids").sum()))
    assert metrics["response_length"].value == batch.lengths("response_ids").mean()
    assert metrics["truncation_rate"].value == batch["finish_reason"].to_pylist().count("length") / 8


def test_every_prompt_gets_n_responses_with_all_columns(worker: RolloutWorker) -> None:
    batch = rows_of(
        worker.generate(prompts_of([3, 5, 4]), n=4, sampling=Sampling(max_tokens=6, temperature=0.5))
    )
    declaration = declaration_of(RolloutWorker.generate)
    assert declaration is not None
    assert set(batch.columns) == {
        "parent_id",
        *declaration.called_with(
            {"sampling": Sampling(), "config": RolloutConfig(model="m"), "policy": None}
        ).writes,
    }
    assert {parent: len(rows) for parent, rows in tokens(batch).items()} == {100: 4, 101: 4, 102: 4}
    lengths = batch.lengths("response_ids")
    assert (lengths <= 6).all()
    for column in ("response_logprobs", "response_versions"):
        assert batch.lengths(column).tolist() == lengths.tolist()
    assert set(batch.numpy("temperature").tolist()) == {0.5}
    assert set(batch["finish_reason"].to_pylist()) <= {"stop", "length"}


def test_any_placement_samples_the_same_tokens(worker: RolloutWorker, tiny_model: Path) -> None:
    prompts = prompts_of([3, 5, 4, 3, 6, 4])
    whole = tokens(rows_of(worker.generate(prompts, n=4, sampling=Sampling(max_tokens=8))))
    for rank, rows in enumerate(([0, 3, 5], [1, 2, 4])):
        replica = RolloutWorker(worker.config, Context(rank=rank, world_size=2, seed=5))
        part = tokens(
            rows_of(replica.generate(prompts.take(rows), n=4, sampling=Sampling(max_tokens=8)))
        )
        assert part == {parent: whole[parent] for parent in part}
    other = RolloutWorker(worker.config, Context(seed=6))
    assert tokens(rows_of(other.generate(prompts, n=4, sampling=Sampling(max_tokens=8)))) != whole


def test_rows_of_one_group_with_other_prompts_are_drawn_independently(worker: RolloutWorker) -> None:
    prompts = prompts_of([3, 3]).with_columns(group_id=[100, 100])
    found = tokens(rows_of(worker.generate(prompts, n=2, sampling=Sampling(max_tokens=12, stop=None))))
    assert found[100] != found[101] and found[100][0] != found[100][1]


def test_rows_of_one_group_that_come_to_the_same_prompt_are_drawn_independently(
    worker: RolloutWorker,
) -> None:
    same = (
        prompts_of([3])
        .take([0, 0, 0])
        .with_columns(sample_id=[100, 101, 102], draw_path=[[2, 0, 1], [2, 1, 1], [3, 1, 1]])
    )
    found = tokens(rows_of(worker.generate(same, n=2, sampling=Sampling(max_tokens=12, stop=None))))
    drawn = [tuple(response) for responses in found.values() for response in responses]
    assert len(set(drawn)) == 6, "turns, rows and responses"


def test_without_seeds_two_replicas_draw_different_tokens(tiny_model: Path) -> None:
    config = RolloutConfig(model=tiny_model, engine="transformers", seeded=False)
    replicas = [RolloutWorker(config, Context(rank=rank, world_size=2)) for rank in range(2)]
    one, other = (
        tokens(rows_of(r.generate(prompts_of([4]), sampling=Sampling(max_tokens=16)))) for r in replicas
    )
    assert one != other


def test_responses_of_one_step_are_handed_over_together_and_before_the_last_is_done(
    tiny_model: Path,
) -> None:
    config = RolloutConfig(model=tiny_model, engine="transformers", max_num_seqs=4)
    sampling = Sampling(max_tokens=5, stop=None)
    parts = [
        part
        for part, _ in said(RolloutWorker(config).generate(prompts_of([3] * 3), n=3, sampling=sampling))
    ]
    assert [part.rows.numpy("parent_id").tolist() for part in parts] == [
        [100, 100, 100, 101],
        [101, 101, 102, 102],
        [102],
    ]
    assert [part.numbers.tolist() for part in parts] == [[0, 1, 2, 0], [1, 2, 0, 1], [2]]
    assert [part.finished.tolist() for part in parts] == [[100], [101], [102]]


def test_a_requeued_prompt_gets_the_responses_that_it_lacks_and_no_others(worker: RolloutWorker) -> None:
    sampling = Sampling(max_tokens=8, stop=None)
    every = tokens(rows_of(worker.generate(prompts_of([3, 5]), n=3, sampling=sampling)))
    again = prompts_of([3, 5]).with_columns(made_before=[[1], []])
    parts = said(worker.generate(again, n=3, sampling=sampling))
    assert parts[-1][0].numbers.tolist() == [0, 2, 0, 1, 2] and parts[-1][0].finished.tolist() == [
        100,
        101,
    ]
    assert tokens(rows_of(parts)) == {100: [every[100][0], every[100][2]], 101: every[101]}


def test_the_longest_expected_responses_start_first_and_are_the_same(tiny_model: Path) -> None:
    config = RolloutConfig(model=tiny_model, engine="transformers", max_num_seqs=2)
    worker, sampling = RolloutWorker(config), Sampling(max_tokens=6, stop=None)
    prompts = prompts_of([3, 5, 4])
    in_order = tokens(rows_of(worker.generate(prompts, n=2, sampling=sampling)))
    forecast = prompts.with_columns(expected_tokens=np.array([9, np.nan, 80], np.float32))
    steps = worker.generate(forecast, n=2, sampling=sampling)
    parts: list[tuple[Children, Metrics]] = []
    for part in steps:
        assert worker.engine.num_unfinished <= 2, "the others wait, because their order may change"
        parts += said([part])
    started = [
        (int(parent), int(number))
        for children, _ in parts
        for parent, number in zip(
            children.rows.numpy("parent_id").tolist(), children.numbers.tolist(), strict=True
        )
    ]
    # One response of the prompt without a forecast, then the longest; each pair ends together.
    assert [sorted(started[k : k + 2]) for k in (0, 2, 4)] == [
        [(101, 0), (102, 0)],
        [(100, 0), (102, 1)],
        [(100, 1), (101, 1)],
    ]
    assert tokens(rows_of(parts)) == in_order


def test_cancelled_responses_are_not_generated(worker: RolloutWorker) -> None:
    sampling = Sampling(max_tokens=8, stop=None)
    every = tokens(rows_of(worker.generate(prompts_of([3, 5]), n=2, sampling=sampling)))
    steps = worker.generate(prompts_of([3, 5]), n=2, sampling=sampling)
    assert next(steps) is None and steps.send([100]) is None
    assert tokens(rows_of(steps)) == {101: every[101]}
    steps = worker.generate(prompts_of([3, 5]), n=2, sampling=sampling)
    assert next(steps) is None
    with pytest.raises(StopIteration):
        steps.send([100, 101])


def test_weights_are_taken_over_and_stamped_on_tokens(worker: RolloutWorker) -> None:
    assert isinstance(worker.engine, TransformersEngine)
    publisher = WeightPublisher()
    weights = publisher.publish(
        whole({n: p * 1.5 for n, p in worker.engine.model.named_parameters()}), version=2
    )
    assert worker.receive_weights(weights) == publisher.finish()
    publisher.close()
    versions, _ = rows_of(worker.generate(prompts_of([3, 4]))).ragged("response_versions")
    assert set(versions.tolist()) == {2}
    worker.offload()
    worker.onload()
    worker.close()


def test_with_a_double_buffer_weights_come_while_responses_are_sampled(
    worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(worker.engine, TransformersEngine)
    worker.config = worker.config.model_copy(update={"double_buffer": True})
    monkeypatch.setattr(worker.engine, "stage_weights", lambda weights: iter([None, None]))
    publisher = WeightPublisher()
    tensors = {n: p.detach() * 1.5 for n, p in worker.engine.model.named_parameters()}
    assert isinstance(worker.receive_weights(publisher.publish(whole(tensors), version=1)), str), (
        "nobody waits for it"
    )
    steps = worker.generate(prompts_of([3, 5]), sampling=Sampling(max_tokens=6, stop=None))
    assert next(steps) is None
    taking = worker.receive_weights(publisher.publish(whole(tensors), version=2))
    assert not isinstance(taking, str)
    for _ in range(2):
        assert next(taking) is None and next(steps) is None and worker.engine.version == 1
    with pytest.raises(StopIteration) as end:
        next(taking)
    checksum, metrics = end.value.value
    assert checksum == publisher.finish() and metrics["weights_pause_s"].value > 0
    versions, _ = rows_of(steps).ragged("response_versions")
    assert versions.tolist() == [1, 1, 1, 2, 2, 2] * 2
    publisher.close()


def test_weights_are_double_buffered_if_the_node_has_twice_their_memory(
    worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = 2 * worker.engine.weight_bytes()
    assert needs > 0
    for set_to, free, doubles in (
        (None, needs, True),
        (None, needs - 1, False),
        (True, 0, True),
        (False, needs, False),
    ):
        monkeypatch.setattr(
            rollouts, "node_memory", lambda free=free: NodeMemory(0, free, "the machine")
        )
        fresh = copy.copy(worker)
        fresh.config = worker.config.model_copy(update={"double_buffer": set_to})
        assert fresh._doubles is doubles
    monkeypatch.setattr(rollouts, "node_memory", lambda: None)
    assert copy.copy(worker)._doubles is False, "of a node that says nothing nothing is known"


def test_greedy_rows_say_that_their_logprobs_are_undivided(worker: RolloutWorker) -> None:
    batch = rows_of(worker.generate(prompts_of([3]), sampling=Sampling(temperature=0, max_tokens=3)))
    assert batch.numpy("temperature").tolist() == [1.0]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=9, top_p=0.5),
        Sampling(max_tokens=9, top_k=5),
        Sampling(max_tokens=9, min_p=0.6),
        Sampling(max_tokens=9, top_p=0.9, top_k=20, min_p=0.05, temperature=0.7, min_tokens=2),
    ],
    ids=str,
)
def test_a_trainer_agrees_with_samples_of_a_part_of_the_distribution(
    tiny_model: Path, sampling: Sampling
) -> None:
    config = RolloutConfig(model=tiny_model, engine="transformers", kept_sets=True)
    worker, prompts = RolloutWorker(config, Context(seed=5)), prompts_of([3, 5])
    rows = rows_of(worker.generate(prompts, n=8, sampling=sampling))
    of_rows = prompts.take(np.searchsorted(prompts.numpy("sample_id"), rows.numpy("parent_id")))
    rows = rows.with_columns(prompt_ids=of_rows["prompt_ids"])
    actor = ActorWorker(ActorConfig(model=tiny_model))
    said = rows.ragged_numpy("response_logprobs")[0]
    gap = np.abs(actor.logprobs(rows).ragged_numpy("old_logprobs")[0] - said)
    assert gap.max() <= 5e-4 and gap.mean() <= 1e-5
    whole = actor.logprobs(rows.select([c for c in rows.columns if not c.startswith("kept")]))
    assert np.abs(whole.ragged_numpy("old_logprobs")[0] - said).max() > 5e-4


def test_kept_sets_are_recorded_only_on_request_and_for_truncated_samples(
    worker: RolloutWorker, tiny_model: Path
) -> None:
    cut, whole = Sampling(max_tokens=3, top_k=5), Sampling(max_tokens=3)
    recording = RolloutWorker(RolloutConfig(model=tiny_model, engine="transformers", kept_sets=True))
    for of, sampling, expected in (
        (worker, cut, False),
        (recording, cut, True),
        (recording, whole, False),
    ):
        batch = rows_of(of.generate(prompts_of([3]), sampling=sampling))
        assert ("kept_ids" in batch) == ("kept_counts" in batch) == expected
        assert "response_logprobs" in batch


class Forgetful(RolloutWorker):
    """Its engine does not record kept sets."""

    def new_engine(self, **settings: Any) -> Any:
        assert settings.pop("kept_sets")
        return TransformersEngine(str(self.config.model), **settings)


def test_an_engine_without_the_kept_sets_that_a_trainer_reads_is_named(tiny_model: Path) -> None:
    worker = Forgetful(RolloutConfig(model=tiny_model, engine="transformers", kept_sets=True))
    assert rows_of(worker.generate(prompts_of([3]), sampling=Sampling(max_tokens=3)))
    steps = worker.generate(prompts_of([3]), sampling=Sampling(max_tokens=3, top_k=5))
    with pytest.raises(
        GenerationError, match=r"TransformersEngine returned no kept_sets .*top_k=5.*trainer"
    ):
        list(steps)


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        (Sampling(top_p=0.9), ""),
        (
            Sampling(temperature=0),
            "node 'generate': .* samples from the whole vocabulary.*refuses greedy",
        ),
        (Sampling(min_tokens=4), "samples from the whole vocabulary"),
        (Sampling(top_k=5, stop=("a",)), r"stop=\('a',\): on a GPU, vLLM cannot return the kept sets"),
    ],
    ids=str,
)
def test_samplings_whose_kept_sets_vllm_cannot_return_on_a_gpu_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampling: Sampling, said: str
) -> None:
    model = folder_with(tmp_path / "m")
    (model / "tokenizer.json").write_text(Tokenizer(WordLevel({"a": 0}, unk_token="a")).to_str())
    monkeypatch.setattr(rollout_config, "_on_cpu", lambda: False)
    config = RolloutConfig(model=model, kept_sets=True, max_context=64)
    sampling = sampling.model_copy(update={"max_tokens": 8})
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    for checked in (config, config.model_copy(update={"kept_sets": False})):
        if said and checked is config:
            with pytest.raises(UserError, match=said):
                check(checked, [3], sampling=sampling)
        else:
            check(checked, [3], sampling=sampling)


def test_no_prompts_give_no_batches(worker: RolloutWorker) -> None:
    assert list(worker.generate(prompts_of([3]).slice(0, 0))) == []


@pytest.mark.parametrize(
    ("lengths", "message", "sample_ids"),
    [
        ([3, 0], "sample 101: the prompt has no tokens", (101,)),
        (
            [3, 30, 4, 31],
            "sample 101: 30 prompt tokens and max_tokens=8 exceed the context of 32",
            (101, 103),
        ),
    ],
)
def test_prompts_that_cannot_be_answered_are_named(
    tiny_model: Path, lengths: list[int], message: str, sample_ids: tuple[int, ...]
) -> None:
    worker = RolloutWorker(RolloutConfig(model=tiny_model, engine="transformers", max_context=32))
    with pytest.raises(SampleError, match=message) as caught:
        list(worker.generate(prompts_of(lengths), sampling=Sampling(max_tokens=8)))
    assert caught.value.sample_ids == sample_ids


# Checks before any process starts


class Table(SimpleNamespace):
    """A source of rows with nothing but a table."""

    name = "train.parquet"

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.table.column_names)


def folder_with(folder: Path, **changes: Any) -> Path:
    config = {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    config |= {"max_position_embeddings": 64}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def check(config: RolloutConfig, lengths: list[int], **arguments: Any) -> None:
    node: Any = SimpleNamespace(name="generate", arguments=arguments)
    source: Any = Table(
        table=pa.table({"prompt_ids": pa.array([[7] * n for n in lengths], pa.list_(pa.int32()))})
    )
    RolloutWorker.check(config, [node], source)


def test_an_engine_that_cannot_be_asked_for_kept_sets_is_refused_before_the_start(tiny_model: Path):
    class Narrow(RolloutWorker):
        def new_engine(self, *, max_context: int, dtype: str, seed: int) -> Any: ...  # pyright: ignore[reportIncompatibleMethodOverride]

    source: Any = Table(table=pa.table({"prompt_ids": [[3]]}))
    config = RolloutConfig(model=tiny_model, engine="transformers")
    Narrow.check(config, [], source)
    config = config.model_copy(update={"kept_sets": True})
    RolloutWorker.check(config, [], source)
    with pytest.raises(UserError, match=r"Narrow\.new_engine does not take kept_sets"):
        Narrow.check(config, [], source)


def test_a_config_that_fits_passes(tmp_path: Path) -> None:
    check(
        RolloutConfig(model=folder_with(tmp_path / "m")), [3, 32], n=8, sampling=Sampling(max_tokens=32)
    )


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        (
            {},
            {"sampling": Sampling(max_tokens=50)},
            r"node 'generate': row 1 of train.parquet has 20 prompt tokens and max_tokens=50, together more than the "
            r"context of 64 \(1 of 3 rows are too long\); lower max_tokens to 44$",
        ),
        (
            {"max_context": 40},
            {"sampling": Sampling(max_tokens=30)},
            r"context of 40 .* lower max_tokens to 20, or raise max_context to up to 64$",
        ),
        (
            {"max_context": 16},
            {"sampling": Sampling(max_tokens=8)},
            r"drop prompts above 8 tokens \(too_long='drop' where they are read\), or raise max_context",
        ),
        ({"routes": True}, {}, r"routes=True: .* is not a mixture of experts; leave it out"),
        (
            {},
            {"sampling": Sampling(max_tokens=64)},
            r"max_tokens=64 leaves no room for a prompt in a context of 64",
        ),
        ({"max_context": 65}, {}, r"max_context=65: the model in .* takes at most 64 tokens"),
        (
            {"tensor_parallel": 4},
            {},
            r"tensor_parallel=4 does not divide the model's 2 attention heads.* is 2",
        ),
        (
            {"max_num_seqs": 20_000},
            {},
            r"max_num_seqs=20000: a step takes in at most 16,384 tokens, at least one for each response",
        ),
        (
            {"kv_cache_gib": 1e-6},
            {},
            r"kv_cache_gib=1e-06 holds the keys and values of \d tokens, but one response with its prompt may have 64; raise it to",
        ),
        ({}, {"sampling": Sampling(), "n": 0}, r"node 'generate': n=0 is not a number of responses"),
        (
            {},
            {"sampling": Sampling(max_tokens=4, min_tokens=5)},
            r"min_tokens=5 is more than max_tokens=4",
        ),
        (
            {"speculation": Speculation(), "engine": "transformers"},
            {},
            r"speculation=.*: engine='transformers' cannot draft; choose engine='vllm'",
        ),
        (
            {"speculation": Speculation(), "kept_sets": True},
            {"sampling": Sampling(max_tokens=8, top_p=0.9)},
            r"vLLM cannot record the kept sets of drafted tokens.*sample without top_p",
        ),
        (
            {"speculation": Speculation(method="mtp"), "quantization": "int8"},
            {},
            r"quantization='int8' would quantise the drafting weights.*choose method='suffix'",
        ),
        (
            {"speculation": Speculation()},
            {"sampling": Sampling(max_tokens=8, min_p=0.1)},
            r"node 'generate': .*min_p=0\.1.*vLLM applies min_p and min_tokens to drafts wrongly; leave",
        ),
        (
            {"speculation": Speculation()},
            {"sampling": Sampling(max_tokens=8, min_tokens=2)},
            r"min_tokens=2.*vLLM applies min_p and min_tokens to drafts wrongly; leave",
        ),
        (
            {"speculation": Speculation(method="mtp")},
            {},
            r"has no heads for further tokens \(num_nextn_predict_layers\); choose method='suffix'",
        ),
        (
            {"speculation": Speculation(method="draft_model", model="/no/model")},
            {},
            r"model '/no/model': no such folder",
        ),
    ],
)
def test_a_plan_that_does_not_fit_suggests_the_nearest_fix(
    tmp_path: Path, settings: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    config = RolloutConfig(model=folder_with(tmp_path / "m"), **settings)
    with pytest.raises(UserError, match=message):
        check(config, [5, 20, 3], **arguments)


@pytest.mark.parametrize(
    ("changes", "chosen", "on_cpu", "message"),
    [
        ({}, {"engine": "transformers"}, True, "engine='transformers' has no quantised kernels"),
        ({"quantization_config": {"bits": 4}}, {}, True, "the weights in .* are quantised already"),
        ({"model_type": "qwen3_moe", "num_experts": 4}, {}, True, "is a mixture of experts"),
        ({}, {"quantization": "fp8"}, True, "vLLM has no fp8 kernels for this CPU; choose 'int8'"),
        ({}, {"compile": True}, True, "compiled code may keep the kernels of old weights"),
        ({}, {"dtype": "float32"}, False, "compute in half precision; choose dtype='bfloat16'"),
        ({}, {"quantization": "w4a16"}, True, "on a CPU, the kernel computes in half precision"),
        (
            {"intermediate_size": 96},
            {"quantization": "w4a16", "tensor_parallel": 2, "dtype": "bfloat16"},
            True,
            "has a weight of 48 columns on a rank, which must be a multiple of 32; choose 'int8'",
        ),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_weights_that_vllm_cannot_quantise_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    chosen: dict[str, Any],
    on_cpu: bool,
    message: str,
) -> None:
    monkeypatch.setattr(rollout_config, "_on_cpu", lambda: on_cpu)
    config = RolloutConfig(
        model=folder_with(tmp_path / "m", **changes), **{"quantization": "int8", **chosen}
    )
    named = rf"RolloutConfig\.quantization='{config.quantization}': .*{message}"
    with pytest.raises(UserError, match=named):
        check(config, [3], sampling=Sampling(max_tokens=8))


def test_speculation_that_fits_passes_and_a_draft_model_shares_the_vocabulary(tmp_path: Path) -> None:
    model, head = folder_with(tmp_path / "m", vocab_size=97), Sampling(max_tokens=8, top_k=5)
    small = folder_with(tmp_path / "small", vocab_size=97)
    other = folder_with(tmp_path / "other", vocab_size=98)
    heads = folder_with(tmp_path / "heads", num_nextn_predict_layers=1)
    for folder, method, draft in (
        (model, "suffix", None),
        (model, "ngram", None),
        (model, "draft_model", small),
        (heads, "mtp", None),
    ):
        speculation = Speculation(method=method, model=draft)  # pyright: ignore[reportArgumentType]
        check(RolloutConfig(model=folder, speculation=speculation), [3], sampling=head)
    speculation = Speculation(method="draft_model", model=other)
    with pytest.raises(UserError, match=r"other has a vocabulary of 98, and .*/m one of 97; choose"):
        check(RolloutConfig(model=model, speculation=speculation), [3], sampling=head)


@pytest.mark.vllm
def test_heads_too_small_for_vllm_on_cpu_are_refused(tmp_path: Path) -> None:
    model = folder_with(tmp_path / "m", num_attention_heads=4)
    with pytest.raises(UserError, match="heads of 16; vLLM on CPU takes heads of 32 and up"):
        check(RolloutConfig(model=model), [3])
    check(RolloutConfig(model=model, engine="transformers"), [3], sampling=Sampling(max_tokens=8))


def test_a_wrong_model_path_is_answered_with_the_nearest(tmp_path: Path) -> None:
    folder_with(tmp_path / "qwen-tiny")
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "qwen-tniy", r"no such folder; did you mean '.*/qwen-tiny'\?"),
        (tmp_path / "something", r"no such folder; folders with a config.json here: '.*/qwen-tiny'"),
        (tmp_path / "empty", r"the folder has no config.json"),
        (tmp_path / "qwen-tiny" / "config.json", r"is a file; give the folder"),
        ("Nobody/no-such-model", r"no model of that name in the local Hugging Face cache; `hf download"),
    ):
        with pytest.raises(UserError, match=message):
            RolloutWorker.check(RolloutConfig(model=path), [], Table(table=pa.table({})))  # pyright: ignore
    (tmp_path / "qwen-tiny" / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"cannot be read"):
        read_model_config(tmp_path / "qwen-tiny")


def test_settings_are_checked_where_they_are_made() -> None:
    with pytest.raises(UserError, match="did you mean 'max_context'"):
        RolloutConfig(model="m", max_contxt=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(UserError, match="engine"):
        RolloutConfig(model="m", engine="vlm")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(None, 5, (5,)), ({"eos_token_id": [1, 2]}, 5, (1, 2)), ({}, [3, 4], (3, 4)), (None, None, ())],
)
def test_stop_tokens_are_those_that_generation_names(
    tmp_path: Path, generation: dict[str, Any] | None, config: Any, expected: tuple[int, ...]
) -> None:
    model = folder_with(tmp_path / "m", eos_token_id=config)
    if generation is not None:
        (model / "generation_config.json").write_text(json.dumps(generation))
    assert read_stop_tokens(model) == expected


def test_parsers_of_agents_are_checked_by_name(tmp_path: Path) -> None:
    config = RolloutConfig(
        model=folder_with(tmp_path / "m"), engine="transformers", tool_parser="hermse"
    )
    check(config, [], sampling=Sampling(max_tokens=8))
    with pytest.raises(UserError, match=r"tool_parser='hermse': .*did you mean 'hermes'"):
        check(config, [], env="env")


def test_checks_import_no_torch_and_no_vllm(tmp_path: Path) -> None:
    folder_with(tmp_path / "m")
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "m" / "tokenizer.json"))
    settings = {"chat_template": "{{ messages }}"}
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps(settings))
    program = (
        "import sys, types, pyarrow as pa\n"
        "from weft.workers.rollout import RolloutWorker\n"
        "from weft.workers.rollout_config import RolloutConfig\n"
        "source = types.SimpleNamespace(name='s', columns=(), table=pa.table({}))\n"
        f"config = RolloutConfig(model={str(tmp_path / 'm')!r}, tool_parser='kimi_k2')\n"
        "node = types.SimpleNamespace(name='play', arguments={'env': 'env'})\n"
        "RolloutWorker.check(config, [node], source)\n"
        "assert not {'torch', 'vllm', 'transformers', 'ray'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_longest_prompt_leaves_room_for_the_longest_answer(tmp_path: Path) -> None:
    config = RolloutConfig(model=folder_with(tmp_path / "m"), max_context=48)
    nodes: Any = [
        SimpleNamespace(writers={"prompt_ids": ""}, arguments={"sampling": Sampling(max_tokens=n)})
        for n in (8, 20)
    ]
    assert RolloutWorker.longest_prompt(config, nodes) == 28
    later: Any = [SimpleNamespace(writers={"prompt_ids": "turn"}, arguments={})]
    assert RolloutWorker.longest_prompt(config, later) is None, "these prompts are made by another node"
