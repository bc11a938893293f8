"""vLLM's process group for tests of its models, and models as a rank of a larger group builds
them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm_groups import experts_group

if TYPE_CHECKING:
    from vllm_models import Ranks

sys.path.insert(0, str(Path(__file__).parent))  # for imports of `dying` and `vllm_models`


@pytest.fixture(scope="module")
def group(inspects_models_here: None) -> Iterator[Any]:
    """vLLM's tensor-parallel group of one rank, shared with any engine in this process."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    set_num_threads = torch.set_num_threads
    from torch._C._distributed_c10d import HashStore
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    own = not parallel_state.model_parallel_is_initialized()
    if own:
        with set_current_vllm_config(VllmConfig()):
            store = HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            parallel_state.init_distributed_environment(1, 0, local_rank=0, backend="gloo")
            parallel_state.initialize_model_parallel(1)
    with experts_group():
        yield parallel_state.get_tp_group()
    if own:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    torch.set_num_threads = set_num_threads


@pytest.fixture
def ranks(group: Any, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    from vllm_models import Ranks

    return Ranks(group, monkeypatch)
