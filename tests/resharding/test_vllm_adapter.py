"""Adapters in vLLM: logprobs equal `peft`, and each version replaces the previous one."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weft.algorithms.sampling import Sampling
from weft.dataflow.errors import GenerationError, WeightSyncError
from weft.resharding.publisher import WeightPublisher
from weft.resharding.weights import Weights, whole
from weft.workers.generation.engine import GenerationRequest, Response, generate
from weft.workers.generation.vllm_engine import VllmEngine
from weft.workers.generation.vllm_settings import VllmSettings
from weft.workers.training.adapter import ServedAdapter, serve_adapters
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


def policies(folder: Path, *loras: Lora) -> list[ServedAdapter]:
    """Return the folder's model with new `peft` adapters, which have no effect yet."""
    from transformers import AutoModelForCausalLM

    return serve_adapters(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), loras)


def publish(policy: ServedAdapter, publisher: WeightPublisher, version: int) -> Weights:
    torch.manual_seed(version)
    for name, tensor in policy.tensors().items():
        if "lora_B" in name:
            tensor.normal_(0, 0.1)
    return publisher.publish(whole(policy.tensors()), version)


def gap(policy: ServedAdapter, prompt: list[int], response: Response) -> float:
    """Return the largest logprob difference between an engine and the model with an adapter."""
    ids = torch.tensor([prompt + response.token_ids.tolist()])
    policy.activate()
    with torch.no_grad():
        logprobs = policy.causal_lm(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
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
    engine = VllmEngine(str(folder), settings, adapters={"actor": LORA})
    try:
        (policy,) = policies(folder, LORA)
        prompt = [int(n) for n in np.random.default_rng(0).integers(3, 64, 48)]
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


FOUR = {
    "all": Lora(rank=3, alpha=6),
    "wide": Lora(rank=9, alpha=4),
    "queries": Lora(rank=2, alpha=8, targets=("q_proj",)),
    "mlp": Lora(rank=8, alpha=8, targets=("gate_proj", "up_proj", "down_proj")),
}


@pytest.mark.thorough
@pytest.mark.vllm
def test_a_mixed_batch_of_four_adapters_equals_each_adapter_alone(
    folder: Path, publisher: WeightPublisher
):
    settings = VllmSettings(max_num_seqs=16, kv_cache_gib=0.05, prefix_caching=True)
    engine = VllmEngine(str(folder), settings, adapters=FOUR)
    prompts = [[5, 6, 7], [int(n) for n in np.random.default_rng(0).integers(3, 64, 40)]]
    requests = [
        GenerationRequest(2 * k + row, np.array(prompt, np.int32), policy=name)
        for k, name in enumerate(FOUR)
        for row, prompt in enumerate(prompts)
    ]

    def responses(names: Collection[str]) -> dict[int, Response]:
        own = [request for request in requests if request.policy in names]
        greedy = Sampling(max_tokens=16, temperature=0, stop=None)
        return {one.request_id: one for step in generate(engine, own, greedy) for one in step}

    try:
        served = dict(zip(FOUR, policies(folder, *FOUR.values()), strict=True))
        with pytest.raises(GenerationError, match="policy 'mlp': no complete version"):
            engine.submit(requests[-1], Sampling())
        for version, (name, policy) in enumerate(served.items(), 3):
            weights = publish(policy, publisher, version)
            assert engine.update_weights(weights, name) == publisher.finish()
        mixed = responses(FOUR)
        alone = {id: one for name in FOUR for id, one in responses([name]).items()}
        for request in requests:
            found, wanted = mixed[request.request_id], alone[request.request_id]
            assert found.token_ids.tolist() == wanted.token_ids.tolist()
            # The kernels of matrix products round differently for other batch sizes.
            assert np.abs(found.logprobs - wanted.logprobs).max() < 1e-5
            assert gap(served[request.policy], request.prompt_ids.tolist(), found) < 1e-4
            assert set(found.versions.tolist()) == {3 + [*FOUR].index(request.policy)}
        assert len({tuple(one.token_ids.tolist()) for one in mixed.values()}) == len(mixed)
        # A new version of one adapter leaves the others and their cached blocks.
        engine.update_weights(publish(served["wide"], publisher, 9), "wide")
        after = responses(FOUR)
        for request in requests:
            found, before = after[request.request_id], mixed[request.request_id]
            same = found.token_ids.tolist() == before.token_ids.tolist()
            assert same == (request.policy != "wide")
            assert set(found.versions.tolist()) == (set(before.versions.tolist()) if same else {9})
        with pytest.raises(GenerationError, match=r"serves no policy 'wild'; did you mean 'wide'\?"):
            engine.submit(replace(requests[0], policy="wild"), Sampling())
    finally:
        engine.close()
