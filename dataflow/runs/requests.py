"""Requests to a run's driver, as files in the run directory, so that they work from any machine.

    runs/NAME/stop.json      {"epoch": 3, "at": 1763851200.2, "host": "node-7"}        end the run
    runs/NAME/stacks.json    {"epoch": 3, "at": 1763851200.2, "worker": "actor[0]"}    write a worker's stack to `live.json`

The driver with this epoch handles the request once. Other drivers ignore it, so that an old request
does not stop a resumed run. Files are safer than signals, because another process may have reused
the driver's pid.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..safe_files import read_json
from .files import STACKS, STOP, Disk

LOOK_S = 1.0
"""[s] Interval between the driver's checks for a stop request."""


def request_stop(run: Path, epoch: int) -> None:
    """Ask the driver with this epoch to end the run. Raises an OSError without write access."""
    _request(run / STOP, epoch, host=platform.node())


def request_stacks(run: Path, epoch: int, worker: str) -> None:
    """Ask the driver with this epoch for the stack of a worker, such as `actor[0]`. Raises an
    OSError without write access."""
    _request(run / STACKS, epoch, worker=worker)


def _request(path: Path, epoch: int, **asked: str) -> None:
    Disk().write_whole(path, json.dumps({"epoch": epoch, "at": time.time(), **asked}).encode() + b"\n")


class RunRequests:
    """Reads requests to the driver with this epoch."""

    def __init__(self, run: Path, epoch: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._epoch, self._clock = run, epoch, clock
        self._heeded: dict[str, Any] = {}
        """Last handled request, keyed by file name."""
        self._looked = -LOOK_S
        self._asked = False

    def new(self, file: str) -> Mapping[str, Any]:
        """Return the new request in a file; empty if there is none."""
        with suppress(OSError, ValueError):  # usually there is no file
            asked = read_json(self._run / file)
            # The file stays, so remember the request.
            if asked.get("epoch") == self._epoch and asked != self._heeded.get(file):
                self._heeded[file] = asked
                return asked
        return {}

    @property
    def stop_asked(self) -> bool:
        """Whether there is a request to end the run. Reads the file at most once every LOOK_S."""
        now = self._clock()
        if not self._asked and now - self._looked >= LOOK_S:
            self._looked = now
            self._asked = bool(self.new(STOP))
        return self._asked
