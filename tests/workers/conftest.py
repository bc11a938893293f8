"""Small models and rows for the tests of training workers."""

import sys
from pathlib import Path

import numpy as np
import pytest

from weft.dataflow.batch import Batch

sys.path.insert(0, str(Path(__file__).parent))  # the programs that tests start and import


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of 2 layers, hidden 64, tied embeddings, random weights, and a file that stands for its tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)  # a tiny model gains nothing from more, and on a busy machine loses much
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = Qwen2Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attention_dropout=0.1,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def rows() -> Batch:
    """23 rows of uneven lengths, some tokens masked, two temperatures, advantages and old log-probabilities at random."""
    return make_rows(23)


def make_rows(num_rows: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    prompts, lengths = rng.integers(1, 9, num_rows), rng.integers(1, 14, num_rows)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    num_tokens = int(cu_seqlens[-1])
    return Batch.of(
        sample_id=np.arange(num_rows),
        prompt_ids=[rng.integers(0, 97, n) for n in prompts],
        response_ids=(rng.integers(0, 97, num_tokens), cu_seqlens),
        response_mask=((rng.random(num_tokens) < 0.9).astype(np.uint8), cu_seqlens),
        temperature=np.where(rng.random(num_rows) < 0.5, 1.0, 0.7),
        advantages=(rng.normal(size=num_tokens), cu_seqlens),
        old_logprobs=(-4.5 + 0.3 * rng.normal(size=num_tokens), cu_seqlens),
        reference_logprobs=(-4.5 + 0.3 * rng.normal(size=num_tokens), cu_seqlens),
    )
