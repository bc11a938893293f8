"""Changes: which parts of a run's directory have changed since one looked last, by the times and sizes of its files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ...dataflow.buffer.run_files import (
    ALERTS,
    CHECKPOINTS,
    CONFIG,
    LIVE,
    LOCK,
    LOGS,
    METRICS,
    PARQUET,
    SAMPLES,
    STOP,
    STREAM,
    TIMELINE,
)

PARTS: Mapping[str, tuple[str, ...]] = {
    "metrics": (f"{METRICS}{STREAM}", f"{METRICS}{PARQUET}"),
    "timeline": (f"{TIMELINE}{STREAM}", f"{TIMELINE}{PARQUET}"),
    "samples": (SAMPLES,),
    "live": (LIVE,),
    "alerts": (ALERTS,),
    "status": (LOCK, CONFIG, STOP),
    "checkpoints": (CHECKPOINTS,),
    "logs": (LOGS,),
}
"""Part of a run -> its files and folders; that of a folder changes with its entries."""


def state_of(run: Path) -> dict[str, object]:
    """Part -> something that is another value when the part has changed."""
    return {part: tuple(_stat(run / name) for name in names) for part, names in PARTS.items()}


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def changed(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """The parts that differ.

    >>> changed({"metrics": 1, "live": 1}, {"metrics": 2, "live": 1})
    ['metrics']
    """
    return [part for part, value in now.items() if before.get(part) != value]
