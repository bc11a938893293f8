"""FullDisk: a full disk pauses a run instead of ending it. What was to be written is written when there is free space again.

A run has one for all of its starts, so a pause is reported once even if several ranks wait.
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
"""Seconds after which a pause is reported again."""
TRY_AGAIN_S = 60.0
"""Longest wait before a write that did not fit is tried again."""
SOME_BYTES = 1 << 20
"""Additional free space that is worth another try."""


class FullDisk:
    """Waits for free space on the disk of a run, and tells the user.

    Args:
        folder: of the run.
        progress: tells the user about a pause.
    """

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._folder = folder
        self._progress = progress
        self._paused = False
        """Whether the run was paused since the last call of `take_paused`."""
        self._said = self._waited = -math.inf
        self._since = 0.0
        """When the present pause began."""

    def report_pause(self, why: str) -> None:
        """Report, at most once in REPORT_AGAIN_S, that the run waits for free space."""
        if time.monotonic() - self._said >= REPORT_AGAIN_S:
            self._said = time.monotonic()
            self._progress.paused(why)

    def write(self, write: Callable[[], T]) -> T:
        """Write, as often as it takes, and return what `write` returned. A write that fails half way must be able to begin again.

        Raises:
            RunError: the disk is still full after MAX_PAUSE_S, or the run is asked to end meanwhile.
        """
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
        """Wait until somebody has freed space, or for TRY_AGAIN_S (it may have been freed just before).

        Raises:
            RunError: as `write`.
        """
        began, before = time.monotonic(), self._free
        while self._free < before + SOME_BYTES and time.monotonic() - began < TRY_AGAIN_S:
            self._wait(why)
        self._paused = True

    def take_paused(self) -> bool:
        """Whether the run was paused; False when that was taken before."""
        paused, self._paused = self._paused, False
        return paused

    @property
    def _free(self) -> int:
        return shutil.disk_usage(self._folder).free

    def _wait(self, why: str) -> None:
        self.report_pause(why)
        now = time.monotonic()
        if now - self._waited > 2 * TRY_AGAIN_S:
            self._since = now
        self._waited, waited = now, now - self._since
        if waited > MAX_PAUSE_S or asked_to_end():
            raise RunError(
                f"{why}; the run waited {waited:.0f} s for room in {self._folder}, and ends. What is on the disk is complete: "
                "resume='latest' goes on from its last checkpoint"
            )
        time.sleep(PAUSE_S)
