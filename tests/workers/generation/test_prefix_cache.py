"""vLLM reuses the keys and values of prompts, but never those of another version."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_model import VOCABULARY, save_model

from weft.algorithms.sampling import Sampling
from weft.resharding.publisher import WeightPublisher
from weft.resharding.weights import Weights, whole
from weft.workers.generation.engine import GenerationRequest, Response, generate
from weft.workers.generation.transformers_engine import TransformersEngine
from weft.workers.generation.vllm_engine import VllmEngine
from weft.workers.generation.vllm_settings import VllmSettings

PROMPT = np.random.default_rng(0).integers(3, VOCABULARY, 200).astype(np.int32)
"""Longer than a block of the cache, which has 128 tokens on a CPU."""


def gap(model: Any, response: Response, prompt: np.ndarray = PROMPT) -> float:
    ids = torch.from_numpy(np.concatenate([prompt, response.token_ids])).long()
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
    chosen = logits.log_softmax(-1).gather(-1, ids[len(prompt) :, None])[:, 0].numpy()
    return float(np.abs(chosen - response.logprobs).max())


def publish(model: Any, publisher: WeightPublisher, version: int) -> Weights:
    """Change the model's weights, and publish them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.3
    return publisher.publish(whole({name: p.detach() for name, p in model.named_parameters()}), version)


@pytest.mark.thorough
@pytest.mark.vllm
def test_a_waiting_request_does_not_reuse_a_prompt_of_the_weights_before(
    tmp_path: Path, publisher: WeightPublisher, inspects_models_here: None
):
    folder = save_model(tmp_path / "model", context=256)
    model = TransformersEngine(str(folder)).model
    settings = VllmSettings(max_num_seqs=1, kv_cache_gib=0.05, prefix_caching=True)
    engine = VllmEngine(str(folder), settings)
    try:
        requests = [GenerationRequest(row, PROMPT, seed=row) for row in range(3)]
        steps = generate(engine, requests, Sampling(max_tokens=8, stop=None))
        for _ in range(4):
            assert next(steps) == []
        engine.update_weights(publish(model, publisher, 1))
        begun, *waited = sorted((one for step in steps for one in step), key=lambda one: one.request_id)
        assert begun.versions.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
        for response in waited:
            assert set(response.versions.tolist()) == {1}
            assert gap(model, response) < 1e-4
    finally:
        engine.close()


class InParts(VllmSettings):
    """Settings of an engine that computes long prompts in several steps, as on GPUs."""

    def engine_arguments(self, *given: Any, **named: Any) -> dict[str, Any]:
        parts = {"enable_chunked_prefill": True, "max_num_batched_tokens": 128}
        return super().engine_arguments(*given, **named) | parts


@pytest.mark.thorough
@pytest.mark.vllm
def test_no_request_reuses_a_prompt_that_two_versions_computed(
    tmp_path: Path, publisher: WeightPublisher, inspects_models_here: None
):
    """The first request computes half of its prompt before the update and the rest after it. The
    second computes the first half again, and the third finds both halves in the cache."""
    folder = save_model(tmp_path / "model", context=512)
    model = TransformersEngine(str(folder)).model
    engine = VllmEngine(str(folder), InParts(max_num_seqs=1, kv_cache_gib=0.05, prefix_caching=True))
    try:
        prompt = np.concatenate([PROMPT, PROMPT])  # three blocks, and a part of the fourth
        sampling = Sampling(max_tokens=2, stop=None)
        # vLLM cannot seed requests whose prompt it computes in parts.
        tickets = [engine.submit(GenerationRequest(row, prompt), sampling) for row in range(3)]
        assert engine.step() == []
        engine.update_weights(publish(model, publisher, 1))
        tickets.append(engine.submit(GenerationRequest(3, prompt), sampling))
        found: dict[int, Response] = {}
        while engine.num_unfinished:
            found |= {one.ticket: one for one in engine.step()}
        assert gap(model, found[tickets[0]], prompt) > 1e-2, "a part of its prompt was computed before"
        for ticket in tickets[1:]:
            assert gap(model, found[ticket], prompt) < 1e-4
    finally:
        engine.close()
