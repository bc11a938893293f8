"""vLLM's groups of ranks in the process of the tests, which several engines share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def experts_group() -> Iterator[None]:
    """A group for experts where an engine of a dense model, which needs none, has made the groups of this process."""
    from vllm.distributed import parallel_state

    missing = parallel_state.model_parallel_is_initialized() and parallel_state._EP is None
    if missing:
        parallel_state._EP = parallel_state.get_tp_group()
    try:
        yield
    finally:
        if missing:
            parallel_state._EP = None
