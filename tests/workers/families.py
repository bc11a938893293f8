"""Tiny models of many `transformers` families, with settings that expose mistakes."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from weft.workers.training.agreement import find_agreement
from weft.workers.training.response_model import ResponseModel

VOCABULARY = 97
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_CAPPED = {
    "sliding_window": 5,
    "query_pre_attn_scalar": 1,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 3.0,
}
_WINDOW = {"sliding_window": 5}
_SHORT = 16
"""[tokens] Some rows in the tests are shorter, some longer."""


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **settings}}


_LONGROPE = _rope(
    "longrope",
    original_max_position_embeddings=_SHORT,
    short_factor=[1.0] * 4,
    long_factor=[4.0, 8.0, 12.0, 16.0],
) | {"original_max_position_embeddings": _SHORT}
_MAMBA = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}

_EYES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "image_size": 16,
    "patch_size": 8,
}
_GEMMA_4 = {
    "text_config": {
        "final_logit_softcapping": 3.0,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        **_WINDOW,
    },
    "vision_config": _EYES,
    "audio_config": None,
}

WERE_WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma 2": ("gemma2", _CAPPED),
    "VaultGemma": ("vaultgemma", _CAPPED),
    "Gemma 4": ("gemma4", _GEMMA_4),
    "Gemma 3 that sees": (
        "gemma3",
        {"text_config": {"attention_dropout": 0.5, **_WINDOW}, "vision_config": _EYES},
    ),
    "Phi-3 longrope": ("phi3", _LONGROPE),
    "dynamic NTK": ("llama", {**_rope("dynamic"), "max_position_embeddings": _SHORT}),
    "Falcon-H1": ("falcon_h1", {"lm_head_multiplier": 0.3, **_MAMBA}),
    "RecurrentGemma": (
        "recurrent_gemma",
        {"attention_window_size": 5, "logits_soft_cap": 3.0, "lru_width": 32},
    ),
    "HyperCLOVAX": ("hyperclovax", {"logits_scaling": 0.25}),
    "ModernBERT-decoder": ("modernbert-decoder", {"local_attention": 5}),
    "PhiMoE": ("phimoe", {"router_jitter_noise": 0.3, "input_jitter_noise": 0.3, **_EXPERTS}),
    "Mixtral": ("mixtral", {"router_jitter_noise": 0.3, **_WINDOW, **_EXPERTS}),
    "BioGPT": ("biogpt", {"layerdrop": 0.5, "hidden_dropout_prob": 0.5, "activation_dropout": 0.5}),
    "DiffLlama": ("diffllama", {}),
    "Llama 4": ("llama4_text", {"attention_chunk_size": 8, "intermediate_size_mlp": 48, **_EXPERTS}),
}
WERE_RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", {}),
    "Qwen3 MoE": ("qwen3_moe", _EXPERTS),
    "Qwen3.5": ("qwen3_5_text", {}),
    "Llama": ("llama", {}),
    "Llama 3 rope": (
        "llama",
        _rope(
            "llama3", original_max_position_embeddings=_SHORT, low_freq_factor=1.0, high_freq_factor=4.0
        ),
    ),
    "YaRN": ("llama", _rope("yarn", original_max_position_embeddings=_SHORT)),
    "Mistral": ("mistral", _WINDOW),
    "Phi-3": ("phi3", _WINDOW),
    "Gemma": ("gemma", {}),
    "Gemma 3": ("gemma3_text", _WINDOW),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", _WINDOW),
    "GPT-2": ("gpt2", {}),
    "GPT-NeoX": ("gpt_neox", {}),
    "OPT": ("opt", {}),
    "Granite": ("granite", {"logits_scaling": 4.0}),
    "Cohere 2": ("cohere2", {"logit_scale": 0.25, **_WINDOW}),
    "StableLM": ("stablelm", {}),
    "Nemotron": ("nemotron", {}),
    "Jamba": ("jamba", {}),
    "MiniMax": ("minimax", _EXPERTS),
    "MPT": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}),
    "GPT-OSS": ("gpt_oss", _EXPERTS | _WINDOW),
}
FAMILIES = WERE_WRONG | WERE_RIGHT


def make(kind: str, settings: dict[str, Any], attention: str | None = None) -> Any:
    torch.manual_seed(0)
    settings = {**_SMALL, **settings} if "text_config" not in settings else _with_small_text(settings)
    config = transformers.CONFIG_MAPPING[kind](**settings)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def _with_small_text(settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, "text_config": {**_SMALL, **settings["text_config"]}}


def make_family(name: str) -> Any:
    return make(*FAMILIES[name])


def amplify(model: Any) -> Any:
    """Scale the weights until the outputs are far enough from uniform to expose mistakes."""
    for parameter in model.parameters():
        parameter.data.mul_(3.0)
    return model


def agreeing_model(causal_lm: Any, *, scalar: bool = False) -> ResponseModel:
    """Return the response model, on the fastest path that agrees with `transformers`."""
    model = ResponseModel(causal_lm, scalar=scalar)
    find_agreement(model).put_on(model)
    return model
