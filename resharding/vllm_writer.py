"""WeightWriter: received slices into vLLM's model, layer by layer, where its loaders would have put them.

A layer gets memory in the loading format when its first slice comes. With its last, vLLM prepares the layer as at start-up and
copies it into the tensors that its kernels use. So memory beyond the model's own is that of the layers whose slices have come
in part: one layer, where the slices come in the order of the recorded layout. On CPU the next layer of the same shape takes over the
memory of the one before, which is mapped and warm.

A version can also be staged: written to memory beside the model, in the loading format of all layers, while the model goes on
computing with what it has. Then only the preparation is left.

    apply:  begin ──> write slices, prepare each layer with its last slice ──> finish
    stage:  write slices beside the model      apply_staged:  begin ──> prepare each layer ──> finish
"""

from __future__ import annotations

import contextlib
import enum
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.platforms import current_platform

from ..dataflow.errors import WeightSyncError, nearest
from .box import Box
from .layout import Held, Place
from .strided import View
from .vllm_layout import Fill, Recording, restore


class ModelState(enum.Enum):
    """What a model of vLLM holds.

    WHOLE --begin--> WRITING --finish--> WHOLE
                        |
                        +-----abort----> PARTIAL, or as before if nothing was written  --begin--> WRITING
    """

    WHOLE = "all weights of one version"
    WRITING = "an update is under way"
    PARTIAL = "weights of two versions: nothing may be generated until all were received again"


class _Layer:
    """A module whose own parameters are written together."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name = name
        self.module = module
        self.waiting = 0
        """Targets that lack slices."""
        self.fills: list[Fill] = []
        self.started = False
        self.lent: list[torch.Tensor] = []
        """Memory that other layers may have after it was prepared."""

    def elements(self, memory: str, view: View) -> torch.Tensor:
        """These elements of one of its parameters, to be written."""
        tensor = getattr(self.module, _own_name(memory)).data
        return tensor.as_strided(view.shape, view.strides, tensor.storage_offset() + view.offset)

    def loading_format(self, name: str) -> torch.Tensor:
        """One of its parameters as the loaders write it: of a bias, which has no loading format of its own, the one that kernels read."""
        parameters, buffers = get_layerwise_info(self.module).restore_metadata
        found = parameters.get(name, buffers.get(name))
        return getattr(self.module, name) if found is None else found

    @property
    def is_copied(self) -> bool:
        """Whether preparing it leaves nothing behind that refers to the memory in the loading format, so that this can be used again."""
        method = getattr(self.module, "quant_method", None)
        known = method is None or isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
        return known and not current_platform.is_zen_cpu()

    def computes_with(self, memory: str) -> bool:
        """Whether vLLM's kernels read this parameter itself: biases, which have no loading format of their own."""
        parameters, buffers = get_layerwise_info(self.module).kernel_tensors or ({}, {})
        name = _own_name(memory)
        return getattr(self.module, name) is parameters.get(name, buffers.get(name))


class _Target:
    """A piece of a tensor that a layer waits for."""

    def __init__(self, layer: _Layer, box: Box, place: Place) -> None:
        self.layer = layer
        self.box = box
        self.place = place
        self.left = [box]

    def lacks(self, part: Box) -> int:
        """How many elements of this part have not come."""
        common = [left.intersection(part) for left in self.left]
        return sum(box.numel for box in common if box)

    def view(self, part: Box) -> View:
        """Where a part of the box goes."""
        steps = zip(part.starts, self.box.starts, self.place.strides, strict=True)
        shift = sum((start - first) * stride for start, first, stride in steps)
        return View(self.place.offset + shift, part.shape, self.place.strides)


class WeightWriter:
    """Writes versions of the weights into a model, from slices in the checkpoint's names and coordinates.

    Args:
        model: the model that was recorded.
        model_config: vLLM's own.
        recording: what `record_layout` found for it.
        written: is told of each slice what the model has of it, before vLLM repacks it: name, box, and elements.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        model_config: Any,
        recording: Recording,
        written: Callable[[str, Box, torch.Tensor], None] = lambda name, box, elements: None,
    ) -> None:
        self.state = ModelState.WHOLE
        self._written = written
        self._model = model
        self._model_config = model_config
        self._tensors: dict[str, Held] = dict(recording.layout.tensors)
        self._fills = recording.fills
        self._written_to = {p.place.memory for held in self._tensors.values() for p in held.pieces if p.place}
        self._layers: dict[str, _Layer] = {}
        self._targets: dict[str, list[_Target]] = {}
        self._before = self.state
        self._touched = False
        self._spare: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        """Memory of layers that were prepared, by shape, strides and dtype."""
        self._staged: dict[str, torch.Tensor] = {}
        """Memory -> what is staged for it. It is kept from version to version."""
        self._staging = False

    def apply(self, slices: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        """Write a version: everything that this rank holds, each element once.

        Args:
            slices: name in the checkpoint, box, and the elements of that box, in the dtype of the recorded layout.

        Raises:
            WeightSyncError: a slice is not of the layout, has another shape or dtype, or came twice; or slices were missing. `state`
                says what the model holds then.
        """
        self.begin()
        try:
            for name, box, source in slices:
                self.write(name, box, source)
            self.finish()
        except BaseException:
            self.abort()
            raise

    def stage(self, slices: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        """Write a version beside the model, which is not touched: the arguments and errors are those of `apply`."""
        self._expect()
        self._staging = True
        try:
            for layer in self._layers.values():
                for fill in layer.fills:
                    self._staged_elements(layer, fill.memory, fill.view).fill_(fill.value)
            for name, box, source in slices:
                self.write(name, box, source)
            self._check_complete()
        finally:
            self._staging = False

    @torch.no_grad()
    def apply_staged(self) -> None:
        """Have the model compute with the version that was staged last."""
        self.begin()
        try:
            for layer in self._layers.values():
                self._start(layer, staged=True)
                self._process(layer)
            self._targets.clear()
            self.finish()
        except BaseException:
            self.abort()
            raise

    def begin(self) -> None:
        """Prepare the model for a new version."""
        if self.state is ModelState.WRITING:
            raise WeightSyncError("an update of this model is under way; finish or abort it first")
        initialize_layerwise_reload(self._model)
        self._expect()
        self._before, self.state = self.state, ModelState.WRITING

    def _expect(self) -> None:
        """Note what is to come, of which nothing has."""
        self._layers, self._targets, self._touched = {}, defaultdict(list), False
        for name, held in self._tensors.items():
            for piece in held.pieces:
                assert piece.place is not None
                target = _Target(self._layer(piece.place.memory), piece.box, piece.place)
                target.layer.waiting += 1
                self._targets[name].append(target)
        for fill in self._fills:
            self._layer(fill.memory).fills.append(fill)

    @torch.no_grad()
    def write(self, name: str, box: Box, source: torch.Tensor) -> None:
        """Copy one slice to wherever the model has elements of it."""
        self._check(name, box, source)
        nowhere = [box] if box.numel else []
        parts: list[tuple[_Target, Box]] = []
        for target in self._targets[name]:
            if common := target.box.intersection(box):
                if target.lacks(common) < common.numel:
                    raise WeightSyncError(f"tensor {name!r}: elements of {common} came twice")
                nowhere = _minus(nowhere, common)
                parts.append((target, common))
        if nowhere:
            raise WeightSyncError(f"tensor {name!r}: {nowhere[0]} was sent to a rank that holds nothing of it")
        for target, part in parts:
            self._write(name, target, part, source[part.within(box)])

    @torch.no_grad()
    def finish(self) -> None:
        """The last slice has come: make sure that all have."""
        self._check_complete()
        for layer in self._layers.values():
            if not layer.started:  # all of it is padding
                self._start(layer)
                self._process(layer)
        self._touched = True
        finalize_layerwise_reload(self._model, self._model_config)
        process_tied(self._model)
        self._spare.clear()
        self.state = ModelState.WHOLE

    def abort(self) -> None:
        """Give up the update. Layers whose slices have not all come keep the weights that they had."""
        restore(self._model)
        self._spare.clear()
        self.state = ModelState.PARTIAL if self._touched else self._before

    def _layer(self, memory: str) -> _Layer:
        name = memory.rpartition(".")[0]
        if name not in self._layers:
            self._layers[name] = _Layer(name, self._model.get_submodule(name))
        return self._layers[name]

    def _check_complete(self) -> None:
        missing = [
            f"{name!r} {left}" for name, targets in self._targets.items() for target in targets for left in target.left
        ]
        if missing:
            more = f", and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise WeightSyncError(f"weights are missing: {', '.join(missing[:5])}{more}")

    def _check(self, name: str, box: Box, source: torch.Tensor) -> None:
        if self.state is not ModelState.WRITING and not self._staging:
            raise WeightSyncError(f"tensor {name!r} came outside of an update")
        held = self._tensors.get(name)
        if held is None:
            raise WeightSyncError(f"tensor {name!r}: this rank holds nothing of it{nearest(name, self._tensors)}")
        dtype = str(source.dtype).removeprefix("torch.")
        if dtype != held.dtype:
            raise WeightSyncError(
                f"tensor {name!r} came as {dtype}, and vLLM holds it as {held.dtype}: the sender casts"
            )
        if tuple(source.shape) != box.shape or len(box.starts) != len(held.shape):
            raise WeightSyncError(
                f"tensor {name!r} of shape {held.shape}: {tuple(source.shape)} elements came for {box}"
            )

    def _write(self, name: str, target: _Target, part: Box, source: torch.Tensor) -> None:
        layer, memory = target.layer, target.place.memory
        if self._staging:
            elements = self._staged_elements(layer, memory, target.view(part))
        else:
            self._start(layer)
            self._touched |= layer.computes_with(memory)
            elements = layer.elements(memory, target.view(part))
        elements.copy_(source)
        self._written(name, part, elements)
        target.left = _minus(target.left, part)
        if not target.left:
            layer.waiting -= 1
            if not layer.waiting and not self._staging:
                self._process(layer)

    def _staged_elements(self, layer: _Layer, memory: str, view: View) -> torch.Tensor:
        if memory not in self._staged:
            wanted = layer.loading_format(_own_name(memory))
            # A GPU reads pinned memory faster.
            pinned = get_layerwise_info(layer.module).restore_device.type == "cuda"
            found = torch.empty_strided(
                wanted.shape, wanted.stride(), dtype=wanted.dtype, device="cpu", pin_memory=pinned
            )
            self._staged[memory] = found
        return self._staged[memory].as_strided(view.shape, view.strides, view.offset)

    def _start(self, layer: _Layer, *, staged: bool = False) -> None:
        """Give a layer its memory in the loading format, with its padding, or with what is staged."""
        if layer.started:
            return
        layer.started = True
        info = get_layerwise_info(layer.module)
        of_cpu = info.restore_device.type == "cpu"
        for name, wanted in get_layer_tensors(layer.module).items():
            memory = f"{layer.name}.{name}" if layer.name else name
            key = (tuple(wanted.shape), wanted.stride(), wanted.dtype)
            if not wanted.is_meta or not of_cpu or not layer.is_copied:
                continue
            if staged and memory in self._staged:
                setattr(layer.module, name, _like(wanted, self._staged[memory]))
            elif not staged and self._spare.get(key):
                layer.lent.append(self._spare[key].pop())
                setattr(layer.module, name, _like(wanted, layer.lent[-1]))
            elif not staged and memory in self._written_to:
                layer.lent.append(torch.empty_strided(wanted.shape, wanted.stride(), dtype=wanted.dtype))
                setattr(layer.module, name, _like(wanted, layer.lent[-1]))
        materialize_layer(layer.module, info)
        if staged:
            for name, tensor in get_layer_tensors(layer.module).items():
                found = self._staged.get(f"{layer.name}.{name}" if layer.name else name)
                if found is not None and found.data_ptr() != tensor.data_ptr():
                    tensor.data.copy_(found)
            return
        for fill in layer.fills:
            self._touched |= layer.computes_with(fill.memory)
            layer.elements(fill.memory, fill.view).fill_(fill.value)

    def _process(self, layer: _Layer) -> None:
        """All slices have come: vLLM prepares the layer, and copies it to where its kernels read it."""
        self._touched = True
        with experts_packed_anew([layer.module]):
            _layerwise_process(layer.module, get_layerwise_info(layer.module))
        for memory in layer.lent:
            self._spare.setdefault((tuple(memory.shape), memory.stride(), memory.dtype), []).append(memory)
        layer.lent = []


@contextlib.contextmanager
def experts_packed_anew(layers: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Have vLLM pack the experts among these layers for its CPU kernel whenever it prepares them.

    vLLM 0.32 packs them once, at start-up, and takes the weights of an update as they are: it then computes with garbage.
    """
    methods = [getattr(layer, "quant_method", None) for layer in layers]
    packed = [m for m in methods if isinstance(m, UnquantizedFusedMoEMethod)] if current_platform.is_cpu() else []
    kernels = [(method, method.moe_kernel) for method in packed]
    for method in packed:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels:
            if method.moe_kernel is None:  # none of its weights came
                method.moe_kernel = kernel


def process_tied(model: torch.nn.Module) -> None:
    """Prepare anew what shares its weight with a layer that was loaded (an output head tied to the embedding).

    vLLM's layerwise reload does this for loaded layers only. On CPU the head multiplies by a packed copy of its
    weight, which would stay that of the old version.
    """
    seen: set[int] = set()
    for layer in model.modules():
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        method = getattr(layer, "quant_method", None)
        if own & seen and hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(layer)  # pyright: ignore[reportOptionalMemberAccess]
        seen |= own


def _like(wanted: torch.Tensor, memory: Any) -> torch.Tensor:
    """A tensor of the class and with the loader of one on `meta`, in this memory: as vLLM's `materialize_meta_tensor` makes it."""
    found = memory.detach()
    found.__class__ = wanted.__class__
    found.__dict__ = wanted.__dict__.copy()
    return found


def _own_name(memory: str) -> str:
    return memory.rpartition(".")[2]


def _minus(boxes: list[Box], other: Box) -> list[Box]:
    return [part for box in boxes for part in box.minus(other)]
