"""Where the sample buffer keeps its files in the directory of a run.

runs/NAME/buffer/ledger.log                       every event since the oldest checkpoint that is kept, or an earlier one
runs/NAME/buffer/history/ledger-*.log.zst         the events before that
runs/NAME/buffer/ledger-000000123456.checkpoint   the state at that position of the log
runs/NAME/buffer/segments/NODE/                   the columns of rows in flight, on each node
"""

from __future__ import annotations

from pathlib import Path

from .log import Position


def ledger_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of the ledgers in a buffer's folder, latest first."""
    return sorted(folder.glob("ledger-*.checkpoint"), reverse=True)


def checkpoint_path(folder: Path, position: Position) -> Path:
    """The checkpoint of this position of the log; it need not exist."""
    return folder / f"ledger-{position.offset:012d}.checkpoint"
