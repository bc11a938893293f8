"""The model for tests of both engines, with requests to it and checks of their responses."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.algorithms.sampling import Sampling
from weft.resharding.publisher import WeightPublisher
from weft.resharding.weights import Weights, whole
from weft.workers.generation.engine import GenerationEngine, GenerationRequest, Response, generate
from weft.workers.kept_sets import KeptSets

VOCABULARY = 32
STOP = 1
CONTEXT = 128


def save_model(folder: Path, *, tied: bool = True, context: int = CONTEXT) -> Path:
    """Save a Qwen2 with heads of 32, as vLLM needs on CPU, and weights large enough to prefer some
    tokens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        eos_token_id=STOP,
        pad_token_id=0,
        bos_token_id=2,
        initializer_range=0.15,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(folder)
    return folder


def prompts_of(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCABULARY, 3 + row % 7).astype(np.int32) for row in range(count)]


def straight_logprobs(
    model: Any, prompt: np.ndarray, response: np.ndarray, sampling: Sampling
) -> torch.Tensor:
    """`[L, V]` log-probabilities of every token at every response position, without cache or batch.

    Truncation follows its definition token by token, to be independent of the engine's code.
    """
    ids = torch.from_numpy(np.concatenate([prompt, response])).long()
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1].float().clone()
    for position in range(0 if sampling.stop is None else min(sampling.min_tokens, len(logits))):
        logits[position, STOP] = -torch.inf
    if sampling.temperature:
        logits /= sampling.temperature
    for row in (
        logits if sampling.temperature else ()
    ):  # a greedy token stays the likeliest under any truncation
        likely = row.softmax(-1)
        row[likely < sampling.min_p * likely.max()] = -torch.inf
        order = row.argsort(descending=True)
        if sampling.top_k:
            row[order[sampling.top_k :]] = -torch.inf
        reached = 0.0
        probabilities = row.softmax(-1)
        for token in order.tolist():
            if reached >= sampling.top_p:
                row[token] = -torch.inf
            reached += float(probabilities[token])
    return logits.log_softmax(-1)


def mask_of(sets: KeptSets, vocabulary: int) -> np.ndarray:
    """Return whether each token is in each kept set: `[L, vocabulary]` bool."""
    mask = np.ones((len(sets.counts), vocabulary), bool)
    start = 0
    for row, count in zip(mask, sets.counts.tolist(), strict=True):
        ids = sets.ids[start : start + abs(count)]
        start += abs(count)
        if count > 0:
            row[:] = False
        row[ids] = count > 0
    assert start == len(sets.ids)
    return mask


def largest_and_mean_gap(
    model: Any, requests: Iterable[GenerationRequest], responses: Iterable[Response], sampling: Sampling
) -> tuple[float, float]:
    """Return the largest and mean difference of reported logprobs from plain forward passes."""
    prompts = {request.request_id: request.prompt_ids for request in requests}
    gaps = []
    for response in responses:
        logprobs = straight_logprobs(model, prompts[response.request_id], response.token_ids, sampling)
        chosen = logprobs.gather(-1, torch.from_numpy(response.token_ids).long()[:, None])[:, 0].numpy()
        gaps.append(np.abs(chosen - response.logprobs))
    return float(np.concatenate(gaps).max()), float(np.concatenate(gaps).mean())


def published(model: Any, publisher: WeightPublisher, *, version: int, scale: float) -> Weights:
    """Publish the model's weights, multiplied by `scale`."""
    return publisher.publish(
        whole({name: p.detach() * scale for name, p in model.named_parameters()}), version
    )


def requests_of(prompts: list[np.ndarray], *, samples: int = 4) -> list[GenerationRequest]:
    return [
        GenerationRequest(row * samples + index, ids, seed=1000 * row + index)
        for row, ids in enumerate(prompts)
        for index in range(samples)
    ]


def all_of(
    engine: GenerationEngine, requests: list[GenerationRequest], sampling: Sampling
) -> dict[int, Response]:
    found = [response for step in generate(engine, requests, sampling) for response in step]
    assert sorted(r.request_id for r in found) == sorted(r.request_id for r in requests)
    return {r.request_id: r for r in found}


def run_apart(program: str, folder: Path) -> None:
    """Run a program that gets the model's folder and prints "done". vLLM's ranks are processes that
    import the main module, so an engine with several ranks needs its own."""
    file = folder / "two_ranks.py"
    file.write_text(textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, str(file), str(folder)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "done" in done.stdout, done.stderr
