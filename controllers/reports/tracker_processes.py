"""TrackerProcesses: starts a process for each tracker, checks them after each step, and ends them.

    start ──> FOLLOWS ──"finished" or "failed" on standard input──> ENDS ──> gone
                 │ ends on its own, or is stuck: warned once          │ timeout: killed, and warned

The run waits for trackers only at its end, for a limited time. Metrics that a tracker missed are in
the run's own files.
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
"""[s] Longest wait for trackers to send remaining metrics when a run has finished."""
LEAVE_S = 5.0
"""[s] The same when a run ends in another way: an error, a signal, or a restart."""
STUCK_S = 60.0
"""[s] Longest time without activity before a tracker counts as stuck."""

Row = Mapping[str, float]


@dataclass
class _Process:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    sent: Path
    seen: tuple[int, float]
    """Modification time of its record of sent metrics, and the time when it was first seen."""
    told: bool = False
    """Whether a warning was shown for it."""


class TrackerProcesses:
    """The trackers of a run.

    Args:
        report: sets the gauges of the backend's endpoint, if `prometheus` is among the trackers.
        warn: shows a line.
        clock: a monotonic clock [s].
        samples: recorded samples of each step to send.
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
        """Start the processes. Metrics from earlier starts of the run are not sent again.

        Args:
            after: the step that the run resumes after, or None for a new run.
        """
        for name in self._names:
            try:
                self._processes.append(self._started(name, after))
            except OSError as error:
                self._warn(
                    f"tracker {name!r} could not be started; the run continues without it: {error}"
                )

    def _started(self, name: str, after: int | None) -> _Process:
        log = self._run / LOGS / f"tracker-{path_of(self._run, name).stem}.log"
        step = [] if after is None else [str(after)]
        # -P keeps the working directory off sys.path; PYTHONPATH has the path of the driver.
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
                start_new_session=True,  # signals of the terminal are for the driver
            )
        return _Process(name, process, log, path_of(self._run, name), (0, self._clock()))

    def stepped(self, row: Row) -> None:
        """Report a step or evaluation to the endpoint, and check the processes without waiting."""
        if self._reports:
            try:
                self._report(self._run.name, row)
            except Exception as error:  # Ray may raise anything, and its endpoint must not end a run
                self._reports = False
                self._warn(f"tracker {PROMETHEUS!r} failed; the run continues without it: {error}")
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
            self._tell(one, f"has not responded for {STUCK_S:g} s")

    def _tell(self, one: _Process, what: str) -> None:
        if one.told:
            return
        one.told = True
        self._warn(
            f"tracker {one.name!r} {what}. The run continues. All metrics are in the run's own files, and missing ones are sent when "
            f"the run is resumed. Log of the tracker: {one.log}"
        )

    def end(self, *, finished: bool) -> None:
        """Let the processes send remaining metrics for FINISH_S or LEAVE_S, and kill the rest.

        Args:
            finished: whether the run has reached the end of its schedule.
        """
        processes, self._processes = self._processes, []
        for one in processes:
            with suppress(OSError):  # the process is gone
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
                self._tell(one, f"had not sent everything {patience_s:g} s after the end, and was killed")
                continue
            if one.process.returncode:
                self._tell(one, f"has ended ({_why(one)})")


def _changed(path: Path) -> int:
    """Return the modification time of a file in nanoseconds, or 0 if it does not exist."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _why(one: _Process) -> str:
    """Return the error that ended a process, or its exit code."""
    code = one.process.returncode
    return SentMetrics.error_in(one.sent) or (f"signal {-code}" if code < 0 else f"exit code {code}")
