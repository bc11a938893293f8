"""Operations of twelve families (docs/models.md): computed from `config.json`, and counted by torch.

torch counts all pairs of tokens, as dense attention computes them, and so does the comparison. The
tests compare the pairs under a mask with a count by hand (`tests/workers/models/test_transformer.py`).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LENGTH = 96
"""[tokens] Longer than the windows, and a large enough share of pairs to notice a mistake."""
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 32}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen2.5": ("qwen2", {"num_key_value_heads": 1, "head_dim": 16, "num_attention_heads": 4}),
    "Qwen3": ("qwen3", {}),
    "Qwen3 MoE": (
        "qwen3_moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    "Llama 3": ("llama", {}),
    "Mistral": ("mistral", WINDOW),
    "Mixtral": ("mixtral", EXPERTS),
    "Gemma 2": ("gemma2", WINDOW),
    "Gemma 3": ("gemma3_text", WINDOW),
    "Phi-3": ("phi3", {"head_dim": 16, **WINDOW}),
    "OLMo 2": ("olmo2", {"head_dim": 16}),
    "GPT-OSS": ("gpt_oss", EXPERTS | WINDOW),
}
"""Name -> model type, and changes to `SIZES`. Models without a setting for the size of a head
divide the hidden size."""


def measure() -> dict[str, float]:
    """Return the largest relative errors."""
    errors = {name: errors_of(*family) for name, family in FAMILIES.items()}
    for name, own in errors.items():
        shown = ", ".join(f"{what} {error:.3%}" for what, error in own.items())
        print(f"  {name:<10} {shown}", flush=True)
    worst = {what: max(own[what] for own in errors.values()) for what in ("forward", "training")}
    parameters = max(own["parameters"] for own in errors.values())
    return {
        "flops_error": round(max(worst.values()), 5),
        "parameters_error": round(parameters, 5),
    }


def errors_of(kind: str, settings: Mapping[str, Any]) -> dict[str, float]:
    """Return a family's relative errors by name: forward pass, training pass, number of parameters."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from weft.workers.models.transformer import Transformer

    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SIZES, **settings, "experts_implementation": "eager"})
    # Experts depend on values, so these models cannot be on the device meta.
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with tempfile.TemporaryDirectory(prefix="weft-flops-") as folder:
        config.save_pretrained(folder)
        sizes = Transformer.of(json.loads((Path(folder) / "config.json").read_text()))
    ids = torch.randint(3, 320, (1, LENGTH))
    counted: list[int] = []
    for trains in (False, True):
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(trains):
            logits = model(ids, use_cache=False).logits
            if trains:
                logits.sum().backward()
        counted.append(counter.get_total_flops())
    rows: dict[str, Any] = {"predicted": LENGTH, "causal": False}
    return {
        "forward": abs(sizes.forward_flops(LENGTH, **rows) / counted[0] - 1),
        "training": abs(sizes.training_flops(LENGTH, **rows) / counted[1] - 1),
        "parameters": abs(sizes.parameters / sum(p.numel() for p in model.parameters()) - 1),
    }
