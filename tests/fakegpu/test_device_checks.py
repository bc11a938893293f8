"""The doctor's first checks and the devices of ranks, with torch's build for CUDA."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.fakegpu


def test_the_doctor_sees_all_gpus_and_copies_to_and_from_each(
    run_on_fake_gpu: Callable[..., dict[str, Any]],
):
    found = run_on_fake_gpu("device_checks.py", SHIM_GPUS=3, SHIM_SKIP=1)
    assert found["driver"]["GPUs"] == found["copies"]["GPUs"] == 3
    assert found["driver"]["CUDA of torch"].startswith("13.")
    speeds = [name for name in found["copies"] if "GB/s" in name]
    assert len(speeds) == 4 and all(found["copies"][name] > 0 for name in speeds)
    assert found["rank"] == "cuda:0"


def test_without_a_usable_gpu_ranks_and_the_doctor_give_torchs_reason_and_the_driver_it_needs(
    run_on_fake_gpu: Callable[..., dict[str, Any]],
):
    found = run_on_fake_gpu("device_checks.py", SHIM_GPUS=0)
    assert found["rank"].startswith(
        "rank 0 of 'actor' has GPU 0, but torch cannot use CUDA: No CUDA GPUs"
    )
    for said in (found["rank"], found["driver"]):
        assert "for CUDA 13.0 needs driver 580 or newer" in said
