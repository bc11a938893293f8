"""FullDisk: a disk without room pauses a run instead of ending it. Whatever was to be written is written when there is room again."""

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

T = TypeVar("T")

SAY_AGAIN_S = 60.0
"""Seconds after which a pause is said again."""
TRY_AGAIN_S = 60.0
"""Longest wait before what did not fit is tried again."""
SOME_BYTES = 1 << 20
"""So much more room than there was is worth another try."""


class FullDisk:
    """Waits for room, and says so.

    Args:
        folder: of the run.
        asked_to_end: whether somebody wants the run to end.
        over: called after a pause.
    """

    def __init__(
        self, folder: Path, progress: Progress, asked_to_end: Callable[[], bool], over: Callable[[], None]
    ) -> None:
        self._folder = folder
        self._progress = progress
        self._asked_to_end = asked_to_end
        self._over = over
        self._said = self._waited = -math.inf
        self._since = 0.0
        """When the present want of room began: what is not said for a while is over."""

    def say(self, why: str) -> None:
        """Somebody waits for room."""
        if time.monotonic() - self._said >= SAY_AGAIN_S:
            self._said = time.monotonic()
            self._progress.paused(why)

    def write(self, write: Callable[[], T]) -> T:
        """Do it, as often as it takes; what fails half way must be fit to be begun again.

        Raises:
            RunError: there is no room after MAX_PAUSE_S, or the run is asked to end meanwhile.
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
        """Wait until somebody has made room, or TRY_AGAIN_S (somebody may have made it just before).

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
        if waited > MAX_PAUSE_S or self._asked_to_end():
            raise RunError(
                f"{why}; the run waited {waited:.0f} s for room in {self._folder}, and ends. What is on the disk is whole: "
                "resume='latest' goes on from its last checkpoint"
            )
        time.sleep(PAUSE_S)
