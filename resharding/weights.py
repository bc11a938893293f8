"""One published version of a model's weights: where each rank of the trainer has put its part. The contract between the two sides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .box import Box

if TYPE_CHECKING:
    import torch

CHECKSUM_MODULUS = 1 << 64


class Part(NamedTuple):
    """A box of a tensor that a rank holds, with its elements."""

    name: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    tensor: torch.Tensor
    """The elements, of the box's shape."""


def whole(named_tensors: Mapping[str, torch.Tensor]) -> Iterator[Part]:
    """Full tensors, each as the only part of itself."""
    for name, tensor in named_tensors.items():
        yield Part(name, tuple(tensor.shape), Box.full(tuple(tensor.shape)), tensor)


@dataclass(frozen=True)
class RankWeights:
    """What one rank published. Plain data, of a size that does not depend on the model."""

    location: str
    """A path that every process of the node can open while the publisher lives."""
    num_bytes: int
    header_bytes: int
    """Length of the description of its parts, which ends the published bytes."""
    header_checksum: str
    """CRC-32 of the description. It stays the same from version to version, so receivers plan once."""
    machine: str
    """Where the location can be opened (see `this_machine`)."""
    host: str = ""
    """Address at which receivers on other machines reach the publisher; empty: it serves this machine alone."""
    port: int = 0
    token: str = field(default="", repr=False)
    """The secret that these receivers show."""


@dataclass(frozen=True)
class Weights:
    """A version of the weights. Those of several ranks add up to those of their group."""

    version: int
    ranks: tuple[RankWeights, ...]
    checksum: str
    """Sum over all elements, as 16 hexadecimal digits (see `checksum.py`); every receiver must arrive at the same."""

    def __add__(self, other: Weights) -> Weights:
        if other.version != self.version:
            raise ValueError(f"weights of the versions {self.version} and {other.version} do not add up")
        checksum = (int(self.checksum, 16) + int(other.checksum, 16)) % CHECKSUM_MODULUS
        return Weights(self.version, self.ranks + other.ranks, f"{checksum:016x}")
