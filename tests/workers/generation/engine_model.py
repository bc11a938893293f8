"""The model for tests of both engines."""

from __future__ import annotations

from pathlib import Path

import torch

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
