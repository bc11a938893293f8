"""Rows that are packed answer as if each were alone, values and gradients, in every family of models that attends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from families import agreeing_model

from weft.workers.training.packed_sequences import PackedSequences

LENGTHS = [9, 1, 4, 7]
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWED = ("Mistral", "Gemma2", "Cohere2", "Phi3", "Mixtral")
"""With a sliding window of 5."""


def make(kind: str) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = SMALL | ({"sliding_window": 5} if kind in WINDOWED else {})
    if kind == "GPT2":
        settings = {
            "vocab_size": 97,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 32,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        settings |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for parameter in model.parameters():  # far enough from uniform for a mistake to show
        parameter.data.mul_(3.0)
    return model


@pytest.mark.parametrize(
    ("kind", "packs"),
    [
        *((kind, True) for kind in ("Llama", "Qwen2", "Qwen3", "GPT2")),
        *((kind, True) for kind in WINDOWED),
        ("StableLm", False),  # its attention cannot be exchanged
        ("Nemotron", False),  # its layers keep what their attention should know
        ("Jamba", False),  # has state
    ],
)
def test_rows_answer_as_if_each_were_alone(kind: str, packs: bool):
    model = make(kind)
    rows = [torch.randint(3, 97, (length,)) for length in LENGTHS]
    alone = [torch.log_softmax(model(input_ids=row[None], use_cache=False).logits[0], -1) for row in rows]
    expected = torch.cat([logits[torch.arange(len(row)), row] for logits, row in zip(alone, rows, strict=True)])
    weights = torch.linspace(-1, 1, sum(LENGTHS))
    gradients = torch.autograd.grad((expected * weights).sum(), [*model.parameters()], allow_unused=True)

    together = agreeing_model(model)
    assert together.packs == packs
    ids = torch.cat(rows)
    got, _ = together(ids, PackedSequences.of(LENGTHS), torch.arange(len(ids)), ids, None)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(
        torch.autograd.grad((got * weights).sum(), [*model.parameters()], allow_unused=True), gradients, strict=True
    ):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()) + 1e-7)
