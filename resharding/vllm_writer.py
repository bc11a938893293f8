"""WeightWriter: received slices into vLLM's model, layer by layer, where its loaders would have put them.

A layer gets memory to be written when its first slice comes, and vLLM prepares it with its last (`vllm_layer.py`). So memory beyond the
model's own is that of the layers whose slices have come in part: one layer, where the slices come in the order of the recorded layout.
On CPU, that of one layer of each shape stays for the next version.

A version can also be staged: written to memory beside the model while this goes on computing with what it has. Linear layers on CPU are
packed there, too. Then only the exchange is left, and the preparation of other layers.

    apply:  begin ──> write slices, prepare each layer with its last slice ──> finish
    stage:  write slices beside the model      apply_staged:  begin ──> exchange or prepare each layer ──> finish
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from ..dataflow.errors import WeightSyncError, nearest
from .box import Box
from .host_memory import copy_elements
from .layout import Held, Place
from .strided import View
from .vllm_layer import Layer, SpareMemory
from .vllm_layout import Recording, restore


class ModelState(enum.Enum):
    """What a model of vLLM holds.

    WHOLE --begin--> WRITING --finish--> WHOLE
                        |
                        +-----abort----> PARTIAL, or as before if nothing was written  --begin--> WRITING
    """

    WHOLE = "all weights of one version"
    WRITING = "an update is under way"
    PARTIAL = "weights of two versions: nothing may be generated until all were received again"


class _Target:
    """A piece of a tensor that a layer waits for.

    Args:
        parts: of which it was made up by the version before; empty: there was none. Parts that come again need no arithmetic on boxes.
    """

    def __init__(self, layer: Layer, box: Box, place: Place, parts: frozenset[Box]) -> None:
        self.layer = layer
        self.box = box
        self.place = place
        self.came: set[Box] = set()
        """Disjoint parts."""
        self._parts = parts

    def lacks(self, part: Box) -> bool:
        """Whether no element of this part has come."""
        if part in self._parts:
            return part not in self.came
        self._parts = frozenset()
        return not any(came.intersection(part) for came in self.came)

    def take(self, part: Box) -> bool:
        """A part has come; returns whether it was the last one."""
        self.came.add(part)
        if self._parts:
            return self.came_as_before
        return sum(came.numel for came in self.came) == self.box.numel

    @property
    def came_as_before(self) -> bool:
        """Whether all has come, in the parts of the version before."""
        return bool(self._parts) and len(self.came) == len(self._parts)

    def left(self) -> list[Box]:
        """What has not come."""
        left = [self.box]
        for came in self.came:
            left = _minus(left, came)
        return left

    def view(self, part: Box) -> View:
        """Where a part of the box goes."""
        steps = zip(part.starts, self.box.starts, self.place.strides, strict=True)
        shift = sum((start - first) * stride for start, first, stride in steps)
        return View(self.place.offset + shift, part.shape, self.place.strides)


_Step = tuple[int, Box, View, tuple[slice, ...] | None]
"""Where a part of a slice goes: number of the target, the part, its place, and the index that selects it; None: it is all of the slice."""


class _Route(NamedTuple):
    """Where a slice of a name and a box goes, and what it has to be."""

    dtype: torch.dtype
    shape: torch.Size
    steps: list[_Step]


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
        self._written_to: defaultdict[str, set[str]] = defaultdict(set)
        """Module -> names of its parameters that are written, with the module's."""
        for memory in [p.place.memory for held in self._tensors.values() for p in held.pieces if p.place]:
            self._written_to[memory.rpartition(".")[0]].add(memory)
        for fill in recording.fills:
            self._written_to[fill.memory.rpartition(".")[0]].add(fill.memory)
        self._routes: dict[tuple[str, Box], _Route] = {}
        """Where slices go that have come before."""
        self._modules: dict[str, torch.nn.Module] = {}
        self._parts: dict[tuple[str, int], frozenset[Box]] = {}
        """Tensor and number of a target -> the parts in which it came last."""
        self._layers: dict[str, Layer] = {}
        self._targets: dict[str, list[_Target]] = {}
        self._before = self.state
        self._touched = False
        """Whether this update has changed something that the model computes with."""
        self._spare = SpareMemory()
        self._kept: dict[str, torch.Tensor] = {}
        """Memory for what is staged, which stays from version to version."""
        self._staging = False

    @torch.no_grad()
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
                self._take(name, box, source)
            self.finish()
        except BaseException:
            self.abort()
            raise

    @torch.no_grad()
    def stage(self, slices: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        """Write a version beside the model, which is not touched: the arguments and errors are those of `apply`."""
        self._expect()
        self._staging = True
        try:
            for layer in self._layers.values():
                layer.stage(self._kept)
                if not layer.waiting:  # all of it is padding
                    layer.finish_staged()
            for name, box, source in slices:
                self._take(name, box, source)
            self._check_complete()
        finally:
            self._staging = False

    @torch.no_grad()
    def apply_staged(self) -> None:
        """Have the model compute with the version that was staged last."""
        staged = self._layers
        self.begin()
        self._layers = staged
        try:
            for layer in staged.values():
                self._touched = True
                layer.take_over()
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
            for number, piece in enumerate(held.pieces):
                assert piece.place is not None
                parts = self._parts.get((name, number), frozenset())
                target = _Target(self._layer(piece.place.memory), piece.box, piece.place, parts)
                target.layer.waiting += 1
                self._targets[name].append(target)
        for fill in self._fills:
            self._layer(fill.memory).fills.append(fill)

    @torch.no_grad()
    def write(self, name: str, box: Box, source: torch.Tensor) -> None:
        """Copy one slice to wherever the model has elements of it."""
        self._take(name, box, source)

    def _take(self, name: str, box: Box, source: torch.Tensor) -> None:
        route = self._routes.get((name, box)) if self._staging or self.state is ModelState.WRITING else None
        if route is None or source.dtype is not route.dtype or source.shape != route.shape:
            self._check(name, box, source)
            route = self._routes[name, box] = _Route(source.dtype, source.shape, self._steps_of(name, box))
        targets = self._targets[name]
        for number, part, _, _ in route.steps:
            if not targets[number].lacks(part):
                raise WeightSyncError(f"tensor {name!r}: elements of {part} came twice")
        for number, part, view, index in route.steps:
            self._write(name, targets[number], part, view, source if index is None else source[index])

    def _steps_of(self, name: str, box: Box) -> list[_Step]:
        """Where the parts of a slice go."""
        nowhere = [box] if box.numel else []
        steps: list[_Step] = []
        for number, target in enumerate(self._targets[name]):
            if common := target.box.intersection(box):
                nowhere = _minus(nowhere, common)
                index = None if common == box else common.within(box)
                steps.append((number, common, target.view(common), index))
        if nowhere:
            raise WeightSyncError(f"tensor {name!r}: {nowhere[0]} was sent to a rank that holds nothing of it")
        return steps

    @torch.no_grad()
    def finish(self) -> None:
        """The last slice has come: make sure that all have."""
        self._check_complete()
        for layer in self._layers.values():
            if not layer.started:  # all of it is padding
                layer.start()
                layer.finish()
        self._touched = True
        finalize_layerwise_reload(self._model, self._model_config)
        process_tied(self._model)
        self.state = ModelState.WHOLE

    def abort(self) -> None:
        """Give up the update. Layers whose slices have not all come keep the weights that they had."""
        restore(self._model)
        self.state = ModelState.PARTIAL if self._touched else self._before

    def _layer(self, memory: str) -> Layer:
        name = memory.rpartition(".")[0]
        if name not in self._layers:
            if name not in self._modules:
                self._modules[name] = self._model.get_submodule(name)
            self._layers[name] = Layer(name, self._modules[name], self._written_to[name], self._spare)
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
        came = {
            (n, i): frozenset(target.came) for n, targets in self._targets.items() for i, target in enumerate(targets)
        }
        if came and came != self._parts:
            if self._parts:
                self._routes.clear()  # of slices that do not come any more
            self._parts = came

    def _check(self, name: str, box: Box, source: torch.Tensor) -> None:
        if self.state is not ModelState.WRITING and not self._staging:
            raise WeightSyncError(f"tensor {name!r} came outside of an update")
        held = self._tensors.get(name)
        if held is None:
            raise WeightSyncError(f"tensor {name!r}: this rank holds nothing of it{nearest(name, self._tensors)}")
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
        layer, memory = target.layer, target.place.memory
        if self._staging:
            elements = layer.staged_elements(memory, view)
        else:
            if not layer.started:
                self._touched |= layer.start()
            self._touched = self._touched or layer.computes_with(memory)
            elements = layer.elements(memory, view)
        copy_elements(elements, source)
        self._written(name, part, elements)
        if not target.take(part):
            return
        layer.waiting -= 1
        if not layer.waiting and self._staging:
            layer.finish_staged()
        elif not layer.waiting:
            self._touched = True
            layer.finish()


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


def _minus(boxes: list[Box], other: Box) -> list[Box]:
    return [part for box in boxes for part in box.minus(other)]
