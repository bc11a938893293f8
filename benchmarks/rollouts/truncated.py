"""Gap between log-probabilities of the generator and the trainer, for samples of a part of the vocabulary.

A model with a vocabulary of 4,096 samples with top-p 0.9, top-k 20, min-p 0.05, and all three, in float32.
The trainer computes the log-probabilities of the same tokens over the recorded kept sets.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY, CONTEXT, TOKENS = 4096, 256, 64
PROMPTS, SAMPLES = 32, 4
REPEATS = 6
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.05},
    {"top_p": 0.9, "top_k": 20, "min_p": 0.05},
)


def measure() -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for engine in ("vllm", "transformers"):
            name = "truncated_gap" if engine == "vllm" else f"truncated_gap_{engine}"
            gaps, without = gaps_of(folder, engine)
            figures[name] = float(f"{max(float(each.mean()) for each in gaps):.3g}")
            figures[f"{name}_largest"] = float(f"{max(float(each.max()) for each in gaps):.3g}")
        figures["truncated_gap_whole"] = round(float(without.mean()), 4)
        generation, training = costs_of(folder)
    return figures | {"kept_generation": round(generation, 2), "kept_training": round(training, 2)}


def gaps_of(folder: str, engine: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the gap of each token for each sampling, [T] nats each, and for top-p alone the gap to the
    trainer's log-probabilities over the whole vocabulary."""
    from weft.algorithms.sampling import Sampling
    from weft.workers.rollout import RolloutWorker
    from weft.workers.rollout_config import RolloutConfig

    settings: dict[str, Any] = {"model": folder, "engine": engine, "kept_sets": True, "dtype": "float32"}
    rollout = RolloutWorker(RolloutConfig(**settings, max_context=CONTEXT))
    actor = _actor(folder)
    gaps: list[np.ndarray] = []
    without = np.zeros(0)
    for narrowed in SAMPLINGS:
        rows = _rows(rollout, Sampling(max_tokens=TOKENS, **narrowed))
        gaps.append(_gap(actor, rows))
        if narrowed == SAMPLINGS[0]:
            without = _gap(actor, _whole(rows))
    rollout.close()
    actor.close()
    return gaps, without


def costs_of(folder: str) -> tuple[float, float]:
    """Return the time of generation and of an optimizer step with kept sets of 20 tokens, over the time
    without."""
    from weft.algorithms.policy_loss import NegativeLogLikelihood
    from weft.algorithms.sampling import Sampling
    from weft.workers.rollout import RolloutWorker
    from weft.workers.rollout_config import RolloutConfig

    sampling, loss = Sampling(max_tokens=TOKENS, top_k=20, stop=None), NegativeLogLikelihood()
    rollouts = [
        RolloutWorker(RolloutConfig(model=folder, engine="transformers", kept_sets=kept_sets))
        for kept_sets in (True, False)
    ]
    actor = _actor(folder)
    rows = _rows(rollouts[0], sampling)
    generation = _ratio(*(partial(_rows, each, sampling) for each in rollouts))
    training = _ratio(*(partial(actor.update, each, loss=loss) for each in (rows, _whole(rows))))
    return generation, training


def _ratio(one: Callable[[], Any], other: Callable[[], Any]) -> float:
    """Call two functions in turns. Return the ratio of their median processor times."""
    seconds: list[list[float]] = []
    for _ in range(REPEATS):
        seconds.append([])
        for call in (one, other):
            began = time.process_time()
            call()
            seconds[-1].append(time.process_time() - began)
    first, second = np.median(seconds[1:], axis=0)
    return float(first / second)


def _actor(folder: str) -> Any:
    from weft.workers.actor import ActorConfig, ActorWorker

    return ActorWorker(ActorConfig(model=folder, learning_rate=1e-6))


def _rows(rollout: Any, sampling: Any) -> Any:
    """Sample responses, with their prompts."""
    from weft.dataflow.batch import Batch

    rng, ids = np.random.default_rng(0), np.arange(PROMPTS)
    prompt_ids = [rng.integers(0, VOCABULARY, 3 + k % 7).astype(np.int32) for k in ids]
    prompts = Batch.of(sample_id=ids, group_id=ids, parent_id=ids, prompt_ids=prompt_ids)
    steps = rollout.generate(prompts, n=SAMPLES, sampling=sampling)
    rows = Batch.concat([part[0].rows for part in steps if part])
    return rows.with_columns(prompt_ids=[prompt_ids[k] for k in rows.numpy("parent_id").tolist()])


def _whole(rows: Any) -> Any:
    return rows.select([column for column in rows.columns if not column.startswith("kept")])


def _gap(actor: Any, rows: Any) -> np.ndarray:
    own = actor.logprobs(rows, into="own").ragged_numpy("own")[0]
    return np.abs(own - rows.ragged_numpy("response_logprobs")[0])


def make_model(folder: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.15,  # large enough to prefer some tokens
        bos_token_id=0,
        eos_token_id=1,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
