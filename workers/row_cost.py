"""What a row costs to train on: linear layers by its tokens, attention by their square."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..dataflow.errors import UserError
from .model_folder import head_dim, num_heads, read_model_config, text_settings


@dataclass(frozen=True)
class RowCost:
    """Cost of rows in tokens of linear layers: L + L^2 / A for a row of L tokens (ByteScale balances ranks so, arXiv:2502.21231).

    >>> RowCost(attention_length=1000)(np.array([500, 1000])).tolist()
    [750.0, 2000.0]
    """

    attention_length: float = math.inf
    """A: tokens of a row whose attention costs as much as everything else; infinite: a row costs its tokens."""

    def __call__(self, num_tokens: np.ndarray) -> np.ndarray:
        """[rows] tokens -> [rows] float64 cost."""
        tokens = np.asarray(num_tokens, np.float64)
        return tokens * (1 + tokens / self.attention_length)


def row_cost_of(model: str | Path) -> RowCost:
    """The cost of rows of a model, counted from its settings in multiplications: those of a token in linear layers and head, beside
    those with the L / 2 tokens that it attends to on average. Layers with a window count none of the latter. Rows of a model whose
    settings do not say enough cost their tokens.
    """
    try:
        settings = text_settings(read_model_config(model))
    except UserError:
        return RowCost()
    names = ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size")
    if any(not isinstance(settings.get(name), int) for name in names):
        return RowCost()
    hidden, layers, vocabulary, inner = (int(settings[name]) for name in names)
    heads, of_head = num_heads(settings) or 0, head_dim(settings) or 0
    queries, keys = heads * of_head, int(settings.get("num_key_value_heads") or heads) * of_head
    inner = _active(settings) or inner
    linear = layers * (2 * hidden * (queries + keys) + 3 * hidden * inner) + hidden * vocabulary
    kinds = settings.get("layer_types") or ["full_attention"] * layers
    full = sum(kind == "full_attention" for kind in kinds)
    return RowCost(linear / (full * queries)) if full and queries else RowCost()


def _active(settings: dict[str, Any]) -> int:
    """Width of the experts that a token goes through, of a mixture."""
    each = settings.get("num_experts_per_tok")
    return int(each) * int(settings.get("moe_intermediate_size") or settings["intermediate_size"]) if each else 0
