"""Layer: a module of vLLM whose own parameters are written together, and the memory in which they are.

    as loaders write it         memory                                             made ready by
    embeddings                  the one that kernels read: written in place        packing on CPU, for a head that uses them
    linear layers, CUDA         the one that kernels read: written in place        nothing
    linear layers, CPU          lent; the next layer of this shape has it next     vLLM's packing
    whatever else               new                                                vLLM, which copies it to where kernels read it

A layer can also be made ready beside the module that computes: a copy of the module with other parameters is prepared, and what this
leaves behind is given to the module afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.platforms import current_platform

from .strided import View
from .vllm_layout import Fill, restore_layer


class SpareMemory:
    """Host memory in the loading format of layers that were prepared. It is mapped and warm, and stays from version to version."""

    def __init__(self) -> None:
        self._free: dict[tuple[Any, ...], list[torch.Tensor]] = {}

    def take(self, wanted: torch.Tensor) -> torch.Tensor:
        """Memory for a tensor of this shape, these strides and this dtype."""
        free = self._free.get(_form(wanted))
        return free.pop() if free else torch.empty_strided(wanted.shape, wanted.stride(), dtype=wanted.dtype)

    def give_back(self, memory: torch.Tensor) -> None:
        """Nothing refers to it any more."""
        self._free.setdefault(_form(memory), []).append(memory)


class Layer:
    """A module whose own parameters are written together.

    Args:
        name: of the module in the model.
        written: names of parameters and buffers, with the module's, that slices are written to.
        spare: from which memory is lent.
    """

    def __init__(self, name: str, module: torch.nn.Module, written: Iterable[str], spare: SpareMemory) -> None:
        self.name = name
        self.module: Any = module
        self.waiting = 0
        """Targets that lack slices."""
        self.fills: list[Fill] = []
        self.started = False
        self.in_place = False
        """Whether kernels read what is written."""
        self._written = {own_name(memory) for memory in written}
        self._spare = spare
        self._lent: list[torch.Tensor] = []
        self._memories: dict[str, tuple[torch.Tensor, int]] = {}
        """The module's parameters, since `start`, each with the offset at which it begins in its storage."""
        self._beside = False
        """Whether it is packed beside the module."""
        self._staged: dict[str, torch.Tensor] = {}
        """What lies beside the module, by names of its parameters."""
        self._new: dict[str, Any] = {}
        """What packing has left on the module that was packed in its place, besides parameters."""

    def elements(self, memory: str, view: View) -> torch.Tensor:
        """These elements of one of its parameters, to be written."""
        if (found := self._memories.get(memory)) is None:
            tensor = getattr(self.module, own_name(memory)).data
            found = self._memories[memory] = tensor, tensor.storage_offset()
        tensor, first = found
        return tensor.as_strided(view.shape, view.strides, first + view.offset)

    def computes_with(self, memory: str) -> bool:
        """Whether vLLM's kernels read this parameter itself: also that of a bias, which has no loading format of its own."""
        if self.in_place:
            return True
        parameters, buffers = get_layerwise_info(self.module).kernel_tensors or ({}, {})
        name = own_name(memory)
        return getattr(self.module, name) is parameters.get(name, buffers.get(name))

    def start(self) -> bool:
        """Give the module memory to be written, with its padding; returns whether kernels read some of what that has overwritten."""
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

    def finish(self) -> None:
        """All slices have come: vLLM prepares the module, and copies to where its kernels read it what was not written there."""
        self._memories = {}  # which hold memory that vLLM frees
        if self.in_place:
            prepare(self.module)
            return
        with experts_packed_anew([self.module]):
            _layerwise_process(self.module, get_layerwise_info(self.module))
        for memory in self._lent:
            self._spare.give_back(memory)
        self._lent = []

    def _is_read_as_written(self) -> bool:
        """Whether kernels read all of its parameters as loaders write them."""
        method = type(getattr(self.module, "quant_method", None))
        if method is not UnquantizedEmbeddingMethod and not (
            method is UnquantizedLinearMethod and current_platform.is_cuda()
        ):
            return False
        parameters, buffers = get_layerwise_info(self.module).kernel_tensors or ({}, {})
        kernel = parameters | buffers
        wanted = get_layer_tensors(self.module)
        return all(name in kernel and _form(kernel[name]) == _form(tensor) for name, tensor in wanted.items())

    def _lend(self) -> None:
        """On CPU, where preparing a layer leaves nothing behind that refers to the memory in the loading format, lend it."""
        if not is_cpu_packed(self.module):
            return
        for name, wanted in get_layer_tensors(self.module).items():
            if wanted.is_meta and name in self._written:
                self._lent.append(self._spare.take(wanted))
                setattr(self.module, name, _like(wanted, self._lent[-1]))

    # Beside the module, which goes on computing

    def stage(self, kept: dict[str, torch.Tensor]) -> None:
        """Have memory beside the module, with its padding.

        Args:
            kept: memory that stays from version to version, by the names of parameters in the model.
        """
        self._beside = is_cpu_packed(self.module)
        for name in sorted(self._written):
            wanted = self._loading_format(name)
            if self._beside and wanted.is_meta and type(self.module.quant_method) is UnquantizedLinearMethod:
                continue  # it is lent when the first slice comes
            memory = f"{self.name}.{name}" if self.name else name
            if memory not in kept:
                kept[memory] = self._new_beside(wanted)
            self._staged[name] = kept[memory]
        for fill in self.fills:
            self.staged_elements(fill.memory, fill.view).fill_(fill.value)

    def staged_elements(self, memory: str, view: View) -> torch.Tensor:
        """These elements of one of its parameters, to be written beside it."""
        name = own_name(memory)
        if name not in self._staged:
            self._staged[name] = self._spare.take(self._loading_format(name))
            self._lent.append(self._staged[name])
        return self._staged[name].as_strided(view.shape, view.strides, view.offset)

    def finish_staged(self) -> None:
        """All slices have come: where the module is packed for kernels on CPU, pack what came, and free the rest."""
        if not self._beside:
            return
        module, parameters = self.module, dict(self.module._parameters)
        for name, staged in self._staged.items():
            parameters[name] = torch.nn.Parameter(staged, requires_grad=False)
        beside = object.__new__(type(module))
        beside.__dict__.update(module.__dict__, _parameters=parameters)
        if not _is_looked_up(module):
            module.quant_method.process_weights_after_loading(beside)
        self._staged = {name: parameters[name].data for name in self._staged}
        left = {staged.data_ptr() for staged in self._staged.values()}
        for memory in self._lent:
            if memory.data_ptr() not in left:
                self._spare.give_back(memory)
        self._lent = [memory for memory in self._lent if memory.data_ptr() in left]
        new = {key: value for key, value in beside.__dict__.items() if module.__dict__.get(key) is not value}
        self._new = {key: value for key, value in new.items() if key != "_parameters"}

    def take_over(self) -> None:
        """Give the module what was staged; vLLM waits for its weights."""
        self.started = True
        if self._beside:
            restore_layer(self.module)
            for name, staged in self._staged.items():
                getattr(self.module, name).data.copy_(staged)
            self.module.__dict__.update(self._new)
            if _is_looked_up(self.module):
                prepare(self.module)
            for memory in self._lent:
                self._spare.give_back(memory)
            self._lent = []
            return
        self.start()
        for name, staged in self._staged.items():
            getattr(self.module, name).data.copy_(staged)
        self.finish()

    def _loading_format(self, name: str) -> torch.Tensor:
        """One of its parameters as loaders write it: of a bias, which has no loading format of its own, the one that kernels read."""
        parameters, buffers = get_layerwise_info(self.module).restore_metadata
        found = parameters.get(name, buffers.get(name))
        return getattr(self.module, name) if found is None else found

    def _new_beside(self, wanted: torch.Tensor) -> torch.Tensor:
        # A GPU reads pinned memory faster.
        pinned = get_layerwise_info(self.module).restore_device.type == "cuda"
        return torch.empty_strided(wanted.shape, wanted.stride(), dtype=wanted.dtype, device="cpu", pin_memory=pinned)


def own_name(memory: str) -> str:
    """Name of a parameter in its module.

    >>> own_name("model.layers.0.mlp.down_proj.weight")
    'weight'
    """
    return memory.rpartition(".")[2]


def is_cpu_packed(module: torch.nn.Module) -> bool:
    """Whether vLLM packs the module's weight for its kernels on CPU, and keeps nothing of the memory in the loading format."""
    method = type(getattr(module, "quant_method", None))
    known = method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    return known and current_platform.is_cpu() and not current_platform.is_zen_cpu()


def prepare(module: Any) -> None:
    """Have vLLM prepare a module whose kernels read its parameters. An embedding is packed when a head uses it, which it may never do."""
    if not _is_looked_up(module):
        module.quant_method.process_weights_after_loading(module)
    elif hasattr(module, "cpu_linear"):

        def pack_and_multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            module.quant_method.process_weights_after_loading(module)  # which replaces this function
            return module.cpu_linear(x, weight, bias)

        module.cpu_linear = pack_and_multiply


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


def _is_looked_up(module: torch.nn.Module) -> bool:
    """Whether it is an embedding on CPU, whose rows are looked up, and no head by its class."""
    return type(module) is VocabParallelEmbedding and is_cpu_packed(module)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _like(wanted: torch.Tensor, memory: Any) -> torch.Tensor:
    """A tensor of the class and with the loader of one on `meta`, in this memory: as vLLM's `materialize_meta_tensor` makes it."""
    found = memory.detach()
    found.__class__ = wanted.__class__
    found.__dict__ = wanted.__dict__.copy()
    return found
