"""Lent weights: forward passes of a model that holds none, with those of another model of the same kind.

Where that one lies over the ranks of a group, a layer's weights are gathered for the time that the layer runs. What is outside of the
layers (embeddings, the last norm, the head) is lent for the whole time, and where one rank holds everything, so is everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from .response_model import ResponseModel


class LentWeights:
    """The tensors that a model is lent, by module; made by `lend_weights`."""

    def __init__(self, model: ResponseModel, full: Callable[[str], Tensor] | None, by_layer: bool) -> None:
        tensors: dict[str, Tensor] = model.causal_lm.state_dict(keep_vars=True)
        self._names: dict[Tensor, str] = {}
        for name, tensor in tensors.items():
            self._names.setdefault(tensor, name)
        self._full = full or (lambda name: tensors[name])
        self._own = {module: (dict(module._parameters), dict(module._buffers)) for module in model.causal_lm.modules()}
        self._inside = (
            {module for layer in model.layers for module in layer.modules()} if by_layer else set[nn.Module]()
        )
        self.factor = 1
        """What all parameters are multiplied by."""

    def multiply(self, factor: int) -> None:
        """Multiply all parameters from now on."""
        self.factor *= factor
        self.lend_outside()

    def lend_outside(self) -> None:
        """Lend what no layer holds."""
        self._lend([module for module in self._own if module not in self._inside])

    def lend_layer(self, layer: nn.Module, *_: Any) -> None:
        """Lend a layer its weights; called before it runs."""
        self._lend(list(layer.modules()))

    def give_back(self, layer: nn.Module, *_: Any) -> None:
        """Take the weights of a layer away; called after it ran."""
        for module in layer.modules():
            if module not in self._own:  # BigBird replaces modules during a pass
                continue
            parameters, buffers = self._own[module]
            module._parameters.update(parameters)
            module._buffers.update(buffers)

    def _lend(self, modules: list[nn.Module]) -> None:
        lent: dict[Tensor, Tensor] = {}  # a tensor that several modules share stays one
        for module in modules:
            if module not in self._own:
                continue
            for held, own in zip((module._parameters, module._buffers), self._own[module], strict=True):
                for key, tensor in own.items():
                    if tensor is not None and tensor in self._names:
                        if tensor not in lent:
                            lent[tensor] = self._multiplied(tensor)
                        held[key] = lent[tensor]  # pyright: ignore[reportArgumentType]

    def _multiplied(self, tensor: Tensor) -> Tensor:
        full = self._full(self._names[tensor]).to(tensor.dtype)
        grows = self.factor != 1 and isinstance(tensor, nn.Parameter) and full.is_floating_point()
        return full * self.factor if grows else full


@contextmanager
def lend_weights(
    model: ResponseModel, full: Callable[[str], Tensor] | None = None, *, by_layer: bool = False
) -> Iterator[LentWeights]:
    """Lend a model its weights for forward passes without a gradient; afterwards it holds what it held.

    Args:
        full, by_layer: see `find_agreement`.
    """
    lent = LentWeights(model, full, by_layer)
    hooks: list[Any] = []
    try:
        lent.lend_outside()
        for layer in model.layers if by_layer else ():
            hooks.append(layer.register_forward_pre_hook(lent.lend_layer))
            hooks.append(layer.register_forward_hook(lent.give_back, always_call=True))
        yield lent
    finally:
        for hook in hooks:
            hook.remove()
        lent.give_back(model.causal_lm)
