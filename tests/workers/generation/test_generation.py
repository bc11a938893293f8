"""Both engines: correct distribution, equal tokens for equal seeds, weight updates between steps.

Tests with `engine` run on both. The vLLM engine starts once per session.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_model import (
    CONTEXT,
    STOP,
    VOCABULARY,
    all_of,
    largest_and_mean_gap,
    mask_of,
    prompts_of,
    published,
    requests_of,
    run_apart,
    straight_logprobs,
)

from weft.algorithms.sampling import Sampling
from weft.dataflow.batch import Batch
from weft.dataflow.errors import GenerationError, WeightSyncError
from weft.resharding import sources, transfer
from weft.resharding.publisher import WeightPublisher
from weft.resharding.weights import whole
from weft.workers.generation.engine import GenerationEngine, GenerationRequest, Response, generate
from weft.workers.generation.transformers_engine import TransformersEngine
from weft.workers.generation.vllm_engine import VllmEngine
from weft.workers.generation.vllm_settings import VllmSettings
from weft.workers.rollout import RolloutWorker


@pytest.mark.vllm
def test_vllm_names_its_model_runner_and_the_room_for_keys_and_values(vllm: VllmEngine):
    facts = vllm.facts()
    assert facts["model runner"] in ("V1", "V2")
    assert int(facts["KV cache (tokens)"]) >= 64


SAMPLINGS = [
    Sampling(max_tokens=24),
    Sampling(max_tokens=24, temperature=0.7),
    Sampling(max_tokens=24, top_k=5),
    Sampling(max_tokens=24, top_p=0.6, temperature=1.3),
    Sampling(max_tokens=24, min_p=0.2),
    Sampling(max_tokens=24, top_k=8, top_p=0.8, min_tokens=6),
    Sampling(max_tokens=24, top_k=20, top_p=0.9, min_p=0.05, temperature=1.2),
    Sampling(max_tokens=24, min_tokens=6),
    Sampling(max_tokens=24, min_tokens=6, stop=None),
    Sampling(max_tokens=24, temperature=0, top_p=0.6),
    Sampling(max_tokens=24, temperature=0, min_tokens=6),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_logprobs_are_those_of_a_straight_forward_pass(
    engine: GenerationEngine, model: Any, sampling: Sampling
) -> None:
    requests = requests_of(prompts_of(6))
    responses = all_of(engine, requests, sampling)
    largest, mean = largest_and_mean_gap(model, requests, responses.values(), sampling)
    assert largest <= 5e-4 and mean <= 1e-5
    whole = Sampling(temperature=sampling.temperature)
    largest, _ = largest_and_mean_gap(model, requests, responses.values(), whole)
    assert (largest > 5e-4) == sampling.truncates


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_kept_sets_are_the_tokens_that_could_be_sampled(
    engine: GenerationEngine, model: Any, sampling: Sampling
) -> None:
    requests = requests_of(prompts_of(6))
    sizes = set[int]()
    for number, response in all_of(engine, requests, sampling).items():
        if not sampling.truncates:
            assert response.kept_sets is None
            continue
        assert response.kept_sets is not None
        prompt, ids = requests[number].prompt_ids, response.token_ids
        expected = straight_logprobs(model, prompt, ids, sampling).isfinite().numpy()
        kept = mask_of(response.kept_sets, VOCABULARY)
        np.testing.assert_array_equal(kept, expected)
        assert len(response.kept_sets.ids) <= VOCABULARY // 2 * len(ids)
        sizes.update(kept.sum(1).tolist())
    if sampling.truncates:
        assert len(sizes) > 1 or sizes == {sampling.top_k}


@pytest.mark.vllm
def test_vllm_gives_the_kept_sets_of_narrow_samples_with_either_model_runner(
    vllm: VllmEngine, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """test_overlapped_steps.py repeats this test with V2, in Triton's interpreter. The interpreter
    cannot run vLLM's kernel for top-k and top-p, so vLLM uses torch's operations here."""
    monkeypatch.setattr("vllm.v1.sample.ops.topk_topp_sampler.HAS_TRITON", False)
    requests = requests_of(prompts_of(4), samples=2)
    for sampling in (s for s in SAMPLINGS if s.narrows and not s.min_tokens):
        for number, response in all_of(vllm, requests, sampling).items():
            prompt = requests[number].prompt_ids
            expected = straight_logprobs(model, prompt, response.token_ids, sampling).isfinite()
            assert response.kept_sets is not None
            np.testing.assert_array_equal(mask_of(response.kept_sets, VOCABULARY), expected.numpy())
    greedy, stopping = Sampling(temperature=0), Sampling(top_k=3, stop=("a",))
    whole = all_of(vllm, requests, Sampling(max_tokens=4))
    assert all(response.kept_sets is None for response in whole.values())
    if vllm._masks:
        with pytest.raises(GenerationError, match=r"refuses request 0: .* requires temperature > 0"):
            all_of(vllm, requests, greedy)
        with pytest.raises(
            GenerationError, match="request 0 has stop strings, and vLLM returns the kept"
        ):
            all_of(vllm, requests, stopping)
    else:
        all_of(vllm, requests, greedy)


def test_requests_of_both_kinds_decode_together_and_only_one_has_kept_sets(
    engine: GenerationEngine,
) -> None:
    ids = prompts_of(1)[0]
    narrow, whole = Sampling(max_tokens=6, top_k=3), Sampling(max_tokens=6)
    kinds = {
        engine.submit(GenerationRequest(i, ids, seed=i), sampling): sampling
        for i, sampling in enumerate(
            (narrow, whole, narrow, whole, Sampling(max_tokens=6, temperature=0))
        )
    }
    found: dict[int, Response] = {}
    while engine.num_unfinished:
        found |= {response.ticket: response for response in engine.step()}
    for ticket, sampling in kinds.items():
        kept = found[ticket].kept_sets
        assert (kept is None) == (sampling is not narrow)
        assert kept is None or kept.counts.tolist() == [3] * len(found[ticket].token_ids)


def test_new_weights_and_recomputed_keys_in_the_middle_lose_no_kept_set(
    engine: GenerationEngine, model: Any, publisher: WeightPublisher
) -> None:
    sampling = Sampling(max_tokens=24, top_k=5, stop=None)
    steps = generate(engine, requests_of(prompts_of(4)), sampling)
    found = [response for _ in range(8) for response in next(steps)]
    engine.update_weights(published(model, publisher, version=engine.version + 1, scale=1.2))
    publisher.finish()
    engine.recompute()
    found += [response for step in steps for response in step]
    assert len(found) == 16
    for response in found:
        assert response.kept_sets is not None and response.kept_sets.counts.tolist() == [5] * 24
        assert (response.kept_sets.ids.reshape(24, 5) == response.token_ids[:, None]).any(1).all()


def test_kept_sets_of_requests_that_are_given_up_are_forgotten(engine: GenerationEngine) -> None:
    requests, sampling = requests_of(prompts_of(6)), Sampling(max_tokens=24, top_k=3)
    steps = generate(engine, requests, sampling)
    next(steps)
    steps.close()
    again = all_of(engine, requests, sampling)
    for response in again.values():
        assert response.kept_sets is not None
        assert len(response.kept_sets.counts) == len(response.token_ids)


def test_the_same_seeds_give_the_same_tokens(engine: GenerationEngine) -> None:
    requests = requests_of(prompts_of(6))
    one, other = (all_of(engine, requests, Sampling(max_tokens=16)) for _ in range(2))
    assert all(one[i].token_ids.tolist() == other[i].token_ids.tolist() for i in one)
    assert len({tuple(r.token_ids.tolist()) for r in one.values()}) == len(one)


def test_a_response_does_not_depend_on_the_rest_of_the_batch(engine: GenerationEngine) -> None:
    requests = requests_of(prompts_of(6))
    together = all_of(engine, requests, Sampling(max_tokens=16))
    for request in requests[::5]:
        alone = all_of(engine, [request], Sampling(max_tokens=16))[request.request_id]
        assert alone.token_ids.tolist() == together[request.request_id].token_ids.tolist()
        np.testing.assert_allclose(alone.logprobs, together[request.request_id].logprobs, atol=2e-5)


def test_a_batch_larger_than_the_limit_is_done_in_parts(folder: Path) -> None:
    requests = requests_of(prompts_of(5))
    engines = [TransformersEngine(str(folder), max_num_seqs=limit) for limit in (3, 256)]
    one, other = (all_of(engine, requests, Sampling(max_tokens=8)) for engine in engines)
    assert all(one[i].token_ids.tolist() == other[i].token_ids.tolist() for i in one)


def test_without_seeds_every_response_is_drawn_afresh(engine: GenerationEngine) -> None:
    requests = [GenerationRequest(i, prompts_of(1)[0]) for i in range(4)]
    found = all_of(engine, requests, Sampling(max_tokens=16, stop=None))
    assert len({tuple(r.token_ids.tolist()) for r in found.values()}) == 4


def test_greedy_equals_transformers(engine: GenerationEngine, model: Any) -> None:
    requests = requests_of(prompts_of(6), samples=1)
    responses = all_of(engine, requests, Sampling(max_tokens=20, temperature=0))
    for request in requests:
        ids = torch.from_numpy(request.prompt_ids)[None].long()
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, pad_token_id=0
        )
        assert responses[request.request_id].token_ids.tolist() == whole[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    "sampling", [Sampling(max_tokens=1), Sampling(max_tokens=1, top_k=6, temperature=1.5)], ids=str
)
def test_tokens_come_with_the_frequency_of_their_probability(
    folder: Path, model: Any, sampling: Sampling
) -> None:
    ids, count = prompts_of(1)[0], 4000
    found = all_of(
        TransformersEngine(str(folder)),
        [GenerationRequest(i, ids, seed=i) for i in range(count)],
        sampling,
    )
    drawn = np.bincount([r.token_ids[0] for r in found.values()], minlength=VOCABULARY)
    expected = straight_logprobs(model, ids, np.zeros(1, np.int32), sampling)[0].exp().numpy() * count
    likely = expected >= 5
    chi_square = float((((drawn - expected) ** 2)[likely] / expected[likely]).sum())
    assert chi_square < 3 * likely.sum()
    assert not drawn[expected == 0].any()


def test_responses_end_with_the_stop_token_or_at_the_limit(engine: GenerationEngine) -> None:
    requests = requests_of(prompts_of(12))
    for response in all_of(engine, requests, Sampling(max_tokens=24, min_tokens=3)).values():
        assert STOP not in response.token_ids[:-1]
        if response.finish_reason == "stop":
            assert response.token_ids[-1] == STOP and len(response.token_ids) > 3
        else:
            assert len(response.token_ids) == 24 and response.token_ids[-1] != STOP
    reasons = {r.finish_reason for r in all_of(engine, requests, Sampling(max_tokens=24)).values()}
    assert reasons == {"stop", "length"}
    whole = all_of(engine, requests, Sampling(max_tokens=24, stop=None)).values()
    assert {len(r.token_ids) for r in whole} == {24}


def test_finished_responses_come_before_the_others_are_done(engine: GenerationEngine) -> None:
    every_step = list(generate(engine, requests_of(prompts_of(12)), Sampling(max_tokens=24)))
    steps = [step for step in every_step if step]
    assert len(every_step) >= 24, "others have their turn after each step"
    lengths = [len(step[0].token_ids) for step in steps]
    assert len(steps) > 2 and lengths == sorted(lengths)
    assert all(len({len(r.token_ids) for r in step}) == 1 for step in steps)


def test_logprobs_follow_new_weights_and_show_a_skipped_update(
    engine: GenerationEngine, model: Any, publisher: WeightPublisher
) -> None:
    requests, sampling = requests_of(prompts_of(6)), Sampling(max_tokens=24)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for version, scale in ((1, 1.2), (2, 0.9)):
        weights = publisher.publish(whole({name: p * scale for name, p in before.items()}), version)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name] * scale)
        stale = all_of(engine, requests, sampling)
        largest, _ = largest_and_mean_gap(model, requests, stale.values(), sampling)
        assert largest > 1e-2, "weights that were not taken over must show"
        assert engine.update_weights(weights) == publisher.finish()
        assert engine.version == version
        fresh = all_of(engine, requests, sampling)
        largest, mean = largest_and_mean_gap(model, requests, fresh.values(), sampling)
        assert largest <= 5e-4 and mean <= 1e-5
        assert {v for r in fresh.values() for v in r.versions.tolist()} == {version}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])


def test_every_token_knows_its_version_when_weights_change_in_the_middle(
    engine: GenerationEngine, model: Any, publisher: WeightPublisher
) -> None:
    steps = generate(engine, requests_of(prompts_of(12)), Sampling(max_tokens=24))
    length = len(next(step for step in steps if step)[0].token_ids)
    engine.update_weights(published(model, publisher, version=3, scale=1.2))
    rest = [response for step in steps for response in step]
    assert any(len(r.token_ids) > length for r in rest)
    for response in rest:
        assert response.versions.tolist() == [0] * length + [3] * (len(response.token_ids) - length)


@pytest.mark.parametrize("recompute", [False, True])
def test_keys_and_values_of_unfinished_responses_are_computed_again_on_request(
    recompute: bool, engine: GenerationEngine, model: Any, publisher: WeightPublisher
) -> None:
    """With recomputed keys and values, tokens after the change have the logprobs of the new
    weights."""
    requests, sampling = requests_of(prompts_of(4)), Sampling(max_tokens=24, stop=None)
    steps = generate(engine, requests, sampling)
    early = [response for _ in range(8) for response in next(steps)]
    engine.update_weights(published(model, publisher, version=engine.version + 1, scale=1.5))
    publisher.finish()
    if recompute:
        engine.recompute()
    found = [response for step in steps for response in step]
    assert not early and len(found) == len(requests)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    gaps: list[float] = []
    for response in found:
        request = next(each for each in requests if each.request_id == response.request_id)
        every = straight_logprobs(model, request.prompt_ids, response.token_ids, sampling)
        exact = every.gather(-1, torch.from_numpy(response.token_ids).long()[:, None])[:, 0]
        new = response.versions == engine.version
        assert new.any() and not new.all() and (np.diff(response.versions) >= 0).all()
        gaps.append(float(np.abs(exact.numpy() - response.logprobs)[new].max()))
    assert (max(gaps) < 1e-3) == recompute


@pytest.mark.vllm
def test_vllm_generates_while_weights_are_staged_with_a_version_per_token(
    vllm: VllmEngine, model: Any, publisher: WeightPublisher
) -> None:
    requests, sampling, cores = (
        requests_of(prompts_of(6)),
        Sampling(max_tokens=24),
        len(os.sched_getaffinity(0)),
    )
    torch.set_num_threads(cores)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for version, scale in ((3, 1.2), (4, 0.9)):
        steps = generate(vllm, requests, sampling)
        next(steps)
        earlier = vllm.version
        weights = published(model, publisher, version=version, scale=scale)
        turns = 0
        for _ in vllm.stage_weights(weights):
            if turns < 3:  # some responses are unfinished when the weights arrive
                next(steps)
            turns += 1
            assert vllm.version == earlier
            assert torch.get_num_threads() == max(1, cores - 1), "the thread that takes them has a core"
        assert turns, "it came while requests went on"
        assert torch.get_num_threads() == cores
        assert vllm.update_weights(weights) == publisher.finish()
        rest = [response for step in steps for response in step]
        assert any(set(r.versions.tolist()) == {earlier, version} for r in rest)
        assert all(r.versions.tolist() == sorted(r.versions.tolist()) for r in rest)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name] * scale)
        fresh = all_of(vllm, requests, sampling)
        largest, mean = largest_and_mean_gap(model, requests, fresh.values(), sampling)
        assert largest <= 5e-4 and mean <= 1e-5
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name])
    torch.set_num_threads(1)


@pytest.mark.vllm
@pytest.mark.parametrize("ends", ["the publisher", "a newer version"])
def test_a_version_that_is_staged_in_part_changes_nothing_and_another_one_arrives(
    vllm: VllmEngine, model: Any, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    requests, sampling, earlier = requests_of(prompts_of(3)), Sampling(max_tokens=8), vllm.version
    before = all_of(vllm, requests, sampling)
    dying, publisher, go_on = WeightPublisher(bucket_bytes=4096), WeightPublisher(), threading.Event()
    fill = transfer.Transfer._fill_pass

    def stops_in_the_middle(self: transfer.Transfer, members: Any) -> None:
        own = self._fill

        def fill_slowly(number: int, slot: int) -> Any:
            if number == len(self.entries) // 2:
                go_on.wait(60)
            return own(number, slot)

        self._fill = fill_slowly
        fill(self, members)

    with monkeypatch.context() as patch:
        patch.setattr(transfer.Transfer, "_fill_pass", stops_in_the_middle)
        staging = iter(vllm.stage_weights(published(model, dying, version=earlier + 1, scale=1.4)))
        next(staging)
    if ends == "the publisher":
        threading.Timer(0.1, go_on.set).start()
        dying.close()
        with pytest.raises(
            WeightSyncError, match=f"version {earlier + 1}, rank 0 of the trainer.*publisher"
        ):
            for _ in staging:
                time.sleep(0.01)
        assert vllm.version == earlier
        after = all_of(vllm, requests, sampling)
        assert all(before[i].token_ids.tolist() == after[i].token_ids.tolist() for i in before)
    weights = published(model, publisher, version=earlier + 2, scale=1.0)
    assert vllm.update_weights(weights) == publisher.finish()
    largest, _ = largest_and_mean_gap(
        model, requests, all_of(vllm, requests, sampling).values(), sampling
    )
    assert largest <= 5e-4
    go_on.set()
    dying.close()
    publisher.close()


@pytest.mark.vllm
def test_a_version_that_is_staged_is_not_taken_for_that_of_another_trainer(
    vllm: VllmEngine, publisher: WeightPublisher, model: Any
) -> None:
    other, version = WeightPublisher(), vllm.version + 1
    for _ in vllm.stage_weights(published(model, other, version=version, scale=1.4)):
        time.sleep(0.001)
    weights = published(model, publisher, version=version, scale=1.0)
    assert vllm.update_weights(weights) == publisher.finish()
    other.close()


def test_changed_bytes_are_refused_and_block_generation_until_new_weights_arrive(
    engine: GenerationEngine, model: Any, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, sampling = requests_of(prompts_of(3)), Sampling(max_tokens=16)
    weights = published(model, publisher, version=4, scale=1.2)
    with monkeypatch.context() as patch:
        real = sources.RankSource.elements
        patch.setattr(sources.RankSource, "elements", lambda *arguments: real(*arguments) + 1)
        with pytest.raises(
            WeightSyncError, match=r"version 4: tensor 'model.embed_tokens.weight' did not arrive"
        ):
            engine.update_weights(weights)
    assert engine.version == 0
    with pytest.raises(
        GenerationError, match="no complete version of the weights has arrived, or a later update failed"
    ):
        all_of(engine, requests, sampling)
    engine.update_weights(published(model, publisher, version=5, scale=1.0))
    largest, _ = largest_and_mean_gap(
        model, requests, all_of(engine, requests, sampling).values(), sampling
    )
    assert largest <= 5e-4


def test_weights_that_do_not_fit_are_refused_by_name(folder: Path, publisher: WeightPublisher) -> None:
    engine = TransformersEngine(str(folder))
    name, tensor = next(iter(engine.model.named_parameters()))
    others = dict(engine.model.named_parameters())
    for tensors, message in (
        ({**others, name: tensor[:-1]}, f"'{name}' has the shape .* in the trainer"),
        (
            {**others, "model.lm_heed": tensor},
            r"'model.lm_heed' was published, but the model has no tensor of that name",
        ),
        ({name: tensor}, r"'model.layers.0.* is needed by the receiver"),
    ):
        with pytest.raises(WeightSyncError, match=message):
            engine.update_weights(publisher.publish(whole(tensors), version=1))


def test_requests_of_an_abandoned_iterator_are_given_up(engine: GenerationEngine) -> None:
    requests, sampling = requests_of(prompts_of(12)), Sampling(max_tokens=24)
    steps = generate(engine, requests, sampling)
    next(steps)
    steps.close()
    if isinstance(engine, VllmEngine):
        assert engine.num_unfinished == 0
    assert len(all_of(engine, requests, sampling)) == len(requests)


def test_cancelled_requests_end_and_the_others_continue(engine: GenerationEngine) -> None:
    requests, sampling = requests_of(prompts_of(6)), Sampling(max_tokens=24)
    alone = all_of(engine, requests, sampling)
    steps = generate(engine, requests, sampling)
    first = [r.request_id for r in next(steps)]
    given_up = [r.request_id for r in requests[::2] if r.request_id not in first]
    rest = [*steps.send(given_up), *(r for step in steps for r in step)]
    assert sorted(r.request_id for r in rest) == [
        r.request_id for r in requests if r.request_id not in (*first, *given_up)
    ]
    assert all(r.token_ids.tolist() == alone[r.request_id].token_ids.tolist() for r in rest)
    if isinstance(engine, VllmEngine):
        assert engine.num_unfinished == 0


def test_two_iterators_may_be_open_at_once(engine: GenerationEngine) -> None:
    requests, sampling = requests_of(prompts_of(6)), Sampling(max_tokens=24)
    alone = all_of(engine, requests, sampling)
    first, second = generate(engine, requests[:12], sampling), generate(engine, requests[12:], sampling)
    found = [
        *next(first),
        *next(second),
        *(r for step in second for r in step),
        *(r for step in first for r in step),
    ]
    assert len(found) == len(requests)
    assert all(r.token_ids.tolist() == alone[r.request_id].token_ids.tolist() for r in found)


def test_a_prompt_beyond_the_context_is_refused_in_plain_text(engine: GenerationEngine) -> None:
    with pytest.raises(GenerationError, match="request 7"):
        list(
            generate(
                engine, [GenerationRequest(7, np.ones(CONTEXT + 1, np.int32))], Sampling(max_tokens=64)
            )
        )
    assert len(all_of(engine, requests_of(prompts_of(1)), Sampling(max_tokens=4))) == 4


@pytest.mark.vllm
def test_vllm_through_the_worker_gives_whole_groups_and_takes_over_weights(
    vllm_worker: RolloutWorker, vllm: VllmEngine, model: Any, publisher: WeightPublisher
) -> None:
    prompts = Batch.of(
        sample_id=np.arange(12) + 50,
        group_id=np.arange(12) + 50,
        parent_id=np.arange(12) + 50,
        prompt_ids=prompts_of(12),
    )
    parts = [
        part[0].rows
        for part in vllm_worker.generate(prompts, n=3, sampling=Sampling(max_tokens=24))
        if part
    ]
    assert len(parts) > 1
    assert sorted(Batch.concat(parts).numpy("parent_id").tolist()) == sorted(3 * list(range(50, 62)))
    weights = published(model, publisher, version=1, scale=1.1)
    assert vllm_worker.receive_weights(weights) == publisher.finish()
    again = [part[0].rows for part in vllm_worker.generate(prompts) if part]
    versions, _ = Batch.concat(again).ragged("response_versions")
    assert set(versions.tolist()) == {1}
    vllm_worker.offload()
    vllm_worker.onload()


@pytest.mark.vllm
def test_vllm_leaves_the_threads_of_this_process_as_they_were(vllm: VllmEngine) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)


@pytest.mark.vllm
@pytest.mark.slow
def test_two_tensor_parallel_ranks_give_the_logprobs_of_one(folder: Path) -> None:
    program = """
        import sys
        import test_generation as t
        from weft.resharding.publisher import WeightPublisher
        from weft.workers.generation.transformers_engine import TransformersEngine
        from weft.workers.generation.vllm_engine import VllmEngine
        from weft.workers.generation.vllm_settings import VllmSettings

        if __name__ == "__main__":
            model = TransformersEngine(sys.argv[1]).model
            settings = VllmSettings(tensor_parallel=2, max_num_seqs=64, kv_cache_gib=0.05)
            engine = VllmEngine(sys.argv[1], settings, kept_sets=True)
            for sampling in t.SAMPLINGS:
                t.test_kept_sets_are_the_tokens_that_could_be_sampled(engine, model, sampling)
            t.test_logprobs_follow_new_weights_and_show_a_skipped_update(engine, model, WeightPublisher())
            engine.close()
            print("done", flush=True)
    """
    before = set(os.listdir("/dev/shm"))
    run_apart(program, folder)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("vllm")}


@pytest.mark.gpu
@pytest.mark.vllm
def test_vllm_on_a_gpu_sleeps_and_takes_over_weights(
    folder: Path, model: Any, publisher: WeightPublisher
) -> None:
    engine = VllmEngine(
        str(folder), VllmSettings(gpu_memory_utilization=0.3, max_num_seqs=64), dtype="float32"
    )
    requests, sampling = requests_of(prompts_of(6)), Sampling(max_tokens=24)
    before = all_of(engine, requests, sampling)
    engine.sleep()
    engine.wake_up()
    after = all_of(engine, requests, sampling)
    assert all(before[i].token_ids.tolist() == after[i].token_ids.tolist() for i in before)
    weights = published(model, publisher, version=1, scale=1.2)
    assert engine.update_weights(weights) == publisher.finish()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    fresh = all_of(engine, requests, sampling)
    largest, mean = largest_and_mean_gap(model, requests, fresh.values(), sampling)
    assert largest <= 5e-3 and mean <= 1e-3
    engine.close()
