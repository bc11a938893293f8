"""vLLM reuses the keys and values of prompts, but never those of another version."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_model import VOCABULARY, save_model

from weft.algorithms.sampling import Sampling
from weft.resharding.publisher import WeightPublisher
from weft.resharding.weights import whole
from weft.workers.generation.engine import GenerationRequest, Response
from weft.workers.generation.transformers_engine import TransformersEngine
from weft.workers.generation.vllm_engine import VllmEngine
from weft.workers.generation.vllm_settings import VllmSettings

PROMPT = np.random.default_rng(0).integers(3, VOCABULARY, 200).astype(np.int32)
"""Longer than a block of the cache, which has 128 tokens on a CPU."""


@pytest.fixture
def publisher() -> Iterator[WeightPublisher]:
    publisher = WeightPublisher()
    yield publisher
    publisher.close()


def gap(model: Any, response: Response) -> float:
    ids = torch.from_numpy(np.concatenate([PROMPT, response.token_ids])).long()
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(PROMPT) - 1 : -1]
    chosen = logits.log_softmax(-1).gather(-1, ids[len(PROMPT) :, None])[:, 0].numpy()
    return float(np.abs(chosen - response.logprobs).max())


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
        steps = engine.generate(requests, Sampling(max_tokens=8, stop=None))
        for _ in range(4):
            assert next(steps) == []
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1.3
        engine.update_weights(
            publisher.publish(whole({name: p.detach() for name, p in model.named_parameters()}), 1)
        )
        begun, *waited = sorted((one for step in steps for one in step), key=lambda one: one.request_id)
        assert begun.versions.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
        for response in waited:
            assert set(response.versions.tolist()) == {1}
            assert gap(model, response) < 1e-4
    finally:
        engine.close()
