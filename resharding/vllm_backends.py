"""Versions that come to a rank of vLLM by one of vLLM's own backends: whole tensors, which its model's loaders cut by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from ..dataflow.errors import WeightSyncError
from .box import Box
from .checksum import box_sum
from .vllm_control import TensorSum
from .vllm_layout import restore
from .vllm_writer import process_tied


class VllmBackends:
    """The transfer engines of vLLM's own backends in a rank. While a version comes by one of them, it stands where Weft's receiver does.

    Args:
        receiver: Weft's.
        settings: vLLM's, of the rank.
        device: of the rank.
        model: of the rank.
    """

    def __init__(
        self, receiver: WeightTransferEngine[Any, Any], settings: Any, device: torch.device, model: Any
    ) -> None:
        self.receiver = receiver
        self._settings, self._device, self._model = settings, device, model
        self._engines: dict[str, WeightTransferEngine[Any, Any]] = {}
        self._loaded: _LoadedTensors | None = None

    def begin(self, backend: str) -> WeightTransferEngine[Any, Any]:
        """A version comes by a backend: note what the model's loaders are given; returns the engine, which vLLM's factory makes."""
        if backend not in self._engines:
            config = WeightTransferConfig(backend=backend)
            made = WeightTransferEngineFactory.create_engine(config, self._settings, self._device, self._model)
            assert made is not None
            self._engines[backend] = made
        self._loaded = _LoadedTensors(self._model)
        return self._engines[backend]

    def end(self, whole: bool) -> dict[str, TensorSum]:
        """It has come, or nothing more comes of it; returns what the loaders were given.

        Args:
            whole: it has come. Otherwise layers whose weights have not all come keep those that they had.
        """
        loaded, self._loaded = self._loaded, None
        if loaded is None:  # this rank could not begin
            assert not whole
            return {}
        loaded.end()
        if whole:
            process_tied(self._model)  # which vLLM's own engines do not
        else:
            restore(self._model)
        return loaded.sums


class _LoadedTensors:
    """Sums of what a model's loaders are given, tensor by tensor, from here on until `end`.

    Args:
        model: of vLLM.
    """

    def __init__(self, model: Any) -> None:
        self.sums: dict[str, TensorSum] = {}
        self._model = model
        load = model.load_weights

        def load_and_sum(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            return load(self._summed(weights))

        model.load_weights = load_and_sum

    def end(self) -> None:
        """Give the model its own loaders back."""
        del self._model.load_weights

    def _summed(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            shape = tuple(tensor.shape)
            if name in self.sums:
                raise WeightSyncError(f"tensor {name!r} came twice")
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.sums[name] = TensorSum(dtype, shape, box_sum(tensor, Box.full(shape), shape))
            yield name, tensor
