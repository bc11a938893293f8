"""What tensor-parallel ranks hold alike is compared at each checkpoint."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weft.workers.replicas import differing, digest

HERE = Path(__file__).parent


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
    command = [sys.executable, str(HERE / "alike_ranks.py"), str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(r)], stderr=subprocess.PIPE, text=True) for r in range(2)]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors)
