"""StopRequest: a file in a run's directory that asks its driver to end the run, on whichever machine it is.

    runs/NAME/stop.json    {"epoch": 3, "host": "node-7", "at": "2026-11-22 04:20:15 UTC"}

The driver that holds the run under that epoch heeds it, and no later one: a run that is resumed is not stopped by an old request. No
process is signalled, so that none can be hit that only has the same number.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..dataflow.buffer.disk import Disk
from ..dataflow.buffer.run_files import STOP

LOOK_S = 1.0
"""Seconds between two looks at the file."""


@dataclass(frozen=True)
class StopOnSignal:
    """The `stop` of a run that ends after the step in which a signal came. It looks at no metric, so no step waits for an evaluation."""

    noted: Callable[[], int]
    """The signal that has come; 0: none."""

    def __call__(self, metrics: Mapping[str, float]) -> bool:
        return bool(self.noted())


def request_stop(run: Path, epoch: int) -> None:
    """Ask the driver that holds a run under an epoch to end it.

    Args:
        run: its directory.
        epoch: of the holder.

    Raises:
        OSError: this user may not write there.
    """
    asked = {
        "epoch": epoch,
        "host": platform.node(),
        "at": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }
    Disk().write_whole(run / STOP, json.dumps(asked).encode() + b"\n")


class StopRequests:
    """What the driver of a run looks at.

    Args:
        run: its directory.
        epoch: of this driver.
        clock: seconds, which only grow.
    """

    def __init__(self, run: Path, epoch: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = run / STOP
        self._epoch = epoch
        self._clock = clock
        self._looked = -LOOK_S
        self._asked = False

    @property
    def asked(self) -> bool:
        """Whether the run was asked to end; what it says is at most LOOK_S old."""
        now = self._clock()
        if not self._asked and now - self._looked >= LOOK_S:
            self._looked = now
            with suppress(OSError, ValueError, TypeError, KeyError):  # there is none, mostly
                self._asked = json.loads(self._path.read_text())["epoch"] == self._epoch
        return self._asked
