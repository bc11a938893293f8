"""The smallest model with a tokenizer."""

from pathlib import Path
from typing import Any


def save_model(folder: Path) -> None:
    """Save a Qwen2 of one layer with fixed random weights, and a word tokenizer."""
    import tokenizers
    import torch
    from tokenizers import models, pre_tokenizers
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes: Any = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    Qwen2ForCausalLM(Qwen2Config(vocab_size=97, num_key_value_heads=2, **sizes)).save_pretrained(folder)
    words = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
