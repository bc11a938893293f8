"""Requests with their own settings, submitted at any time, decode together in both engines."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from engine_model import STOP, VOCABULARY, all_of, prompts_of, published, requests_of, straight_logprobs
from tokenizers import Tokenizer

from weft.algorithms.distillation import distillation
from weft.algorithms.sampling import Sampling
from weft.dataflow.batch import Batch
from weft.dataflow.errors import GenerationError, SampleError, UserError
from weft.dataflow.graph import group
from weft.dataflow.source import TableSource
from weft.resharding import sources
from weft.resharding.publisher import WeightPublisher
from weft.workers.actor import ActorWorker
from weft.workers.generation.engine import (
    GenerationEngine,
    GenerationRequest,
    Requests,
    Response,
    Structure,
    generate,
)
from weft.workers.generation.transformers_engine import TransformersEngine
from weft.workers.generation.vllm_engine import VllmEngine
from weft.workers.reference import ReferenceConfig, ReferenceWorker
from weft.workers.rollout import RolloutWorker
from weft.workers.teacher import TeacherWorker

SAMPLINGS = (
    Sampling(max_tokens=24),
    Sampling(max_tokens=7, temperature=0.7, stop=None),
    Sampling(max_tokens=12, temperature=0),
    Sampling(max_tokens=20, top_k=5, min_tokens=6),
    Sampling(max_tokens=16, top_p=0.6, temperature=1.3),
)


def finish(engine: GenerationEngine) -> dict[int, Response]:
    found: dict[int, Response] = {}
    while engine.num_unfinished:
        found |= {response.ticket: response for response in engine.step()}
    assert engine.step() == []
    return found


def test_requests_of_any_settings_that_come_at_any_time_are_sampled_as_if_alone(
    engine: GenerationEngine,
):
    requests = requests_of(prompts_of(5), samples=3)
    settings = {r.request_id: SAMPLINGS[r.request_id % len(SAMPLINGS)] for r in requests}
    alone = {r.request_id: all_of(engine, [r], settings[r.request_id])[r.request_id] for r in requests}
    found: dict[int, Response] = {}
    tickets: dict[int, int] = {}
    for request in requests:
        tickets[engine.submit(request, settings[request.request_id])] = request.request_id
        for _ in range(request.request_id % 3):
            found |= {response.ticket: response for response in engine.step()}
    assert 0 < engine.num_unfinished == len(requests) - len(found)
    found |= finish(engine)
    assert len(tickets) == len(requests) and found.keys() == tickets.keys()
    for ticket, response in found.items():
        other = alone[tickets[ticket]]
        assert response.request_id == other.request_id
        assert response.token_ids.tolist() == other.token_ids.tolist()
        assert response.finish_reason == other.finish_reason
        np.testing.assert_allclose(response.logprobs, other.logprobs, atol=2e-5)


def test_requests_end_at_their_own_stop_tokens_too(engine: GenerationEngine):
    (request, *_) = requests_of(prompts_of(1))
    free = all_of(engine, [request], Sampling(max_tokens=24, stop=None))[0].token_ids.tolist()
    own = next(token for token in free if token != STOP)
    stopping = GenerationRequest(0, request.prompt_ids, request.seed, stop_token_ids=(own,))
    for sampling, ends_before in (
        (Sampling(max_tokens=24), True),
        (Sampling(max_tokens=24, stop=None), False),
    ):
        response = all_of(engine, [stopping], sampling)[0]
        end = min(free.index(own), free.index(STOP) if STOP in free else 24) + 1
        assert response.token_ids.tolist() == (free[:end] if ends_before else free)
        assert response.finish_reason == ("stop" if ends_before else "length")
    late = all_of(engine, [stopping], Sampling(max_tokens=24, min_tokens=5))[0]
    assert len(late.token_ids) >= 5 and own not in late.token_ids[:5].tolist()[:-1]


def test_an_aborted_request_ends_whether_it_waits_or_decodes(engine: GenerationEngine):
    requests, sampling = requests_of(prompts_of(2)), Sampling(max_tokens=12, stop=None)
    tickets = [engine.submit(request, sampling) for request in requests[:4]]
    assert engine.step() == []
    tickets += [engine.submit(request, sampling) for request in requests[4:]]
    engine.abort([tickets[1], tickets[5], 10**9])
    assert engine.num_unfinished == len(requests) - 2
    found = finish(engine)
    assert found.keys() == {*tickets} - {tickets[1], tickets[5]}
    engine.abort(tickets)
    alone = all_of(engine, requests, sampling)
    assert all(r.token_ids.tolist() == alone[r.request_id].token_ids.tolist() for r in found.values())


def test_each_caller_gets_its_own_responses_whoever_steps(engine: GenerationEngine):
    requests, sampling = requests_of(prompts_of(4)), Sampling(max_tokens=8, stop=None)
    steps = generate(engine, requests[:4], sampling)
    next(steps)
    with closing(Requests(engine)) as first, closing(Requests(engine)) as second:
        assert first.step() == [] and not first.num_unfinished
        early = [first.submit(request, sampling) for request in requests[4:8]]
        late = [second.submit(request, sampling) for request in requests[8:12]]
        first.abort([early[0], late[0]])  # only its own
        while second.num_unfinished:
            assert all(response.ticket in late for response in second.step())
        assert first.num_unfinished == 3
        assert [response.ticket for response in first.step()] == early[1:], "without another step"
        assert not first.num_unfinished
        second.submit(requests[12], sampling)
    found = [response.request_id for step in steps for response in step]
    assert found == [0, 1, 2, 3] and not engine.num_unfinished


@pytest.mark.parametrize("recompute", [False, True])
def test_new_weights_and_caches_reach_the_requests_of_several_submits(
    recompute: bool, engine: GenerationEngine, model: Any, publisher: WeightPublisher
):
    requests, sampling = requests_of(prompts_of(4)), Sampling(max_tokens=12, stop=None)
    tickets: dict[int, int] = {}
    for begin, request in enumerate(requests[::2]):
        tickets[engine.submit(request, sampling)] = begin
        assert engine.step() == []
    new = engine.version + 1
    engine.update_weights(published(model, publisher, version=new, scale=1.5))
    publisher.finish()
    if recompute:
        engine.recompute()
    last = engine.submit(requests[1], sampling)
    found = finish(engine)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    gaps: list[float] = []
    assert found[last].versions.tolist() == [new] * 12
    for ticket, begin in tickets.items():
        response, before = found[ticket], 8 - begin
        assert response.versions.tolist() == [new - 1] * before + [new] * (12 - before)
        request = requests[response.request_id]
        every = straight_logprobs(model, request.prompt_ids, response.token_ids, sampling)
        exact = every.gather(-1, torch.from_numpy(response.token_ids).long()[:, None])[:, 0]
        gaps.append(float(np.abs(exact.numpy() - response.logprobs)[before:].max()))
    assert (max(gaps) < 1e-3) == recompute


def test_unfinished_requests_never_continue_with_incomplete_weights(
    engine: GenerationEngine, model: Any, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
):
    (request, *_), sampling = requests_of(prompts_of(1)), Sampling(max_tokens=8, stop=None)
    ticket = engine.submit(request, sampling)
    assert engine.step() == []
    weights = published(model, publisher, version=engine.version + 1, scale=1.2)
    with monkeypatch.context() as patch:
        real = sources.RankSource.elements
        patch.setattr(sources.RankSource, "elements", lambda *arguments: real(*arguments) + 1)
        with pytest.raises(Exception, match="did not arrive as it was published"):
            engine.update_weights(weights)
    for _ in range(2):
        with pytest.raises(GenerationError, match="no complete version of the weights has arrived"):
            engine.step()
    version = engine.version + 2
    engine.update_weights(published(model, publisher, version=version, scale=1.0))
    assert finish(engine)[ticket].versions.tolist() == [version - 2] + [version] * 7


def test_a_failed_step_ends_the_requests_of_all_callers(folder: Path, monkeypatch: pytest.MonkeyPatch):
    engine = TransformersEngine(str(folder))
    (request, other, *_), sampling = requests_of(prompts_of(2)), Sampling(max_tokens=8, stop=None)
    with closing(Requests(engine)) as first, closing(Requests(engine)) as second:
        first.submit(request, sampling)
        second.submit(other, sampling)
        with monkeypatch.context() as patch:
            patch.setattr(engine.model, "forward", lambda **_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                first.step()
        for own in (first, second):
            with pytest.raises(GenerationError, match="the engine dropped 1 requests"):
                own.step()
    assert len(all_of(engine, [request], sampling)) == 1


def test_requests_decode_in_one_pass_and_columns_of_ended_requests_go(folder: Path):
    engine = TransformersEngine(str(folder), max_num_seqs=8)
    (request, *_), sampling = requests_of(prompts_of(1)), Sampling(max_tokens=8, stop=None)
    passes: list[int] = []
    engine.model.register_forward_pre_hook(
        lambda _module, _args, given: passes.append(len(given["input_ids"])), with_kwargs=True
    )
    for _ in range(60):
        engine.submit(request, sampling)
        engine.step()
        assert engine._running[""].length <= len(request.prompt_ids) + sampling.max_tokens
    assert sorted(set(passes)) == [1, 2, 3, 4, 5, 6, 7] and len(passes) == 2 * 60 - 1


def test_token_ids_that_the_model_lacks_are_refused_and_other_requests_go_on(engine: GenerationEngine):
    (request, *_) = requests_of(prompts_of(1))
    ticket = engine.submit(request, Sampling(max_tokens=4))
    wrong = GenerationRequest(1, np.array([1, 1 << 30], np.int32), 0)
    with pytest.raises((GenerationError, ValueError), match=str(1 << 30)):
        engine.submit(wrong, Sampling(max_tokens=4))
    assert finish(engine).keys() == {ticket}


def test_the_transformers_engine_refuses_structured_output(folder: Path):
    engine = TransformersEngine(str(folder))
    request = GenerationRequest(3, prompts_of(1)[0], structure=Structure("regex", "a+"))
    with pytest.raises(
        GenerationError,
        match=r"request 3 asks for structured output \(regex\), which engine='transformers' cannot",
    ):
        engine.submit(request, Sampling())
    assert not engine.num_unfinished


@pytest.mark.vllm
# vLLM 0.32 gives xgrammar 0.2.8 an argument that it no longer needs.
@pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning")
def test_vllm_enforces_the_structure_of_each_request(
    vllm: VllmEngine, with_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
):
    prompt, sampling = prompts_of(1)[0], Sampling(max_tokens=12)
    wanted = (
        Structure("regex", "[de]{3}(ab|cd)"),
        Structure("choice", ["ff", "dge"]),
        Structure("grammar", 'root ::= "d" ("ge" | "fe") "h"'),
        None,
    )
    requests = [GenerationRequest(i, prompt, 7, structure=one) for i, one in enumerate(wanted)]
    found = all_of(vllm, requests, sampling)
    tokenizer = Tokenizer.from_file(str(with_tokenizer / "tokenizer.json"))
    texts = [tokenizer.decode(found[i].token_ids[:-1].tolist()) for i in range(3)]
    assert len(texts[0]) == 5 and set(texts[0][:3]) <= {*"de"} and texts[0][3:] in ("ab", "cd")
    assert texts[1] in ("ff", "dge")
    assert texts[2] in ("dgeh", "dfeh")
    assert all(found[i].finish_reason == "stop" for i in range(3))
    free = all_of(vllm, [GenerationRequest(0, prompt, 7)], sampling)[0]
    assert found[3].token_ids.tolist() == free.token_ids.tolist(), "others are not constrained"
    with pytest.raises(GenerationError, match="vLLM refuses request 5"):
        vllm.submit(GenerationRequest(5, prompt, structure=Structure("json", "{no schema")), sampling)
    monkeypatch.setattr(vllm._core.structured_output_manager, "_create_grammar", lambda _: 1 / 0)
    with pytest.raises(GenerationError, match="vLLM refuses request 6: division by zero"):
        vllm.submit(GenerationRequest(6, prompt, structure=Structure("regex", "d")), sampling)
    assert not vllm.num_unfinished and not vllm._engine.has_unfinished_requests()


@pytest.mark.vllm
def test_likeliest_tokens_by_vllm_are_those_of_a_forward_pass(vllm: VllmEngine, model: Any):
    """The tokens of a request that is being sampled stay the same."""
    drawn = np.random.default_rng(0)
    prompts = [drawn.integers(3, VOCABULARY, n).astype(np.int32) for n in (1, 4, 7)]
    responses = [drawn.integers(3, VOCABULARY, n).astype(np.int32) for n in (5, 1, 0)]
    sampling = Sampling(max_tokens=12, stop=None)
    alone = all_of(vllm, [GenerationRequest(0, prompts[1], 3)], sampling)[0]
    ticket = vllm.submit(GenerationRequest(0, prompts[1], 3), sampling)
    vllm.step()
    logprobs, ids = vllm.top_logprobs(prompts, responses, 4)
    row = 0
    for prompt, response in zip(prompts, responses, strict=True):
        tokens = torch.tensor(np.concatenate([prompt, response]).tolist())[None]
        with torch.no_grad():
            logits = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        for position in range(len(response)):
            np.testing.assert_allclose(logprobs[row], logits[position].topk(4).values, atol=1e-4)
            np.testing.assert_allclose(logits[position][ids[row].tolist()], logprobs[row], atol=1e-4)
            row += 1
    assert row == len(logprobs) == 6
    found: dict[int, Response] = {}
    while ticket not in found:
        found |= {response.ticket: response for response in vllm.step()}
    assert {*found} == {ticket} and found[ticket].token_ids.tolist() == alone.token_ids.tolist()
    with pytest.raises(GenerationError, match="vLLM cannot score row 0"):
        vllm.top_logprobs([np.full(100_000, 5, np.int32)], [np.array([3], np.int32)], 2)
    assert vllm.top_logprobs([], [], 2)[0].shape == (0, 2)
    whole, _ = vllm.top_logprobs(prompts[:1], responses[:1], 1_000_000)
    assert whole.shape == (5, model.config.vocab_size), "more tokens than the vocabulary has"


@pytest.mark.vllm
def test_a_teacher_in_vllm_writes_what_a_reference_writes(vllm: VllmEngine, folder: Path):
    rows = Batch.of(
        prompt_ids=[[5, 6], [7], [8, 9]],
        response_ids=[[3, 4, 5], [6], [7, 8]],
        domain=["math", "code", "math"],
    )
    teacher = object.__new__(TeacherWorker)  # another engine in this process would end this one
    teacher.engine = vllm
    reference = ReferenceWorker(ReferenceConfig(model=str(folder)))
    found, expected = (
        one.top_logprobs(rows, top=3, where=("domain", "math")) for one in (teacher, reference)
    )
    assert found.lengths("teacher_ids").tolist() == [9, 0, 6]
    assert found["teacher_ids"].equals(expected["teacher_ids"])
    logprobs = (each.ragged_numpy("teacher_logprobs")[0] for each in (found, expected))
    np.testing.assert_allclose(next(logprobs), next(logprobs), atol=1e-4)
    with pytest.raises(SampleError, match=r"gives probabilities at temperature 1, not 0\.7"):
        teacher.top_logprobs(rows.with_columns(temperature=[1.0, 1.0, 0.7]))
    found, expected = (
        one.logprobs(rows, into="own").ragged_numpy("own")[0] for one in (teacher, reference)
    )
    np.testing.assert_allclose(found, expected, atol=1e-4)
    texts = rows.with_columns(theirs=[[3], [4, 5], []], asked=[[7, 8], [9], [5]])
    ways: dict[str, Any] = {"into": "own", "of": "theirs", "prompts": "asked"}
    found, expected = (one.logprobs(texts, **ways).ragged_numpy("own") for one in (teacher, reference))
    np.testing.assert_allclose(found[0], expected[0], atol=1e-4)
    assert found[1].tolist() == expected[1].tolist() == [0, 1, 3, 3]
    assert len(teacher.logprobs(rows.slice(0, 0), into="own")) == 0
    reference.close()


def test_a_teacher_in_vllm_reads_no_kept_sets(folder: Path):
    source = TableSource("prompts", pa.table({"prompt_ids": [[1]]}))
    groups: dict[str, Any] = {"rollout": RolloutWorker, "teacher": TeacherWorker, "actor": ActorWorker}
    handles = {name: group(worker, model=str(folder)) for name, worker in groups.items()}
    for sampling in (Sampling(), Sampling(top_p=0.9)):
        [node] = [
            n
            for n in distillation(source, **handles, top=0, sampling=sampling).nodes
            if n.group == "teacher"
        ]
        if not sampling.truncates:
            TeacherWorker.check(handles["teacher"].config, [node], source)
            continue
        with pytest.raises(
            UserError, match=r"'teacher\.logprobs': a TeacherWorker gives probabilities over"
        ):
            TeacherWorker.check(handles["teacher"].config, [node], source)
