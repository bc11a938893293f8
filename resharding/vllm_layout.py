"""vLLM layout: records where each box of a checkpoint tensor lands in this rank's parameters.

The model's own `load_weights` runs once, on tensors without memory, while a dispatch mode records
each copy instead of executing it. So Weft maintains no table of fused projections, grouped heads,
padding or experts.

    checkpoint                       fake on `meta`          the model's loader            parameter on `meta`
    layers.0.k_proj.weight   ->      torch.empty(64, 128)    .narrow(0, 32, 32)   copy_    layers.0.qkv_proj.weight[64:96]

A view of a fake keeps its storage, offset and strides, which determine its box. A clone of a view
is recorded as the view, and a tensor that a loader zeroes before it copies it is a fill. Other
results (a cast, a sum) have no box and raise an error, as does a copy on top of another.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors, get_tensor_load_numel

from ..dataflow.errors import UserError, WeftError
from .layout import Box, Held, Piece, Place, RankLayout, Where
from .strided import View, paired_boxes


@dataclass(frozen=True, slots=True)
class Fill:
    """Elements that a loader sets to one value, such as the padding of a vocabulary."""

    memory: str
    view: View
    value: float


@dataclass(frozen=True)
class Recording:
    """The tensors that a rank takes from a checkpoint, and the fills of its loaders. Plain data."""

    layout: RankLayout
    """By name in the checkpoint, in the order of the model's layers. A place's memory is the name
    of a parameter or buffer. The sender casts to the dtypes of the parameters."""
    fills: tuple[Fill, ...]
    """Fills, which precede the copies of the layout."""
    unused: tuple[str, ...]
    """Checkpoint tensors that this rank does not use, such as experts of other ranks."""


def record_layout(
    model: torch.nn.Module, checkpoint: Mapping[str, tuple[tuple[int, ...], str]], where: Where = Where()
) -> Recording:
    """Run the model's own loader once on fakes, and record its copies. The model is unchanged.

    Args:
        model: a vLLM model, loaded or not, from vLLM's own `initialize_model`.
        checkpoint: tensor name -> shape and name of the torch dtype.
        where: location of this rank.

    Raises:
        UserError: the loader rejects a name or a shape, computes with a tensor instead of copying
            boxes of it, loads an element twice, or leaves one without a value. The message names
            the tensor and the parameter.
    """
    wanted = dict(model.named_parameters())
    fakes = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, (shape, dtype) in checkpoint.items()
    }
    initialize_layerwise_reload(model)
    try:
        recorder = _Recorder(fakes, _memories(model, wanted))
        with recorder:
            _load(model, fakes)
        return recorder.recording(where, wanted)
    finally:
        restore(model)


def restore(model: torch.nn.Module) -> None:
    """Undo `initialize_layerwise_reload`: restore the tensors that vLLM's kernels use."""
    for layer in model.modules():
        restore_layer(layer)
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload


def restore_layer(layer: torch.nn.Module) -> None:
    """Restore the tensors that vLLM's kernels use, if this layer waits for its weights."""
    info = get_layerwise_info(layer)
    if info.can_load():
        _unwrap_loaders(layer)
        _place_kernel_tensors(layer, info)
        info.reset()


@dataclass
class _Memory:
    """A parameter or buffer, and the copies and fills that land in it."""

    name: str
    tensor: torch.Tensor
    kernel: torch.Tensor | None
    """Tensor that the model computes with. Tied parameters share one object."""
    reason: str
    """Why copies into it are not possible; empty if they are."""
    boxes: list[tuple[Box, str]] = field(default_factory=list)
    """Boxes in the parameter's own coordinates, each with the name of its tensor."""
    filled: list[Box] = field(default_factory=list)


def _memories(model: torch.nn.Module, wanted: Mapping[str, torch.Tensor]) -> dict[int, _Memory]:
    """Return the memories that loaders may write, by storage. Restores the original loaders."""
    found: dict[int, _Memory] = {}
    for prefix, layer in model.named_modules():
        info = get_layerwise_info(layer)
        parameters, buffers = info.kernel_tensors or ({}, {})
        kernel = parameters | buffers
        _unwrap_loaders(layer)
        for name, tensor in get_layer_tensors(layer).items():
            reason = ""
            if is_deferred_attention_layer(layer):
                reason = "vLLM prepares the scales of attention by itself"
            elif name in layer._non_persistent_buffers_set:
                reason = "it is a buffer that no checkpoint has"
            elif not tensor.is_contiguous():
                reason = f"it lies with the strides {tensor.stride()} in memory"
            full_name = f"{prefix}.{name}" if prefix else name
            found.setdefault(_storage(tensor), _Memory(full_name, tensor, kernel.get(name), reason))
    return found


def _unwrap_loaders(layer: torch.nn.Module) -> None:
    """Restore the original loaders, which vLLM wraps to collect a layer's weights."""
    for tensor in get_layer_tensors(layer).values():
        if (loader := _get_original_loader(tensor)) is not getattr(tensor, "weight_loader", loader):
            tensor.weight_loader = loader  # pyright: ignore[reportAttributeAccessIssue]


def _load(model: torch.nn.Module, fakes: Mapping[str, torch.Tensor]) -> None:
    name = ""

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal name
        for entry in fakes.items():
            name = entry[0]
            yield entry

    try:
        with torch.no_grad():
            model.load_weights(tensors())  # pyright: ignore[reportCallIssue]
    except WeftError:
        raise
    except Exception as error:
        shape = f" of shape {tuple(fakes[name].shape)}" if name else ""
        raise UserError(
            f"vLLM's {type(model).__name__} cannot load tensor {name!r}{shape}: {type(error).__name__}: {error}"
        ) from error


class _Recorder(TorchDispatchMode):
    """Records copies from fakes into memories, and fills of memories, without executing them."""

    def __init__(self, fakes: Mapping[str, torch.Tensor], memories: Mapping[int, _Memory]) -> None:
        super().__init__()
        self._fakes = {_storage(fake): (name, fake) for name, fake in fakes.items()}
        self._memories = memories
        self._pieces: dict[str, list[Piece]] = {}
        self._dtypes: dict[str, str] = {}
        self._fills: list[Fill] = []
        self._zeroed = set[int]()
        """Storages of fakes that the loader has set to zero."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [*_tensors(args), *_tensors(kwargs.values())]
        sources = [tensor for tensor in inputs if _storage(tensor) in self._fakes]
        target = next(_tensors(kwargs.values()), inputs[0]) if inputs and _writes(func) else None
        memory = self._memories.get(_storage(target)) if target is not None else None
        if memory is not None and target is not None:
            if func is torch.ops.aten.copy_.default:
                self._copy(memory, target, args[1])
            elif func is torch.ops.aten.zero_.default:
                self._fill(memory, target, 0)
            elif func is torch.ops.aten.fill_.Scalar:
                self._fill(memory, target, args[1])
            else:
                raise UserError(
                    f"parameter {memory.name!r}: its loader writes with {func}; only copies and fills can be recorded"
                )
            return target
        if not sources:
            return func(*args, **kwargs)
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        if func is torch.ops.aten.zero_.default and target is not None and self._is_whole(target):
            self._zeroed.add(_storage(target))
            return target
        result = func(*args, **kwargs) if target is None and func not in _READS else None
        views = list(_tensors([result]))
        if not views or any(not self._is_view(view) for view in views):
            names = ", ".join(repr(self._fakes[_storage(source)][0]) for source in sources)
            raise UserError(
                f"tensor {names}: vLLM's loader creates a new tensor from it with {func}; only copies of its boxes can be recorded"
            )
        return result

    def _is_whole(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a whole fake that has no recorded copies."""
        name, fake = self._fakes[_storage(tensor)]
        return tensor.numel() == fake.numel() and name not in self._pieces

    def _is_view(self, tensor: torch.Tensor) -> bool:
        _, fake = self._fakes.get(_storage(tensor), ("", None))
        return fake is not None and fake.dtype == tensor.dtype

    def _copy(self, memory: _Memory, target: torch.Tensor, source: torch.Tensor) -> None:
        name, fake = self._fakes.get(_storage(source), ("", None))
        if fake is None:
            raise UserError(
                f"parameter {memory.name!r}: its loader copies from a tensor that is not in the checkpoint"
            )
        if _storage(source) in self._zeroed:
            self._fill(memory, target, 0)
            return
        problem = f"tensor {name!r} cannot be recorded into {memory.name!r}: "
        if memory.reason:
            raise UserError(problem + memory.reason)
        if source.numel() != target.numel():
            raise UserError(
                f"{problem}the loader copies {tuple(source.shape)} into {tuple(target.shape)}, each element several times"
            )
        dtype = str(target.dtype).removeprefix("torch.")
        if self._dtypes.setdefault(name, dtype) != dtype:
            raise UserError(f"{problem}it lands as {self._dtypes[name]} and as {dtype}")
        try:
            there, here = _view(target, memory.tensor), _view(source.expand(target.shape), fake)
            pieces = [
                Piece(box, Place(memory.name, view.offset, view.strides))
                for box, view in paired_boxes(tuple(fake.shape), here, there)
            ]
            boxes = [box for box, _ in paired_boxes(tuple(memory.tensor.shape), there, here)]
        except ValueError as error:
            raise UserError(problem + str(error)) from error
        known = self._pieces.setdefault(name, [])
        if all(piece in known for piece in pieces):
            return  # some loaders copy the same box to the same place several times
        known += pieces
        memory.boxes += [(box, name) for box in boxes]

    def _fill(self, memory: _Memory, target: torch.Tensor, value: float) -> None:
        view = _view(target, memory.tensor)
        boxes = [box for box, _ in paired_boxes(tuple(memory.tensor.shape), view, view)]
        if not boxes:
            return
        for box, name in memory.boxes:
            if any(box.intersection(filled) for filled in boxes):
                raise UserError(
                    f"parameter {memory.name!r}: its loader fills with {value} over tensor {name!r}"
                )
        memory.filled += boxes
        self._fills.append(Fill(memory.name, view, value))

    def recording(self, where: Where, wanted: Mapping[str, torch.Tensor]) -> Recording:
        """Check the recording and return it.

        Raises:
            UserError: an element of a parameter was loaded twice, or not at all.
        """
        touched = [memory for memory in self._memories.values() if memory.boxes or memory.filled]
        loaded: dict[int, str] = {}
        for memory in touched:
            _check(memory)
            if (first := loaded.setdefault(id(memory.kernel), memory.name)) != memory.name:
                raise UserError(
                    f"{first!r} and {memory.name!r} are one parameter, and the checkpoint has both; leave out one of them"
                )
        if missing := [name for name, parameter in wanted.items() if id(parameter) not in loaded]:
            raise UserError(f"the checkpoint lacks weights for vLLM's parameters: {', '.join(missing)}")
        order = {memory.name: number for number, memory in enumerate(self._memories.values())}
        shapes = {name: tuple(fake.shape) for name, fake in self._fakes.values()}
        held = [(name, pieces) for name, pieces in self._pieces.items() if pieces]
        held.sort(key=lambda entry: min(order[piece.place.memory] for piece in entry[1] if piece.place))
        tensors = {name: Held(shapes[name], self._dtypes[name], tuple(pieces)) for name, pieces in held}
        unused = tuple(name for name in shapes if name not in tensors)
        return Recording(RankLayout(where, tensors), tuple(self._fills), unused)


_READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
)
"""Operations that need values, which a fake does not have."""


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@functools.cache
def _writes(func: Any) -> bool:
    """Whether an operation writes into its first argument, or into the one named `out`."""
    return any(
        argument.alias_info and argument.alias_info.is_write for argument in func._schema.arguments
    )


def _check(memory: _Memory) -> None:
    """Check that each element that vLLM loads comes from exactly one place."""
    boxes = sorted(memory.boxes, key=lambda entry: entry[0].starts)
    for position, (box, name) in enumerate(boxes):
        for other, other_name in boxes[position + 1 :]:
            if box.starts and other.starts[0] >= box.stops[0]:
                break
            if both := box.intersection(other):
                raise UserError(
                    f"parameter {memory.name!r}: {both} is loaded twice, from {name!r} and from {other_name!r}"
                )
    whole = Box.full(tuple(memory.tensor.shape))
    filled: list[Box] = []
    for box in memory.filled:
        filled += _minus([box], filled + [box for box, _ in boxes])
    found = sum(box.numel for box, _ in boxes) + sum(box.numel for box in filled)
    # vLLM may declare that some elements are never loaded, such as padding to a kernel's block
    # size.
    if found < min(get_tensor_load_numel(memory.tensor), whole.numel):
        left = _minus([whole], [*filled, *(box for box, _ in boxes)])
        raise UserError(
            f"parameter {memory.name!r}: no tensor of the checkpoint lands in {left[0]} of its shape {whole.shape}"
        )


def _minus(boxes: list[Box], others: list[Box]) -> list[Box]:
    for other in others:
        boxes = [part for box in boxes for part in box.minus(other)]
    return boxes


def _storage(tensor: torch.Tensor) -> int:
    """Return an identifier of the storage that also works on `meta`, without an address."""
    return tensor.untyped_storage()._cdata


def _view(tensor: torch.Tensor, base: torch.Tensor) -> View:
    return View(
        int(tensor.storage_offset() - base.storage_offset()), tuple(tensor.shape), tensor.stride()
    )
