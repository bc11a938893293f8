"""vLLM's model as a destination: find where each box of a checkpoint tensor belongs, and write it
there.

`record_layout` runs the model's own `load_weights` once on meta tensors, while a dispatch mode
records each copy instead of executing it. So Weft needs no table of fused projections, grouped
heads, padding or experts.

    checkpoint                       fake on `meta`          the model's loader            parameter on `meta`
    layers.0.k_proj.weight   ->      torch.empty(64, 128)    .narrow(0, 32, 32)   copy_    layers.0.qkv_proj.weight[64:96]

The offset and strides of a view of a fake tensor determine its box. A clone of a view counts as the
view. If a loader zeroes a tensor before it copies it, the copy counts as a fill. Other results (a
cast, a sum) have no box and raise an error, as does a second copy to the same elements.

`WeightWriter` writes received slices, layer by layer. A layer gets memory with its first slice, and
vLLM prepares the layer after its last slice, so only incomplete layers need extra memory: one
layer, if slices arrive in the order of the recorded layout. On CPU, the writer keeps the memory of
one layer of each shape for the next version.

`stage` writes a version to other memory while the model continues to compute, and packs linear
layers on CPU there. `apply_staged` swaps in these layers, and prepares all others.

    apply:  begin_update ──> write slices, prepare each layer with its last slice ──> finish_update
    stage:  write slices beside the model
    apply_staged:  begin_update ──> exchange or prepare each layer ──> finish_update
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors, get_tensor_load_numel
from vllm.platforms import current_platform

from ..dataflow.errors import UserError, WeftError, WeightSyncError, nearest
from .buckets import copy_elements
from .weights import Box, Layout, Piece, TensorLayout, View, Where, paired_boxes

# Recording


@dataclass(frozen=True, slots=True)
class _Fill:
    """Elements that a loader sets to one value, such as the padding of a vocabulary."""

    memory: str
    view: View
    value: float


@dataclass(frozen=True)
class _RecordedLayout:
    """The tensors that a rank takes from a checkpoint, and its loaders' fills."""

    layout: Layout
    """Tensors in the order of the model's layers. A piece's `memory` names a parameter or buffer.
    The sender casts elements to the dtypes of the parameters."""
    fills: tuple[_Fill, ...]
    unused: tuple[str, ...]
    """Checkpoint tensors that this rank does not use, such as experts of other ranks."""


def record_layout(
    model: torch.nn.Module, checkpoint: Mapping[str, tuple[tuple[int, ...], str]], where: Where = Where()
) -> _RecordedLayout:
    """Run a vLLM model's own loader once on fake tensors, and record its copies. The model, loaded
    or not, stays unchanged. `checkpoint` maps the name of each tensor to its shape and dtype.
    Raises UserError if the loader rejects a name or a shape, computes with a tensor instead of
    copying boxes of it, loads an element twice, or leaves an element without a value. The message
    names the tensor and the parameter."""
    fakes = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, (shape, dtype) in checkpoint.items()
    }
    initialize_layerwise_reload(model)
    try:
        recorder = _Recorder(fakes, _memories(model))
        with recorder:
            _load(model, fakes)
        return recorder.recording(where)
    finally:
        restore(model)


def restore(model: torch.nn.Module) -> None:
    """Undo `initialize_layerwise_reload`: restore the tensors that vLLM's kernels use."""
    for layer in model.modules():
        restore_layer(layer)
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload


def restore_layer(layer: torch.nn.Module) -> None:
    """Restore the tensors that vLLM's kernels use, if this layer waits for weights."""
    info = get_layerwise_info(layer)
    if info.can_load():
        _unwrap_loaders(layer)
        _place_kernel_tensors(layer, info)
        info.reset()


@dataclass
class _Memory:
    name: str
    tensor: torch.Tensor
    kernel: torch.Tensor
    """The tensor that the model uses, or the one to load if it uses others, such as quantised ones.
    Tied parameters share one object."""
    is_parameter: bool
    reason: str
    """Why a loader may not copy into it; empty if it may."""
    boxes: list[tuple[Box, str]] = field(default_factory=list)
    """Boxes in the parameter's own coordinates, each with the name of the checkpoint tensor."""
    filled: list[Box] = field(default_factory=list)


def _memories(model: torch.nn.Module) -> dict[int, _Memory]:
    """Return the memories that loaders may write, by storage. Restores the original loaders."""
    found: dict[int, _Memory] = {}
    for prefix, layer in model.named_modules():
        kernel = _kernel_tensors(layer)
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
            used, is_parameter = kernel.get(name, tensor), name in layer._parameters
            found.setdefault(_storage(tensor), _Memory(full_name, tensor, used, is_parameter, reason))
    return found


def _kernel_tensors(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    parameters, buffers = get_layerwise_info(layer).kernel_tensors or ({}, {})
    return parameters | buffers


def _unwrap_loaders(layer: torch.nn.Module) -> None:
    """Restore the loaders that vLLM has wrapped."""
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
        self._fills: list[_Fill] = []
        self._zeroed = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        inputs = [*_tensors(args), *_tensors(kwargs.values())]
        sources = [tensor for tensor in inputs if _storage(tensor) in self._fakes]
        target = next(_tensors(kwargs.values()), inputs[0]) if inputs and _writes(func) else None
        memory = self._memories.get(_storage(target)) if target is not None else None
        if memory is not None and target is not None:
            if func is aten.copy_.default:
                self._copy(memory, target, args[1])
            elif func in (aten.zero_.default, aten.fill_.Scalar):
                self._fill(memory, target, 0 if func is aten.zero_.default else args[1])
            else:
                raise UserError(
                    f"parameter {memory.name!r}: its loader writes with {func}; only copies and fills can be recorded"
                )
            return target
        if not sources:
            return func(*args, **kwargs)
        if func is aten.clone.default:
            return aten.alias.default(args[0])
        if func is aten.zero_.default and target is not None and self._is_whole(target):
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
                Piece(box, memory.name, view)
                for box, view in paired_boxes(tuple(fake.shape), here, there)
            ]
            boxes = [box for box, _ in paired_boxes(tuple(memory.tensor.shape), there, here)]
        except ValueError as error:
            raise UserError(problem + str(error)) from error
        known = self._pieces.setdefault(name, [])
        if all(piece in known for piece in pieces):
            return  # some loaders repeat a copy
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
        self._fills.append(_Fill(memory.name, view, value))

    def recording(self, where: Where) -> _RecordedLayout:
        """Check that each parameter element was loaded exactly once, and return the recording."""
        touched = [memory for memory in self._memories.values() if memory.boxes or memory.filled]
        loaded: dict[int, str] = {}
        for memory in touched:
            _check(memory)
            if (first := loaded.setdefault(id(memory.kernel), memory.name)) != memory.name:
                raise UserError(
                    f"{first!r} and {memory.name!r} are one parameter, and the checkpoint has both; leave out one of them"
                )
        parameters = [memory for memory in self._memories.values() if memory.is_parameter]
        if missing := [each.name for each in parameters if id(each.kernel) not in loaded]:
            raise UserError(f"the checkpoint lacks weights for vLLM's parameters: {', '.join(missing)}")
        order = {memory.name: number for number, memory in enumerate(self._memories.values())}
        shapes = {name: tuple(fake.shape) for name, fake in self._fakes.values()}
        held = [(name, pieces) for name, pieces in self._pieces.items() if pieces]
        # In this order, layers complete one after the other, so only one needs extra memory.
        held.sort(key=lambda entry: min(order[piece.memory] for piece in entry[1]))
        tensors = [TensorLayout(n, shapes[n], self._dtypes[n], (tuple(own),)) for n, own in held]
        unused = tuple(name for name in shapes if not self._pieces.get(name))
        return _RecordedLayout(Layout.of(tensors, [where]), tuple(self._fills), unused)


_READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
)
"""Operations that need values, which a fake tensor does not have."""


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@functools.cache
def _writes(func: Any) -> bool:
    """Return whether an operation writes into its first argument, or into `out`."""
    return any(
        argument.alias_info and argument.alias_info.is_write for argument in func._schema.arguments
    )


def _check(memory: _Memory) -> None:
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
    # vLLM may declare elements as never loaded, such as padding to a kernel's block size.
    if found < min(get_tensor_load_numel(memory.tensor), whole.numel):
        left = _minus([whole], [*filled, *(box for box, _ in boxes)])
        raise UserError(
            f"parameter {memory.name!r}: no tensor of the checkpoint lands in {left[0]} of its shape {whole.shape}"
        )


def _storage(tensor: torch.Tensor) -> int:
    # Meta tensors have this identifier too, but their storages have no address.
    return tensor.untyped_storage()._cdata


def _view(tensor: torch.Tensor, base: torch.Tensor) -> View:
    return View(
        int(tensor.storage_offset() - base.storage_offset()), tuple(tensor.shape), tensor.stride()
    )


# Layer: a module of vLLM whose own parameters are written together, and the memory for them.
#
#     module                   memory to write               preparation
#     embeddings               the memory that kernels read  packing on CPU, for a head that uses them
#     linear layers, CUDA      the memory that kernels read  none
#     linear layers, CPU       lent, reused between layers   vLLM packs the weight
#     all others               new                           vLLM copies it to the kernels' memory
#
# Staging prepares a copy of the module with other parameters, and later moves the results to the
# module.


class _SpareMemory:
    """Host memory in the loading format, reused for later layers and versions."""

    def __init__(self) -> None:
        self._free: dict[tuple[Any, ...], list[torch.Tensor]] = {}

    def lend(self, wanted: torch.Tensor) -> torch.Tensor:
        if free := self._free.get(_form(wanted)):
            return free.pop()
        return torch.empty_strided(wanted.shape, wanted.stride(), dtype=wanted.dtype)

    def give_back(self, memory: torch.Tensor) -> None:
        self._free.setdefault(_form(memory), []).append(memory)


class _Layer:
    """The module `name` of the model, whose own parameters are written together. `written` contains
    the full names of the parameters and buffers to write."""

    def __init__(
        self, name: str, module: torch.nn.Module, written: Iterable[str], spare: _SpareMemory
    ) -> None:
        self.name = name
        self.module: Any = module
        self.waiting = 0
        """Number of targets that lack slices."""
        self.fills: list[_Fill] = []
        self.started = False
        self.in_place = False
        """Whether slices go directly to the memory that kernels read."""
        self._written = {own_name(memory) for memory in written}
        self._spare = spare
        self._lent: list[torch.Tensor] = []
        self._memories: dict[str, tuple[torch.Tensor, int]] = {}
        """The module's parameters since `start`, each with its offset in the storage."""
        self._beside = False
        """Whether vLLM packs a copy of the module instead of the module itself."""
        self._staged: dict[str, torch.Tensor] = {}
        self._new: dict[str, Any] = {}
        """Attributes, besides parameters, that packing has set on the copy of the module."""

    def elements(self, memory: str, view: View) -> torch.Tensor:
        if (found := self._memories.get(memory)) is None:
            tensor = getattr(self.module, own_name(memory)).data
            found = self._memories[memory] = tensor, tensor.storage_offset()
        tensor, first = found
        return tensor.as_strided(view.shape, view.strides, first + view.offset)

    def computes_with(self, memory: str) -> bool:
        """Return whether vLLM's kernels read this parameter directly, such as a bias."""
        if self.in_place:
            return True
        name = own_name(memory)
        return getattr(self.module, name) is _kernel_tensors(self.module).get(name)

    def start(self) -> bool:
        """Give the module writable memory. Return whether this wrote padding to memory in use."""
        self.started = True
        self._memories = {}
        if self._is_read_as_written():
            restore_layer(self.module)
            self.in_place = True
        else:
            self._lend()
            materialize_layer(self.module, get_layerwise_info(self.module))
        for fill in self.fills:
            self.elements(fill.memory, fill.view).fill_(fill.value)
        return any(self.computes_with(fill.memory) for fill in self.fills)

    def complete(self) -> None:
        """After the last slice, let vLLM prepare the module and copy it to its kernels' memory."""
        self._memories = {}  # they would keep memory alive that vLLM frees
        if self.in_place:
            prepare(self.module)
            return
        with experts_packed_anew([self.module]):
            _layerwise_process(self.module, get_layerwise_info(self.module))
        self._give_back()

    def _give_back(self, but: Container[int] = ()) -> None:
        """Return lent memory to the pool, except at the addresses `but`."""
        for memory in self._lent:
            if memory.data_ptr() not in but:
                self._spare.give_back(memory)
        self._lent = [memory for memory in self._lent if memory.data_ptr() in but]

    def _is_read_as_written(self) -> bool:
        method = type(getattr(self.module, "quant_method", None))
        if method is not UnquantizedEmbeddingMethod and not (
            method is UnquantizedLinearMethod and current_platform.is_cuda()
        ):
            return False
        kernel, wanted = _kernel_tensors(self.module), get_layer_tensors(self.module)
        return all(
            name in kernel and _form(kernel[name]) == _form(tensor) for name, tensor in wanted.items()
        )

    def _lend(self) -> None:
        """On CPU, lend memory if no reference to it remains after the layer is prepared."""
        if not is_cpu_packed(self.module):
            return
        for name, wanted in get_layer_tensors(self.module).items():
            if wanted.is_meta and name in self._written:
                self._lent.append(self._spare.lend(wanted))
                setattr(self.module, name, with_class_of(wanted, self._lent[-1]))

    # Staging, while the module continues to compute

    def stage(self, kept: dict[str, torch.Tensor]) -> None:
        """Allocate staging memory, and fill its padding. `kept` maps parameter names to memory that
        all versions reuse."""
        self._beside = is_cpu_packed(self.module)
        for name in sorted(self._written):
            wanted = self._loading_format(name)
            is_linear = self._beside and type(self.module.quant_method) is UnquantizedLinearMethod
            if is_linear and wanted.is_meta:
                continue
            memory = f"{self.name}.{name}" if self.name else name
            if memory not in kept:
                kept[memory] = self._new_beside(wanted)
            self._staged[name] = kept[memory]
        for fill in self.fills:
            self.staged_elements(fill.memory, fill.view).fill_(fill.value)

    def staged_elements(self, memory: str, view: View) -> torch.Tensor:
        name = own_name(memory)
        if name not in self._staged:
            self._staged[name] = self._spare.lend(self._loading_format(name))
            self._lent.append(self._staged[name])
        return self._staged[name].as_strided(view.shape, view.strides, view.offset)

    def complete_staged(self) -> None:
        """After the last slice, pack staged parameters for CPU kernels, and free staging memory."""
        if not self._beside:
            return
        module, parameters = self.module, dict(self.module._parameters)
        for name, staged in self._staged.items():
            parameters[name] = torch.nn.Parameter(staged, requires_grad=False)
        # vLLM packs in place, so give it a copy that shares everything but parameters.
        beside = object.__new__(type(module))
        beside.__dict__.update(module.__dict__, _parameters=parameters)
        if not _is_looked_up(module):
            module.quant_method.process_weights_after_loading(beside)
        self._staged = {name: parameters[name].data for name in self._staged}
        self._give_back({staged.data_ptr() for staged in self._staged.values()})
        known = module.__dict__
        new = {key: value for key, value in beside.__dict__.items() if known.get(key) is not value}
        self._new = {key: value for key, value in new.items() if key != "_parameters"}

    def take_over(self) -> None:
        """Move the staged parameters into the module, which waits for weights."""
        self.started = True
        if self._beside:
            restore_layer(self.module)
        else:
            self.start()
        for name, staged in self._staged.items():
            getattr(self.module, name).data.copy_(staged)
        if not self._beside:
            self.complete()
            return
        self.module.__dict__.update(self._new)
        if _is_looked_up(self.module):
            prepare(self.module)
        self._give_back()

    def _loading_format(self, name: str) -> torch.Tensor:
        """Return a parameter in the loading format or, if it has none, in the kernels' format."""
        parameters, buffers = get_layerwise_info(self.module).restore_metadata
        found = parameters.get(name, buffers.get(name))
        return getattr(self.module, name) if found is None else found

    def _new_beside(self, wanted: torch.Tensor) -> torch.Tensor:
        # Copies from pinned memory to a GPU are faster.
        pinned = get_layerwise_info(self.module).restore_device.type == "cuda"
        return torch.empty_strided(
            wanted.shape, wanted.stride(), dtype=wanted.dtype, device="cpu", pin_memory=pinned
        )


def own_name(memory: str) -> str:
    return memory.rpartition(".")[2]


def is_cpu_packed(module: torch.nn.Module) -> bool:
    """Return whether vLLM packs the weight for its CPU kernels, and keeps no unpacked copy."""
    method = type(getattr(module, "quant_method", None))
    known = method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    return known and current_platform.is_cpu() and not current_platform.is_zen_cpu()


def prepare(module: Any) -> None:
    """Let vLLM prepare a module. An embedding is only packed when a head first uses it."""
    if not _is_looked_up(module):
        module.quant_method.process_weights_after_loading(module)
    elif hasattr(module, "cpu_linear"):

        def pack_and_multiply(
            x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
        ) -> torch.Tensor:
            module.quant_method.process_weights_after_loading(module)  # replaces this function
            return module.cpu_linear(x, weight, bias)

        module.cpu_linear = pack_and_multiply


@contextlib.contextmanager
def experts_packed_anew(layers: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Inside the context, vLLM repacks these layers' experts for its CPU kernel.

    vLLM 0.32 packs experts only at startup. It would use updated weights unpacked, and produce
    garbage.
    """
    methods = [getattr(layer, "quant_method", None) for layer in layers]
    packed = [
        m for m in methods if current_platform.is_cpu() and isinstance(m, UnquantizedFusedMoEMethod)
    ]
    kernels = [(method, method.moe_kernel) for method in packed]
    for method in packed:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel


def _is_looked_up(module: torch.nn.Module) -> bool:
    """Return whether a module on CPU is an embedding for row lookups, and not a head."""
    return type(module) is VocabParallelEmbedding and is_cpu_packed(module)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def with_class_of(wanted: torch.Tensor, memory: Any) -> torch.Tensor:
    """Return `memory` with `wanted`'s class and loader, like vLLM's `materialize_meta_tensor`."""
    found = memory.detach()
    found.__class__ = wanted.__class__
    found.__dict__ = wanted.__dict__.copy()
    return found


class _ModelState(enum.Enum):
    """State of a vLLM model's weights.

    WHOLE --begin_update--> WRITING --finish_update--> WHOLE
                               |
                               +-----abort----> PARTIAL --begin_update--> WRITING

    An abort before the first write returns to the previous state.
    """

    WHOLE = "all weights of one version"
    WRITING = "an update is under way"
    PARTIAL = "weights of two versions: nothing may be generated until all were received again"


class _Target:
    """A piece of a tensor for which a layer waits. `parts` are the boxes in which the previous
    version arrived, if any. If the same parts arrive again, no box arithmetic is needed."""

    def __init__(self, layer: _Layer, piece: Piece, parts: frozenset[Box]) -> None:
        assert piece.view is not None
        self.layer = layer
        self.box = piece.box
        self.memory = piece.memory
        self._position = piece.view
        self.came: set[Box] = set()
        """Disjoint parts that have arrived."""
        self._parts = parts

    def lacks(self, part: Box) -> bool:
        if part in self._parts:
            return part not in self.came
        self._parts = frozenset()
        return not any(came.intersection(part) for came in self.came)

    def record(self, part: Box) -> bool:
        """Record a part that has arrived. Return whether it was the last one."""
        self.came.add(part)
        if self._parts:
            return self.came_as_before
        return sum(came.numel for came in self.came) == self.box.numel

    @property
    def came_as_before(self) -> bool:
        """Return whether everything has arrived, in the same parts as the previous version."""
        return bool(self._parts) and len(self.came) == len(self._parts)

    def left(self) -> list[Box]:
        return _minus([self.box], self.came)

    def view(self, part: Box) -> View:
        steps = zip(part.starts, self.box.starts, self._position.strides, strict=True)
        shift = sum((start - first) * stride for start, first, stride in steps)
        return View(self._position.offset + shift, part.shape, self._position.strides)


_Step = tuple[int, Box, View, tuple[slice, ...] | None]
"""Number of the target, box of the slice, position in memory, and index into the slice (None:
all)."""


class _Route(NamedTuple):
    dtype: torch.dtype
    shape: torch.Size
    steps: list[_Step]


class WeightWriter:
    """Writes versions into a recorded model. Slices have the tensor names and index ranges of the
    model's Hugging Face files. Calls `written` with each slice's name, box and elements, before
    vLLM repacks them."""

    def __init__(
        self,
        model: torch.nn.Module,
        model_config: Any,
        recording: _RecordedLayout,
        written: Callable[[str, Box, torch.Tensor], None] = lambda name, box, elements: None,
    ) -> None:
        self.state = _ModelState.WHOLE
        self._written = written
        self._model = model
        self._model_config = model_config
        self._tensors = recording.layout.tensors
        self._fills = recording.fills
        self._written_to: defaultdict[str, set[str]] = defaultdict(set)
        """Maps each module to the full names of its parameters to write."""
        memories = [piece.memory for tensor in self._tensors.values() for piece in tensor.pieces[0]]
        for memory in (*memories, *(fill.memory for fill in recording.fills)):
            self._written_to[memory.rpartition(".")[0]].add(memory)
        self._routes: dict[tuple[str, Box], _Route] = {}
        self._modules: dict[str, torch.nn.Module] = {}
        self._parts: dict[tuple[str, int], frozenset[Box]] = {}
        """Maps (tensor, number of the target) to the parts in which the last version arrived."""
        self._layers: dict[str, _Layer] = {}
        self._targets: dict[str, list[_Target]] = {}
        self._before = self.state
        self._touched = False
        """Whether this update has changed memory that the model uses."""
        self._spare = _SpareMemory()
        self._kept: dict[str, torch.Tensor] = {}
        self._staging = False

    @contextlib.contextmanager
    def _updating(self) -> Iterator[None]:
        self.begin_update()
        try:
            yield
            self.finish_update()
        except BaseException:
            self.abort()
            raise

    @torch.no_grad()
    def apply(self, slices: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        """Write a version: each element that this rank holds, exactly once. A slice is a checkpoint
        tensor's name, a box, and the box's elements in the dtype of the recorded layout. Raises
        WeightSyncError if a slice does not match the layout in name, shape or dtype, arrives twice,
        or is missing. `state` then says what the model contains."""
        with self._updating():
            for name, box, source in slices:
                self.write_slice(name, box, source)

    @torch.no_grad()
    def stage(self, slices: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        """Write a version to staging memory. Arguments and errors are those of `apply`."""
        self._expect()
        self._staging = True
        try:
            for layer in self._layers.values():
                layer.stage(self._kept)
                if not layer.waiting:
                    layer.complete_staged()
            for name, box, source in slices:
                self.write_slice(name, box, source)
            self._check_complete()
        finally:
            self._staging = False

    @torch.no_grad()
    def apply_staged(self) -> None:
        staged = self._layers
        with self._updating():
            self._layers = staged
            for layer in staged.values():
                self._touched = True
                layer.take_over()
            self._targets.clear()

    def begin_update(self) -> None:
        if self.state is _ModelState.WRITING:
            raise WeightSyncError("an update of this model is under way; finish or abort it first")
        initialize_layerwise_reload(self._model)
        self._expect()
        self._before, self.state = self.state, _ModelState.WRITING

    def _expect(self) -> None:
        self._layers, self._targets, self._touched = {}, defaultdict(list), False
        for name, tensor in self._tensors.items():
            for number, piece in enumerate(tensor.pieces[0]):
                parts = self._parts.get((name, number), frozenset())
                target = _Target(self._layer(piece.memory), piece, parts)
                target.layer.waiting += 1
                self._targets[name].append(target)
        for fill in self._fills:
            self._layer(fill.memory).fills.append(fill)

    def write_slice(self, name: str, box: Box, source: torch.Tensor) -> None:
        """Copy one slice to all places that hold some of its elements."""
        route = (
            self._routes.get((name, box)) if self._staging or self.state is _ModelState.WRITING else None
        )
        if route is None or source.dtype is not route.dtype or source.shape != route.shape:
            self._check(name, box, source)
            route = self._routes[name, box] = _Route(
                source.dtype, source.shape, self._steps_of(name, box)
            )
        targets = self._targets[name]
        for number, part, _, _ in route.steps:
            # Check all targets first, so that a rejected slice is written nowhere.
            if not targets[number].lacks(part):
                raise WeightSyncError(f"tensor {name!r}: elements of {part} came twice")
        for number, part, view, index in route.steps:
            self._write(name, targets[number], part, view, source if index is None else source[index])

    def _steps_of(self, name: str, box: Box) -> list[_Step]:
        nowhere = [box] if box.numel else []
        steps: list[_Step] = []
        for number, target in enumerate(self._targets[name]):
            if common := target.box.intersection(box):
                nowhere = _minus(nowhere, [common])
                index = None if common == box else common.within(box)
                steps.append((number, common, target.view(common), index))
        if nowhere:
            raise WeightSyncError(
                f"tensor {name!r}: {nowhere[0]} was sent to a rank that holds nothing of it"
            )
        return steps

    @torch.no_grad()
    def finish_update(self) -> None:
        """Check that no slice is missing, and complete the update."""
        self._check_complete()
        for layer in self._layers.values():
            if not layer.started:
                layer.start()
                layer.complete()
        # vLLM changes the remaining layers below, so an error would leave a mix of versions.
        self._touched = True
        finalize_layerwise_reload(self._model, self._model_config)
        process_tied(self._model)
        self.state = _ModelState.WHOLE

    def abort(self) -> None:
        """Abort the update. Incomplete layers keep their previous weights."""
        restore(self._model)
        self.state = _ModelState.PARTIAL if self._touched else self._before

    def _layer(self, memory: str) -> _Layer:
        name = memory.rpartition(".")[0]
        if name not in self._layers:
            if name not in self._modules:
                self._modules[name] = self._model.get_submodule(name)
            self._layers[name] = _Layer(name, self._modules[name], self._written_to[name], self._spare)
        return self._layers[name]

    def _check_complete(self) -> None:
        if all(target.came_as_before for targets in self._targets.values() for target in targets):
            return
        missing = [
            f"{name!r} {left}"
            for name, targets in self._targets.items()
            for target in targets
            for left in target.left()
        ]
        if missing:
            more = f", and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise WeightSyncError(f"weights are missing: {', '.join(missing[:5])}{more}")
        came: dict[tuple[str, int], frozenset[Box]] = {}
        for name, targets in self._targets.items():
            came |= {(name, number): frozenset(target.came) for number, target in enumerate(targets)}
        if came and came != self._parts:
            if self._parts:
                self._routes.clear()  # the sender now cuts its slices differently
            self._parts = came

    def _check(self, name: str, box: Box, source: torch.Tensor) -> None:
        if self.state is not _ModelState.WRITING and not self._staging:
            raise WeightSyncError(f"tensor {name!r} came outside an update")
        held = self._tensors.get(name)
        if held is None:
            raise WeightSyncError(
                f"tensor {name!r}: this rank holds nothing of it{nearest(name, self._tensors)}"
            )
        if source.dtype != getattr(torch, held.dtype):
            dtype = str(source.dtype).removeprefix("torch.")
            raise WeightSyncError(
                f"tensor {name!r} came as {dtype}, and vLLM holds it as {held.dtype}: the sender casts"
            )
        if tuple(source.shape) != box.shape or len(box.starts) != len(held.shape):
            raise WeightSyncError(
                f"tensor {name!r} of shape {held.shape}: {tuple(source.shape)} elements came for {box}"
            )

    def _write(self, name: str, target: _Target, part: Box, view: View, source: torch.Tensor) -> None:
        layer, memory = target.layer, target.memory
        if self._staging:
            elements = layer.staged_elements(memory, view)
        else:
            if not layer.started:
                self._touched |= layer.start()
            self._touched = self._touched or layer.computes_with(memory)
            elements = layer.elements(memory, view)
        copy_elements(elements, source)
        self._written(name, part, elements)
        if not target.record(part):
            return
        layer.waiting -= 1
        if not layer.waiting and self._staging:
            layer.complete_staged()
        elif not layer.waiting:
            self._touched = True
            layer.complete()


def process_tied(model: torch.nn.Module) -> None:
    """Prepare modules that share their weight with a loaded layer, such as a tied output head.

    vLLM's layerwise reload only prepares loaded layers. On CPU, the head multiplies by a packed
    copy of its weight, which would otherwise stay at the old version.
    """
    seen: set[int] = set()
    for layer in model.modules():
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        method = getattr(layer, "quant_method", None)
        if own & seen and hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(layer)  # pyright: ignore[reportOptionalMemberAccess]
        seen |= own


def _minus(boxes: list[Box], others: Iterable[Box]) -> list[Box]:
    for other in others:
        boxes = [part for box in boxes for part in box.minus(other)]
    return boxes
