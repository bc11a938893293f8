"""Alerts: what a person has to know of a run, in `alerts.jsonl` of its directory: symptoms, deaths, replacements, memory that runs out.

    {"time": 1763851200.2, "step": 12, "name": "no_signal", "text": "...", "ends": false}

The file is appended to, a JSON object in each line, in the order in which things happened, over all starts of the run. docs/watching.md has
the table of names.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import UserError
from ..safe_files import open_file, parse_object
from ..untrusted_text import redacted
from .files import ALERTS

MOST_BYTES = 32 << 20
"""Most bytes of the alerts file that are read, the last: a damaged file may have any number."""
MAX_PENDING = 1000
"""Alerts that are kept while the file cannot be written; the oldest are given up."""


@dataclass(frozen=True)
class Alert:
    """One thing that a person has to know."""

    name: str
    """What it is, such as `no_signal` or `replaced`."""
    text: str
    """In words, with what to try."""
    step: int = 0
    """Steps that were over."""
    time: float = 0.0
    """Seconds since 1970."""
    ends: bool = False
    """Whether the run ended because of it."""


class Alerts:
    """Writes the alerts of a run.

    Args:
        run: its directory.
        clock: seconds since 1970.
    """

    def __init__(self, run: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = run / ALERTS, clock
        self._pending: deque[Alert] = deque(maxlen=MAX_PENDING)
        """Those that are not on the disk: it was full, say."""
        self.step = 0
        """Steps that are over."""

    def add(self, name: str, text: str, *, ends: bool = False) -> Alert:
        """Note something. If it cannot be written now, it is written with the next; an alert never ends a run."""
        alert = Alert(name, redacted(text), self.step, self._clock(), ends)
        self._pending.append(alert)
        self.flush()
        return alert

    def flush(self) -> None:
        """Write what could not be written before."""
        if not self._pending:
            return
        lines = "".join(f"{json.dumps(asdict(alert))}\n" for alert in self._pending)
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:
            return
        try:
            self._append(descriptor, lines.encode())
        except OSError:
            return
        finally:
            os.close(descriptor)
        self._pending.clear()

    @staticmethod
    def _append(descriptor: int, lines: bytes) -> None:
        """Append lines completely, or not at all. What a killed process has left of a line is ended first."""
        before = os.fstat(descriptor).st_size
        torn = before > 0 and os.pread(descriptor, 1, before - 1) != b"\n"
        try:
            os.writev(descriptor, [b"\n" * torn, lines])
            if os.fstat(descriptor).st_size != before + torn + len(lines):
                raise OSError("the disk is full")
        except OSError:
            os.ftruncate(descriptor, before)
            raise


MAX_STEP = 1 << 53
"""A larger number of steps is damage: it is no exact number in a page."""


def read_alerts(run: Path) -> list[Alert]:
    """The alerts of a run, oldest first, those in the last MOST_BYTES of its file; none where it has none.

    A line that is no alert (torn by a full disk, say) is left out.

    Args:
        run: its directory.
    """
    try:
        with open_file(run / ALERTS) as file:
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
    """Whether what a line says is what a driver writes: anybody may have edited it."""
    named = isinstance(alert.name, str) and isinstance(alert.text, str)
    counted = isinstance(alert.step, int) and 0 <= alert.step <= MAX_STEP
    return named and counted and isinstance(alert.time, int | float) and math.isfinite(alert.time)
