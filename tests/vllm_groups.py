"""vLLM's process groups in the test process, shared by several engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def experts_group() -> Iterator[None]:
    """Add a group for experts if the engine of a dense model has created groups without one."""
    from vllm.distributed import parallel_state

    missing = parallel_state.model_parallel_is_initialized() and parallel_state._EP is None
    if missing:
        parallel_state._EP = parallel_state.get_tp_group()
    try:
        yield
    finally:
        if missing:
            parallel_state._EP = None
