"""Stop strings end responses at the same token in both engines, and the completing token is
kept."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from engine_model import STOP, VOCABULARY
from tokenizers import Tokenizer, decoders, models

import weft
from weft.algorithms.sampling import Sampling
from weft.dataflow.errors import UserError
from weft.workers.generation.engine import (
    GenerationEngine,
    GenerationRequest,
    Response,
    generate,
    stop_check,
    stop_check_of,
)
from weft.workers.generation.transformers_engine import TransformersEngine
from weft.workers.rollout import RolloutWorker
from weft.workers.rollout_config import RolloutConfig

LETTERS = "abcdefgh"
STOPS = ("ab", "c", "hgf")


@pytest.fixture(params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request: pytest.FixtureRequest, with_tokenizer: Path) -> GenerationEngine:
    if request.param == "vllm":
        return request.getfixturevalue("vllm_worker").engine
    return TransformersEngine(str(with_tokenizer), kept_sets=True)


def responses_of(engine: GenerationEngine, sampling: Sampling) -> list[Response]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCABULARY, 3 + row % 7).astype(np.int32) for row in range(12)]
    requests = [GenerationRequest(row, ids, seed=row) for row, ids in enumerate(prompts)]
    return sorted(
        (r for batch in generate(engine, requests, sampling) for r in batch), key=lambda r: r.request_id
    )


def text_of(folder: Path, ids: Any) -> str:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).decode([int(i) for i in ids])


def test_a_response_is_the_unstopped_one_up_to_the_token_that_completes_a_stop_string(
    engine: GenerationEngine, with_tokenizer: Path
):
    stopped = responses_of(engine, Sampling(max_tokens=24, stop=STOPS))
    free = responses_of(engine, Sampling(max_tokens=24))
    ends = 0
    for one, other in zip(stopped, free, strict=True):
        length = len(one.token_ids)
        texts = [text_of(with_tokenizer, other.token_ids[:n]) for n in range(len(other.token_ids) + 1)]
        found = [n for n, text in enumerate(texts) if any(stop in text for stop in STOPS)]
        assert length == (found[0] if found else len(other.token_ids))
        assert one.token_ids.tolist() == other.token_ids[:length].tolist()
        np.testing.assert_allclose(
            one.logprobs, other.logprobs[:length], rtol=1e-4
        )  # the batch has other rows here, so rounding differs
        assert one.versions.tolist() == other.versions[:length].tolist()
        assert one.finish_reason == ("stop" if found else other.finish_reason)
        ends += bool(found)
    assert ends > 3, "most end by a stop string"


def test_a_response_that_stops_has_the_kept_sets_of_its_tokens(engine: GenerationEngine):
    responses = responses_of(engine, Sampling(max_tokens=24, stop=STOPS, top_k=6))
    for response in responses:
        assert response.kept_sets is not None
        assert response.kept_sets.counts.tolist() == [6] * len(response.token_ids)
    assert any(r.finish_reason == "stop" and r.token_ids[-1] != STOP for r in responses)


def test_min_tokens_and_no_stop_hold_for_stop_strings(engine: GenerationEngine, with_tokenizer: Path):
    late = responses_of(engine, Sampling(max_tokens=12, stop=tuple(LETTERS[3:]), min_tokens=5))
    assert min(len(response.token_ids) for response in late) >= 5
    assert any(len(response.token_ids) < 12 for response in late)
    on = responses_of(engine, Sampling(max_tokens=12, stop=None))
    assert {len(response.token_ids) for response in on} == {12}


@pytest.mark.vllm
def test_responses_that_stop_leave_the_engine_idle(vllm_worker: RolloutWorker, with_tokenizer: Path):
    engine: Any = vllm_worker.engine
    responses_of(engine, Sampling(max_tokens=24, stop=STOPS))
    assert engine.num_unfinished == 0 and not engine._finished and not engine._requests


def test_an_occurrence_before_min_tokens_ends_nothing_and_a_later_one_does():
    ends = stop_check(("ab",), lambda ids: "".join("ab"[i] for i in ids))
    assert [ends([0, 1, 0, 1][:n]) for n in range(1, 5)] == [False, True, False, True]


def test_a_stop_string_of_several_bytes_is_found_in_byte_tokens(tmp_path: Path):
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ends = stop_check_of(Sampling(stop=("🙂 ends",)), str(tmp_path))
    ids = tokenizer.encode("x" * 50 + "🙂 ends here").ids
    assert ends is not None
    assert [n for n in range(1, len(ids) + 1) if ends(ids[:n])] == [59]
    assert stop_check_of(Sampling(stop=None), str(tmp_path)) is None


def test_one_text_is_a_value_and_an_empty_one_is_refused():
    assert Sampling(stop="</answer>").stop == ("</answer>",)  # pyright: ignore[reportArgumentType]
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"no setting 'ignore_stop' \(value True\); set stop=None"):
        Sampling(ignore_stop=True)  # pyright: ignore[reportCallIssue]
    assert Sampling(stop=("a",)).writes == Sampling().writes, "the distribution is whole"
    with pytest.raises(UserError, match=r"stop has the lone surrogate '\\ud800'"):
        Sampling(stop=("a", "\ud800"))
    with pytest.raises(UserError, match="stop has an empty text"):
        Sampling(stop=("a", ""))


def test_a_model_without_a_tokenizer_is_refused_before_the_run(tmp_path: Path):
    from engine_model import save_model

    prompts: Any = weft.TableSource(
        "rows", pa.table({"prompt_ids": pa.array([[3, 4]], pa.list_(pa.int32()))})
    )
    rollout = weft.group(weft.RolloutWorker, model=save_model(tmp_path / "bare"), engine="transformers")

    @weft.graph
    def sampled(prompts: Any, *, rollout: Any) -> Any:
        return rollout.generate(prompts, sampling=Sampling(max_tokens=4, stop=("a",)))

    graph = sampled(prompts, rollout=rollout)
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        RolloutConfig(model=tmp_path / "bare", engine="transformers").check(graph.nodes, graph.source)


def test_a_stop_string_ends_a_response_whose_beginning_another_engine_sampled(
    engine: GenerationEngine, with_tokenizer: Path
):
    checked = 0
    for last in range(8, 24):
        given = GenerationRequest(0, np.array([5, 6, 7, 8, 9, last], np.int32), sampled=3)
        greedy = Sampling(max_tokens=24, temperature=0)
        (free,) = (r for step in generate(engine, [given], greedy) for r in step)
        text = text_of(with_tokenizer, free.token_ids[:1])
        stop = text_of(with_tokenizer, [last]) + text
        if free.token_ids[0] == STOP or not text or stop in text_of(with_tokenizer, free.token_ids):
            continue
        stopping = greedy.model_copy(update={"stop": (stop,)})
        (rest,) = (r for step in generate(engine, [given], stopping) for r in step)
        assert rest.token_ids.tolist() == free.token_ids[:1].tolist() and rest.finish_reason == "stop"
        checked += 1
    assert checked
