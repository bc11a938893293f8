"""Weights: plain-data records of a published version, its parts, and checksums."""

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
"""Prefix of a transport that is one of vLLM's own backends."""

CHECKSUM_MODULUS = 1 << 64


class TensorPart(NamedTuple):
    """A box of a checkpoint's tensor of this name and shape, with its elements."""

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor
    dtype: torch.dtype | None = None
    """Dtype of the transfer; None for the tensor's own. Casts happen during the copy."""


def whole(named_tensors: Mapping[str, torch.Tensor]) -> Iterator[TensorPart]:
    for name, tensor in named_tensors.items():
        yield TensorPart(name, tuple(tensor.shape), Box.full(tuple(tensor.shape)), tensor)


LOOPBACK = "127.0.0.1"
"""Address on which a rank listens if no other machine has to reach it."""


@dataclass(frozen=True)
class RankWeights:
    """The endpoint that publishes one rank's parts, as plain data of constant size. The token
    authenticates receivers."""

    host: str
    """Address for receivers on other machines; empty for none, and LOOPBACK only."""
    port: int
    machine: str
    """Machine that can map the rank's memory (see `this_machine`); others get messages."""
    token: str = field(default="", repr=False)


@dataclass(frozen=True)
class Weights:
    """A published version. The records of a group's ranks add up."""

    version: int
    ranks: tuple[RankWeights, ...]
    receiver: str = ""
    """Receiver's name in messages, such as "rollout[0]"."""
    backend: str = ""
    """vLLM backend that carries the weights; empty for Weft's transfer."""

    def __add__(self, other: Weights) -> Weights:
        if other.version != self.version:
            raise ValueError(f"cannot add weights of versions {self.version} and {other.version}")
        return replace(self, ranks=self.ranks + other.ranks)

    def to(self, receiver: str) -> Weights:
        return replace(self, receiver=receiver)


@dataclass(frozen=True)
class Given:
    """Summary of a published version. The summaries of a group's ranks add up."""

    version: int
    checksum: str | None
    """Sum over all elements, as 16 hexadecimal digits; None if no receiver took everything."""
    num_bytes: int
    """Size of all elements, as they travel to a receiver that takes all of them."""

    def __add__(self, other: Given) -> Given:
        num_bytes = self.num_bytes + other.num_bytes
        if self.checksum is None or other.checksum is None:
            return Given(self.version, None, num_bytes)
        checksum = f"{(int(self.checksum, 16) + int(other.checksum, 16)) % CHECKSUM_MODULUS:016x}"
        return Given(self.version, checksum, num_bytes)


# Checksum
#
#     sum(tensor)  =  sum over elements of  bits(element) * row_weight(row) * column_weight(column)
#
# modulo 2^64. The column is the index along the last dimension; the row is the flat index over all
# other dimensions. Both count in the whole tensor, and all weights are odd pseudo-random numbers.
# Any way of cutting a tensor gives the same sum. A slice that is missing, swapped, shifted or from
# another version changes the sum, except with a chance of about 2^-64. Bits are taken in the
# tensor's dtype, without rounding.


_BLOCK_ELEMENTS = 1 << 16


def box_sum(tensor: torch.Tensor, box: Box, shape: tuple[int, ...]) -> int:
    """Return the checksum of one box of a tensor of this shape, in [0, 2^64); 0 for an empty box.
    `tensor` has the elements, in the box's shape, of any dtype, strides and device. Sums of
    disjoint boxes add up modulo 2^64.

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
    # From three dimensions on, row weights are copies instead of views, and too large to cache.
    rows, columns = (_weights_of if len(shape) < 3 else _weights_of.__wrapped__)(box, shape)
    if bits.device.type == "cpu":
        with np.errstate(over="ignore"):
            return (
                int((np.einsum("rc,c->r", bits.numpy(), columns) * rows).sum(dtype=np.int64))
                % CHECKSUM_MODULUS
            )
    # torch warns about arrays that are read-only, so copy them.
    on_device = torch.from_numpy(columns.copy()).to(bits.device)
    step = max(1, _BLOCK_ELEMENTS * 16 // bits.shape[1])
    # The products take 8 bytes per element, so make them in blocks.
    sums = torch.cat(
        [(bits[first : first + step] * on_device).sum(1) for first in range(0, len(bits), step)]
    )
    return int((sums * torch.from_numpy(rows.copy()).to(bits.device)).sum().item()) % CHECKSUM_MODULUS


@functools.lru_cache(maxsize=1 << 16)
def tensor_factor(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Return a tensor's odd factor in a model's checksum, so that renaming changes the checksum."""
    # Unlike `hash`, a CRC is equal in all processes.
    header = f"{name}|{dtype}|{tuple(shape)}".encode()
    return int(_mixed(np.array([zlib.crc32(header) << 32 | zlib.crc32(header[::-1])], np.uint64))[0]) | 1


@functools.lru_cache(maxsize=256)
def _weights(kind: int, count: int) -> np.ndarray:
    """Odd pseudo-random weights of the indices below `count`, for rows (0) or columns (1)."""
    with np.errstate(over="ignore"):
        mixed = _mixed(np.arange(count, dtype=np.uint64) * np.uint64(2) + np.uint64(kind))
    odd = (mixed | np.uint64(1)).view(np.int64)
    # The cache returns this array itself, so callers must not change it.
    odd.flags.writeable = False
    return odd


@functools.lru_cache(maxsize=1 << 15)
def _weights_of(box: Box, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    start, stop = (box.starts[-1], box.stops[-1]) if shape else (0, 1)
    return _row_weights(box, shape), _weights(1, shape[-1] if shape else 1)[start:stop]


def _row_weights(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    leading = shape[:-1]
    if not leading:
        return _weights(0, 1)
    total = int(np.prod(leading))
    if len(leading) == 1:
        return _weights(0, total)[box.starts[0] : box.stops[0]]
    ranges = [
        np.arange(start, stop) for start, stop in zip(box.starts[:-1], box.stops[:-1], strict=True)
    ]
    return _weights(0, total)[
        np.ravel_multi_index(np.meshgrid(*ranges, indexing="ij"), leading).reshape(-1)
    ]


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Finalizer of SplitMix64 (Steele, Lea and Flood, 2014); each bit depends on all bits."""
    with np.errstate(over="ignore"):
        numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
        numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return numbers ^ (numbers >> np.uint64(31))
