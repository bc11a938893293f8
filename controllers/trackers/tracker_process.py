"""TrackerProcess: the program that hands the metrics of one run to one tracker.

    python -m weft.controllers.trackers.tracker_process RUN TRACKER [STEP]

The driver starts it, and holds its standard input open. It ends when a line comes there that says how the run ended, or when the driver
is gone: then it sends what remains, and has PATIENCE_S for that. It never writes to the run's directory but for its log and what it has
sent (`sent_metrics.py`), whose time of change shows the driver that it is not stuck.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...dataflow.buffer.run_files import CONFIG
from ...dataflow.redaction import redacted, without_secrets
from ...dataflow.safe_files import parse_object, read_file
from .new_values import NewValues
from .sent_metrics import SentMetrics, path_of
from .tracker import TrackedRun, Tracker, new_tracker

POLL_S = 1.0
"""Seconds between two looks at the metrics of the run."""
PATIENCE_S = 60.0
"""Longest time for what remains to be sent when the driver is gone."""
FINISHED = "finished"
"""The line that says that the run came to its end."""
NICE = 5
"""It gives way to the run."""


class TrackerProcess:
    """Hands metrics to a tracker.

    Args:
        run: directory of the run.
        name: of the tracker.
        after: the step after which the run goes on; None: it begins.
    """

    def __init__(self, run: Path, name: str, after: int | None) -> None:
        self._run, self._name, self._after = run, name, after
        self._values = NewValues(run)
        self._path = path_of(run, name)
        self._sent = SentMetrics.read(self._path)

    def follow(self, said_within: Callable[[float], str | None]) -> None:
        """Send metrics until the run is over.

        Args:
            said_within: waits so many seconds for what the driver says at the end; empty: it is gone; None: it has said nothing yet.
        """
        tracker = new_tracker(self._name)
        if tracker.overwrites and self._after is not None:
            self._sent.go_back(self._after)
        config = _config(self._run / CONFIG)
        run = TrackedRun(self._run.name, self._run, config, self._sent.id, self._after, self._sent.logged)
        self._sent.id = tracker.open(run)
        said = None
        try:
            while said is None:
                said = said_within(POLL_S)  # first: what is on the disk when the run is over is all there is
                self._send(tracker)
        finally:
            self._values.close()
        tracker.close(failed=said != FINISHED)

    def _send(self, tracker: Tracker) -> None:
        sent = False
        for step, metrics in self._values:
            if new := self._sent.new(step, metrics):
                tracker.log(step, new)
                self._sent.note(step, new)
                sent = True
        if sent:
            tracker.flush()
        self._sent.write(self._path)

    def failed(self, error: BaseException) -> None:
        """Note why it ended."""
        self._sent.error = redacted(f"{type(error).__name__}: {error}")
        with suppress(OSError):
            self._sent.write(self._path)


class Input:
    """Waits for the line that ends the process, in a thread, so that it is heard also while a tracker is stuck."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._wait, daemon=True, name="input").start()

    def _wait(self) -> None:
        line = sys.stdin.readline().strip()
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)  # its signal ends this process, wherever it is stuck
        self._lines.put(line)

    def within(self, seconds: float) -> str | None:
        """The line, if it comes in time; empty when the driver is gone. None: nothing came."""
        try:
            return self._lines.get(timeout=seconds)
        except queue.Empty:
            return None


def _config(path: Path) -> dict[str, Any]:
    """The configuration of a run without secrets, also those of this environment; empty where it cannot be read."""
    try:
        return without_secrets(parse_object(read_file(path).decode(errors="replace"), path))
    except (OSError, ValueError):
        return {}


def main(run: str, name: str, *after: str) -> int:
    """Follow a run to its end; returns the exit code."""
    os.nice(NICE)
    follower = TrackerProcess(Path(run), name, int(after[0]) if after else None)
    try:
        follower.follow(Input().within)
    except BaseException as error:
        traceback.print_exc()
        follower.failed(error)
        return 1
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread that the tracker's package has left does not keep the process
