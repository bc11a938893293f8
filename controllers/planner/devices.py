"""Devices: peaks and bandwidths from the vendors' data sheets, for costs without a run.

device_named("NVIDIA H100 80GB HBM3").peak_flops("bfloat16")
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...dataflow.errors import UserError, nearest

_TERA = 1e12


@dataclass(frozen=True)
class Device:
    """One GPU, or one core of a CPU. All rates are peaks, which no program reaches."""

    name: str
    memory_bytes: float
    memory_bandwidth: float
    """[bytes/s]"""
    flops: Mapping[str, float]
    """Dtype -> [FLOP/s] of dense matrix products; "float32" without TF32, as torch computes by default."""
    node_bandwidth: float
    """[bytes/s] To another device of the same node, in one direction."""
    host_bandwidth: float
    """[bytes/s] To the host's memory, in one direction."""
    network_bandwidth: float = 50e9
    """[bytes/s] To a device of another node, in one direction: one port of 400 Gbit/s for each GPU, as
    in NVIDIA's reference systems. Clusters differ."""

    def peak_flops(self, dtype: str) -> float:
        """Return the peak for a dtype. Raises a UserError if it is unknown."""
        if dtype not in self.flops:
            raise UserError(
                f"device {self.name!r} has no peak for dtype {dtype!r}; it has {', '.join(self.flops)}"
            )
        return self.flops[dtype]


def _rates(half: float, single: float) -> dict[str, float]:
    """Return dtype -> FLOP/s, from [TFLOP/s] of 16-bit and of float32 products."""
    return {"bfloat16": half * _TERA, "float16": half * _TERA, "float32": single * _TERA}


# NVIDIA states NVLink and PCIe in both directions together; the table has half of that. Peaks are
# dense, which is half of a figure with sparsity.

DEVICES = {
    # H100 data sheet, SXM5 with 80 GB: 1,979 TFLOP/s in bfloat16 with sparsity, 67 in float32, 3.35 TB/s,
    # NVLink 900 GB/s, PCIe 5 128 GB/s
    "H100": Device("H100", 80e9, 3.35e12, _rates(989.5, 67), 450e9, 64e9),
    # H100 data sheet, PCIe with 80 GB: 1,513 TFLOP/s with sparsity, 51, 2 TB/s, NVLink bridge 600 GB/s
    "H100 PCIe": Device("H100 PCIe", 80e9, 2e12, _rates(756.5, 51), 300e9, 64e9),
    # H100 data sheet, NVL with 94 GB: 1,671 TFLOP/s with sparsity, 60, 3.9 TB/s, NVLink bridge 600 GB/s
    "H100 NVL": Device("H100 NVL", 94e9, 3.9e12, _rates(835.5, 60), 300e9, 64e9),
    # H200 data sheet, SXM: 1,979 TFLOP/s with sparsity, 67, 141 GB, 4.8 TB/s, NVLink 900 GB/s
    "H200": Device("H200", 141e9, 4.8e12, _rates(989.5, 67), 450e9, 64e9),
    # H20, as resellers list it; NVIDIA publishes no data sheet: 148 TFLOP/s, 44, 96 GB, 4 TB/s, NVLink 900 GB/s
    "H20": Device("H20", 96e9, 4e12, _rates(148, 44), 450e9, 64e9),
    # B200 in the data sheet of DGX B200, for one of eight: 4.5 PFLOP/s with sparsity, 75, 180 GB, 8 TB/s,
    # NVLink 1.8 TB/s
    "B200": Device("B200", 180e9, 8e12, _rates(2250, 75), 900e9, 64e9),
    # A100 data sheet, SXM with 80 GB: 312 TFLOP/s dense, 19.5, 2,039 GB/s, NVLink 600 GB/s, PCIe 4 64 GB/s.
    # The one with 40 GB has 1,555 GB/s.
    "A100": Device("A100", 80e9, 2.039e12, _rates(312, 19.5), 300e9, 32e9, 25e9),
    # L40S data sheet: 362.05 TFLOP/s dense, 91.6, 48 GB, 864 GB/s; no NVLink, PCIe 4 64 GB/s
    "L40S": Device("L40S", 48e9, 864e9, _rates(362.05, 91.6), 32e9, 32e9, 25e9),
    # One core of the machine of docs/benchmarks.md (AMD EPYC with AVX-512), measured: products of two
    # matrices in float32, and copies in memory while the machine was busy. Other CPUs differ by several
    # times. The network is one of 10 Gbit/s, assumed.
    "CPU": Device("CPU", 12e9, 8.3e9, {"float32": 104e9}, 8.3e9, 8.3e9, 1.25e9),
}
"""Name -> device. `device_named` also takes the name that a driver reports."""


def device_named(name: str) -> Device | None:
    """Return the device with this name, in the table or as the driver gives it, or None.

    >>> [found and found.name for found in map(device_named, ("NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", "CPU"))]
    ['H100', None, 'CPU']
    """
    if "MIG" in name:  # a slice of a GPU
        return None
    found = [key for key in DEVICES if all(re.search(rf"\b{part}\b", name) for part in key.split())]
    return DEVICES[max(found, key=len)] if found else None


def device(name: str) -> Device:
    """Return a device of the table. Raises a UserError that lists them."""
    if (found := device_named(name)) is None:
        raise UserError(
            f"no device is called {name!r}{nearest(name, DEVICES)} (devices: {', '.join(DEVICES)})"
        )
    return found
