"""The duration of `weft --help`, in separate processes."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time


def measure(rounds: int = 9) -> dict[str, float]:
    """Return milliseconds of the fastest run, and the median."""
    command = [sys.executable, "-m", "weft", "--help"]
    took: list[float] = []
    for _ in range(rounds):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        took.append(1e3 * (time.perf_counter() - started))
    return {"help_ms": round(min(took), 1), "help_median_ms": round(statistics.median(took), 1)}
