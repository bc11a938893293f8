"""One published version of a model's weights, and how to open it: the contract between sender and receiver."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tensor:
    """Where one full tensor lies in the published bytes."""

    name: str
    """Hugging Face parameter name."""
    dtype: str
    """torch's name for it, e.g. "float32"."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start."""


@dataclass(frozen=True)
class Weights:
    """A version of the weights, published by a training group. Plain data: it travels to the receivers as it is."""

    version: int
    location: str
    """A path that every process of this node can open while the publisher lives."""
    tensors: tuple[Tensor, ...]
    num_bytes: int
    checksum: str
    """Of every tensor's name, type, shape and bytes, in order; the receiver must arrive at the same."""
