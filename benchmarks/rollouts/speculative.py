"""Speculation: whether responses keep their distribution, and how much faster they are.

- A model with a vocabulary of 5 answers one prompt with 20,000 responses of 5 tokens, with and without each kind of
  drafts. A chi-squared test compares how often each of the 3,125 responses occurs.
- A model of 28M parameters repeats a text of 64 tokens: each token follows with a probability of about 0.95. Two
  engines, with suffix drafts and without, decode in turns 2 and 64 responses of 128 tokens, on one core. Figures
  compare processor time.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY, LENGTH, RESPONSES = 5, 5, 20_000
FEWEST = 10
"""Rarer responses, counted over both samples, are one category of the test."""
PERIOD, LARGE_VOCABULARY, HIDDEN, CONTEXT, TOKENS = 64, 4096, 512, 192, 128
FOLLOWS = 0.95
REPEATS = 4


def measure() -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        figures = _p_values(Path(folder))
        return figures | _speedups(Path(folder) / "large")


def _p_values(folder: Path) -> dict[str, float]:
    from weft.workers.generation.speculation import Speculation

    for seed in range(2):
        _save_model(folder / str(seed), seed, VOCABULARY, hidden_size=64, layers=2)
    plain = _counts(folder / "0", None, seed=0)
    kinds: dict[str, Any] = {
        "suffix": {},
        "ngram": {"method": "ngram"},
        "draft_model": {"method": "draft_model", "model": folder / "1"},
    }
    figures: dict[str, float] = {}
    for number, (name, kind) in enumerate(kinds.items(), 1):
        speculation = Speculation(off_above=RESPONSES, **kind)
        counts = _counts(folder / "0", speculation, seed=number)
        figures[f"speculation_p_{name}" if kind else "speculation_p"] = round(p_value(plain, counts), 4)
    return figures


def p_value(one: np.ndarray, other: np.ndarray) -> float:
    """Return the p value of the chi-squared test that two samples of the same size have one
    distribution. Takes how often each of K categories occurred, [K] each."""
    import torch

    both = np.stack([one, other]).astype(float)
    rare = both.sum(0) < FEWEST
    table = np.concatenate([both[:, ~rare], both[:, rare].sum(1, keepdims=True)], axis=1)
    table = table[:, table.sum(0) > 0]
    expected = table.sum(0) / 2
    statistic = ((table - expected) ** 2 / expected).sum()
    halves = torch.tensor([table.shape[1] - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(*halves))


def _counts(model: Path, speculation: Any, seed: int) -> np.ndarray:
    """Return how often each possible response occurred."""
    from weft.algorithms.sampling import Sampling
    from weft.workers.generation.engine import GenerationRequest, generate

    engine = _engine(model, speculation, max_num_seqs=256)
    prompt = np.array([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2], np.int32)
    first = seed * RESPONSES
    requests = [GenerationRequest(k, prompt, seed=first + k) for k in range(RESPONSES)]
    steps = generate(engine, requests, Sampling(max_tokens=LENGTH, stop=None), slots=256)
    found = np.stack([one.token_ids for step in steps for one in step])
    print(_shown(engine), flush=True)
    engine.close()
    numbers = found @ VOCABULARY ** np.arange(LENGTH)
    return np.bincount(numbers, minlength=VOCABULARY**LENGTH)


def _speedups(folder: Path) -> dict[str, float]:
    from weft.workers.generation.speculation import Speculation

    _save_repeating_model(folder)
    engines = [_engine(folder, each, max_num_seqs=64) for each in (None, Speculation())]
    figures: dict[str, float] = {}
    for responses in (2, 64):
        seconds: list[list[float]] = []
        for repeat in range(REPEATS):
            seconds.append([_seconds(engine, responses, repeat) for engine in engines])
            if repeat == 0:  # the first calls compile, and measure whether drafts pay
                engines[1].take_metrics()
        metrics = {name: metric.value for name, metric in engines[1].take_metrics().items()}
        print({name: round(value, 3) for name, value in metrics.items()}, seconds, flush=True)
        plain, drafted = np.median(seconds[1:], axis=0)
        end = "" if responses == 2 else f"_{responses}"
        figures[f"speculation_speedup{end}"] = round(float(plain / drafted), 2)
        figures[f"speculating{end}"] = round(metrics["speculating"], 3)
        if not end:
            figures["draft_acceptance"] = round(metrics["draft_acceptance"], 3)
    for engine in engines:
        engine.close()
    return figures


def _seconds(engine: Any, responses: int, repeat: int) -> float:
    from weft.algorithms.sampling import Sampling
    from weft.workers.generation.engine import GenerationRequest, generate

    rng = np.random.default_rng([responses, repeat])
    prompts = rng.integers(0, LARGE_VOCABULARY, (responses, 16)).astype(np.int32)
    requests = [GenerationRequest(k, ids, seed=1000 * repeat + k) for k, ids in enumerate(prompts)]
    began = time.process_time()
    for _ in generate(engine, requests, Sampling(max_tokens=TOKENS, stop=None)):
        pass
    return time.process_time() - began


def _engine(model: Path, speculation: Any, max_num_seqs: int) -> Any:
    from weft.workers.generation.vllm_engine import VllmEngine
    from weft.workers.generation.vllm_settings import VllmSettings

    settings = VllmSettings(max_num_seqs=max_num_seqs, speculation=speculation)
    return VllmEngine(str(model), settings, dtype="float32")


def _shown(engine: Any) -> dict[str, float]:
    return {name: round(metric.value, 3) for name, metric in engine.take_metrics().items()}


def _save_model(folder: Path, seed: int, vocabulary: int, hidden_size: int, layers: int) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.15,  # large enough to prefer some tokens
        bos_token_id=0,
        eos_token_id=1,
    )
    model = Qwen2ForCausalLM(config).float()
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return model


def _save_repeating_model(folder: Path) -> None:
    """Save a model in which token t + 1 follows token t, modulo `PERIOD`, with a probability of about
    `FOLLOWS`. Its layers add nothing to the result, but take their full time."""
    import torch

    model = _save_model(folder, 0, LARGE_VOCABULARY, hidden_size=HIDDEN, layers=8)
    cycle = torch.nn.functional.normalize(torch.randn(PERIOD, HIDDEN), dim=-1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(cycle[torch.arange(LARGE_VOCABULARY) % PERIOD])
        # The final norm makes vectors of length HIDDEN**0.5. All other tokens have logits near 0.
        logit = float(np.log(FOLLOWS / (1 - FOLLOWS) * LARGE_VOCABULARY))
        model.lm_head.weight.zero_()
        model.lm_head.weight[:PERIOD] = cycle.roll(1, 0) * logit / HIDDEN**0.5
    model.save_pretrained(folder)
