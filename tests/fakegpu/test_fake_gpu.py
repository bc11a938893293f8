from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.fakegpu
def test_the_real_allocator_serves_the_fake_gpu(run_on_fake_gpu: Callable[..., dict[str, Any]]) -> None:
    made = run_on_fake_gpu("one_allocation.py")
    assert made["device"] == "cuda:0"
    assert made["allocated"] == 4 << 20
    # torch takes blocks of 20 MiB from the device for tensors of 1 to 10 MiB.
    assert made["on_device"] == 20 << 20
