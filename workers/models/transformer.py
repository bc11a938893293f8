"""The sizes of a transformer, from its `config.json` and without torch: parameters, floating-point
operations, and bytes of keys and values.

    Transformer.of(read_model_config(model)).training_flops(tokens, predicted=tokens)

One multiplication of a matrix product counts as two operations, as in Megatron-LM (arXiv:2104.04473)
and torch's `FlopCounterMode`; elementwise operations do not count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .model_folder import EXPERTS_NAMES, context_of, head_dim, num_heads, text_settings

_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_INNER = ("intermediate_size", "n_inner", "ffn_dim")
_CHOSEN = ("num_experts_per_tok", "experts_per_token", "moe_topk")
_UNGATED = {
    *("bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt"),
    *("nemotron", "opt", "persimmon", "phi", "starcoder2"),
}
"""Types of models whose MLP has two matrices; others have three (SwiGLU, arXiv:2002.05202)."""
_LEARNED_POSITIONS = {"gpt2", "gpt_bigcode", "gpt_neo", "opt"}
_TIED = {*_LEARNED_POSITIONS, "cohere", "cohere2", "gemma", "gemma2", "gemma3"}
"""Types whose head is the embedding, if the settings do not say."""
_BIASED = {"qwen2", "qwen2_moe"}
"""Types with biases of queries, keys and values that their settings do not mention."""
_PERIODS = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "gemma3": 6}
"""Type -> every how many layers one attends to all tokens, if the settings do not list the layers."""


class Matrix(NamedTuple):
    """A weight matrix of a layer."""

    name: str
    rows: int
    columns: int
    copies: int = 1
    """Number of experts that each have such a matrix."""
    used: int = 1
    """Number of copies that compute a token."""

    @property
    def products(self) -> int:
        """Multiplications per token."""
        return self.used * self.rows * self.columns


@dataclass(frozen=True)
class Layer:
    matrices: tuple[Matrix, ...]
    vectors: int
    """Number of parameters in norms and biases; norms of queries and keys are left out."""
    window: int | None = None
    """[tokens] Tokens that a token attends to, itself included; None for all tokens before it, 0 for
    a layer without attention between tokens."""

    @property
    def products(self) -> int:
        return sum(matrix.products for matrix in self.matrices)

    @property
    def parameters(self) -> int:
        own = (matrix.copies * matrix.rows * matrix.columns for matrix in self.matrices)
        return self.vectors + sum(own)


@dataclass(frozen=True)
class Transformer:
    """A causal language model with grouped queries (arXiv:2305.13245), and dense or sparse MLPs. Layers
    with a state instead of attention count as attention without pairs of tokens.

    >>> one = Transformer.of({"hidden_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 1, "vocab_size": 5})
    >>> one.products, one.head_products, one.kv_bytes(10)  # 4 matrices of 2 x 2, 3 of 2 x 1; 5 x 2
    (22, 10, 80)
    """

    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    tied: bool = False
    positions: int = 0
    """Number of learned embeddings of positions."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Transformer:
        """Return the sizes that the content of a `config.json` gives. Raises a ValueError that names
        the missing setting, or an architecture that this class does not describe."""
        text = text_settings(settings)
        kind = str(text.get("model_type", "")).removesuffix("_text")
        if text.get("kv_lora_rank"):
            raise ValueError(
                f"a model of type {kind!r} has latent attention (kv_lora_rank={text['kv_lora_rank']}), whose costs are unknown"
            )
        hidden, number = _needed(text, _HIDDEN), _needed(text, _LAYERS)
        heads, of_head = num_heads(text), head_dim(text)
        if not heads or not of_head:
            raise ValueError("the model's settings lack 'num_attention_heads', so its costs are unknown")
        kv_heads = int(text.get("num_key_value_heads") or heads)
        queries, keys = heads * of_head, kv_heads * of_head
        attention = (
            Matrix("self_attn.q_proj", queries, hidden),
            Matrix("self_attn.k_proj", keys, hidden),
            Matrix("self_attn.v_proj", keys, hidden),
            Matrix("self_attn.o_proj", hidden, queries),
        )
        biases = queries + 2 * keys if kind in _BIASED or text.get("attention_bias") else 0
        layers: list[Layer] = []
        for index, window in enumerate(_windows(text, kind, number)):
            mlp = _mlp(text, kind, index, hidden)
            vectors = 2 * hidden + biases
            if kind in _LEARNED_POSITIONS:  # layer norms and all matrices have biases
                vectors = 4 * hidden + sum(matrix.rows for matrix in (*attention, *mlp))
            layers.append(Layer((*attention, *mlp), vectors, window))
        return cls(
            hidden,
            _needed(text, ("vocab_size",)),
            heads,
            kv_heads,
            of_head,
            tuple(layers),
            tied=bool(text.get("tie_word_embeddings", kind in _TIED)),
            positions=(context_of(text) or 0) * (kind in _LEARNED_POSITIONS),
        )

    # Sizes

    @property
    def parameters(self) -> int:
        """Number of parameters, without norms of queries and keys and the last norm."""
        outer = (1 + (not self.tied)) * self.vocabulary + self.positions
        return sum(layer.parameters for layer in self.layers) + outer * self.hidden

    @property
    def products(self) -> int:
        """Multiplications per token in the matrices of all layers, without attention and head."""
        return sum(layer.products for layer in self.layers)

    @property
    def head_products(self) -> int:
        """Multiplications per token in the head."""
        return self.vocabulary * self.hidden

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor by name, as in the files of a Llama."""
        found: dict[str, tuple[int, ...]] = {}
        found["model.embed_tokens.weight"] = (self.vocabulary, self.hidden)
        if self.positions:
            found["model.embed_positions.weight"] = (self.positions, self.hidden)
        for number, layer in enumerate(self.layers):
            of_layer = f"model.layers.{number}"
            found[f"{of_layer}.norms_and_biases"] = (layer.vectors,)
            for name, rows, columns, copies, _ in layer.matrices:
                shape = (rows, columns) if copies == 1 else (copies, rows, columns)
                found[f"{of_layer}.{name}.weight"] = shape
        if not self.tied:
            found["lm_head.weight"] = (self.vocabulary, self.hidden)
        return found

    def kv_bytes(self, tokens: float, width: int = 2, *, windows: bool = True) -> float:
        """Return the bytes of keys and values of one sequence.

        Args:
            tokens: length of the sequence.
            width: [bytes] of a key's element.
            windows: whether layers with a sliding window keep only the tokens in it.
        """
        each = 2 * self.kv_heads * self.head_dim * width
        kept = (
            tokens if layer.window is None or not windows else min(tokens, layer.window)
            for layer in self.layers
        )
        return each * sum(kept)

    def read_bytes(self, tokens: float, width: int = 2) -> float:
        """Return the bytes of weights that a pass over these tokens reads, with the head. Tokens
        choose their experts independently."""
        read = float(self.head_products)
        for layer in self.layers:
            for matrix in layer.matrices:
                missed = (1 - matrix.used / matrix.copies) ** tokens
                read += matrix.rows * matrix.columns * matrix.copies * (1 - missed)
        return width * read

    # Operations

    def forward_flops(
        self, tokens: ArrayLike, *, after: ArrayLike = 0, predicted: ArrayLike = 0, causal: bool = True
    ) -> float:
        """Return the floating-point operations of a forward pass, summed over rows.

        Args:
            tokens: [rows] number of tokens to compute.
            after: [rows] number of tokens before these whose keys and values exist: a shared prompt,
                or the context of decoding.
            predicted: [rows] number of tokens that the head reads.
            causal: count only pairs of tokens that the mask shows, within sliding windows. Otherwise,
                every token attends to all tokens of its row, as Megatron-LM and torch count.
        """
        return sum(self._forward(tokens, after, predicted, causal=causal))

    def training_flops(
        self,
        tokens: ArrayLike,
        *,
        after: ArrayLike = 0,
        predicted: ArrayLike = 0,
        causal: bool = True,
        adapter: bool = False,
        recomputes: bool = False,
    ) -> float:
        """Return the floating-point operations of a forward and a backward pass. The other arguments
        are as in `forward_flops`.

        Args:
            adapter: whether the model's weights get no gradients. The operations of the adapter
                itself are left out.
            recomputes: whether the backward pass repeats the forward pass of the layers, as
                activation checkpointing does.
        """
        layers, attention, head = self._forward(tokens, after, predicted, causal=causal)
        passes = 2 if adapter else 3
        return passes * (layers + head) + 3 * attention + recomputes * (layers + attention)

    def _forward(
        self, tokens: ArrayLike, after: ArrayLike, predicted: ArrayLike, *, causal: bool
    ) -> tuple[float, float, float]:
        """Return the operations of the layers' matrices, of attention, and of the head."""
        rows, before = np.broadcast_arrays(np.asarray(tokens, float), np.asarray(after, float))
        every = float((rows * (before + rows)).sum())
        pairs = 0.0
        # Scores and weighted values are two products for each pair of tokens.
        for window in {layer.window for layer in self.layers}:
            number = sum(layer.window == window for layer in self.layers)
            pairs += number * (_visible(rows, before, window) if causal else every)
        linear = 2 * self.products * float(rows.sum())
        head = 2 * self.head_products * float(np.asarray(predicted, float).sum())
        return linear, 4 * self.heads * self.head_dim * pairs, head


def _visible(tokens: np.ndarray, after: np.ndarray, window: int | None) -> float:
    """Return the number of pairs of tokens that a causal mask shows, summed over rows."""

    def up_to(length: np.ndarray) -> np.ndarray:
        full = length if window is None else np.minimum(length, window)
        return full * (full + 1) / 2 + (length - full) * (0 if window is None else window)

    return float((up_to(after + tokens) - up_to(after)).sum())


def _needed(settings: Mapping[str, Any], names: tuple[str, ...]) -> int:
    value = _first(settings, names)
    if value is None:
        raise ValueError(f"the model's settings lack {names[0]!r}, so its costs are unknown")
    return value


def _first(settings: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    values = (settings.get(name) for name in names)
    return next((int(value) for value in values if isinstance(value, int | float) and value), None)


def _windows(settings: Mapping[str, Any], kind: str, layers: int) -> list[int | None]:
    window = _first(settings, ("sliding_window",))
    if settings.get("use_sliding_window") is False:
        window = None
    kinds = settings.get("layer_types")
    if isinstance(kinds, list) and kinds:
        other = window or _first(settings, ("attention_chunk_size",)) or 0
        of_kind = {"full_attention": None, "sliding_attention": other, "chunked_attention": other}
        return [of_kind.get(each, 0) for each in kinds]  # layers with a state keep no tokens
    if window is None:
        return [None] * layers
    if "use_sliding_window" in settings:  # Qwen
        first = int(settings.get("max_window_layers") or 0)
        return [window if layer >= first else None for layer in range(layers)]
    period = _first(settings, ("sliding_window_pattern",)) or _PERIODS.get(kind, math.inf)
    return [window if (layer + 1) % period else None for layer in range(layers)]


def _mlp(settings: Mapping[str, Any], kind: str, layer: int, hidden: int) -> tuple[Matrix, ...]:
    inner = _first(settings, _INNER) or 4 * hidden
    experts = _first(settings, EXPERTS_NAMES) or 1
    dense = layer in (settings.get("mlp_only_layers") or ())
    dense |= (layer + 1) % (_first(settings, ("decoder_sparse_step",)) or 1) > 0
    dense |= layer < (_first(settings, ("first_k_dense_replace",)) or 0)
    if experts == 1 or dense:
        return _feed_forward("mlp", inner, hidden, gated=kind not in _UNGATED)
    of_expert = _first(settings, ("moe_intermediate_size",)) or inner
    chosen = _first(settings, _CHOSEN) or 1
    made = [Matrix("mlp.gate", experts, hidden)]
    made += _feed_forward("mlp.experts", of_expert, hidden, copies=experts, used=chosen)
    shared = _first(settings, ("shared_expert_intermediate_size",))
    shared = shared or of_expert * (_first(settings, ("n_shared_experts",)) or 0)
    made += _feed_forward("mlp.shared_expert", shared, hidden) if shared else ()
    return tuple(made)


def _feed_forward(
    name: str, inner: int, hidden: int, *, gated: bool = True, copies: int = 1, used: int = 1
) -> tuple[Matrix, ...]:
    into = ("gate_proj", "up_proj") if gated else ("up_proj",)
    made = [Matrix(f"{name}.{each}", inner, hidden, copies, used) for each in into]
    return (*made, Matrix(f"{name}.down_proj", hidden, inner, copies, used))
