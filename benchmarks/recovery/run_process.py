"""A run of `killed_run.py` seen from outside: its processes, its steps, and what it prints."""

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
"""Between two looks at all processes of the machine."""
STUCK_S = 240.0
"""Longest wait for a run to go on."""
RANKS = frozenset({"actor_0", "actor_1", "rollout_0", "rollout_1", "reward_0"})
"""Worker processes of a run under Ray, by the names of their logs."""


class RunProcess:
    """A run in a session of its own; what it prints goes to a file. Leaving its `with` ends all of its processes."""

    def __init__(self, root: Path, name: str, *settings: str) -> None:
        self.path = root / name
        self.log = self.path / "buffer" / LOG
        self._printed = root / f"{name}.out"
        # One thread in each process, as Ray's workers have; a program in one process would take all cores for tiny tensors.
        path = os.pathsep.join([str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "TMPDIR": str(root), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        command = [sys.executable, str(PROGRAM), "--root", str(root), "--name", name, *settings]
        with self._printed.open("wb") as file:
            self._driver = psutil.Popen(
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
        """The reaper of a killed driver ends what is left of the run."""
        ranks = self.ranks().values()
        if self._driver.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._driver.pid, signal.SIGKILL)
            self.finish()
        for process in psutil.wait_procs(ranks, timeout=30)[1]:
            process.kill()

    @property
    def output(self) -> str:
        return self._printed.read_text(errors="replace")

    @property
    def step(self) -> int:
        """The last step whose end is in the log; -1: none."""
        with suppress(FileNotFoundError), self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 19)))
            if found := re.findall(rb'"key":"step","value":(\d+)', file.read()):
                return int(found[-1])
        return -1

    def ranks(self) -> dict[str, psutil.Process]:
        """Worker processes under Ray: the standard output of each is its log, and so is that of a successor."""
        logs = f"{self.path.resolve() / 'logs'}/"
        found: dict[str, psutil.Process] = {}
        for process in psutil.process_iter():
            with suppress(OSError, psutil.NoSuchProcess):
                target = os.readlink(f"/proc/{process.pid}/fd/1")
                if target.startswith(logs):
                    found[Path(target).stem] = process
        return found

    def wait(self, until: Callable[[], bool], poll_s: float = POLL_S) -> None:
        """
        Raises:
            RuntimeError: the run has ended, or has not gone on for STUCK_S.
        """
        began = time.monotonic()
        while not until():
            stuck = time.monotonic() - began > STUCK_S
            if stuck or self._driver.poll() is not None:
                what = (
                    f"did not go on for {STUCK_S:.0f} s" if stuck else f"ended with {self._driver.poll()}"
                )
                raise RuntimeError(
                    f"{self.path.name} {what}; the end of its output:\n{self.output[-3000:]}"
                )
            time.sleep(poll_s)

    def wait_for_ranks(self, gone: psutil.Process | None = None) -> None:
        """Until all worker processes are there, and the one that is gone is none of them."""
        self.wait(
            lambda: {name for name, process in self.ranks().items() if process != gone} >= RANKS, LOOK_S
        )

    def wait_for_step(self, after: int) -> None:
        """Until a later step than this is over."""
        self.wait(lambda: self.step > after)

    def wait_for_moment(self, rng: random.Random) -> None:
        """Until a random moment of the next step."""
        self.wait_for_step(self.step)
        time.sleep(rng.uniform(0.1, 0.6))

    def finish(self) -> int:
        """Its exit code, once it has ended."""
        return self._driver.wait(STUCK_S)
