"""Each checkpoint compares the replicated tensors of tensor-parallel ranks."""

from pathlib import Path

import pytest
import torch
from alike_ranks import main
from ranks import run_processes

from weft.workers.training.sharding import differing, digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_one_element_on_one_rank_is_found(dtype: torch.dtype):
    embedding, norm = torch.ones(50, 4, dtype=dtype), torch.ones(4, dtype=dtype)
    changed = embedding.clone()
    changed[7, 2] = 2
    ranks = [torch.stack([digest(one), digest(norm)]) for one in (embedding, changed, embedding)]
    assert differing(["embedding", "norm"], ranks) == ["embedding"]
    assert differing(["embedding", "norm"], [ranks[0], ranks[2]]) == []


@pytest.mark.slow
def test_ranks_that_are_apart_are_named_and_rounding_is_mended(tmp_path: Path):
    run_processes(main, tmp_path, 2)
