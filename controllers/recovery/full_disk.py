"""FullDisk: a full disk pauses a run instead of ending it. What was to be written is written when there is free space again."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ...dataflow.buffer.disk import MAX_PAUSE_S, PAUSE_S, is_full
from ...dataflow.errors import RunError
from ..progress import Progress
from .ending import asked_to_end

T = TypeVar("T")

SAY_AGAIN_S = 60.0
"""Seconds after which a pause is said again."""
TRY_AGAIN_S = 60.0
"""Longest wait before a write that did not fit is tried again."""
SOME_BYTES = 1 << 20
"""Additional free space that is worth another try."""


class FullDisk:
    """Waits for free space, and says so.

    Args:
        folder: of the run.
        over: called after a pause.
    """

    def __init__(self, folder: Path, progress: Progress, over: Callable[[], None] = lambda: None) -> None:
        self._folder = folder
        self._progress = progress
        self._over = over
        self._said = self._waited = -math.inf
        self._since = 0.0
        """When the present pause began."""

    def say(self, why: str) -> None:
        """Say, at most once in SAY_AGAIN_S, that somebody waits for free space."""
        if time.monotonic() - self._said >= SAY_AGAIN_S:
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
                if time.monotonic() - began > PAUSE_S:
                    self._over()
                return result

    def wait_for_more(self, why: str) -> None:
        """Wait until somebody has freed space, or for TRY_AGAIN_S (it may have been freed just before).

        Raises:
            RunError: as `write`.
        """
        began, before = time.monotonic(), self._free
        while self._free < before + SOME_BYTES and time.monotonic() - began < TRY_AGAIN_S:
            self._wait(why)
        self._over()

    @property
    def _free(self) -> int:
        return shutil.disk_usage(self._folder).free

    def _wait(self, why: str) -> None:
        self.say(why)
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
