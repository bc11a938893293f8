"""Containment: run the attacks of the tests in the sandbox that this machine has, and time it."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "workers"))


def measure(repeats: int = 20) -> dict[str, float]:
    from attacks import contained  # pyright: ignore[reportMissingImports]

    from weft.workers.sandbox import Sandbox, working_engine

    engine = working_engine()
    number = 0
    for name, error in contained(engine):
        number += error is None
        print(
            f"{name}: {'contained' if error is None else f'NOT CONTAINED: {error}'} ({engine})",
            flush=True,
        )
    starts_s: list[float] = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        with Sandbox(engine=engine) as sandbox:
            sandbox.run(["true"])
            starts_s.append(time.perf_counter() - started_s)
    runs_s: list[float] = []
    with Sandbox(engine=engine) as sandbox:
        for _ in range(repeats):
            started_s = time.perf_counter()
            sandbox.run(["true"])
            runs_s.append(time.perf_counter() - started_s)
    return {
        "contained": number,
        "sandbox_start_ms": round(1000 * statistics.median(starts_s), 1),
        "sandbox_run_ms": round(1000 * statistics.median(runs_s), 1),
    }
