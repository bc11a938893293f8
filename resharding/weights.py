"""Where a version of the weights is given away, as plain data, and the parts that it is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from .box import Box

if TYPE_CHECKING:
    import torch

BY_VLLM = "vllm:"
"""Before the name of one of vLLM's own backends, as a transport."""

CHECKSUM_MODULUS = 1 << 64
"""Checksums are counted modulo this number."""


class Part(NamedTuple):
    """A box of a tensor that a rank holds, with its elements."""

    name: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    tensor: torch.Tensor
    """The elements, of the box's shape."""
    dtype: torch.dtype | None = None
    """In which they travel; None: their own. They are cast as they are copied, so that no second copy is held."""


def whole(named_tensors: Mapping[str, torch.Tensor]) -> Iterator[Part]:
    """Full tensors, each as the only part of itself."""
    for name, tensor in named_tensors.items():
        yield Part(name, tuple(tensor.shape), Box.full(tuple(tensor.shape)), tensor)


LOOPBACK = "127.0.0.1"
"""Where a rank listens that no other machine has to reach."""


@dataclass(frozen=True)
class RankWeights:
    """Where one rank gives its parts away. Plain data, of a size that does not depend on the model."""

    host: str
    """Address at which receivers on other machines reach it; empty: there are none, and it listens on LOOPBACK."""
    port: int
    machine: str
    """Where its memory can be mapped (see `this_machine`). Receivers on other machines are sent what they take."""
    token: str = field(default="", repr=False)
    """The secret that receivers show."""


@dataclass(frozen=True)
class Weights:
    """A version that is given away. Those of several ranks add up to those of their group."""

    version: int
    ranks: tuple[RankWeights, ...]
    receiver: str = ""
    """Who takes it, in the words of messages: "rollout[0]"."""
    backend: str = ""
    """vLLM's own, by which it travels while both sides work on it; empty: Weft's own way."""

    def __add__(self, other: Weights) -> Weights:
        if other.version != self.version:
            raise ValueError(f"weights of the versions {self.version} and {other.version} do not add up")
        return replace(self, ranks=self.ranks + other.ranks)

    def to(self, receiver: str) -> Weights:
        """The same for this receiver."""
        return replace(self, receiver=receiver)


@dataclass(frozen=True)
class Given:
    """What was given of a version. That of several ranks adds up to that of their group."""

    version: int
    checksum: str | None
    """Sum over all elements, as 16 hexadecimal digits (see `checksum.py`); every receiver must arrive at the same. None: nobody took all
    of it."""
    num_bytes: int
    """Of all elements, as they travel to a receiver that takes all of them."""

    def __add__(self, other: Given) -> Given:
        num_bytes = self.num_bytes + other.num_bytes
        if self.checksum is None or other.checksum is None:
            return Given(self.version, None, num_bytes)
        checksum = f"{(int(self.checksum, 16) + int(other.checksum, 16)) % CHECKSUM_MODULUS:016x}"
        return Given(self.version, checksum, num_bytes)
