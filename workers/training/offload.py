"""Offload: moments of AdamW that lie in host memory, and are on the device only while their parameters are updated.

Parameters that lie in host memory, too (`ModelConfig.offload="everything"`), are FSDP2's own: it brings a layer to the device before it
runs, and takes gradients back. Over several ranks it does so while the layer before computes, by streams of its own: the host is ahead of
the device, since it waits for it in no layer. On one rank FSDP of torch 2.13 copies on the stream that computes, so nothing overlaps. Their
moments are updated where they lie, by the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .memory import MOMENTS_BYTES
from .moments import MOMENTS, PlainMoments
from .sharding import local_part, lying_as


class HostMoments(PlainMoments):
    """AdamW with its moments in host memory, pinned where the device is a GPU. A step updates the parameters part by part; the moments
    of the next part arrive, and those of the last one leave, while one is computed. The numbers are those of AdamW.

    Args:
        groups, settings: of `torch.optim.AdamW`.
        device: of the parameters. On a CPU nothing is moved.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], device: torch.device, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = device

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        groups = self.param_groups
        parts = list(_parts(groups))
        try:
            arrived = self._bring(parts[0][1]) if parts else None
            for number, (group, parameters) in enumerate(parts):
                following = parts[number + 1][1] if number + 1 < len(parts) else []
                current, arrived = arrived, self._bring(following)
                if self._stream is not None and current is not None:
                    torch.cuda.current_stream(self._device).wait_event(current)
                self.param_groups = [{**group, "params": parameters}]
                super().step()
                self._take(parameters)
        finally:
            self.param_groups = groups
            if self._stream is not None:
                self._stream.synchronize()  # the host may read the moments from now on

    def first_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        return {name: self._host_zeros(parameter) for name in MOMENTS}

    def follow(self, device: torch.device) -> None:
        """They stay in host memory."""

    def _host_zeros(self, parameter: Tensor) -> Tensor:
        zeros = torch.zeros_like(local_part(parameter), device="cpu", memory_format=torch.preserve_format)
        return lying_as(parameter, zeros if self._stream is None else zeros.pin_memory())

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _bring(self, parameters: Sequence[nn.Parameter]) -> torch.Event | None:
        """Begin to copy the moments of these parameters to the device; the event is set when they are there."""
        if self._stream is None:
            return None
        computing = torch.cuda.current_stream(self._device)
        with self._on_stream():
            for parameter in parameters:
                state = self.state[parameter]
                for key in MOMENTS if state else ():
                    here = local_part(state[key]).to(self._device, non_blocking=True)
                    here.record_stream(computing)
                    state[f"host_{key}"], state[key] = state[key], lying_as(parameter, here)
        return self._stream.record_event()

    def _take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Begin to copy the moments of these parameters back."""
        if self._stream is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._on_stream():
            for parameter in parameters:
                state = self.state[parameter]
                for key in MOMENTS if state else ():
                    host = state.pop(f"host_{key}", None)
                    host = self._host_zeros(parameter) if host is None else host
                    there = local_part(state[key])
                    there.record_stream(self._stream)
                    local_part(host).copy_(there, non_blocking=True)
                    state[key] = host


def _parts(groups: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[nn.Parameter]]]:
    """Parameters that are updated together, with their group; those without a gradient are left out."""
    for group in groups:
        part: list[nn.Parameter] = []
        size = 0
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            own = len(MOMENTS) * local_part(parameter).nbytes
            if part and size + own > MOMENTS_BYTES:
                yield group, part
                part, size = [], 0
            part.append(parameter)
            size += own
        if part:
            yield group, part
