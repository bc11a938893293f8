"""FullDisk: pauses a run on a full disk instead of ending it, and retries its writes.

All starts of a run share one instance, which reports each pause only once.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ...dataflow.errors import RunError
from ...dataflow.runs.files import MAX_PAUSE_S, PAUSE_S, is_full
from ..reports.progress import Progress
from ..signals import asked_to_end

T = TypeVar("T")

REPORT_AGAIN_S = 60.0
TRY_AGAIN_S = 60.0
"""[s] Longest wait before the retry of a failed write."""
SOME_BYTES = 1 << 20
"""[bytes] Additional free space that makes a retry worthwhile."""


class FullDisk:
    def __init__(self, folder: Path, progress: Progress) -> None:
        self._folder = folder
        self._progress = progress
        self._paused = False
        self._said = self._waited = -math.inf
        self._since = 0.0
        self._free = math.inf
        """[bytes] Free space when a pause was last reported or waited out."""

    def report_pause(self, why: str) -> None:
        """Report the pause, at most once in REPORT_AGAIN_S."""
        self._free = self._free_bytes()
        if time.monotonic() - self._said >= REPORT_AGAIN_S:
            self._said = time.monotonic()
            text = f"paused because the disk is full: {why}; the run continues when there is space"
            self._progress.alert("disk_full", text, warning=False)

    def write(self, write: Callable[[], T]) -> T:
        """Call `write` until it succeeds, and return its result. A write that fails halfway must be
        able to start over. Raises a `RunError` if the disk is still full after MAX_PAUSE_S, or if
        the run was asked to end."""
        began = time.monotonic()
        while True:
            try:
                result = write()
            except OSError as error:
                if not is_full(error):
                    raise
                self._wait(str(error))
            else:
                self._paused |= time.monotonic() - began > PAUSE_S
                return result

    def wait_for_more(self, why: str) -> None:
        """Wait until space is freed, or for TRY_AGAIN_S."""
        # Space may have been freed since another rank's report, so compare with the smaller value.
        began, enough = time.monotonic(), min(self._free, self._free_bytes()) + SOME_BYTES
        while self._free_bytes() < enough and time.monotonic() - began < TRY_AGAIN_S:
            self._wait(why)
        self._free = self._free_bytes()
        self._paused = True

    def take_paused(self) -> bool:
        paused, self._paused = self._paused, False
        return paused

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self._folder).free

    def _wait(self, why: str) -> None:
        self.report_pause(why)
        now = time.monotonic()
        # The last wait is long over, so this one begins another pause.
        if now - self._waited > 2 * TRY_AGAIN_S:
            self._since = now
        self._waited, waited = now, now - self._since
        if waited > MAX_PAUSE_S or asked_to_end():
            raise RunError(
                f"{why}; the run waited {waited:.0f} s for space in {self._folder} and ends. The files on the disk are complete: "
                "resume='latest' continues from the last checkpoint"
            )
        time.sleep(PAUSE_S)
