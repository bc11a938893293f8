"""A model with random weights and a tokenizer, made on the spot: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path


def save_random_model(folder: Path, *, large: bool) -> Path:
    """Save a model of Qwen2's shape.

    Args:
        large: the sizes of Qwen2-0.5B; otherwise a tiny one, which a CPU trains in seconds.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    letters = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = 151_936 if large else 512
    names = {
        name: number for number, name in enumerate([*letters, *(f"<{i}>" for i in range(len(letters), vocabulary))])
    }
    tokens = Tokenizer(models.BPE(names, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokens.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
    sizes = (896, 4864, 24, 14, 2) if large else (64, 128, 2, 2, 2)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=sizes[0],
        intermediate_size=sizes[1],
        num_hidden_layers=sizes[2],
        num_attention_heads=sizes[3],
        num_key_value_heads=sizes[4],
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    if large:
        model = model.bfloat16()
    model.save_pretrained(folder)
    return folder
