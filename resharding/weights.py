"""One published version of a model's weights, and how to open it: the contract between sender and receiver."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorEntry:
    """Name, type, shape and place of one full tensor in the published bytes."""

    name: str
    """Hugging Face parameter name."""
    dtype: str
    """torch's name for it, e.g. "float32"."""
    shape: tuple[int, ...]
    offset: int
    """In bytes, from the start."""


@dataclass(frozen=True)
class Weights:
    """A version of the weights, published by a training group. Plain data: it travels to the receivers as it is."""

    version: int
    location: str
    """A path that every process of this node can open while the publisher lives."""
    tensors: tuple[TensorEntry, ...]
    num_bytes: int
    checksum: str
    """CRC-32 of every tensor's name, type, shape and bytes, in order; the receiver must arrive at the same."""
