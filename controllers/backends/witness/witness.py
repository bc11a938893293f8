"""Witness: what a node knows of the processes of ranks on it. One is in the driver, one in the server of segments of each other node."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ....workers.node_memory import node_memory
from .exit_status import HeldProcess, said_of
from .memory import Memory, ProcessMemory, course, memory_of, object_store
from .out_of_memory import kills, said_by_kernel
from .stacks import WAIT_S, ask_stacks

SAMPLE_S = 1.0
"""Seconds between two readings of the memory of a process."""
READINGS = 120
"""Readings that are kept of each."""
STORE_S = 10.0
"""Seconds between two looks at the object stores: these look at all processes."""
EXIT_S = 2.0
"""Longest wait for the exit status of a process that is gone."""


@dataclass
class _Watched:
    process: HeldProcess
    readings: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=READINGS))
    """Seconds and own bytes."""
    memory: ProcessMemory | None = None


class Witness:
    """Watches processes of this machine.

    Args:
        logs: folder of their logs.
        root: of the file system, where the kernel's files are.
    """

    def __init__(self, logs: Path, root: Path = Path("/")) -> None:
        self._logs, self._root = logs, root
        self._watched: dict[str, _Watched] = {}
        self._kills = kills(root)
        self._sampled = self._stored = float("-inf")
        self._store_bytes = 0
        self._lock = threading.Lock()
        """A server is asked on one thread, and takes readings on another."""

    def watch(self, processes: Mapping[str, int]) -> None:
        """Watch these, and no others.

        Args:
            processes: worker, such as `rollout[0]` -> number of its process on this machine.
        """
        with self._lock:
            for who in list(self._watched):
                if processes.get(who) != self._watched[who].process.pid:
                    self._watched.pop(who).process.close()
            for who, pid in processes.items():
                if who not in self._watched:
                    try:
                        self._watched[who] = _Watched(HeldProcess(pid))
                    except OSError:  # it has ended meanwhile
                        continue

    def look(self) -> None:
        """Take a reading of their memory, when it is time."""
        now = time.monotonic()
        if now - self._sampled < SAMPLE_S:
            return
        with self._lock:
            self._sampled = now
            for watched in self._watched.values():
                memory = memory_of(watched.process.pid, self._root)
                if memory is not None:
                    watched.memory = memory
                    watched.readings.append((now, memory.resident_bytes))
            if now - self._stored >= STORE_S:
                self._stored, self._store_bytes = now, object_store(self._root)

    def memory(self) -> Memory:
        """The last readings, and the memory of the node now."""
        with self._lock:
            found = {who: watched.memory for who, watched in self._watched.items() if watched.memory}
        return Memory(found, node_memory(self._root), self._store_bytes)

    def stacks(self, whose: Collection[str], wait_s: float = WAIT_S) -> dict[str, str]:
        """Where processes stand: worker -> some lines. Those that are not watched are left out.

        Args:
            whose: workers.
            wait_s: longest wait for all of them; others may use this witness meanwhile.
        """
        with self._lock:
            asked = ask_stacks(
                {who: (self._watched[who].process, self._log(who)) for who in whose if who in self._watched}
            )
        return asked.answers(wait_s) if asked.logs else {}

    def ending(self, who: str, wait_s: float = EXIT_S, *, blamed: bool = False) -> str:
        """How a process ended, in words: its exit code or signal, memory that ran out, and how its memory went; empty: that is not known.

        Args:
            who: the worker.
            wait_s: longest wait for its exit status.
            blamed: it is known already who has ended it.
        """
        with self._lock:
            watched = self._watched.pop(who, None)
            if watched is None:
                return ""
            code = watched.process.exit_code(wait_s)
            watched.process.close()
            before, self._kills = self._kills, kills(self._root)
        by_kernel = said_by_kernel(before, self._kills) if code in (None, -9) and not blamed else ""
        if code == -9 and not by_kernel and not blamed:
            by_kernel = (
                "the kernel counts nothing that it ended for want of memory: somebody, or another program, has sent it"
            )
        return "; ".join(part for part in (said_of(code), by_kernel, course(watched.readings)) if part)

    def _log(self, who: str) -> Path:
        return self._logs / log_name(who)

    def close(self) -> None:
        self.watch({})


def log_name(who: str) -> str:
    """Name of the log of a worker.

    >>> log_name("rollout[0]")
    'rollout_0.log'
    """
    return f"{who.replace('[', '_').rstrip(']')}.log"
