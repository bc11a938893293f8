"""Requests to the driver of a run, as files in the run's directory, on whichever machine the driver is.

    runs/NAME/stop.json      {"epoch": 3, "at": 1763851200.2, "host": "node-7"}        end the run
    runs/NAME/stacks.json    {"epoch": 3, "at": 1763851200.2, "worker": "actor[0]"}    say in `live.json` where a worker stands

The driver that holds the run under that epoch heeds a request once. No later one does: a run that is resumed is not stopped by an old
request. No process is signalled, so that none can be hit that only has the same number.
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
"""Seconds between two looks for a request to end."""


def request_stop(run: Path, epoch: int) -> None:
    """Ask the driver that holds a run under an epoch to end it.

    Args:
        run: its directory.
        epoch: of the holder.

    Raises:
        OSError: this user may not write there.
    """
    _request(run / STOP, epoch, host=platform.node())


def request_stacks(run: Path, epoch: int, worker: str) -> None:
    """Ask the driver that holds a run under an epoch where a worker stands.

    Args:
        run: its directory.
        epoch: of the holder.
        worker: such as `actor[0]`.

    Raises:
        OSError: this user may not write there.
    """
    _request(run / STACKS, epoch, worker=worker)


def _request(path: Path, epoch: int, **asked: str) -> None:
    Disk().write_whole(path, json.dumps({"epoch": epoch, "at": time.time(), **asked}).encode() + b"\n")


class RunRequests:
    """Requests of one kind, as the driver of a run sees them.

    Args:
        path: of their file.
        epoch: of this driver.
    """

    def __init__(self, path: Path, epoch: int) -> None:
        self._path, self._epoch = path, epoch
        self._heeded: Any = None

    def new(self) -> Mapping[str, Any] | None:
        """The request that has come since the last look; None: there is none."""
        with suppress(OSError, ValueError):  # there is none, mostly
            asked = read_json(self._path)
            if asked.get("epoch") == self._epoch and asked != self._heeded:
                self._heeded = asked
                return asked
        return None


class StopRequests:
    """Requests to end a run, looked for at most every LOOK_S.

    Args:
        run: its directory.
        epoch: of this driver.
        clock: seconds, which only grow.
    """

    def __init__(self, run: Path, epoch: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests = RunRequests(run / STOP, epoch)
        self._clock = clock
        self._looked = -LOOK_S
        self._asked = False

    @property
    def asked(self) -> bool:
        """Whether the run was asked to end; what it says is at most LOOK_S old."""
        now = self._clock()
        if not self._asked and now - self._looked >= LOOK_S:
            self._looked = now
            self._asked = self._requests.new() is not None
        return self._asked


class StacksRequests:
    """Requests to say where workers stand.

    Args:
        run: its directory.
        epoch: of this driver.
    """

    def __init__(self, run: Path, epoch: int) -> None:
        self._requests = RunRequests(run / STACKS, epoch)

    def new(self) -> list[str]:
        """Workers that somebody has asked about since the last look."""
        asked = self._requests.new() or {}
        return [str(asked["worker"])] if "worker" in asked else []
