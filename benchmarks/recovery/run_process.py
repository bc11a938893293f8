"""A run seen from outside: processes, steps and output."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from weft.dataflow.runs.files import LOG

PROGRAM = Path(__file__).with_name("killed_run.py")
POLL_S = 0.02
LOOK_S = 0.2
"""[s] Interval for listing all processes of the machine."""
STUCK_S = 240.0
"""[s] Longest wait for progress of a run."""
RANKS = frozenset({"actor_0", "actor_1", "rollout_0", "rollout_1", "reward_0"})
"""Worker processes of a run under Ray, by the names of their logs."""


class RunProcess:
    """A run in a separate session, with its output in a file. Leaving the `with` ends its
    processes.

    Args:
        root: folder for run directories and temporary files.
        program: takes the arguments `--root` and `--name`, besides `settings`.
        stuck_s: [s] longest wait for progress.
    """

    def __init__(
        self,
        root: Path,
        name: str,
        *settings: str,
        program: Path = PROGRAM,
        stuck_s: float = STUCK_S,
    ) -> None:
        self._stuck_s = stuck_s
        self.path = root / name
        self.log = self.path / "buffer" / LOG
        self._printed = root / f"{name}.out"
        # One thread per process, as in Ray's workers. Otherwise one process would take all cores
        # for tiny tensors.
        path = os.pathsep.join([str(program.parents[1]), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "TMPDIR": str(root), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        command = [sys.executable, str(program), "--root", str(root), "--name", name, *settings]
        with self._printed.open("ab") as file:
            self.driver = psutil.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )

    def __enter__(self) -> RunProcess:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the driver if needed; its reaper then ends the rest of the run."""
        ranks = self.ranks().values()
        if self.driver.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.driver.pid, signal.SIGKILL)
            self.finish()
        for process in psutil.wait_procs(ranks, timeout=30)[1]:
            process.kill()

    @property
    def output(self) -> str:
        return self._printed.read_text(errors="replace")

    @property
    def step(self) -> int:
        """Return the last finished step in the log, or -1."""
        with suppress(FileNotFoundError), self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 19)))
            if found := re.findall(rb'"key":"step","value":(\d+)', file.read()):
                return int(found[-1])
        return -1

    def ranks(self) -> dict[str, psutil.Process]:
        """Return worker processes by name; the log is the standard output of a worker and its
        replacements."""
        logs = f"{self.path.resolve() / 'logs'}/"
        found: dict[str, psutil.Process] = {}
        for process in psutil.process_iter():
            with suppress(OSError, psutil.NoSuchProcess):
                target = os.readlink(f"/proc/{process.pid}/fd/1")
                if target.startswith(logs):
                    found[Path(target).stem] = process
        return found

    def wait(self, until: Callable[[], bool], poll_s: float = POLL_S) -> None:
        """Wait for a condition. Raises RuntimeError if the run has ended, or made no progress for
        `stuck_s`."""
        began = time.monotonic()
        while not until():
            stuck = time.monotonic() - began > self._stuck_s
            if stuck or self.driver.poll() is not None:
                what = (
                    f"did not go on for {self._stuck_s:.0f} s"
                    if stuck
                    else f"ended with {self.driver.poll()}"
                )
                raise RuntimeError(
                    f"{self.path.name} {what}; the end of its output:\n{self.output[-3000:]}"
                )
            time.sleep(poll_s)

    def wait_for_ranks(self, gone: psutil.Process | None = None) -> None:
        """Wait until all worker processes are up, and `gone` is not one of them."""
        self.wait(
            lambda: {name for name, process in self.ranks().items() if process != gone} >= RANKS, LOOK_S
        )

    def wait_for_step(self, after: int) -> None:
        self.wait(lambda: self.step > after)

    def wait_for_moment(self, rng: random.Random) -> None:
        """Wait until a random moment of the next step."""
        self.wait_for_step(self.step)
        time.sleep(rng.uniform(0.1, 0.6))

    def finish(self) -> int:
        """Wait for the end of the run, and return its exit code."""
        return self.driver.wait(self._stuck_s)
