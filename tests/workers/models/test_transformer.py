"""Sizes of transformers against published numbers, Megatron-LM's formulas, and counts by hand."""

from typing import Any

import numpy as np
import pytest

from weft.workers.models.transformer import Transformer

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 6,
    "intermediate_size": 10,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 50,
}


def shape(
    kind: str, hidden: int, inner: int, layers: int, heads: int, keys: int, vocabulary: int
) -> Any:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": vocabulary,
    }


CARDS: dict[str, tuple[int, dict[str, Any]]] = {
    "Qwen2.5-1.5B": (
        1_543_714_304,
        shape("qwen2", 1536, 8960, 28, 12, 2, 151_936) | {"tie_word_embeddings": True},
    ),
    "Qwen3-0.6B": (
        596_049_920,
        shape("qwen3", 1024, 3072, 28, 16, 8, 151_936) | {"tie_word_embeddings": True, "head_dim": 128},
    ),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        shape("qwen3_moe", 2048, 6144, 48, 32, 4, 151_936)
        | {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "Llama-3.1-8B": (8_030_261_248, shape("llama", 4096, 14_336, 32, 32, 8, 128_256)),
    "Mistral-7B": (7_241_732_096, shape("mistral", 4096, 14_336, 32, 32, 8, 32_000)),
    "Mixtral-8x7B": (
        46_702_792_704,
        shape("mixtral", 4096, 14_336, 32, 32, 8, 32_000)
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "Gemma-2-2B": (
        2_614_341_888,
        shape("gemma2", 2304, 9216, 26, 8, 4, 256_000) | {"head_dim": 256},
    ),
    "Phi-3-mini": (3_821_079_552, shape("phi3", 3072, 8192, 32, 32, 32, 32_064)),
    "OLMo-2-7B": (7_298_617_344, shape("olmo2", 4096, 11_008, 32, 32, 32, 100_352)),
    "GPT-OSS-20B": (
        20_914_757_184,
        shape("gpt_oss", 2880, 2880, 24, 64, 8, 201_088)
        | {"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "attention_bias": True},
    ),
}
"""Parameters from the model cards."""


@pytest.mark.parametrize("name", CARDS)
def test_models_have_the_parameters_of_their_cards(name: str):
    parameters, settings = CARDS[name]
    model = Transformer.of(settings)
    assert model.parameters == pytest.approx(parameters, rel=5e-4)
    assert sum(int(np.prod(shape)) for shape in model.shapes().values()) == model.parameters


def classical(hidden: int, layers: int, vocabulary: int, length: int, heads: int) -> Transformer:
    return Transformer.of(
        {
            "model_type": "gpt2",
            "n_embd": hidden,
            "n_layer": layers,
            "n_head": heads,
            "vocab_size": vocabulary,
            "n_positions": length,
        }
    )


@pytest.mark.parametrize(
    ("hidden", "layers", "rows", "parameters", "flops", "once"),
    [
        (12_288, 96, 1536, 174_615_822_336, 4.5109707533231063e18, 3.386196746387325e18),
        (20_480, 105, 2520, 529_600_778_240, 2.221594167685939e19, 1.6670073745833984e19),
    ],
    ids=["175B", "530B"],
)
def test_classical_models_have_megatrons_parameters_and_operations(
    hidden: int, layers: int, rows: int, parameters: int, flops: float, once: float
):
    model = classical(hidden, layers, 51_200, 2048, hidden // 128)
    assert model.parameters == parameters
    batch: dict[str, Any] = {"tokens": [2048] * rows, "predicted": [2048] * rows, "causal": False}
    assert model.training_flops(**batch, recomputes=True) == pytest.approx(flops, rel=1e-12)
    assert model.training_flops(**batch) == pytest.approx(once, rel=1e-12)


def test_a_small_classical_model_has_the_operations_that_torch_counts():
    model = classical(128, 4, 512, 64, 4)
    assert model.training_flops([64, 64], predicted=[64, 64], causal=False) == 704_643_072
    assert model.parameters + 2 * 128 == 867_072, "torch counts the last norm, too"


def test_pairs_of_tokens_are_those_of_the_mask():
    chance = np.random.default_rng(0)
    for _ in range(30):
        after, tokens = chance.integers(0, 20, 5), chance.integers(0, 20, 5)
        windows = [None if chance.random() < 0.3 else int(chance.integers(1, 25)) for _ in range(3)]
        kinds = ["full_attention" if w is None else "sliding_attention" for w in windows]
        window = next((w for w in windows if w is not None), 1)
        model = Transformer.of(SMALL | {"sliding_window": window, "layer_types": kinds})
        pairs = sum(
            kind == "full_attention" or place - other < window
            for kind in kinds
            for before, number in zip(after.tolist(), tokens.tolist(), strict=True)
            for place in range(before, before + number)
            for other in range(place + 1)
        )
        linear = 2 * int(tokens.sum()) * model.products
        # Scores and weighted values of 2 heads of 4 elements.
        assert model.forward_flops(tokens, after=after) == linear + 2 * 2 * 8 * pairs
        assert model.training_flops(tokens, after=after) == 3 * (linear + 32 * pairs)
        adapter = model.training_flops(tokens, after=after, adapter=True)
        assert adapter == 2 * linear + 3 * 32 * pairs


def test_a_shared_prompt_is_computed_once():
    model = Transformer.of(SMALL)
    alone = model.forward_flops([7 + 3, 7 + 4], predicted=[3, 4])
    shared = model.forward_flops(7) + model.forward_flops([3, 4], after=7, predicted=[3, 4])
    assert shared == alone - model.forward_flops(7)


def test_a_mixture_computes_its_router_and_the_chosen_experts():
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 5}
    sizes = SMALL | experts | {"model_type": "qwen3_moe", "mlp_only_layers": [0]}
    model = Transformer.of(sizes)
    attention = 6 * 8 + 2 * 6 * 4 + 8 * 6
    assert [layer.products - attention for layer in model.layers] == [
        3 * 6 * 10,
        *[8 * 6 + 2 * 3 * 6 * 5] * 2,
    ]
    assert model.layers[1].parameters == 2 * 6 + attention + 8 * 6 + 8 * 3 * 6 * 5
    shared = Transformer.of(sizes | {"shared_expert_intermediate_size": 7, "mlp_only_layers": []})
    assert shared.layers[0].products == model.layers[1].products + 3 * 6 * 7
    assert Transformer.of(sizes | {"decoder_sparse_step": 2}).layers[0] == model.layers[0]


def test_a_pass_reads_the_experts_that_its_tokens_choose():
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1}
    model = Transformer.of(SMALL | experts | {"model_type": "mixtral"})
    always = 50 * 6 + 3 * (6 * 8 + 2 * 6 * 4 + 8 * 6 + 4 * 6)
    expert = 3 * 3 * 6 * 10
    assert model.read_bytes(1) == 2 * (always + expert)
    assert model.read_bytes(2) == pytest.approx(2 * (always + 4 * expert * (1 - 0.75**2)))
    assert model.read_bytes(1000) == pytest.approx(2 * (always + 4 * expert))


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        ({"sliding_window": None}, [None, None, None]),
        ({"model_type": "mistral", "sliding_window": 9}, [9, 9, 9]),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": False}, [None] * 3),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            [None, None, 9],
        ),
        ({"model_type": "gemma2", "sliding_window": 9}, [9, None, 9]),
        ({"model_type": "gemma3_text", "sliding_window": 9, "sliding_window_pattern": 3}, [9, 9, None]),
        ({"model_type": "gemma3_text", "sliding_window": 9}, [9, 9, 9]),
        (
            {
                "sliding_window": 9,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            [None, 9, None],
        ),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, [None, 0, None]),
    ],
)
def test_windows_follow_the_settings(settings: dict[str, Any], windows: list[int | None]):
    assert [layer.window for layer in Transformer.of(SMALL | settings).layers] == windows


def test_keys_and_values_are_those_of_the_layers_and_windows():
    yi = Transformer.of(shape("llama", 7168, 20_480, 60, 56, 8, 64_000))
    assert yi.kv_bytes(1) == 245_760 and yi.kv_bytes(50_000) == 12_288_000_000
    qwen = Transformer.of(shape("qwen2", 3584, 18_944, 28, 28, 4, 152_064))
    assert qwen.kv_bytes(1) == 57_344 and qwen.kv_bytes(32_768) == 1_879_048_192
    windows = Transformer.of(SMALL | {"model_type": "gemma2", "sliding_window": 9})
    assert windows.kv_bytes(20) == 2 * 4 * 2 * (9 + 20 + 9)
    assert windows.kv_bytes(20, windows=False) == 2 * 4 * 2 * 60


def test_a_multimodal_model_has_the_sizes_of_its_text_model():
    nested = {"model_type": "gemma3", "text_config": {**SMALL, "model_type": "gemma3_text"}}
    assert Transformer.of(nested) == Transformer.of(SMALL | {"model_type": "gemma3"})


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_missing_setting_is_named(name: str):
    with pytest.raises(ValueError, match=f"the model's settings lack '{name}'"):
        Transformer.of({key: value for key, value in SMALL.items() if key != name})


def test_latent_attention_is_refused():
    with pytest.raises(
        ValueError, match=r"type 'deepseek_v3' has latent attention \(kv_lora_rank=512\)"
    ):
        Transformer.of(SMALL | {"model_type": "deepseek_v3", "kv_lora_rank": 512})
