"""Strided views as boxes of a contiguous tensor, by arithmetic on offsets and strides.

A loader may narrow, transpose, split or flatten a tensor before it copies elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .layout import Box

MAX_BOXES = 1 << 16
"""Views that consist of more boxes (every second element of a long row) are rejected."""


@dataclass(frozen=True, slots=True)
class View:
    """The elements `offset + sum(i * strides)` of a memory, for each index `i` below `shape`."""

    offset: int
    """In elements."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements, for each dimension of the view."""


class _Axis(NamedTuple):
    length: int
    step: int
    """In indices of the tensor's dimension."""
    stride: int
    """In the other memory."""


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def paired_boxes(shape: tuple[int, ...], view: View, other: View) -> list[tuple[Box, View]]:
    """Return the boxes that a view covers, each with its position in another memory.

    Each returned view has the shape of its box, with one stride per dimension of the tensor.

    >>> rows = View(offset=8, shape=(2, 4), strides=(4, 1))  # rows 2 and 3 of a tensor (4, 4)
    >>> paired_boxes((4, 4), rows, View(100, (2, 4), (16, 1)))
    [(Box([2:4, 0:4]), View(offset=100, shape=(2, 4), strides=(16, 1)))]

    Args:
        shape: shape of the tensor, which is contiguous.
        view: view of the tensor.
        other: view of the other memory, with the same shape.

    Raises:
        ValueError: the view repeats an element by a stride of 0, its elements form no boxes, or
            more than `MAX_BOXES`.
    """
    if math.prod(view.shape) == 0:
        return []
    starts = _index(shape, view.offset)
    spans: list[_Axis] = []
    outer: list[tuple[int, _Axis]] = []
    for dim, axes in enumerate(_axes(shape, view, other)):
        last = starts[dim] + sum((axis.length - 1) * axis.step for axis in axes)
        if last >= shape[dim]:
            raise ValueError(f"the view wraps around the end of dimension {dim}")
        merged = _merged(axes)
        spans.append(merged.pop(0) if merged and merged[0].step == 1 else _Axis(1, 1, 0))
        outer += [(dim, axis) for axis in merged]
    if (count := math.prod(axis.length for _, axis in outer)) > MAX_BOXES:
        raise ValueError(f"the view falls into {count} boxes, which is more than {MAX_BOXES}")
    return list(_boxes(starts, spans, outer, other.offset))


def _boxes(
    starts: tuple[int, ...], spans: list[_Axis], outer: list[tuple[int, _Axis]], offset: int
) -> Iterator[tuple[Box, View]]:
    """Yield one box for each index along the axes that no box can span."""
    lengths = tuple(axis.length for axis in spans)
    strides = tuple(axis.stride for axis in spans)
    for index in itertools.product(*(range(axis.length) for _, axis in outer)):
        moved, there = list(starts), offset
        for position, (dim, axis) in zip(index, outer, strict=True):
            moved[dim] += position * axis.step
            there += position * axis.stride
        stops = tuple(start + length for start, length in zip(moved, lengths, strict=True))
        yield Box(tuple(moved), stops), View(there, lengths, strides)


def _index(shape: tuple[int, ...], offset: int) -> tuple[int, ...]:
    if not 0 <= offset < math.prod(shape):
        raise ValueError(f"the view starts at element {offset} of {math.prod(shape)}")
    index = []
    for stride in contiguous_strides(shape):
        index.append(offset // stride)
        offset %= stride
    return tuple(index)


def _axes(shape: tuple[int, ...], view: View, other: View) -> list[list[_Axis]]:
    """For each dimension of the tensor, return the dimensions of the view that run along it."""
    tensor_strides = contiguous_strides(shape)
    dims = [dim for dim, extent in enumerate(shape) if extent > 1]
    found: list[list[_Axis]] = [[] for _ in shape]
    for count, stride, there in zip(view.shape, view.strides, other.strides, strict=True):
        if count > 1 and stride == 0:
            raise ValueError("the view shows one element several times")
        while count > 1:
            dim = next((dim for dim in dims if tensor_strides[dim] <= stride), None)
            if dim is None or stride % tensor_strides[dim]:
                raise ValueError(f"a stride of {stride} runs along no dimension of the shape {shape}")
            step = stride // tensor_strides[dim]
            length = -(-shape[dim] // step)
            if count <= length:
                found[dim].append(_Axis(count, step, there))
                break
            # One dimension of the view spans several dimensions of the tensor.
            if shape[dim] % step or count % length:
                raise ValueError(
                    f"a dimension of {count} elements ends inside of dimension {dim} of the shape {shape}"
                )
            found[dim].append(_Axis(length, step, there))
            count, stride, there = count // length, stride * length, there * length
    return found


def _merged(axes: list[_Axis]) -> list[_Axis]:
    """Sort axes by step, and join axes that continue each other in both memories."""
    merged: list[_Axis] = []
    for axis in sorted(axes, key=lambda axis: axis.step):
        if merged:
            inner = merged[-1]
            if axis.step == inner.length * inner.step and axis.stride == inner.length * inner.stride:
                merged[-1] = _Axis(inner.length * axis.length, inner.step, inner.stride)
                continue
        merged.append(axis)
    return merged
