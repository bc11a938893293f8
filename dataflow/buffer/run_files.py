"""Names of the files and folders in the directory of a run, `runs/NAME/`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

CONFIG = "config.json"
"""The resolved configuration."""
GRAPH, MERMAID = "graph.json", "graph.mmd"
"""The graphs, for programs and drawn."""
STREAM, PARQUET = ".arrows", ".parquet"
"""Suffixes of a table: while the run goes on, and once it is over."""
METRICS, TIMELINE, PROCESSES = "metrics", "timeline", "processes"
"""Tables, without their suffixes; the last one stays a stream."""
SAMPLES = "samples"
SAMPLES_ARCHIVE = "samples.parquet"
"""All samples, where somebody archived them."""
ALERTS = "alerts.jsonl"
LIVE = "live.json"
"""What the run looks like now."""
STOP, STACKS = "stop.json", "stacks.json"
"""What the driver is asked for."""
LOCK = "lock"
"""The driver that holds the run, and those before it."""
CHECKPOINTS = "checkpoints"
SKIPPED = "skipped"
"""Rows of bad optimizer steps, by worker group."""
TRACKERS = "trackers"
"""What each tracker has taken of the metrics."""
LOGS = "logs"
"""A log for each worker, tracker and dashboard."""
BUFFER = "buffer"
"""The sample buffer; in it:"""
LOG = "ledger.log"
SEGMENTS = "segments"

LEFT = (
    LOCK,
    BUFFER,
    *(name + suffix for name in (METRICS, TIMELINE) for suffix in (STREAM, PARQUET)),
    ALERTS,
    SAMPLES_ARCHIVE,
    f"{SAMPLES}/*.arrow",
    f"{CHECKPOINTS}/step_*",
)
"""What shows that a folder is a run's. The folder of a model has a `config.json`, too, so that one proves nothing."""


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run, or a part of one; False where it is not there, or may not be read."""
    with suppress(OSError):
        return any(list(folder.glob(name)) for name in LEFT)
    return False
