"""Decoding: the rows of a batch between two tokens, with their cache of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class DecodingBatch:
    """The rows of a batch: their keys and values, and where each begins."""

    cache: Any
    length: int
    """Columns in the cache, padding included."""
    origin: Tensor
    """[B] the column whose position is 0: columns of padding at the left of each row, less the positions that images leave out."""
    inside: Tensor | None
    """[B, columns] whether a column belongs to the row; None when no row is padded."""

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows ([kept] int64; one may be named several times)."""
        self.cache.batch_select_indices(rows)
        self.origin = self.origin[rows]
        if self.inside is not None:
            self.inside = self.inside[rows]

    def attention_mask(self) -> Tensor | None:
        """Mask of the next forward, which adds one column."""
        return None if self.inside is None else self.inside[:, : self.length + 1]


def new_cache(capacity: int) -> Any:
    """A cache of keys and values for `capacity` tokens a row. Its layers write in place; `DynamicLayer` of `transformers` copies all of
    its keys for each new token."""
    from transformers.cache_utils import Cache, DynamicLayer

    class PreallocatedLayer(DynamicLayer):
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
                rows, heads, _, size = key_states.shape
                self.all_keys = key_states.new_empty(rows, heads, capacity, size)
                self.all_values = value_states.new_empty(rows, heads, capacity, value_states.shape[-1])
                self.used = 0
            end = self.used + key_states.shape[2]
            self.all_keys[:, :, self.used : end] = key_states
            self.all_values[:, :, self.used : end] = value_states
            self.used = end
            self.keys, self.values = self.all_keys[:, :, :end], self.all_values[:, :, :end]
            return self.keys, self.values

        def batch_select_indices(self, indices: Tensor) -> None:
            self.all_keys, self.all_values = self.all_keys[indices], self.all_values[indices]
            self.keys, self.values = self.all_keys[:, :, : self.used], self.all_values[:, :, : self.used]

    return Cache(layer_class_to_replicate=PreallocatedLayer)
