"""StacksRequest: a file in a run's directory that asks its driver where the process of a worker stands.

    runs/NAME/stacks.json    {"epoch": 3, "worker": "actor[0]", "at": 1763851200.2}

The driver that holds the run under that epoch answers in `live.json`.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

from ..dataflow.buffer.disk import Disk
from ..dataflow.buffer.run_files import STACKS


def request_stacks(run: Path, epoch: int, worker: str) -> None:
    """Ask the driver that holds a run under an epoch where a worker stands.

    Args:
        run: its directory.
        epoch: of the holder.
        worker: such as `actor[0]`.

    Raises:
        OSError: this user may not write there.
    """
    asked = {"epoch": epoch, "worker": worker, "at": time.time()}
    Disk().write_whole(run / STACKS, json.dumps(asked).encode() + b"\n")


class StacksRequests:
    """What the driver of a run looks at.

    Args:
        run: its directory.
        epoch: of this driver.
    """

    def __init__(self, run: Path, epoch: int) -> None:
        self._path, self._epoch, self._answered = run / STACKS, epoch, 0.0

    def new(self) -> list[str]:
        """Workers that somebody has asked about since the last look."""
        with suppress(OSError, ValueError, TypeError, KeyError):  # there is none, mostly
            asked = json.loads(self._path.read_text())
            if asked["epoch"] == self._epoch and asked["at"] != self._answered:
                self._answered = asked["at"]
                return [str(asked["worker"])]
        return []
