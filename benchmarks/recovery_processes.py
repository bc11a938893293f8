"""A run of `recovery_run.py` from outside: its processes, how far it is, and how to kill one of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from weft.dataflow.buffer.sample_buffer import LOG

HERE = Path(__file__).resolve().parent
POLL_S = 0.02
LOOK_S = 0.2
"""Between two looks at all processes of the machine."""
STUCK_S = 240.0
"""Longest wait for a run to go on."""
RANKS = frozenset({"actor_0", "actor_1", "rollout_0", "rollout_1", "reward_0"})
"""Worker processes of a run under Ray, as their logs are called."""


class RunEnded(Exception):
    """The program of the run has ended."""


class RunStuck(Exception):
    """The run did not go on in time."""


class Run:
    """A run as a program in a session of its own; what it prints is appended to a file. Leaving its `with` ends all of it."""

    def __init__(self, root: Path, name: str, *settings: str, program: Path = HERE / "recovery_run.py") -> None:
        self.path = root / name
        self.output = root / f"{name}.out"
        self._command = [sys.executable, str(program), "--root", str(root), "--name", name, *settings]
        # One thread in each process, as Ray's workers have; a program in one process would take all cores for tiny tensors.
        self._environment = {**os.environ, "TMPDIR": str(root), "OMP_NUM_THREADS": "1"}
        self.driver: psutil.Popen | None = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.ended:
            with suppress(ProcessLookupError):
                self.signal_all(signal.SIGKILL)
            self.finish()
        for process in self.left_over():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def start(self, *more: str) -> None:
        with self.output.open("ab") as file:
            self.driver = psutil.Popen(
                [*self._command, *more],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=self._environment,
                # What was started in the background of a shell ignores Ctrl-C, and so would all that it starts.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def said(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    @property
    def ended(self) -> bool:
        return self.driver is None or self.driver.poll() is not None

    @property
    def step(self) -> int:
        """The last step that the log has heard of the end of; -1: none."""
        with suppress(FileNotFoundError), (self.path / "buffer" / LOG).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 19)))
            if found := re.findall(rb'"key":"step","value":(\d+)', file.read()):
                return int(found[-1])
        return -1

    def ranks(self) -> dict[str, psutil.Process]:
        """Worker processes under Ray: each has its log as its standard output, also one that took another's place."""
        logs = f"{self.path.resolve() / 'logs'}/"
        found: dict[str, psutil.Process] = {}
        for process in psutil.process_iter():
            with suppress(OSError, psutil.NoSuchProcess):
                target = os.readlink(f"/proc/{process.pid}/fd/1")
                if target.startswith(logs):
                    found[Path(target).stem] = process
        return found

    def wait(self, until: Callable[[], bool], seconds: float = STUCK_S, poll_s: float = POLL_S) -> float:
        """Seconds that it took.

        Raises:
            RunEnded, RunStuck
        """
        began = time.monotonic()
        while not until():
            if self.ended:
                raise RunEnded(f"{self.path.name} ended; the end of what it said:\n{self.said[-3000:]}")
            if time.monotonic() - began > seconds:
                raise RunStuck(
                    f"{self.path.name} did not go on for {seconds:.0f} s; the end of what it said:\n{self.said[-3000:]}"
                )
            time.sleep(poll_s)
        return time.monotonic() - began

    def wait_until_whole(self, gone: Collection[psutil.Process] = ()) -> None:
        """Until all of its worker processes are there, and are none of those that are gone."""
        self.wait(lambda: {n for n, process in self.ranks().items() if process not in gone} >= RANKS, poll_s=LOOK_S)

    def wait_for_step(self, after: int) -> float:
        """Until a later step than this is over; seconds that it took."""
        return self.wait(lambda: self.step > after)

    def signal(self, number: int) -> None:
        """To the driver's process alone."""
        assert self.driver is not None
        self.driver.send_signal(number)

    def signal_all(self, number: int) -> None:
        """To its process group."""
        assert self.driver is not None
        os.killpg(self.driver.pid, number)

    def finish(self, seconds: float = STUCK_S) -> int:
        assert self.driver is not None
        return self.driver.wait(seconds)

    def left_over(self) -> Sequence[psutil.Process]:
        """Processes that name the run's folders in their environment or command, or have its logs open; not the driver itself."""
        root = str(self.path.parent.resolve()).encode()
        found = [*self.ranks().values()]
        for process in psutil.process_iter():
            if process.pid == os.getpid() or (self.driver is not None and process.pid == self.driver.pid):
                continue
            with suppress(OSError, psutil.Error):
                folder = Path(f"/proc/{process.pid}")
                named = root in (folder / "cmdline").read_bytes() or root in (folder / "environ").read_bytes()
                if named and process not in found and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found
