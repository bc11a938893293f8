"""The NVIDIA driver of this machine, and whether it fits torch."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from ..dataflow.cgroups import text_of
from ..dataflow.lazy import torch

OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""Major CUDA version -> the oldest driver for Linux that runs it (NVIDIA's guide to CUDA minor
version compatibility)."""


def oldest_driver(cuda: str) -> int | None:
    """Return the oldest driver for a CUDA version, or None if unknown.

    >>> oldest_driver("12.8"), oldest_driver("13.0"), oldest_driver("")
    (525, 580, None)
    """
    major = cuda.partition(".")[0]
    return OLDEST_DRIVERS.get(int(major)) if major.isdigit() else None


def is_too_old(driver: str, cuda: str) -> bool:
    """Return whether a driver is known to be too old for a CUDA version.

    >>> is_too_old("550.54.15", "13.0"), is_too_old("550.54.15", "12.8"), is_too_old("580.65.06", "13.0")
    (True, False, False)
    """
    major, oldest = driver.partition(".")[0], oldest_driver(cuda)
    return major.isdigit() and oldest is not None and int(major) < oldest


def driver_version(root: Path = Path("/")) -> str:
    """Return the version of the loaded driver, such as "550.54.15", or "" without a driver."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    # The first line names the kernel module, and has no other number with a dot.
    found = re.search(r"^NVRM version:.*?\b(\d+\.\d+(?:\.\d+)?)\b", text, re.MULTILINE)
    return found[1] if found else ""


def gpu_model(root: Path = Path("/")) -> str:
    """Return the name of this machine's first GPU, such as "NVIDIA H100 80GB HBM3", or "" without one.
    Asks no library, because CUDA's state would not survive a fork."""
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        if found := re.search(r"^Model:\s*(.+?)\s*$", text_of(file), re.MULTILINE):
            return found[1]
    return ""


def cuda_of_driver(library: str = "libcuda.so.1") -> str:
    """Return the newest CUDA version that the driver's library runs, such as "12.4", or "". The library
    can be newer than the driver: NVIDIA's packages `cuda-compat` replace it."""
    number = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    return "" if failed or not number.value else f"{number.value // 1000}.{number.value % 1000 // 10}"


def reason_without_cuda(root: Path = Path("/")) -> str:
    """Return why torch cannot use this machine's GPUs: torch's error, the driver, and the driver that
    this build of torch needs."""
    try:
        torch.cuda.init()
        said = "it found no device"
    except Exception as error:
        said = " ".join(str(error).split()).rstrip(".")
    cuda, driver = torch.version.cuda or "", driver_version(root)
    if not cuda:
        fix = "install the packages of requirements/cuda.txt in a separate environment"
        return f"torch {torch.__version__} is built for CPUs ({said}); {fix} (docs/gpu.md)"
    there = f"the driver is {driver}" if driver else "no driver is loaded"
    oldest = oldest_driver(cuda)
    needed = f"driver {oldest} or newer" if oldest else "a driver for it"
    fix = (
        "; update the driver, or install packages for an older CUDA" if is_too_old(driver, cuda) else ""
    )
    return (
        f"{said} ({there}; torch {torch.__version__} for CUDA {cuda} needs {needed}{fix}; docs/gpu.md)"
    )
