"""Adapters in vLLM: logprobs equal `peft`, and each version replaces the previous one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weft.algorithms.sampling import Sampling
from weft.dataflow.errors import WeightSyncError
from weft.resharding.publisher import WeightPublisher
from weft.resharding.weights import Weights, whole
from weft.workers.generation.engine import GenerationRequest, Response, generate
from weft.workers.generation.vllm_engine import VllmEngine
from weft.workers.generation.vllm_settings import VllmSettings
from weft.workers.training.adapter import adapter_of, serve_adapter
from weft.workers.training.lora import Lora

LORA = Lora(rank=3, alpha=6, published="adapter")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
}


def a_policy(folder: Path) -> Any:
    """Return the folder's model with a new `peft` adapter, which has no effect yet."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    serve_adapter(model, LORA)
    return model


def publish(model: Any, publisher: WeightPublisher, version: int) -> Weights:
    torch.manual_seed(version)
    for name, tensor in adapter_of(model).items():
        if "lora_B" in name:
            tensor.normal_(0, 0.1)
    return publisher.publish(whole(adapter_of(model)), version)


def gap(model: Any, prompt: list[int], response: Response) -> float:
    """Return the largest logprob difference between an engine and the model."""
    ids = torch.tensor([prompt + response.token_ids.tolist()])
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    own = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
    return float(np.abs(own - response.logprobs).max())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("adapter") / "model"
    Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)).float().save_pretrained(folder)
    return folder


@pytest.fixture
def publisher() -> Iterator[WeightPublisher]:
    publisher = WeightPublisher()
    yield publisher
    publisher.close()


def _slots(worker: Any) -> Any:
    return worker.model_runner.lora_manager._adapter_manager


def sampled(engine: VllmEngine, prompt: list[int], tokens: int = 12) -> Any:
    request = GenerationRequest(0, np.array(prompt, np.int32), seed=1)
    return generate(engine, [request], Sampling(max_tokens=tokens, stop=None))


@pytest.mark.thorough
@pytest.mark.vllm
def test_vllm_serves_each_version_of_an_adapter_and_never_two_at_once(
    folder: Path, publisher: WeightPublisher
):
    settings = VllmSettings(max_num_seqs=8, kv_cache_gib=0.05, prefix_caching=True)
    engine = VllmEngine(str(folder), settings, adapter=LORA)
    try:
        policy, prompt = a_policy(folder), [int(n) for n in np.random.default_rng(0).integers(3, 64, 48)]
        for version in (
            1,
            2,
        ):  # the second time, the prefix cache holds the first version
            assert engine.update_weights(publish(policy, publisher, version)) == publisher.finish()
            (response,) = [one for step in sampled(engine, prompt) for one in step]
            assert gap(policy, prompt, response) < 1e-4 and set(response.versions.tolist()) == {version}
        under_way = sampled(engine, prompt, tokens=24)
        for _ in range(8):
            assert next(under_way) == []
        engine.update_weights(publish(policy, publisher, 3))
        (response,) = [one for step in under_way for one in step]
        assert sorted(set(response.versions.tolist())) == [2, 3], (
            "what is under way goes on under the new version"
        )
        (after,) = [one for step in sampled(engine, prompt) for one in step]
        assert gap(policy, prompt, after) < 1e-4
        managers: Any = engine._engine.collective_rpc(_slots)  # pyright: ignore[reportArgumentType]
        manager = managers[0]
        served, activate = manager.get_adapter(1), manager.activate_adapter
        manager.activate_adapter = lambda number: (
            (activate(number) and manager.get_adapter(number) is served) or 1 / 0
        )
        with pytest.raises(WeightSyncError, match="could not take adapter version 4: division by zero"):
            engine.update_weights(publish(policy, publisher, 4))
        assert manager.get_adapter(1) is served and 1 in manager.lora_index_to_id, (
            "the slot keeps what it had"
        )
        del manager.activate_adapter
        unknown = {"base_model.model.model.layers.0.self_attn.rotary.lora_A.weight": torch.zeros(3, 64)}
        with pytest.raises(
            WeightSyncError,
            match=r"does not support an adapter on layer 'model.layers.0.self_attn.rotary'",
        ):
            engine.update_weights(publisher.publish(whole(unknown), 5))
    finally:
        engine.close()
