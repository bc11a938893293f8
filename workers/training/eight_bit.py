"""AdamW whose moments are kept in 8 bits (arXiv:2110.02861): a quarter of their memory. Numbers and update are torchao's.

A tensor is cut into blocks along its last dimension. A block has one scale, its largest magnitude, and each of its elements a code, one of
256 values between -1 and 1 that lie densely near 0. The step itself is computed in float32: codes are decoded, and encoded again.

Blocks never reach over the end of a row. So the codes of a parameter lie over the ranks as the parameter does, its scales as a tensor with
shorter rows, and a snapshot goes on, to the bit, on any number of ranks. Vectors, small tensors, and those whose rows are not made of whole
blocks (`memory.moment_block`) have float32 moments, and torch's own step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...dataflow.errors import UserError
from .memory import MISSING_TORCHAO, moment_block
from .moments import MOMENTS, PlainMoments
from .sharding import local_part

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
            self.param_groups = [{**g, "params": [p for p in g["params"] if _block(p) is None]} for g in groups]
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
        update = cast(Any, torch.compile)(single_param_adam, fullgraph=True, dynamic=False, recompile_limit=_SHAPES)
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
