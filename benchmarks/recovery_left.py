"""What a run under Ray leaves behind on the machine when it ends, in each of the ways in which it can."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from recovery_processes import LOOK_S, Run

WAIT_S = 10.0
"""After the end of the driver's process."""
GONE_S = 60.0
"""After it: the longest that is waited for those that are left then."""
PATIENCE_S = 120.0
"""Longest wait for the driver to end."""


@dataclass(frozen=True)
class Ending:
    """How a run is ended, and the exit code that is promised."""

    name: str
    number: int | None
    """Signal; None: the run comes to its own end."""
    everybody: bool
    """The signal goes to the whole process group, as a terminal and many cluster managers send it; else to the driver alone."""
    code: int


ENDINGS = (
    Ending("normal end", None, False, 0),
    Ending("Ctrl-C", signal.SIGINT, True, 130),
    Ending("SIGTERM to the driver", signal.SIGTERM, False, 0),
    Ending("SIGTERM to its process group", signal.SIGTERM, True, 0),
    Ending("SIGKILL of the driver", signal.SIGKILL, False, -signal.SIGKILL),
)


@dataclass(frozen=True)
class Left:
    """Found some seconds after the end."""

    ending: Ending
    code: int | None
    """Exit code; None: it had not ended after PATIENCE_S, and was ended."""
    ended_s: float
    """Seconds from the signal to the end of the driver."""
    started: int
    """Processes that the run had."""
    processes: list[str]
    shared_memory: list[str]
    ports: list[int]
    folders: list[str]
    """Below the temporary folder."""
    saved: bool
    """The run says that it saved itself."""
    said: str
    """The end of what it printed."""
    gone_s: float | None
    """Seconds from the end of the driver until the last of the processes was gone, where that took less than a minute."""

    @property
    def count(self) -> int:
        return len(self.processes) + len(self.shared_memory) + len(self.ports)


def end_one(ending: Ending, work: Path, root: Path, rng: random.Random) -> Left:
    root.mkdir()
    steps = 8 if ending.number is None else 100_000
    with Run(root, "run", "--folder", str(work), "--steps", str(steps), "--every", "2") as run:
        run.start()
        assert run.driver is not None
        run.wait_until_whole()
        run.wait_for_step(2)
        family: set[psutil.Process] = set()
        memory: set[str] = set()
        until = time.monotonic() + rng.uniform(0.5, 1.5)
        while time.monotonic() < until and not run.ended:
            family |= {*run.driver.children(recursive=True), *run.left_over()}
            memory |= shared_memory_of([*family, run.driver])
            time.sleep(LOOK_S)
        began = time.monotonic()
        if ending.number is not None:
            (run.signal_all if ending.everybody else run.signal)(ending.number)
        code = None
        with suppress(psutil.TimeoutExpired):
            code = run.finish(PATIENCE_S)
        ended = time.monotonic()
        time.sleep(WAIT_S if code is not None else 0)
        alive = {p for p in {*family, *run.left_over()} if is_alive(p)}
        left = Left(
            ending,
            code,
            ended - began,
            len(family) + 1,
            sorted(described(p) for p in alive),
            sorted(path for path in memory if Path(path).exists()),
            sorted(port for p in alive for port in listening(p)),
            sorted(p.name for p in root.iterdir() if p.name not in ("run", "run.out")),
            "saved in" in run.said,
            run.said[-1500:],
            gone_after(alive, ended),
        )
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    return left


def gone_after(processes: Iterable[psutil.Process], ended: float) -> float | None:
    left = set(processes)
    while time.monotonic() < ended + GONE_S:
        left = {p for p in left if is_alive(p)}
        if not left:
            return time.monotonic() - ended
        time.sleep(LOOK_S)
    return None


def is_alive(process: psutil.Process) -> bool:
    """The same process, not another one that was given its number."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def described(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())[:60] or process.name()
    return "gone"


def listening(process: psutil.Process) -> list[int]:
    with suppress(psutil.Error):
        return [c.laddr.port for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return []


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[str]:
    """Files in /dev/shm that they have mapped or open, and that have a name there."""
    found: set[str] = set()
    for process in processes:
        folder = Path(f"/proc/{process.pid}")
        with suppress(OSError):
            found |= {line.split(maxsplit=5)[-1].strip() for line in (folder / "maps").read_text().splitlines()}
        with suppress(OSError):
            for descriptor in (folder / "fd").iterdir():
                with suppress(OSError):
                    found.add(os.readlink(descriptor))
    return {path for path in found if path.startswith("/dev/shm/") and Path(path).exists()}
