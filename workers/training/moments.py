"""Optimizers, by the moments that they keep: AdamW in float32 on the device, in float32 in host memory,
or in 8 bits; and Muon."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...dataflow.errors import UserError
from .engine import ModelConfig
from .memory import MISSING_TORCHAO, MOMENTS_BYTES, moment_block
from .optimizer import OptimizerConfig
from .sharding import box_of, full_tensor, local_part, lying_as

MOMENTS = ("exp_avg", "exp_avg_sq")


class Moments(torch.optim.AdamW):
    def first_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in MOMENTS
        }

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return a parameter's moments and step count, and create them before its first step."""
        state = self.state[parameter]
        if not state:
            # Fused AdamW expects the step count on the parameter's device.
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= self.first_moments(parameter)
        return state

    def held(self) -> dict[str, Tensor]:
        """Return moments and step counts by name, except those that stay in host memory."""
        return {
            f"{number}.{key}": value
            for number, state in enumerate(self.state.values())
            for key, value in state.items()
        }

    def replace(self, held: Mapping[str, Tensor]) -> None:
        """Replace the local parts of tensors that `held` returned."""
        for number, state in enumerate(self.state.values()):
            for key in state:
                if (part := held.get(f"{number}.{key}")) is not None:
                    state[key] = lying_as(state[key], part)


# Offload: moments stay in host memory, and are on the device while AdamW updates their parameters.
# With `ModelConfig.offload="everything"`, FSDP2 also offloads parameters and gradients, and the
# host updates parameters and moments in place. On several ranks, FSDP2 copies during the previous
# layer's computation. On one rank, torch 2.13 copies on the compute stream, so nothing overlaps.


class _HostMoments(Moments):
    """AdamW with moments in host memory, pinned for a GPU. A step updates the parameters in parts.
    While it computes one part, it copies the next part's moments to the device and the previous
    part's back."""

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
                self._return(parameters)
        finally:
            self.param_groups = groups
            if self._stream is not None:
                self._stream.synchronize()  # the host may read the moments after this method returns

    def first_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        return {name: self._host_zeros(parameter) for name in MOMENTS}

    def held(self) -> dict[str, Tensor]:
        return {}

    def _host_zeros(self, parameter: Tensor) -> Tensor:
        zeros = torch.zeros_like(
            local_part(parameter), device="cpu", memory_format=torch.preserve_format
        )
        return lying_as(parameter, zeros if self._stream is None else zeros.pin_memory())

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _bring(self, parameters: Sequence[nn.Parameter]) -> torch.Event | None:
        """Start copying the moments of these parameters to the device. Return an event that fires
        when the copy is complete."""
        if self._stream is None:
            return None
        computing = torch.cuda.current_stream(self._device)
        with self._on_stream():
            for parameter in parameters:
                state = self.state[parameter]
                for key in MOMENTS if state else ():
                    here = local_part(state[key]).to(self._device, non_blocking=True)
                    # The allocator must not reuse this memory until the compute stream has read it.
                    here.record_stream(computing)
                    state[f"host_{key}"], state[key] = state[key], lying_as(parameter, here)
        return self._stream.record_event()

    def _return(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._stream is None:
            return
        # Copy the moments back only after the compute stream has updated them.
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
    """Yield the parameters to update together (those with a gradient), with their group."""
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


# 8-bit moments (arXiv:2110.02861); torchao provides the codes and the update. Each block along the
# last dimension has one scale: its largest magnitude. Each element has an 8-bit code for one of 256
# values between -1 and 1, densest near 0. A step decodes the moments, computes the update in
# float32, and encodes the results.
#
# Blocks never cross the end of a row. So codes and scales are sharded like their parameter, and any
# number of ranks can restore a snapshot bit for bit. Moments stay float32 for vectors, small
# tensors, and rows that are not a whole number of blocks (`memory.moment_block`).


SIGNED = dict(zip(MOMENTS, (True, False), strict=True))
CODES, SCALES = "_codes", "_scales"
"""Suffixes that a moment's codes and scales add to its name in the state."""
_PIECE = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Elements to update at once. A CPU makes ten float32 copies of them; a GPU compiles the update."""
_SHAPES = 256
"""Limit on recompilations of the update, one for each size of a parameter's last piece."""


class _EightBitMoments(Moments):
    """AdamW with moments in 8 bits. Raises UserError if torchao is not installed."""

    def __init__(self, groups: Iterable[dict[str, Any]], device: torch.device, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self._moment, self._adamw = _load_library(device)
        self._piece = _PIECE[device.type]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        groups = self.param_groups
        plain = [{**g, "params": [p for p in g["params"] if _block(p) is None]} for g in groups]
        try:
            self.param_groups = plain
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
            found[name + SCALES] = _lying_along(
                parameter, (*before, last // block), block, torch.float32
            )
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
                self._moment(parts[name + CODES][piece], parts[name + SCALES][blocks], signed)
                for name, signed in SIGNED.items()
            ]
            self._adamw(
                own[piece], gradient[piece], state["step"], *moments, None, rate, *group["betas"], group["weight_decay"],
                group["eps"], True, False,
            )  # fmt: skip


def in_8_bits(state: Iterable[str]) -> bool:
    return any(name.endswith(CODES) for name in state)


def _load_library(
    device: torch.device,
) -> tuple[Callable[[Tensor, Tensor, bool], Any], Callable[..., None]]:
    """Return two functions of torchao: `(codes [n], scales [n / block], signed)` -> a moment that
    shares their memory; and AdamW's in-place update of one parameter."""
    log = logging.getLogger("torchao")
    level = log.level
    log.setLevel(logging.ERROR)  # torchao warns about missing kernels for other machines
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
    if device.type == "cuda":  # as torchao does; on a CPU, compiling needs a compiler and a minute
        compiled: Any = torch.compile
        update = compiled(update, fullgraph=True, dynamic=False, recompile_limit=_SHAPES)
    return moment, update


def _block(parameter: Tensor) -> int | None:
    """Return a parameter's block size, equal on all ranks, or None if its moments are float32."""
    last = local_part(parameter).shape[-1] if parameter.ndim else 0
    return moment_block(tuple(parameter.shape), last)


def _lying_along(parameter: Tensor, shape: Iterable[int], shorter: int, dtype: torch.dtype) -> Tensor:
    """Return zeros sharded like a parameter of full shape `shape`, with rows shorter by the factor
    `shorter`."""
    *before, last = local_part(parameter).shape
    zeros = torch.zeros((*before, last // shorter), dtype=dtype, device=local_part(parameter).device)
    if not isinstance(parameter, DTensor):
        return zeros
    full = torch.Size(shape)
    stride = torch.empty(full, device="meta").stride()
    laid = DTensor.from_local(
        zeros, parameter.device_mesh, parameter.placements, run_check=False, shape=full, stride=stride
    )
    # `from_local` silently moves a local tensor to the device type of its mesh.
    assert laid.to_local().device == zeros.device
    return laid


# Muon (https://kellerjordan.github.io/posts/muon/): the momentum of a matrix is replaced by a matrix
# with the same singular vectors and with singular values near 1. A Newton-Schulz iteration computes
# it, from the whole matrix. So each rank gathers the matrix, computes all of it, and updates its own
# part: any number of ranks makes the same update bit for bit, if their gradients are equal.


MOMENTUM = "momentum"
"""Name of Muon's momentum in the state."""
_MUON_DECAY = 0.95
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""a, b, c of X <- a X + b (X X^T) X + c (X X^T)^2 X. Five steps bring singular values between about
0.01 and 1 to between about 0.7 and 1.2."""


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return the matrix U f(S) V^T in bfloat16, for a matrix U S V^T, where f(S) is near 1. A matrix of
    zeros stays zero."""
    a, b, c = _NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.T if tall else x  # so that the products are the smaller ones
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class _Muon(Moments):
    """Muon for the given matrices, AdamW for all other parameters. Updates have the root mean square
    of AdamW's: 0.2 sqrt(max(rows, columns)) times the orthogonal matrix (arXiv:2502.16982)."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], matrices: Iterable[nn.Parameter], **settings: Any
    ) -> None:
        self._matrices = {id(matrix) for matrix in matrices}
        super().__init__(groups, **settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        groups = self.param_groups
        rest = [{**g, "params": [p for p in g["params"] if id(p) not in self._matrices]} for g in groups]
        try:
            self.param_groups = rest
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            for parameter in group["params"]:
                if id(parameter) in self._matrices and parameter.grad is not None:
                    self._update(parameter, group)

    def first_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        if id(parameter) not in self._matrices:
            return super().first_moments(parameter)
        return {MOMENTUM: torch.zeros_like(parameter, memory_format=torch.preserve_format)}

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state_of(parameter)
        state["step"] += 1
        gradient, momentum = local_part(parameter.grad), local_part(state[MOMENTUM])  # pyright: ignore
        momentum.lerp_(gradient, 1 - _MUON_DECAY)
        own = gradient.lerp(momentum, _MUON_DECAY)  # Nesterov's
        whole = orthogonalized(full_tensor(lying_as(parameter, own)))
        box, size = box_of(parameter), 0.2 * math.sqrt(max(parameter.shape))
        update = whole[tuple(map(slice, box.starts, box.stops))]
        weight, rate = local_part(parameter.detach()), group["lr"]
        weight.mul_(1 - rate * group["weight_decay"]).add_(update, alpha=-rate * size)


def has_momentum(state: Iterable[str]) -> bool:
    return any(name.endswith(f".{MOMENTUM}") for name in state)


def _checked_matrices(matrices: Sequence[tuple[str, nn.Parameter]], model: ModelConfig) -> None:
    said = f'optimizer="muon": model {str(model.model)!r}'
    if not matrices:
        raise UserError(f'{said} has no layers with a usual name; set optimizer="adamw"')
    for name, matrix in matrices:
        if matrix.ndim != 2:
            raise UserError(
                f"{said} has {name!r} of shape {list(matrix.shape)}, but Muon is defined for matrices; "
                'set optimizer="adamw"'
            )


def make_optimizer(
    model: ModelConfig,
    config: OptimizerConfig,
    parameters: Iterable[nn.Parameter],
    device: torch.device,
    layers: Sequence[nn.Module] = (),
) -> Moments:
    """Create the optimizer of all parameters that require a gradient. Weight decay applies only to
    matrices. Muon updates the matrices of `layers`. Raises UserError if moments="8bit" and torchao is
    not installed, or if Muon is not defined for the layers."""
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            # A fused update needs all parameters on one mesh.
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((parameter.ndim > 1, mesh), []).append(parameter)
    kinds = [
        {"params": of_kind, "weight_decay": config.weight_decay if is_matrix else 0.0}
        for (is_matrix, _), of_kind in groups.items()
    ]
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "fused": True}
    if config.optimizer == "muon":
        named = [pair for layer in layers for pair in layer.named_parameters() if pair[1].requires_grad]
        matrices = [(name, parameter) for name, parameter in named if parameter.ndim > 1]
        _checked_matrices(matrices, model)
        return _Muon(kinds, [matrix for _, matrix in matrices], **settings)
    if model.offload == "moments":
        return _HostMoments(kinds, device, **settings)
    if config.moments == "8bit":
        return _EightBitMoments(kinds, device, **settings)
    return Moments(kinds, **settings)
