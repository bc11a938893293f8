"""Copies: writes checkpoints to a second place (`CheckpointConfig.copy_to`) in the background.

    complete ──add──> waiting ──> being copied ──> copied
                         ^            │ failed: reported, and tried again after a pause
                         └────────────┘ (dropped when a later checkpoint waits)

Training never waits for a copy. At its end, a run waits for the copy of its last checkpoint, END_S at most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from ...dataflow.buffer.run_files import CHECKPOINTS
from .checkpoints import CheckpointConfig, complete_checkpoints, step_of
from .remote_run import RemoteRun

FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 300.0
"""Seconds before a failed copy is tried again: the first pause, and the longest. Each pause is twice as long as the one before."""
END_S = 600.0
"""Longest wait for the copy of the last checkpoint when a run is at its end."""
LEAVE_S = 60.0
"""Longest wait for that copy when a run was asked to end."""
SAY_S = 30.0
"""Seconds between two lines that tell the user what the run waits for."""


def copies_of(run: Path, config: CheckpointConfig) -> Copies | None:
    """The copies that the settings of a run ask for; None if they ask for none.

    Args:
        run: the directory of the run.
        config: its settings.

    Raises:
        UserError: the address cannot be used.
    """
    return Copies(run, RemoteRun.at(config.copy_to, run.name)) if config.copy_to is not None else None


class Copies:
    """Copies the checkpoints of a run in a thread, one at a time. Of those that wait, only the latest is copied.

    Args:
        run: the directory of the run.
        remote: where the copies go.
        first_pause_s: seconds before a failed copy is tried again for the first time.
    """

    def __init__(self, run: Path, remote: RemoteRun, *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self._run, self._remote, self._first_pause_s = run, remote, first_pause_s
        self._changed = threading.Condition()
        self._waiting: int | None = None
        self._went_back_to: int | None = None
        """Step from which the run goes on, until the first copy: later ones there are of what it gave up."""
        self._busy = False
        self._closing = False
        self._notes: list[str] = []
        self.copied: list[int] = []
        """Steps whose checkpoints were copied."""
        self._thread = threading.Thread(target=self._work, name="copies of checkpoints", daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Copy the latest checkpoint in the run directory, unless an earlier start of the run copied it."""
        latest = next(iter(complete_checkpoints(self._run / CHECKPOINTS)), None)
        if latest is not None:
            self._went_back_to = step_of(latest)
            self.add(self._went_back_to)

    def add(self, step: int) -> None:
        """Queue the complete checkpoint of a step. It replaces an earlier one that still waits. It is not copied if the second place has
        this very checkpoint."""
        with self._changed:
            self._waiting = step
            self._changed.notify_all()

    def take_notes(self) -> list[str]:
        """Messages for the user, a line each. Each message is returned once."""
        with self._changed:
            notes, self._notes = self._notes, []
        return notes

    def close(
        self, timeout_s: float = 0.0, *, say: Callable[[str], None] = lambda line: None, say_s: float = SAY_S
    ) -> None:
        """Wait for the copies that are due, and end the thread.

        Args:
            timeout_s: longest wait.
            say: called during the wait, with lines that tell what is waited for and what has failed.
            say_s: seconds between two lines about the wait.
        """
        end = time.monotonic() + timeout_s
        while not (done := self._is_done(min(say_s, max(0.0, end - time.monotonic())))) and time.monotonic() < end:
            for line in self.take_notes():
                say(line)
            say(
                f"waiting for the copy of the last checkpoint to {self._remote}, {max(0.0, end - time.monotonic()):.0f} s at most"
            )
        with self._changed:
            if not done and timeout_s:
                self._notes.append(
                    f"the last checkpoint was not copied to {self._remote} within {timeout_s:.0f} s; it is complete in {self._run}"
                )
            self._closing = True
            self._changed.notify_all()

    def _is_done(self, timeout_s: float) -> bool:
        """Wait until no copy is due. Returns whether that is so after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and not self._busy, timeout_s)

    def _work(self) -> None:
        pause_s = self._first_pause_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closing)
                if self._closing or self._waiting is None:
                    return
                step, self._waiting, self._busy = self._waiting, None, True
            failure = self._copy(step)
            with self._changed:
                self._busy = False
                if failure:
                    self._notes.append(f"checkpoint of step {step} could not be copied to {self._remote}: {failure}")
                    if self._waiting is None and (self._run / CHECKPOINTS / f"step_{step:06d}").exists():
                        self._notes[-1] += f"; it is tried again in {pause_s:.3g} s"
                        self._waiting = step
                self._changed.notify_all()
                if failure:
                    failed = (None, step)  # a later checkpoint ends the pause: its copy may not fail
                    self._changed.wait_for(lambda known=failed: self._closing or self._waiting not in known, pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S) if failure else self._first_pause_s

    def _copy(self, step: int) -> str:
        """Copy a checkpoint; returns why it failed, empty when it did not."""
        began = time.monotonic()
        try:
            if not self._remote.has(self._run, step):
                written = self._remote.copy(self._run, step, went_back_to=self._went_back_to)
                self._went_back_to = None
                seconds = time.monotonic() - began
                with self._changed:
                    self.copied.append(step)
                    self._notes.append(
                        f"checkpoint of step {step} was copied to {self._remote} ({written / 1e6:.1f} MB, {seconds:.1f} s)"
                    )
                self._prune()
        except Exception as error:  # even if the checkpoint cannot be read, the thread goes on with the next one
            return _in_a_line(error)
        return ""

    def _prune(self) -> None:
        """Remove the copies of checkpoints that the run no longer keeps. After a failure it is tried again with the next copy."""
        try:
            self._remote.prune(self._run)
        except Exception as error:
            with self._changed:
                self._notes.append(
                    f"old checkpoints could not be removed from {self._remote} for now: {_in_a_line(error)}"
                )


def _in_a_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
