"""The optimizer of a model: AdamW, of the kind that keeps its moments as the settings say."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...dataflow.errors import UserError
from .engine import ModelConfig, OptimizerConfig
from .memory import MISSING_TORCHAO, MOMENTS_BYTES, moment_block
from .sharding import local_part, lying_as

# Moments
#
# AdamW's moments: what it keeps of each parameter. Each way of keeping them is a class.
#
# PlainMoments       float32, beside their parameters
# HostMoments        float32, in host memory (`offload.py`)
# EightBitMoments    in 8 bits, beside their parameters (`eight_bit.py`)


MOMENTS = ("exp_avg", "exp_avg_sq")
"""Their names, as torch gives them: the running means of gradients, and of their squares."""


class PlainMoments(torch.optim.AdamW):
    """AdamW with float32 moments that lie where their parameters do."""

    def first_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """The moments of a parameter before its first step."""
        return {
            name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in MOMENTS
        }

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """The moments and the number of steps of a parameter; made as AdamW makes them at its first step, if there are none yet."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= self.first_moments(parameter)
        return state

    def follow(self, device: torch.device) -> None:
        """Move moments to the device of their parameters, which have been moved there."""
        for state in self.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(device)


# Offload
#
# Offload: moments of AdamW that lie in host memory, and are on the device only while their
# parameters are updated.
#
# Parameters that lie in host memory, too (`ModelConfig.offload="everything"`), are FSDP2's own: it
# brings a layer to the device before it runs, and takes gradients back. Over several ranks it does
# so while the layer before computes, by streams of its own: the host is ahead of the device, since
# it waits for it in no layer. On one rank FSDP of torch 2.13 copies on the stream that computes,
# so nothing overlaps. Their moments are updated where they lie, by the host.


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


# Eight bit
#
# AdamW whose moments are kept in 8 bits (arXiv:2110.02861): a quarter of their memory. Numbers and
# update are torchao's.
#
# A tensor is cut into blocks along its last dimension. A block has one scale, its largest
# magnitude, and each of its elements a code, one of 256 values between -1 and 1 that lie densely
# near 0. The step itself is computed in float32: codes are decoded, and encoded again.
#
# Blocks never reach over the end of a row. So the codes of a parameter lie over the ranks as the
# parameter does, its scales as a tensor with shorter rows, and a snapshot goes on, to the bit, on
# any number of ranks. Vectors, small tensors, and those whose rows are not made of whole blocks
# (`memory.moment_block`) have float32 moments, and torch's own step.


SIGNED = dict(zip(MOMENTS, (True, False), strict=True))
"""Name of a moment -> whether it has a sign."""
CODES, SCALES = "_codes", "_scales"
"""What is added to the name of a moment."""
_PIECE = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Elements that are updated at once. A CPU holds some ten float32 and int64 copies of them, a GPU compiles the update."""
_SHAPES = 256
"""Sizes of pieces that an update is compiled for, at most: one of each parameter's rest."""


class EightBitMoments(PlainMoments):
    """AdamW with moments in 8 bits.

    Args:
        groups, settings: of `torch.optim.AdamW`.
        device: of the parameters.

    Raises:
        UserError: torchao is not installed.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], device: torch.device, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self._library = _load_library(device)
        self._piece = _PIECE[device.type]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        groups = self.param_groups
        try:
            self.param_groups = [
                {**g, "params": [p for p in g["params"] if _block(p) is None]} for g in groups
            ]
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            for parameter in group["params"]:
                if parameter.grad is not None and _block(parameter) is not None:
                    self._update(parameter, group)

    def first_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        block = _block(parameter)
        if block is None:
            return super().first_moments(parameter)
        *before, last = parameter.shape
        found: dict[str, Tensor] = {}
        for name in MOMENTS:
            found[name + CODES] = _lying_along(parameter, parameter.shape, 1, torch.uint8)
            found[name + SCALES] = _lying_along(parameter, (*before, last // block), block, torch.float32)
        return found

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state_of(parameter)
        state["step"] += 1
        block = _block(parameter)
        assert block is not None
        own, gradient = local_part(parameter.detach()).view(-1), local_part(parameter.grad).reshape(-1)  # pyright: ignore
        parts = {name: local_part(state[name]).view(-1) for name in state if name != "step"}
        rate = torch.tensor(group["lr"], dtype=torch.float32)
        for start in range(0, len(own), self._piece):
            piece = slice(start, start + self._piece)
            blocks = slice(start // block, -(-min(piece.stop, len(own)) // block))
            moments = [
                self._library.moment(parts[name + CODES][piece], parts[name + SCALES][blocks], signed)
                for name, signed in SIGNED.items()
            ]
            self._library.update(
                own[piece], gradient[piece], state["step"], *moments, None, rate, *group["betas"], group["weight_decay"],
                group["eps"], True, False,
            )  # fmt: skip


def in_8_bits(state: Iterable[str]) -> bool:
    """Whether a state of training with these names has moments in 8 bits."""
    return any(name.endswith(CODES) for name in state)


@dataclass(frozen=True)
class _Library:
    """What is taken from torchao."""

    moment: Callable[[Tensor, Tensor, bool], Any]
    """(codes [n], scales [n / block], signed) -> the moment, which shares their memory."""
    update: Callable[..., None]
    """Its AdamW of one parameter, in place."""


def _load_library(device: torch.device) -> _Library:
    log = logging.getLogger("torchao")
    level = log.level
    log.setLevel(logging.ERROR)  # it tells of kernels for other machines that it does not find
    try:
        from torchao.optim.adam import single_param_adam  # pyright: ignore[reportMissingImports]
        from torchao.optim.subclass_8bit import (  # pyright: ignore[reportMissingImports]
            OptimState8bit,
            get_qmap_signed,
            get_qmap_unsigned,
        )
    except ImportError as error:
        raise UserError(f"{MISSING_TORCHAO} ({error})") from None
    finally:
        log.setLevel(level)
    values = {
        True: torch.tensor(get_qmap_signed(), device=device),
        False: torch.tensor(get_qmap_unsigned(), device=device),
    }

    def moment(codes: Tensor, scales: Tensor, signed: bool) -> Any:
        return OptimState8bit(codes, scales, values[signed], signed, dtype=torch.float32)

    update = single_param_adam
    if device.type == "cuda":  # as torchao itself does; on a CPU it would take a compiler, and a minute
        update = cast(Any, torch.compile)(
            single_param_adam, fullgraph=True, dynamic=False, recompile_limit=_SHAPES
        )
    return _Library(moment, update)


def _block(parameter: Tensor) -> int | None:
    """Elements of a block of a parameter; None: its moments are float32. Equal on all ranks."""
    last = local_part(parameter).shape[-1] if parameter.ndim else 0
    return moment_block(tuple(parameter.shape), last)


def _lying_along(parameter: Tensor, shape: Iterable[int], shorter: int, dtype: torch.dtype) -> Tensor:
    """Zeros that lie over the ranks as a parameter does, with rows that are shorter by a factor.

    Args:
        shape: of the full tensor.
    """
    *before, last = local_part(parameter).shape
    zeros = torch.zeros((*before, last // shorter), dtype=dtype, device=local_part(parameter).device)
    if not isinstance(parameter, DTensor):
        return zeros
    full = torch.Size(shape)
    stride = torch.empty(full, device="meta").stride()
    laid = DTensor.from_local(
        zeros, parameter.device_mesh, parameter.placements, run_check=False, shape=full, stride=stride
    )
    assert laid.to_local().device == zeros.device
    return laid


def make_optimizer(
    model: ModelConfig, config: OptimizerConfig, parameters: Iterable[nn.Parameter], device: torch.device
) -> PlainMoments:
    """An optimizer of the parameters that have a gradient; matrices alone have weight decay.

    Args:
        model: says where moments lie.
        config: of the optimizer.
        device: that computes.

    Raises:
        UserError: moments are to be kept in 8 bits, and torchao is not installed.
    """
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            mesh = (
                parameter.device_mesh if isinstance(parameter, DTensor) else None
            )  # one operation takes one mesh
            groups.setdefault((parameter.ndim > 1, mesh), []).append(parameter)
    kinds = [
        {"params": of_kind, "weight_decay": config.weight_decay if is_matrix else 0.0}
        for (is_matrix, _), of_kind in groups.items()
    ]
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "fused": True}
    if model.offload == "moments":
        return HostMoments(kinds, device, **settings)
    if config.moments == "8bit":
        return EightBitMoments(kinds, device, **settings)
    return PlainMoments(kinds, **settings)
