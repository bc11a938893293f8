"""Devices by the names that drivers give, and their peaks."""

import pytest

from weft.controllers.planner.devices import DEVICES, device, device_named
from weft.dataflow.errors import UserError


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_a_gpu_is_known_by_its_name(name: str, known: str | None):
    found = device_named(name)
    assert (found and found.name) == known


def test_every_device_has_rates_in_the_right_order():
    for name, one in DEVICES.items():
        assert one.name == name and device(name) is one
        assert one.flops["float32"] <= max(one.flops.values())
        assert one.memory_bandwidth >= one.node_bandwidth >= one.network_bandwidth > 0
        assert one.node_bandwidth >= one.host_bandwidth > 0
        # More than a byte for every thousand operations, and less than one for every ten.
        assert 1e-3 < one.memory_bandwidth / max(one.flops.values()) < 0.1


def test_unknown_devices_and_dtypes_are_named():
    with pytest.raises(
        UserError, match=r"no device is called 'H10'; did you mean 'H100'\? \(devices: H100,"
    ):
        device("H10")
    with pytest.raises(UserError, match="device 'CPU' has no peak for dtype 'bfloat16'; it has float32"):
        device("CPU").peak_flops("bfloat16")
