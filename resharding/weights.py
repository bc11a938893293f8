"""Where a version of the weights is given away, as plain data, and the parts that it is made of."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ..dataflow.lazy import torch
from .layout import Box

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


# Checksum
#
# A checksum of weights that does not depend on how they lie over ranks: sums over boxes add up to
# the sum over the tensor.
#
#     sum(tensor)  =  sum over elements of  bits(element) * row_weight(row) * column_weight(column)     modulo 2^64
#
# The column is the index along the last dimension, the row is the flat index over all others, both
# in the whole tensor, and the weights are odd pseudo-random numbers. So a slice that is missing,
# exchanged, shifted or of another version changes the sum, unless about one chance in 2^64 hides
# it; and any way of cutting a tensor gives the same sum. Bits are those of the dtype: no rounding
# is involved.


_BLOCK_ELEMENTS = 1 << 16


def box_sum(tensor: torch.Tensor, box: Box, shape: tuple[int, ...]) -> int:
    """The sum over one box of a tensor.

    Args:
        tensor: the elements of the box, of the box's shape; any dtype, strides and device.
        box: where they are in the whole tensor.
        shape: of the whole tensor.

    Returns:
        A number in [0, 2^64); 0 for a box without elements. Disjoint boxes add up, modulo 2^64.

    >>> whole = torch.arange(12.0).view(3, 4)
    >>> parts = [Box((0, 0), (3, 1)), Box((0, 1), (3, 4))]
    >>> sum(box_sum(whole[part.slices], part, (3, 4)) for part in parts) % 2**64 == box_sum(whole, Box.full((3, 4)), (3, 4))
    True
    """
    if not tensor.numel():
        return 0
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().view(signed[tensor.element_size()])
    bits = bits.reshape(-1, bits.shape[-1]) if bits.ndim else bits.reshape(1, 1)
    rows, columns = (_weights_of if len(shape) < 3 else _weights_of.__wrapped__)(box, shape)
    if bits.device.type == "cpu":
        with np.errstate(over="ignore"):
            return (
                int((np.einsum("rc,c->r", bits.numpy(), columns) * rows).sum(dtype=np.int64))
                % CHECKSUM_MODULUS
            )
    on_device = torch.from_numpy(columns.copy()).to(bits.device)
    step = max(1, _BLOCK_ELEMENTS * 16 // bits.shape[1])
    sums = torch.cat(
        [(bits[first : first + step] * on_device).sum(1) for first in range(0, len(bits), step)]
    )
    return int((sums * torch.from_numpy(rows.copy()).to(bits.device)).sum().item()) % CHECKSUM_MODULUS


@functools.lru_cache(maxsize=1 << 16)
def tensor_factor(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """The odd number by which the sum of a tensor is multiplied in the sum over a model: the same bits under another name, dtype or shape
    are other weights."""
    header = f"{name}|{dtype}|{tuple(shape)}".encode()
    return int(_mixed(np.array([zlib.crc32(header) << 32 | zlib.crc32(header[::-1])], np.uint64))[0]) | 1


@functools.lru_cache(maxsize=256)
def _weights(kind: int, count: int) -> np.ndarray:
    """Odd pseudo-random numbers for the indices below `count`: those of rows (0) or of columns (1)."""
    with np.errstate(over="ignore"):
        mixed = _mixed(np.arange(count, dtype=np.uint64) * np.uint64(2) + np.uint64(kind))
    odd = (mixed | np.uint64(1)).view(np.int64)
    odd.flags.writeable = False
    return odd


@functools.lru_cache(maxsize=1 << 15)
def _weights_of(box: Box, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Weights of the rows and of the columns of a box: of a tensor with at most two dimensions, views."""
    start, stop = (box.starts[-1], box.stops[-1]) if shape else (0, 1)
    return _row_weights(box, shape), _weights(1, shape[-1] if shape else 1)[start:stop]


def _row_weights(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    """Weights of the rows of a box, by the rows' flat indices in the whole tensor."""
    leading = shape[:-1]
    if not leading:
        return _weights(0, 1)
    total = int(np.prod(leading))
    if len(leading) == 1:
        return _weights(0, total)[box.starts[0] : box.stops[0]]
    ranges = [np.arange(start, stop) for start, stop in zip(box.starts[:-1], box.stops[:-1], strict=True)]
    return _weights(0, total)[
        np.ravel_multi_index(np.meshgrid(*ranges, indexing="ij"), leading).reshape(-1)
    ]


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): each bit of the result depends on all bits of the number."""
    with np.errstate(over="ignore"):
        numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
        numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return numbers ^ (numbers >> np.uint64(31))
