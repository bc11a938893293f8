"""A driver that torch cannot use is named, with the driver that torch needs."""

from pathlib import Path

import pytest
import torch

from weft.workers.cuda_driver import driver_version, gpu_model, reason_without_cuda

PROPRIETARY = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
)
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)\n"
)
COMPILER = "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"


def machine(root: Path, version: str) -> Path:
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/driver/nvidia/version").write_text(version + COMPILER)
    return root


@pytest.mark.parametrize(
    ("text", "version"), [(PROPRIETARY, "535.104.05"), (OPEN, "580.65.06"), ("", "")]
)
def test_the_version_of_the_loaded_driver_is_read(text: str, version: str, tmp_path: Path):
    assert driver_version(tmp_path) == ""
    assert driver_version(machine(tmp_path, text)) == version


def test_the_name_of_the_first_gpu_is_read(tmp_path: Path):
    assert gpu_model(tmp_path) == ""
    for bus in ("0000:1b:00.0", "0000:5d:00.0"):
        folder = tmp_path / "proc/driver/nvidia/gpus" / bus
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 16\n")
    assert gpu_model(tmp_path) == "NVIDIA H100 80GB HBM3"


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA")
def test_a_build_for_cpus_is_named(tmp_path: Path):
    why = reason_without_cuda(machine(tmp_path, OPEN))
    assert why.startswith(f"torch {torch.__version__} is built for CPUs (Torch not compiled with CUDA")
    assert "requirements/cuda.txt" in why


def test_an_old_driver_is_named_with_the_one_that_torch_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def too_old() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 12020).\nUpdate it."
        )

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", too_old)
    assert reason_without_cuda(machine(tmp_path, PROPRIETARY)) == (
        "The NVIDIA driver on your system is too old (found version 12020). Update it (the driver is 535.104.05; "
        f"torch {torch.__version__} for CUDA 13.0 needs driver 580 or newer; update the driver, or install packages "
        "for an older CUDA; docs/gpu.md)"
    )
