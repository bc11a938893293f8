"""Checkpoint names: where the tensors of a checkpoint lie in the tensors of a model, of which one may hold several.

`transformers` knows how a model's tensors are cut and named when it is saved. That runs once, on tensors without memory and without
copies, so that each result is a view of a tensor of the model and its strides say which box it is. So no table of families is ours.

    in memory                                            in the checkpoint
    layers.0.mlp.experts.gate_up_proj (8, 28, 16)        layers.0.block_sparse_moe.experts.3.w1.weight (14, 16)
        box [3:4, 0:14, 0:16]                      ->        all of it

What `transformers` computes in another way (parts that it joins, rows that it interleaves) keeps its name in memory: receivers that load
the model with `transformers` know it, and vLLM refuses it by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...resharding.box import Box
from ...resharding.strided import contiguous_strides
from ...resharding.weights import Part


@dataclass(frozen=True)
class _Stored:
    """A tensor of the checkpoint, as a box of a tensor of the model."""

    name: str
    shape: tuple[int, ...]
    box: Box
    """Of the tensor of the model; empty along no dimension."""
    dims: tuple[int | None, ...]
    """For each dimension, the dimension of the tensor of the model that it runs along; None: it has one index."""

    views: dict[tuple[Box, tuple[int, ...]], tuple[Box, tuple[int, ...], tuple[int, ...], int] | None] = field(
        default_factory=dict, compare=False, repr=False
    )
    """By box and strides of a part of the tensor of the model: what it has of this one, and how that lies in its memory."""

    def part(self, held: Part) -> Part:
        """What a part of the tensor of the model has of this one: a view, or an empty tensor."""
        strides = held.tensor.stride()
        if (key := (held.box, strides)) not in self.views:
            self.views[key] = self._view(held.box, strides)
        if (view := self.views[key]) is None:
            empty = Box.full((0,) * len(self.shape))
            return Part(self.name, self.shape, empty, held.tensor.new_empty(empty.shape), held.dtype)
        box, extents, strides, offset = view
        tensor = held.tensor.as_strided(extents, strides, held.tensor.storage_offset() + offset)
        return Part(self.name, self.shape, box, tensor, held.dtype)

    def _view(self, held: Box, strides: tuple[int, ...]) -> tuple[Box, tuple[int, ...], tuple[int, ...], int] | None:
        common = self.box.intersection(held)
        if common is None:
            return None
        starts = tuple(0 if dim is None else common.starts[dim] - self.box.starts[dim] for dim in self.dims)
        extents = tuple(1 if dim is None else common.shape[dim] for dim in self.dims)
        stops = tuple(start + extent for start, extent in zip(starts, extents, strict=True))
        shift = sum((a - b) * stride for a, b, stride in zip(common.starts, held.starts, strides, strict=True))
        own = tuple(0 if dim is None else strides[dim] for dim in self.dims)
        return Box(starts, stops), extents, own, shift


class CheckpointNames:
    """How the tensors of a model are named and cut in its checkpoint.

    Args:
        causal_lm: a model of `transformers`, with the conversions that were used to load it.
        tensors: of the model, by their names in it; shapes and dtypes are read alone.
    """

    def __init__(self, causal_lm: Any, tensors: Mapping[str, Tensor]) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        fakes = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in tensors.items()}
        with torch.no_grad(), _Views():
            stored = revert_weight_conversion(causal_lm, fakes)
        of_storage = {fake.untyped_storage()._cdata: name for name, fake in fakes.items()}
        self._stored: dict[str, list[_Stored]] = {name: [] for name in fakes}
        for name, view in stored.items():
            source = of_storage.get(view.untyped_storage()._cdata)
            if source is not None and (located := _located(name, view, tuple(fakes[source].shape))) is not None:
                self._stored[source].append(located)
        for name, fake in fakes.items():
            found = self._stored[name]
            if not found or sum(each.box.numel for each in found) != fake.numel():
                shape = tuple(fake.shape)
                self._stored[name] = [_Stored(name, shape, Box.full(shape), tuple(range(len(shape))))]

    def of(self, name: str) -> list[str]:
        """Names in the checkpoint of what a tensor of the model holds."""
        return [stored.name for stored in self._stored[name]]

    def parts(self, held: Part) -> Iterator[Part]:
        """A part of a tensor of the model, as parts of tensors of the checkpoint: views, one of each of them; of some, empty ones."""
        return (stored.part(held) for stored in self._stored[held.name])


class _Views(TorchDispatchMode):
    """Copies are views of what they copy, unless they are asked for in a shape that no view has."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.clone.default:
            return aten.alias.default(args[0])
        if func in (aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default):
            try:
                return func(*args, **(kwargs or {}))
            except RuntimeError:  # the second half of a `reshape` that copies
                return args[0].new_empty(args[1])
        return func(*args, **(kwargs or {}))


def _located(name: str, view: Tensor, shape: tuple[int, ...]) -> _Stored | None:
    """The box of a contiguous tensor of this shape that a view of it shows, dimension by dimension; None: it shows no such box."""
    if not view.numel():
        return None
    strides, offset = contiguous_strides(shape), int(view.storage_offset())
    long = {stride: dim for dim, stride in enumerate(strides) if shape[dim] > 1}
    dims = tuple(
        long.get(stride) if extent > 1 else None for extent, stride in zip(view.shape, view.stride(), strict=True)
    )
    used = [dim for dim in dims if dim is not None]
    starts: list[int] = []
    stops: list[int] = []
    for dim, stride in enumerate(strides):
        starts.append(offset // stride)
        offset %= stride
        stops.append(starts[-1] + (view.shape[dims.index(dim)] if dim in used else 1))
    box = Box(tuple(starts), tuple(stops))
    if len(set(used)) < len(used) or box.numel != view.numel() or box.intersection(Box.full(shape)) != box:
        return None
    return _Stored(name, tuple(view.shape), box, dims)
