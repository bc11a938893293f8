"""Checks of `weft doctor --try` and `--gpu` on the machine: driver, packages, resources, collectives and
copies."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...dataflow.byte_units import GIB, MIB
from ...dataflow.cgroups import usable_cpus
from ...workers.cuda_driver import cuda_of_driver, driver_version, reason_without_cuda
from ...workers.node_memory import node_memory
from .trials import Case, Figures, Trial


def driver(case: Case) -> Figures:
    """Check that torch can use the GPUs."""
    with case.phase("import torch"):
        import torch
    figures: dict[str, float | str] = {
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "none",
    }
    if not case.gpu:
        return figures
    with case.phase("start CUDA"):
        if not torch.cuda.is_available():
            error = AssertionError(reason_without_cuda())
            if torch.version.cuda is None:
                error.add_note(INSTALL)
            raise error
    gpu = torch.cuda.get_device_properties(0)
    return {
        **figures,
        "driver": driver_version() or "unknown",
        "CUDA of the driver": cuda_of_driver() or "unknown",
        "GPUs": torch.cuda.device_count(),
        "first": torch.cuda.get_device_name(0),
        "GiB": round(gpu.total_memory / GIB, 1),
    }


def packages(case: Case) -> Figures:
    """Import the libraries of a run, each in its own process, and check that vLLM sees the GPUs."""
    names = ["transformers", "ray", "datasets"]
    programs = {name: f"import {name}; print({name}.__version__)" for name in names}
    if case.gpu or find_spec("vllm") is not None:
        of_vllm = "from vllm import __version__ as v; from vllm.platforms import current_platform as p"
        programs["vllm"] = f"{of_vllm}; print(v, p.device_name)"
    figures: dict[str, float | str] = {}
    for name, program in programs.items():
        said = case.python(f"import {name}", "-c", program)
        figures[name] = said.strip().rpartition("\n")[2]
    if case.gpu:
        runs_on = str(figures["vllm"]).rpartition(" ")[2]
        assert runs_on == "cuda", f"vLLM runs on {runs_on!r}, not on 'cuda'"
        ready = any(map(find_spec, ("flashinfer_cubin", "flashinfer_jit_cache")))
        figures["FlashInfer's kernels"] = "installed" if ready else "compiled when first used"
        figures["nvcc"] = shutil.which("nvcc") or "none"
    return figures


def resources(case: Case, root: Path = Path("/")) -> Figures:
    """Check CPUs and host memory for each GPU, and shared memory. The limits are below the expected
    sizes."""
    from ..node_layout import machine_gpus

    gpus = machine_gpus() if case.gpu else 0
    cpus, memory = usable_cpus(root), node_memory(root)
    shared = shutil.disk_usage(root / "dev/shm").total / GIB
    limit = memory.limit_bytes / GIB if memory else 0.0
    figures: dict[str, float | str] = {
        "CPUs": cpus,
        "GiB in /dev/shm": round(shared, 1),
        "GiB of host memory": round(limit, 1),
        "GiB free": round(memory.free_bytes / GIB, 1) if memory else "unknown",
    }
    if gpus:
        assert cpus >= 2 * gpus, f"{cpus} CPUs for {gpus} GPUs"
        assert shared >= 1, f"/dev/shm has {shared:.2f} GiB"
        assert not limit or limit >= 8 * gpus, f"{limit:.0f} GiB of host memory for {gpus} GPUs"
    return figures


def collectives(case: Case) -> Figures:
    """Run the collectives of training: over all GPUs with NCCL, or over two processes with gloo."""
    if case.gpu:
        import torch

        ranks = torch.cuda.device_count()
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = given.split(",") if given else [str(rank) for rank in range(ranks)]
    else:
        ranks, devices = 2, []
    collect = partial(_collect, f"file://{case.folder}/rendezvous", ranks, devices)
    with (
        case.phase("processes, connections and all-reduce"),
        multiprocessing.get_context("spawn").Pool(ranks) as pool,  # CUDA does not survive a fork
    ):
        # This raises a rank's error at once, even while other ranks wait for it.
        found = pool.imap_unordered(collect, range(ranks))
        times = [found.next(timeout=COLLECTIVES_S - 20) for _ in range(ranks)]
    small, large = (max(each) for each in zip(*times, strict=True))
    # Bytes that each link carries in an all-reduce, as in NVIDIA's nccl-tests.
    speed = 2 * (ranks - 1) / ranks * _LARGE[bool(devices)] / large / 1e9
    figures: dict[str, float | str] = {
        "ranks": ranks,
        "backend": "nccl" if case.gpu else "gloo",
        "small all-reduce (ms)": round(1e3 * small, 1),
        "large all-reduce (ms)": round(1e3 * large, 1),
        "bus (GB/s)": round(speed, 1),
    }
    slow = case.gpu and ranks > 1 and speed < 10
    assert not slow, f"an all-reduce of 1 GiB moves {speed:.1f} GB/s on each link"
    return figures


COLLECTIVES_S = 240
"""[s] Deadline of the check of collectives."""
_SMALL, _LARGE = {False: 4 * MIB, True: 64 * MIB}, {False: 16 * MIB, True: GIB}
"""[bytes] Sizes of the all-reduces: on CPUs, and on GPUs."""


def _collect(rendezvous: str, ranks: int, devices: Sequence[str], rank: int) -> tuple[float, float]:
    """Check the collectives on one rank, which sees only its own GPU, as in a run. Return the seconds
    of a small and of a large all-reduce."""
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[rank]
    import torch
    import torch.distributed as dist

    device = torch.device("cuda" if devices else "cpu")
    backend = "nccl" if devices else "gloo"
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=ranks)
    seconds: list[float] = []
    for num_bytes in (_SMALL[bool(devices)], _LARGE[bool(devices)]):
        numbers = torch.full((num_bytes // 4,), float(rank + 1), device=device)
        dist.all_reduce(numbers)
        expected = ranks * (ranks + 1) / 2
        wrong = f"rank {rank}: the sum over ranks is {numbers[0]}, not {expected}"
        assert bool((numbers == expected).all()), wrong
        # The first all-reduce also opened the connections.
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(numbers)
        if devices:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        del numbers
    parts = [torch.empty(1, device=device) for _ in range(ranks)]
    dist.all_gather(parts, torch.tensor([float(rank)], device=device))
    assert [int(part) for part in parts] == list(range(ranks)), f"rank {rank}: gathered {parts}"
    dist.destroy_process_group()
    return seconds[0], seconds[1]


_COPIED = {False: 64 * MIB, True: 2 * GIB}
"""[bytes] Size of a copy: on CPUs, and on GPUs."""


def copies(case: Case) -> Figures:
    """Copy between host and GPU memory, on all GPUs at the same time."""
    import torch

    num_bytes = _COPIED[case.gpu]
    gpus = torch.cuda.device_count() if case.gpu else 0
    devices = [torch.device("cuda", k) for k in range(gpus)] or [torch.device("cpu")]
    there = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for device in devices]
    figures: dict[str, float | str] = {"GPUs": gpus}
    for kind in ("pageable", "pinned") if case.gpu else ("pageable",):
        with case.phase(f"{kind} host memory"):
            here = [
                torch.empty(num_bytes, dtype=torch.uint8, pin_memory=kind == "pinned") for _ in there
            ]
            for one in here:
                one.fill_(1)  # the kernel provides pages at the first write
        for name, targets, sources in (("to", there, here), ("from", here, there)):
            with case.phase(f"copy {name} the device, {kind}"):
                seconds = _copy_all(targets, sources)
            figures[f"{kind}, {name} the device (GB/s)"] = round(num_bytes / seconds / 1e9, 1)
        del here
    slowest = min((v for name, v in figures.items() if "pinned" in name), default=None)
    assert slowest is None or float(slowest) > 4, f"pinned copies move {slowest} GB/s on each GPU"
    return figures


def _copy_all(targets: Sequence[Any], sources: Sequence[Any]) -> float:
    """Copy all pairs of tensors at the same time. Return the seconds of the slowest."""
    import torch

    def copy(target: Any, source: Any) -> None:
        target.copy_(source, non_blocking=True)
        gpu = target if target.is_cuda else source
        if gpu.is_cuda:
            torch.cuda.synchronize(gpu.device)

    threads = [threading.Thread(target=copy, args=pair) for pair in zip(targets, sources, strict=True)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


UPDATE = "update the driver, or install packages for an older CUDA (docs/gpu.md)"
INSTALL = "pip install --no-deps -r requirements/cuda.txt, in a separate environment"
HARDWARE = (
    Trial(
        "driver",
        "torch finds all GPUs; for CUDA 13, the driver is 580 or newer",
        UPDATE,
        driver,
        180,
    ),
    Trial(
        "packages",
        "all libraries can be imported, and vLLM runs on CUDA",
        INSTALL,
        packages,
        300,
        needs=("driver",),
    ),
    Trial(
        "resources",
        "for each GPU 4 CPUs and 32 GiB of host memory (fails below 2 and 8); 8 GiB in /dev/shm (fails below 1)",
        "raise the limits of the container (docker run --cpus --memory --shm-size=8g), or use fewer GPUs",
        resources,
        60,
        needs=("driver",),
    ),
    Trial(
        "collectives",
        "all-reduce over all GPUs: above 350 GB/s on 8 x H100 with NVLink, 10 to 50 GB/s over PCIe",
        "look for NCCL_P2P_DISABLE and NCCL_IB_DISABLE in the environment, and at nvidia-smi topo -m",
        collectives,
        COLLECTIVES_S,
        needs=("driver",),
    ),
    Trial(
        "copies",
        "pinned above 20 GB/s on each GPU (PCIe 4 or newer), pageable above 4 GB/s",
        "look at the PCIe link (nvidia-smi -q -d PCIE) and at other load; set offload to nothing",
        copies,
        240,
        needs=("driver",),
    ),
)
