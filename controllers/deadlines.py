"""Deadlines: how long a group may take to start, and a rank may be silent, where the user does not say: larger models take longer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..dataflow.errors import UserError
from ..dataflow.handle import Handle
from ..workers.model_folder import find_model_config
from .backends.backend import START_TIMEOUT_S

CALL_S = 600.0
"""Of silence, whatever the model."""
READ_BYTES_PER_S = 50e6
"""Slowest disk that a model is expected to be read from: one that many ranks share over a network."""
COPY_BYTES_PER_S = 200e6
"""Slowest copy of all parameters (to publish them, to take them over, to move them to host memory) that is expected."""


def model_bytes(handles: Iterable[Handle]) -> int:
    """Bytes of the files of the largest model of these groups; 0: none has a model in safetensors files."""
    return max((_stored_bytes(getattr(handle.config, "model", None)) for handle in handles), default=0)


def longest_start_s(num_bytes: int) -> float:
    """Longest wait for the workers of a group to be up.

    >>> longest_start_s(0), longest_start_s(140_000_000_000)
    (300.0, 3100.0)
    """
    return START_TIMEOUT_S + num_bytes / READ_BYTES_PER_S


def longest_silence_s(num_bytes: int) -> float:
    """Longest silence of a rank that was called.

    >>> longest_silence_s(0), longest_silence_s(140_000_000_000)
    (600.0, 1300.0)
    """
    return CALL_S + num_bytes / COPY_BYTES_PER_S


def set_deadlines(
    start_timeout_s: float | None, call_timeout_s: float | None, handles: Iterable[Handle]
) -> dict[str, float]:
    """The deadlines of a run: what the user says, or what its largest model suggests.

    Raises:
        UserError: there is no time to start.
    """
    if start_timeout_s is not None and not start_timeout_s > 0:
        raise UserError(f"Driver(start_timeout_s={start_timeout_s!r}): it is a number of seconds above 0")
    num_bytes = model_bytes(handles) if None in (start_timeout_s, call_timeout_s) else 0
    return {
        "start_timeout_s": longest_start_s(num_bytes) if start_timeout_s is None else start_timeout_s,
        "call_timeout_s": longest_silence_s(num_bytes) if call_timeout_s is None else call_timeout_s,
    }


def _stored_bytes(model: str | Path | None) -> int:
    if model is None:
        return 0
    try:
        folder = find_model_config(model).parent
    except UserError:  # whoever loads it says so
        return 0
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
