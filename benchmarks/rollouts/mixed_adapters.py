"""Compare the responses of a mixed batch of four adapters with each adapter alone.

Four adapters of ranks 4 to 16 with random weights, over one model, answer the same prompts greedily: all at
once, and each adapter alone. Alone, an adapter answers its quarter of the requests, or all of them: then
both batches have the same size. The kernels of matrix products may round differently for batches of
another size, with or without adapters.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from truncated import make_model

PROMPTS, TOKENS, REPEATS = 16, 48, 5


def measure() -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for engine in ("vllm", "transformers"):
            end = "" if engine == "vllm" else f"_{engine}"
            found = compared(folder, engine)
            figures |= {f"adapters_{name}{end}": value for name, value in found.items()}
    return figures


def compared(folder: str, kind: str) -> dict[str, float]:
    """Return figures of an engine: the share of responses that are equal to the bit in batches of equal
    size, the share with equal tokens in smaller batches, the largest gap of their log-probabilities, and
    the ratio of the times of a mixed batch and a batch of one adapter."""
    from weft.workers.generation.transformers_engine import TransformersEngine
    from weft.workers.generation.vllm_engine import VllmEngine
    from weft.workers.generation.vllm_settings import VllmSettings
    from weft.workers.training.lora import Lora

    loras = {f"rank{rank}": Lora(rank=rank, alpha=2 * rank) for rank in (4, 8, 12, 16)}
    settings = VllmSettings(max_num_seqs=256, kv_cache_gib=0.25)
    made: Any = (
        VllmEngine(folder, settings, dtype="float32", adapters=loras)
        if kind == "vllm"
        else TransformersEngine(folder, dtype="float32", adapters=loras)
    )
    names = list(loras)
    try:
        _send_adapters(folder, made, loras)
        mixed = _responses(made, dict(enumerate(names)))
        for row in range(PROMPTS):
            own = {tuple(mixed[PROMPTS * k + row].token_ids.tolist()) for k in range(len(names))}
            if len(own) < len(names):
                raise RuntimeError(
                    f"adapters answer prompt {row} alike, so the comparison shows nothing"
                )
        smaller: dict[int, Any] = {}
        equal: dict[int, Any] = {}
        for place, name in enumerate(names):
            smaller |= _responses(made, {place: name})
            own = _responses(made, dict.fromkeys(range(len(names)), name))
            equal |= {id: one for id, one in own.items() if id // PROMPTS == place}
        gaps = [_gap(one, smaller[id]) for id, one in mixed.items()]
        exact = [_gap(one, equal[id]) == 0 for id, one in mixed.items()]
        ratio = float(np.median([_time(made, names) for _ in range(REPEATS)]))
    finally:
        made.close()
    same = [gap for gap in gaps if gap < np.inf]
    return {
        "equal": round(sum(exact) / len(exact), 4),
        "equal_tokens": round(len(same) / len(gaps), 4),
        "gap": float(f"{max(same, default=np.nan):.3g}"),
        "time": round(ratio, 2),
    }


def _gap(one: Any, other: Any) -> float:
    """Return the largest difference of log-probabilities; infinity if the tokens differ."""
    if not np.array_equal(one.token_ids, other.token_ids):
        return np.inf
    return float(np.abs(one.logprobs - other.logprobs).max())


def _time(engine: Any, names: Sequence[str]) -> float:
    """Return the ratio of processor times of a mixed batch and a batch of one adapter."""
    seconds: list[float] = []
    for policies in (names, [names[-1]] * len(names)):
        began = time.process_time()
        _responses(engine, dict(enumerate(policies)))
        seconds.append(time.process_time() - began)
    return seconds[0] / seconds[1]


def _send_adapters(folder: str, engine: Any, loras: Mapping[str, Any]) -> None:
    """Give an engine random weights of all adapters, as if actors had published them."""
    import torch
    from transformers import AutoModelForCausalLM

    from weft.resharding.publisher import WeightPublisher
    from weft.resharding.weights import whole
    from weft.workers.training.adapter import serve_adapters

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    publisher = WeightPublisher()
    for version, (name, served) in enumerate(
        zip(loras, serve_adapters(model, [*loras.values()]), strict=True), 1
    ):
        tensors = {each: torch.randn_like(tensor) * 0.1 for each, tensor in served.tensors().items()}
        engine.update_weights(publisher.publish(whole(tensors), version), name)
        publisher.finish()
    publisher.close()


def _responses(engine: Any, policies: Mapping[int, str]) -> dict[int, Any]:
    """Return the greedy responses, by number, to each prompt of the policy at each place."""
    from weft.algorithms.sampling import Sampling
    from weft.workers.generation.engine import GenerationRequest, generate

    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 4096, 3 + k % 7).astype(np.int32) for k in range(PROMPTS)]
    requests = [
        GenerationRequest(PROMPTS * place + row, ids, policy=policy)
        for place, policy in policies.items()
        for row, ids in enumerate(prompts)
    ]
    sampling = Sampling(max_tokens=TOKENS, temperature=0, stop=None)
    return {one.request_id: one for step in generate(engine, requests, sampling) for one in step}
