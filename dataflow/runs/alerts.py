"""Alerts of a run, such as symptoms (`controllers/reports/symptoms.py`), dead processes and low
memory, in the file `alerts.jsonl` of the run directory.

    {"time": 1763851200.2, "step": 12, "name": "no_signal", "text": "...", "ends": false}

All starts of a run append to the same file. docs/watching.md lists the names.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import UserError
from ..safe_files import open_file, parse_object
from ..untrusted_text import redacted
from .files import ALERTS

MOST_BYTES = 32 << 20
"""[bytes] Maximum size to read, from the end of the file."""
MAX_PENDING = 1000
"""Maximum number of alerts to keep while the file cannot be written; drops the oldest."""


@dataclass(frozen=True)
class Alert:
    """An event that the user should know about."""

    name: str
    text: str
    step: int = 0
    """Number of finished steps at that time."""
    time: float = 0.0
    """[s] Unix time."""
    ends: bool = False
    """Whether the alert ended the run."""


class Alerts:
    """Writes the alerts of a run."""

    def __init__(self, run: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = run / ALERTS, clock
        self._pending: deque[Alert] = deque(maxlen=MAX_PENDING)
        """Alerts that could not be written yet."""
        self.step = 0
        """Number of finished steps."""

    def report(self, name: str, text: str, *, ends: bool = False) -> Alert:
        """Write an alert, or keep it for the next call if that fails. Never raises an error."""
        alert = Alert(name, redacted(text), self.step, self._clock(), ends)
        self._pending.append(alert)
        self.flush()
        return alert

    def flush(self) -> None:
        if not self._pending:
            return
        lines = "".join(f"{json.dumps(asdict(alert))}\n" for alert in self._pending).encode()
        with suppress(OSError):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                _append(descriptor, lines)
            finally:
                os.close(descriptor)
            self._pending.clear()


def _append(descriptor: int, lines: bytes) -> None:
    """Append all lines or none. End a partial line that a killed process left."""
    before = os.fstat(descriptor).st_size
    torn = before > 0 and os.pread(descriptor, 1, before - 1) != b"\n"
    try:
        # Use one system call, so that a kill leaves at most one partial line.
        os.writev(descriptor, [b"\n" * torn, lines])
        if os.fstat(descriptor).st_size != before + torn + len(lines):
            raise OSError("the disk is full")
    except OSError:
        os.ftruncate(descriptor, before)
        raise


MAX_STEP = 1 << 53
"""Maximum step of a valid line. JavaScript cannot represent larger numbers exactly."""


def read_alerts(run: Path) -> list[Alert]:
    """Return the alerts in the last MOST_BYTES of a run's file, oldest first; empty if there is no
    file. Skips invalid lines."""
    try:
        with open_file(run / ALERTS) as file:
            # This may start inside a line, which is then skipped as invalid.
            file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_BYTES))
            lines = file.read(MOST_BYTES).decode(errors="replace").splitlines()
    except (OSError, UserError):
        return []
    found: list[Alert] = []
    for line in lines:
        try:
            alert = Alert(**parse_object(line, run / ALERTS))
        except (ValueError, TypeError):
            continue
        if _is_sound(alert):
            found.append(alert)
    return found


def _is_sound(alert: Alert) -> bool:
    """Return whether an alert's fields are valid. A user may have edited the file."""
    named = isinstance(alert.name, str) and isinstance(alert.text, str)
    counted = isinstance(alert.step, int) and 0 <= alert.step <= MAX_STEP
    return named and counted and isinstance(alert.time, int | float) and math.isfinite(alert.time)
