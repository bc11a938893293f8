"""Packed rows give the same values and gradients as single rows, in every family with attention."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from families import agreeing_model, make_family

from weft.workers.training import agreement, packed_attention
from weft.workers.training.packed_sequences import PackedSequences, SharedPrompts

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
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if kind == "GptOss" else "sdpa"
    )
    for parameter in model.parameters():  # far enough from uniform to expose mistakes
        parameter.data.mul_(3.0)
    return model


@pytest.mark.parametrize(
    ("kind", "packs"),
    [
        *((kind, True) for kind in ("Llama", "Qwen2", "Qwen3", "GPT2")),
        *((kind, True) for kind in WINDOWED),
        ("GptOss", True),  # its attention has sinks
        ("StableLm", False),  # its attention cannot be replaced
        ("Nemotron", False),  # its layers drop arguments that attention needs
        ("Jamba", False),  # stateful
    ],
)
def test_rows_answer_as_if_each_were_alone(kind: str, packs: bool):
    model = make(kind)
    rows = [torch.randint(3, 97, (length,)) for length in LENGTHS]
    alone = [
        torch.log_softmax(model(input_ids=row[None], use_cache=False).logits[0], -1) for row in rows
    ]
    expected = torch.cat(
        [logits[torch.arange(len(row)), row] for logits, row in zip(alone, rows, strict=True)]
    )
    weights = torch.linspace(-1, 1, sum(LENGTHS))
    gradients = torch.autograd.grad((expected * weights).sum(), [*model.parameters()], allow_unused=True)

    together = agreeing_model(model)
    assert together.packs == packs
    ids = torch.cat(rows)
    got, _ = together(ids, PackedSequences.of_lengths(LENGTHS), torch.arange(len(ids)), ids, None)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(
        torch.autograd.grad((got * weights).sum(), [*model.parameters()], allow_unused=True),
        gradients,
        strict=True,
    ):
        if theirs is not None:
            torch.testing.assert_close(
                mine, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()) + 1e-7
            )


@pytest.mark.parametrize("kind", ["Qwen2", "Mistral", "Gemma2"])
def test_packed_rows_in_bfloat16_are_as_near_to_float64_as_rows_alone(kind: str):
    made = make(kind)
    rows = [torch.randint(3, 97, (length,)) for length in LENGTHS]
    ids, weights = torch.cat(rows), torch.linspace(-1, 1, sum(LENGTHS))
    found: dict[str, list[Any]] = {}
    for way, dtype in (("exact", torch.float64), ("alone", torch.bfloat16), ("packed", torch.bfloat16)):
        model = copy.deepcopy(made).to(dtype)
        if way == "packed":
            together = agreeing_model(made)
            together.causal_lm.to(dtype)
            model = together.causal_lm
            logprobs, _ = together(
                ids, PackedSequences.of_lengths(LENGTHS), torch.arange(len(ids)), ids, None
            )
        else:
            logits = (model(input_ids=row[None], use_cache=False).logits[0] for row in rows)
            logits = torch.cat([each.to(torch.promote_types(dtype, torch.float32)) for each in logits])
            logprobs = torch.log_softmax(logits, -1)[torch.arange(len(ids)), ids]
        gradients = torch.autograd.grad((logprobs * weights).sum(), [*model.parameters()])
        found[way] = [logprobs.detach(), torch.cat([each.double().flatten() for each in gradients])]
    for exact, alone, packed in zip(found["exact"], found["alone"], found["packed"], strict=True):
        rounding = (alone - exact).norm()
        assert rounding > 1e-4 * exact.norm(), "nothing is rounded"
        assert (packed - exact).norm() < 1.3 * rounding


def kernel_by_rows(
    query: Any,
    key: Any,
    value: Any,
    starts: Any,
    starts_of_keys: Any,
    longest: int,
    longest_of_keys: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Any:
    """Compute the documented result of `torch.nn.attention.varlen.varlen_attn`, row by row.

    The queries of a row are its last tokens. Each attends to itself and `window_size[0]` tokens
    before.
    """
    assert (
        enable_gqa == (query.shape[1] != key.shape[1])
        and window_size[1] == 0
        and starts.dtype == torch.int32
    )
    found: list[Any] = []
    for row in range(len(starts) - 1):
        own = slice(int(starts[row]), int(starts[row + 1]))
        keys = slice(int(starts_of_keys[row]), int(starts_of_keys[row + 1]))
        q, k, v = query[own], key[keys], value[keys]
        assert 0 < len(q) <= longest and len(q) <= len(k) <= longest_of_keys
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        back = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        seen = (back >= 0) & (back <= (len(k) if window_size[0] < 0 else window_size[0]))
        found.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(found)


ROWS = PackedSequences.of_lengths(LENGTHS)
SHARING = SharedPrompts.among(
    np.array([6, 1]), np.array([3]), np.array([4, 1, 8, 2]), np.array([0, 1, 0, 0]), torch.device("cpu")
)


@pytest.mark.parametrize("rows", [ROWS, SHARING], ids=["alone", "shared prompts"])
@pytest.mark.parametrize("name", ["Qwen2", "Mistral", "Gemma 3"])
def test_the_varlen_kernel_gives_the_same_as_padding(
    name: str, rows: PackedSequences, monkeypatch: pytest.MonkeyPatch
):
    model = agreeing_model(make_family(name).double())
    ids = torch.randint(3, 97, (int(rows.lengths.sum()),))
    inputs = (ids, rows)
    _, expected = model.run_backbone(*inputs)
    parameters = [p for p in model.backbone.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(expected.square().sum(), parameters, allow_unused=True)
    monkeypatch.setattr(packed_attention, "find_kernel", lambda device: kernel_by_rows)
    monkeypatch.setattr(packed_attention, "takes", lambda query, softcap, dropout: True)
    model.causal_lm.set_attn_implementation(packed_attention.VARLEN)
    _, found = model.run_backbone(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for mine, theirs in zip(
        torch.autograd.grad(found.square().sum(), parameters, allow_unused=True), gradients, strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)


def top_left(*arguments: Any, **named: Any) -> Any:
    """A kernel that takes queries for the first tokens of a row: correct only without shared
    prompts."""
    query, key, value, starts, starts_of_keys, *rest = arguments
    keys = torch.cat(
        [torch.arange(b, b + e - s) for b, s, e in zip(starts_of_keys, starts, starts[1:], strict=False)]
    )
    return kernel_by_rows(query, key[keys], value[keys], starts, starts, *rest, **named)


def blind_to_the_last(*arguments: Any, window_size: tuple[int, int], **named: Any) -> Any:
    """A kernel with a window that is one token too short on the left."""
    return kernel_by_rows(*arguments, window_size=(2, 0), **named)


@pytest.mark.parametrize(
    ("kernel", "chosen"),
    [
        (None, "weft_packed"),
        (kernel_by_rows, "weft_packed_varlen"),
        (top_left, "weft_packed"),
        (blind_to_the_last, "weft_packed"),
    ],
)
def test_the_kernel_is_chosen_where_it_agrees_with_the_model_in_bfloat16(
    kernel: Any, chosen: str, monkeypatch: pytest.MonkeyPatch
):
    for module in (packed_attention, agreement):
        monkeypatch.setattr(module, "find_kernel", lambda device: kernel)
    model = agreeing_model(make_family("Qwen3"))
    assert model.causal_lm.config._attn_implementation == chosen
    assert model.packs and model.shares_prompts


@pytest.mark.gpu
def test_torchs_kernel_is_chosen_on_a_gpu():
    model = agreeing_model(make_family("Qwen3").cuda())
    assert model.causal_lm.config._attn_implementation == packed_attention.VARLEN


def with_sinks(query: Any, key: Any, value: Any, sinks: Any, window: int | None) -> Any:
    """Compute attention of one row [L, heads, size] by formula: each head has one extra score,
    without value."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.3
    back = torch.arange(len(query))[:, None] - torch.arange(len(key))
    scores = scores.masked_fill((back < 0) | (back >= (window or len(key))), -torch.inf)
    scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :-1], value)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("lengths", [LENGTHS, [7, 7]])
def test_a_sink_adds_one_score_to_each_row(lengths: list[int], window: int | None):
    torch.manual_seed(0)
    tokens = sum(lengths)
    given = [
        torch.randn(tokens, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    ]
    sinks = (2 * torch.randn(4, dtype=torch.float64)).requires_grad_()
    rows = zip(*(x.split(lengths) for x in given), strict=True)
    expected = torch.cat([with_sinks(q, k, v, sinks, window) for q, k, v in rows])
    query, key, value = [x.transpose(0, 1)[None] for x in given]
    packed = PackedSequences.of_lengths(lengths)
    found, _ = packed_attention.packed_attention(
        torch.nn.Identity(),
        query,
        key,
        value,
        None,
        rows=packed,
        scaling=0.3,
        sliding_window=window,
        s_aux=sinks,
    )
    torch.testing.assert_close(found[0], expected, rtol=1e-10, atol=1e-10)
    weights = torch.randn_like(expected)
    gradients = (torch.autograd.grad((x * weights).sum(), [*given, sinks]) for x in (found[0], expected))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
