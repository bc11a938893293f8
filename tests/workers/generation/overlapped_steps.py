"""A program for test_overlapped_steps.py: vLLM on a CPU with overlapping steps, which vLLM allows on
GPUs alone.

    python overlapped_steps.py FOLDER V1|V2     prints its findings as JSON
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_model import VOCABULARY
from with_model_runner_v2 import allow_model_runner_v2

from weft.algorithms.sampling import Sampling
from weft.resharding.publisher import WeightPublisher
from weft.resharding.weights import Weights, whole
from weft.workers.generation.engine import GenerationRequest, Response, generate
from weft.workers.generation.transformers_engine import TransformersEngine
from weft.workers.generation.vllm_engine import VllmEngine
from weft.workers.generation.vllm_settings import VllmSettings

FOLDER = Path(sys.argv[1])
PROMPTS = [
    np.random.default_rng(row).integers(3, VOCABULARY, 3 + row).astype(np.int32) for row in range(6)
]
REQUESTS = [GenerationRequest(row, ids, seed=row) for row, ids in enumerate(PROMPTS)]
SCALES = (1.0, 1.3, 0.8)
"""Version -> factor of all weights."""


def allow_overlap() -> None:
    from vllm.platforms.cpu import CpuPlatform

    chosen = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        chosen(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    replaced: Any = staticmethod(check_and_update_config)
    CpuPlatform.check_and_update_config = replaced


class Overlapping(VllmSettings):
    """Settings of an engine on a CPU that overlaps its steps."""

    def engine_arguments(self, *given: Any, **named: Any) -> dict[str, Any]:
        return super().engine_arguments(*given, **named) | {"async_scheduling": True}


def start(overlap: bool) -> VllmEngine:
    settings = Overlapping if overlap else VllmSettings
    # Four at the same time, so that requests wait, start and end in the middle.
    return VllmEngine(str(FOLDER), settings(max_num_seqs=4, kv_cache_gib=0.05, prefix_caching=True))


def sampled(engine: VllmEngine, sampling: Sampling) -> list[Response]:
    found = [one for step in generate(engine, REQUESTS, sampling) for one in step]
    return sorted(found, key=lambda one: one.request_id)


def publish(model: Any, publisher: WeightPublisher, version: int) -> Weights:
    scaled = {name: p.detach() * SCALES[version] for name, p in model.named_parameters()}
    return publisher.publish(whole(scaled), version)


def gap(model: Any, response: Response) -> float:
    """Return the largest difference of a response's log-probabilities from those of the version
    that sampled each token, in plain forward passes."""
    ids = torch.from_numpy(np.concatenate([PROMPTS[response.request_id], response.token_ids])).long()
    largest = 0.0
    for version in set(response.versions.tolist()):
        changed = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        torch.nn.utils.vector_to_parameters(changed * SCALES[version], model.parameters())
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(PROMPTS[response.request_id]) - 1 : -1]
        torch.nn.utils.vector_to_parameters(changed, model.parameters())
        chosen = logits.log_softmax(-1).gather(-1, ids[-len(response.token_ids) :, None])[:, 0].numpy()
        own = response.versions == version
        largest = max(largest, float(np.abs(chosen - response.logprobs)[own].max()))
    return largest


def run(overlap: bool) -> dict[str, Any]:
    model, publisher = TransformersEngine(str(FOLDER)).model, WeightPublisher()
    engine = start(overlap)
    core = engine._core

    def in_flight() -> int:
        return len(core.batch_queue or ())

    found: dict[str, Any] = {"v2": core.vllm_config.use_v2_model_runner}
    found |= {"in_flight": [], "versions": []}
    plain = sampled(engine, Sampling(max_tokens=8))
    found["tokens"] = [[one.token_ids.tolist() for one in plain]]
    found["gaps"] = [gap(model, one) for one in plain]
    found["in_flight"].append(in_flight())
    engine._drain()  # as before sleep, which resets the caches
    found["reset"] = [in_flight(), engine._engine.reset_prefix_cache()]

    # Updates in the middle. The second time, the cache is built again with the new weights, so that
    # plain forward passes give the same log-probabilities.
    for version in (1, 2):
        steps = generate(engine, REQUESTS, Sampling(max_tokens=8, stop=None))
        changed = [one for _ in range(5) for one in next(steps)]
        found["in_flight"].append(in_flight())
        engine.update_weights(publish(model, publisher, version))
        if version == 2:
            engine.recompute()
        changed += [one for step in steps for one in step]
        changed.sort(key=lambda one: one.request_id)
        found["versions"].append([one.versions.tolist() for one in changed])
        found["tokens"].append([one.token_ids.tolist() for one in changed])
    found["gaps"] += [gap(model, one) for one in changed]

    # Cancelled in the middle, with a step in flight.
    steps = generate(engine, REQUESTS, Sampling(max_tokens=8, stop=None))
    cancelled = [one for _ in range(3) for one in next(steps)]
    cancelled += steps.send([0, 5])
    cancelled += [one for step in steps for one in step]
    found["cancelled"] = sorted(one.request_id for one in cancelled)
    found["gaps"] += [gap(model, one) for one in cancelled]
    engine._drain()
    found["reset"] += [in_flight(), engine._engine.reset_prefix_cache()]
    engine.close()
    publisher.close()
    return found


if __name__ == "__main__":
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if sys.argv[2] == "V2":
        allow_model_runner_v2()
    allow_overlap()
    print(json.dumps([run(overlap=False), run(overlap=True)]))
