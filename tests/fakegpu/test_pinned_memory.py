"""Pinned host memory of ranks, as torch's real allocator takes it."""

from collections.abc import Callable
from typing import Any

import pytest

from weft.controllers.backends.rank import allocator_settings
from weft.dataflow.graph import group
from weft.workers.rollout import RolloutWorker

pytestmark = pytest.mark.fakegpu


def test_large_pinned_blocks_of_a_rank_have_their_exact_size(
    run_on_fake_gpu: Callable[..., dict[str, Any]],
):
    rollout: Any = group(RolloutWorker, model="m")
    made = run_on_fake_gpu("pinned_blocks.py", **allocator_settings(rollout, {}))
    assert made["large"] == 48 + 192 + 96 + 1187
    assert made["freed"] == 0 and not made["reuses_smaller"]


def test_torch_serves_large_requests_from_smaller_blocks_if_it_keeps_blocks_of_exact_size(
    run_on_fake_gpu: Callable[..., dict[str, Any]],
):
    """If this fails, torch compares sizes, and `allocator_settings` needs no limit on kept blocks."""
    plain = run_on_fake_gpu("pinned_blocks.py", PYTORCH_ALLOC_CONF="")
    assert plain["large"] == 64 + 256 + 128 + 2048
    alone = run_on_fake_gpu("pinned_blocks.py", PYTORCH_ALLOC_CONF="pinned_max_round_threshold_mb:16")
    assert alone["reuses_smaller"]
