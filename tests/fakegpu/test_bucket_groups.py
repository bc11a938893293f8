"""The process groups, copies and memory of weights that go from GPU to GPU."""

from collections.abc import Callable
from typing import Any

import pytest

CHUNK = 16 << 20
OWN_BYTES = (24_576 + 64) * 1024 * 2 // 2
"""Bytes of one rank's half of the rows, as bfloat16."""


@pytest.mark.fakegpu
@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_one_nccl_group_serves_all_versions_and_no_bucket_passes_through_the_host(
    transport: str, run_on_fake_gpu: Callable[..., dict[str, Any]]
) -> None:
    found = run_on_fake_gpu("bucket_groups.py", TRANSPORT=transport, SHIM_GPUS=2)
    for rank in found["trainer"]:
        assert rank["groups"] == ["ProcessGroupNCCL"], "kept from version to version"
        assert OWN_BYTES <= rank["to_gpu"] <= 1.01 * OWN_BYTES, "each rank copies its own parts once"
        assert rank["from_gpu"] < 1 << 16
        buckets = 2 * 2 * CHUNK  # two buckets, each with a chunk of both ranks
        assert buckets <= rank["held"] < buckets + (1 << 20)
    for receiver in found["receivers"]:
        maps = transport == "ipc"
        assert receiver["groups"] == ([] if maps else ["ProcessGroupNCCL"])
        assert receiver["maps_own_gpu"] == [True] * (3 if maps else 0), "one map of each version"
        assert receiver["to_gpu"] < 1 << 16 and receiver["from_gpu"] < 1 << 16
        # Its own parts stay; its memory for a bucket does not.
        assert receiver["held"] < OWN_BYTES + CHUNK


@pytest.mark.fakegpu
def test_memory_of_a_transfer_goes_back_to_the_gpu(
    run_on_fake_gpu: Callable[..., dict[str, Any]],
) -> None:
    assert run_on_fake_gpu("released_memory.py", SHIM_SKIP=1) == {"cached": 256 << 20, "released": 0}
