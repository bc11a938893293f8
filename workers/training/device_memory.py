"""GPU memory of a training engine: errors when it runs out, and turns on a GPU that groups share."""

from __future__ import annotations

import functools
import mmap
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ...dataflow.errors import UserError
from .engine import ModelConfig, TrainingConfig
from .memory import settings_that_save_memory
from .sharding import local_part, lying_as

if TYPE_CHECKING:
    from .moments import Moments

F = TypeVar("F", bound=Callable[..., Any])
GIB = 2**30
_STATE = "optimizer."


@contextmanager
def memory_errors(
    phase: str, config: ModelConfig, training: TrainingConfig | None, *, tokens: int = 0
) -> Iterator[None]:
    """Inside the context, turn `torch.OutOfMemoryError` into a UserError that names the phase, the
    memory in use, and settings that save memory. `tokens` is the size of the phase's microbatches."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        wanted = re.search(r"allocate ([\d.]+ \w+)", str(error))
        asked = f" and asked for {wanted[1]} more" if wanted else ""
        ways = "; ".join(settings_that_save_memory(config, training, tokens=tokens))
        raise UserError(
            f"{_in_use()} during {phase}{asked}. Each of these saves memory: {ways}. "
            "`weft plan` estimates what they save"
        ) from None


def in_phase(phase: str, *, runs_model: bool = False) -> Callable[[F], F]:
    """Decorator: run a method of an engine in `memory_errors`."""

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def run(engine: Any, *args: Any, **kwargs: Any) -> Any:
            tokens = engine.microbatch_tokens if runs_model else 0
            with memory_errors(phase, engine.config, engine.training, tokens=tokens):
                return method(engine, *args, **kwargs)

        return run  # pyright: ignore[reportReturnType]

    return wrap


def _in_use() -> str:
    if not torch.cuda.is_available():
        return "the device ran out of memory"
    free, total = torch.cuda.mem_get_info()
    held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    others = max(0, total - free - reserved)
    return (
        f"the GPU ({total / GIB:.1f} GiB) ran out of memory: this process used {held / GIB:.1f} GiB and cached "
        f"{(reserved - held) / GIB:.1f} GiB, CUDA and other processes used {others / GIB:.1f} GiB,"
    )


class PinnedBlock:
    """A block of host memory with room for some tensors. For a GPU, the block is pinned, without the
    rounding to a power of two of torch's allocator. The system commits its pages at the first copy."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._device = device
        # Views of other dtypes must start at aligned addresses.
        starts = np.cumsum([0] + [-(-tensor.nbytes // 16) * 16 for tensor in tensors.values()]).tolist()
        memory = mmap.mmap(-1, max(1, starts[-1]))
        # Use huge pages if the kernel has them: it creates them several times faster.
        with suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        if device.type == "cuda":
            cudart: Any = torch.cuda.cudart()
            registered = cudart.cudaHostRegister(self._memory.data_ptr(), self._memory.nbytes, 0)
            torch.cuda.check_error(int(registered))
        self.copies = {
            name: self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, (name, tensor) in zip(starts, tensors.items(), strict=False)
        }
        """Maps the names of the tensors to uninitialized tensors of their shapes."""

    def close(self) -> None:
        """Unpin the block. Its tensors stay usable."""
        if self._device.type == "cuda":
            cudart: Any = torch.cuda.cudart()
            cudart.cudaHostUnregister(self._memory.data_ptr())


class HostCopies:
    """A model and its optimizer's state on the host, while other groups use the GPU. A tensor's copy
    has the same pinned memory in every turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: list[PinnedBlock] = []
        self._copies: dict[str, Tensor] = {}
        self._current: set[str] = set()
        """Frozen parameters whose copy has their values."""

    def move(self, model: nn.Module, optimizer: Moments | None, device: torch.device) -> None:
        """Move all tensors to the GPU, or to the host, in place. FSDP must have resharded the model."""
        parameters, state = dict(model.named_parameters()), optimizer.held() if optimizer else {}
        own = {**parameters, **dict(model.named_buffers())}
        held = {name: t for name, t in own.items() if local_part(t).device.type != device.type}
        held |= {f"{_STATE}{name}": tensor for name, tensor in state.items()}
        if device.type == "cpu":
            frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
            parts = self._to_host(held, frozen)
        else:
            parts = {n: local_part(t).to(device, non_blocking=True) for n, t in held.items()}
        # Before the host reads a copy, or overwrites it.
        torch.cuda.synchronize(self._device)
        moved = {t: lying_as(t, parts[name]) for name, t in own.items() if name in parts}
        # FSDP registers new local parts only in `_apply`, which may call the function on gradients.
        model._apply(lambda tensor: moved[tensor] if tensor in moved else tensor.to(device))
        if optimizer is not None:
            optimizer.replace({name: parts[f"{_STATE}{name}"] for name in state})

    def _to_host(self, tensors: Mapping[str, Tensor], frozen: Collection[str]) -> dict[str, Tensor]:
        parts = {name: local_part(tensor) for name, tensor in tensors.items()}
        if new := {name: part for name, part in parts.items() if name not in self._copies}:
            self._blocks.append(PinnedBlock(new, self._device))
            self._copies |= self._blocks[-1].copies
        for name, part in parts.items():
            if name not in self._current:
                self._copies[name].copy_(part, non_blocking=True)
        self._current |= parts.keys() & frozen
        return {name: self._copies[name] for name in parts}

    def forget_frozen(self) -> None:
        """Copy frozen parameters again in the next turn, because their values have changed."""
        self._current.clear()

    def close(self) -> None:
        for block in self._blocks:
            block.close()
