"""TrackerProcesses: the driver's side of the trackers. It starts a process for each, looks at them after each step, and ends them.

    start ──> FOLLOWS ──"finished" or "failed" on its standard input──> ENDS ──> gone
                 │ ends by itself, or is stuck: said once                 │ PATIENCE: killed, and said

The run never waits for a tracker until it is over, and then for a bounded time. What a tracker lacks is in the run's own files.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...dataflow.runs.files import LOGS
from . import tracker_process
from .tracker_process import SentMetrics, path_of
from .trackers import PROMETHEUS

FINISH_S = 30.0
"""Longest time that a run that is finished gives its trackers for what remains."""
LEAVE_S = 5.0
"""The same of a run that ends in another way: an error, a signal, or to start again."""
STUCK_S = 60.0
"""Time for which the process of a tracker may show no sign of life."""

Row = Mapping[str, float]


@dataclass
class _Process:
    """The process of one tracker."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    sent: Path
    seen: tuple[int, float]
    """Time of change of what it has sent, and when that was seen first."""
    told: bool = False
    """Something was said about it."""


class TrackerProcesses:
    """The trackers of a run.

    Args:
        names: of the trackers.
        run: directory of the run.
        report: sets the gauges of the backend's endpoint, where `prometheus` is among the trackers.
        warn: shows a line.
        clock: seconds, which only grow.
        samples: number of recorded samples of a step that each tracker gets.
    """

    def __init__(
        self,
        names: Sequence[str],
        run: Path,
        report: Callable[[str, Row], None],
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        samples: int = 0,
    ) -> None:
        self._names = [name for name in names if name != PROMETHEUS]
        self._reports = PROMETHEUS in names
        self._report = report
        self._run = run
        self._warn = warn
        self._samples = samples
        self._clock = clock
        self._processes: list[_Process] = []

    def start(self, after: int | None) -> None:
        """Start the processes. What each has sent in an earlier start of the run is not sent again.

        Args:
            after: the step after which the run goes on; None: it begins.
        """
        for name in self._names:
            try:
                self._processes.append(self._started(name, after))
            except OSError as error:
                self._warn(
                    f"tracker {name!r} could not be started, and the run goes on without it: {error}"
                )

    def _started(self, name: str, after: int | None) -> _Process:
        log = self._run / LOGS / f"tracker-{path_of(self._run, name).stem}.log"
        step = [] if after is None else [str(after)]
        with log.open("ab") as output:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    tracker_process.__name__,
                    str(self._run),
                    name,
                    str(self._samples),
                    *step,
                ],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                },
                start_new_session=True,  # a signal of the terminal is for the driver
            )
        return _Process(name, process, log, path_of(self._run, name), (0, self._clock()))

    def stepped(self, row: Row) -> None:
        """A step or an evaluation is over: report it to the endpoint, and see whether the processes live. Nothing is waited for."""
        if self._reports:
            try:
                self._report(self._run.name, row)
            except Exception as error:  # whatever Ray raises: its endpoint must not end a run
                self._reports = False
                self._warn(f"tracker {PROMETHEUS!r} failed, and the run goes on without it: {error}")
        for one in self._processes:
            self._look(one)

    def _look(self, one: _Process) -> None:
        if one.told:
            return
        if one.process.poll() is not None:
            self._tell(one, f"has ended ({_why(one)})")
            return
        changed = _changed(one.sent)
        if changed != one.seen[0]:
            one.seen = changed, self._clock()
        elif self._clock() - one.seen[1] > STUCK_S:
            self._tell(one, f"has shown no sign of life for {STUCK_S:g} s")

    def _tell(self, one: _Process, what: str) -> None:
        if one.told:
            return
        one.told = True
        self._warn(
            f"tracker {one.name!r} {what}. The run goes on; all metrics are in its own files, and what is missing there is sent when the "
            f"run is resumed. Its log: {one.log}"
        )

    def end(self, *, finished: bool) -> None:
        """Have the processes send what remains, wait for them for FINISH_S or LEAVE_S, and end those that live then.

        Args:
            finished: the run has come to the end of its schedule.
        """
        processes, self._processes = self._processes, []
        for one in processes:
            with suppress(OSError):  # it is gone
                assert one.process.stdin is not None
                one.process.stdin.write(
                    f"{tracker_process.FINISHED if finished else 'failed'}\n".encode()
                )
                one.process.stdin.close()
        patience_s = FINISH_S if finished else LEAVE_S
        deadline = self._clock() + patience_s
        for one in processes:
            try:
                one.process.wait(max(0.0, deadline - self._clock()))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
                self._tell(one, f"had not sent everything {patience_s:g} s after the end, and was ended")
                continue
            if one.process.returncode:
                self._tell(one, f"has ended ({_why(one)})")


def _changed(path: Path) -> int:
    """Time of the last change of a file, in nanoseconds; 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _why(one: _Process) -> str:
    """Why a process ended: its own words, or its exit code."""
    code = one.process.returncode
    return SentMetrics.error_in(one.sent) or (f"signal {-code}" if code < 0 else f"exit code {code}")
