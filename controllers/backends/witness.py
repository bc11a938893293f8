"""Witness: memory, stacks and exit reasons of the processes on a node. The driver and the segment
server of each other node have one."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import select
import signal
import struct
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ...dataflow.byte_units import gib
from ...workers.node_memory import NodeMemory, cgroup_folders, node_memory

# Memory of processes, as the kernel counts it (about 30 us per process)


ENDS = 4
"""Number of readings in a description, evenly spread over time."""


@dataclass(frozen=True)
class ProcessMemory:
    """Resident memory of a process."""

    resident_bytes: int
    """Private memory: the heap and mapped files."""
    shared_bytes: int
    """Shared memory that it has touched: row segments, weight transfers, Ray's object store. Other
    processes may count it as well."""


@dataclass(frozen=True)
class Memory:
    """Memory of a node, and of the run's processes on it."""

    processes: dict[str, ProcessMemory]
    """Worker, such as `rollout[0]` -> its memory."""
    node: NodeMemory | None = None
    object_store_bytes: int = 0
    """Bytes in Ray's object store."""


def memory_of(process: int | str, root: Path = Path("/")) -> ProcessMemory | None:
    """Return the memory of a process on this machine, or None if it is gone.

    >>> memory_of("self").resident_bytes > 1 << 20, memory_of(-1)
    (True, None)

    Args:
        process: Its pid, or "self".
    """
    try:
        text = (root / f"proc/{process}/status").read_text()
    except OSError:
        return None
    found = {
        name: int(kib) << 10 for name, kib in re.findall(r"^(Rss\w+):\s+(\d+) kB$", text, re.MULTILINE)
    }
    if "RssAnon" not in found:  # a zombie
        return None
    return ProcessMemory(found["RssAnon"] + found.get("RssFile", 0), found.get("RssShmem", 0))


def object_store(root: Path = Path("/")) -> int:
    """Bytes in the object stores of this machine's Ray nodes that this user may see."""
    total = 0
    for entry in (root / "proc").glob("[0-9]*"):
        try:
            is_raylet = (entry / "comm").read_text() == "raylet\n"
        except OSError:
            continue
        memory = memory_of(entry.name, root) if is_raylet else None
        total += memory.shared_bytes if memory else 0
    return total


def course(readings: Sequence[tuple[float, int]]) -> str:
    """Describe memory over time; empty for fewer than two readings.

    >>> course([(0.0, 1 << 30), (10.0, 2 << 30), (20.0, 4 << 30)])
    'its own memory in the last 20 s: 1.0 GiB, 2.0 GiB, 4.0 GiB'

    Args:
        readings: Pairs of seconds and bytes, oldest first.
    """
    if len(readings) < 2:
        return ""
    last = len(readings) - 1
    shown = sorted({round(k * last / (ENDS - 1)) for k in range(ENDS)})
    return f"its own memory in the last {readings[-1][0] - readings[0][0]:.0f} s: " + ", ".join(
        gib(readings[k][1]) for k in shown
    )


# Exit status of a process that need not be a child of this one, through its pidfd. Linux 6.15 and
# later report it for any process; earlier versions only while no process has waited for it.


GET_INFO = 0xC040FF0B
"""PIDFD_GET_INFO in linux/pidfd.h, for its first 64 bytes."""
EXIT = 1 << 3
"""PIDFD_INFO_EXIT: the exit status is requested, or present."""
INFO = struct.Struct("=Q52xi")
"""Layout: the mask, and the exit status."""
EXIT_POLL_S = 0.02


class HeldProcess:
    """A handle to a process, which keeps its pid from being reused.

    Args:
        pid: Pid of a process on this machine.

    Raises:
        OSError: There is no such process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._held = os.pidfd_open(pid)

    def send(self, number: int) -> bool:
        """Send a signal. Return whether the process exists."""
        with suppress(OSError):
            signal.pidfd_send_signal(self._held, number)
            return True
        return False

    def exit_code(self, wait_s: float) -> int | None:
        """Return the exit code, or minus the signal that ended it; None if it is alive or the
        status is unknown.

        Args:
            wait_s: [s] Longest wait for its end, and for its parent to reap it.
        """
        if not select.select([self._held], [], [], wait_s)[0]:
            return None
        status = self._status()
        while status is None and wait_s > 0:  # its parent has not reaped it yet
            select.select([], [], [], EXIT_POLL_S)
            wait_s -= EXIT_POLL_S
            status = self._status()
        return None if status is None else os.waitstatus_to_exitcode(status)

    def _status(self) -> int | None:
        info = bytearray(INFO.size)
        INFO.pack_into(info, 0, EXIT, 0)
        with suppress(OSError):
            fcntl.ioctl(self._held, GET_INFO, info)
            mask, status = INFO.unpack(info)
            if mask & EXIT:
                return status
        with suppress(OSError, ValueError, IndexError):  # a zombie: the exit status is in its stat file
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
            return int(fields[49]) if fields[0] in "ZX" else None
        return None

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._held)


def said_of(code: int | None) -> str:
    """Describe an exit code.

    >>> said_of(3), said_of(-9), said_of(None)
    ('exit code 3', 'signal SIGKILL', '')
    """
    if code is None:
        return ""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


# Out of memory: find out whether memory ran out, which the process itself cannot report. The kernel
# counts the processes that it kills; Ray's memory monitor raises an error.


FILES = ("memory.events", "memory.oom_control")
"""Files of a cgroup (versions 2 and 1) that count processes killed because it ran out of memory."""
ADVICE = (
    "give the worker more memory, or smaller microbatches, shorter responses, fewer ranks on its node"
)


def kills(root: Path = Path("/")) -> dict[str, int]:
    """Return file -> number of processes killed by the kernel because memory ran out.

    >>> all(number >= 0 for number in kills().values())
    True
    """
    found: dict[str, int] = {}
    for file in (
        *(folder / name for folder in cgroup_folders(root) for name in FILES),
        root / "proc/vmstat",
    ):
        try:
            text = file.read_text()
        except OSError:
            continue
        if number := re.search(r"^oom_kill (\d+)$", text, re.MULTILINE):
            found[str(file)] = int(number[1])
    return found


def said_by_kernel(before: dict[str, int], now: dict[str, int]) -> str:
    """Describe what the kernel's counts say about a process that SIGKILL ended; empty if they did
    not grow.

    Args:
        before: Earlier result of `kills()`.
        now: `kills()` after the end of the process.
    """
    grown = [file for file, number in now.items() if number > before.get(file, number)]
    if not grown:
        return ""
    return f"out of memory: the kernel has killed a process on this machine since the last check ({grown[0]} counts them); {ADVICE}"


def said_by_ray(error: str) -> str:
    """Describe a memory monitor error of Ray; empty for other errors."""
    if (
        "OutOfMemoryError" not in error
        and "memory pressure" not in error
        and "memory monitor" not in error.lower()
    ):
        return ""
    was = re.search(r"was ([\d.]+ ?GB / [\d.]+ ?GB)", error)
    had = f" ({was[1]} were in use)" if was else ""
    return f"out of memory: Ray's memory monitor ended it, because its node had too little left{had}; {ADVICE}"


# Stacks: on a signal, a process writes the stacks of all threads to its log, even while it hangs in
# C. The reader shows the thread that executes calls; the log has all of them.


SIGNAL = signal.SIGURG
"""Ignored by processes that do not handle it."""
WAIT_S = 2.0
"""[s] Longest wait for the stacks of a process."""
SETTLED_S = 0.1
"""[s] The stacks are complete when the log has not grown for this long."""
POLL_S = 0.02
MAX_BYTES = 1 << 20
"""[bytes] Maximum part of a log that is read."""
MAX_FRAMES = 12
AT_WORK = "executor.py"
"""File with a frame in the stack of the thread that executes calls."""
FRAME = re.compile(r'^  File "(.*)", line (\S+) in (.*)$')
STATES = {
    "T": "it is stopped, by SIGSTOP or from a terminal",
    "t": "a debugger has stopped it",
    "D": "it waits in the kernel for a device or a file system, which does not answer",
    "Z": "it has ended",
    "X": "it has ended",
}


def write_on_request(stream: int = 2) -> None:
    """Let this process write its stacks on request.

    Args:
        stream: File descriptor to write to.
    """
    faulthandler.register(SIGNAL, file=stream, all_threads=True)


@dataclass(frozen=True)
class Asked:
    """Processes of this machine that were asked for their stacks."""

    logs: Mapping[str, tuple[int, Path]]
    """Worker -> pid and log of its process."""
    begun: Mapping[str, int]
    """Size of each log before the request."""
    known: Mapping[str, bool]

    def answers(self, wait_s: float = WAIT_S) -> dict[str, str]:
        """Return a description of each process's stack. Processes may end in the meantime.

        Args:
            wait_s: [s] Longest wait for all of them.

        Returns:
            Worker -> innermost frames of the thread that executes calls, or why there are none.
        """
        deadline, grown, last = time.monotonic() + wait_s, dict(self.begun), time.monotonic()
        while time.monotonic() < deadline:
            now = {who: _size(log) for who, (_, log) in self.logs.items()}
            if now != grown:
                grown, last = now, time.monotonic()
            all_wrote = all(now[who] > self.begun[who] for who, known in self.known.items() if known)
            if all_wrote and time.monotonic() - last > SETTLED_S:
                break
            time.sleep(POLL_S)
        return {
            who: _in_words(_read(log, self.begun[who]), pid, known=self.known[who])
            for who, (pid, log) in self.logs.items()
        }


def ask_stacks(processes: Mapping[str, tuple[HeldProcess, Path]]) -> Asked:
    """Ask processes of this machine to write their stacks."""
    begun = {who: _size(log) for who, (_, log) in processes.items()}
    known = {who: process.send(SIGNAL) for who, (process, _) in processes.items()}
    return Asked({who: (process.pid, log) for who, (process, log) in processes.items()}, begun, known)


def _in_words(text: str, pid: int, *, known: bool) -> str:
    if not known:
        return "its process is gone"
    found = threads_in(text)
    if not found:
        state = STATES.get(_state(pid), "it does not respond to signals")
        return f"its process does not report its stack: {state}"
    working = [
        frames
        for frames in found
        if any(Path(file).parts[-2:] == ("ranks", AT_WORK) for file, *_ in frames)
    ]
    return shown(working[0] if working else found[-1])


def threads_in(text: str) -> list[list[tuple[str, str, str]]]:
    """Parse the output of `faulthandler`: frames (file, line, function) of each thread, innermost
    first.

    >>> threads_in('noise\\nThread 0x01 (most recent call first):\\n  File "a.py", line 7 in f\\n  File "b.py", line 9 in g\\n')
    [[('a.py', '7', 'f'), ('b.py', '9', 'g')]]
    """
    found: list[list[tuple[str, str, str]]] = []
    for line in text.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")):
            found.append([])
        elif found and (frame := FRAME.match(line)):
            found[-1].append((frame[1], frame[2], frame[3]))
    return [frames for frames in found if frames]


def shown(frames: list[tuple[str, str, str]]) -> str:
    """Describe the frames above the executor's; without any, the worker waits for a call."""
    own: list[tuple[str, str, str]] = []
    for frame in frames:
        if Path(frame[0]).name == AT_WORK and Path(frame[0]).parent.name == "ranks":
            break
        own.append(frame)
    if not own or (len(own) < len(frames) and frames[len(own)][2] == "_serve"):
        return "it is idle: it waits for a call"
    more = [f"  ... and {len(own) - MAX_FRAMES} more"] if len(own) > MAX_FRAMES else []
    lines = [f'  File "{file}", line {line}, in {name}' for file, line, name in own[:MAX_FRAMES]]
    return "\n".join(["stack (innermost call first)", *lines, *more])


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


def _read(log: Path, begin: int) -> str:
    try:
        with log.open("rb") as file:
            file.seek(begin)
            return file.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (OSError, IndexError):
        return "Z"


# Witness

SAMPLE_S = 1.0
"""[s] Time between two readings of a process's memory."""
READINGS = 120
"""Number of readings kept per process."""
STORE_S = 10.0
"""[s] Time between two readings of object stores, which scan all processes."""
EXIT_S = 2.0
"""[s] Longest wait for the exit status of a process that is gone."""


@dataclass
class _Watched:
    process: HeldProcess
    readings: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=READINGS))
    """Pairs of seconds and private bytes."""
    memory: ProcessMemory | None = None


class Witness:
    """Watches processes of this machine.

    Args:
        logs: Folder of their logs.
        root: Root of the file system with the kernel's files.
    """

    def __init__(self, logs: Path, root: Path = Path("/")) -> None:
        self._logs, self._root = logs, root
        self._watched: dict[str, _Watched] = {}
        self._kills = kills(root)
        self._sampled = self._stored = float("-inf")
        self._store_bytes = 0
        self._lock = threading.Lock()
        """A segment server answers on one thread and takes readings on another."""

    def watch(self, processes: Mapping[str, int]) -> None:
        """Watch these processes, and no others."""
        with self._lock:
            for who in list(self._watched):
                if processes.get(who) != self._watched[who].process.pid:
                    self._watched.pop(who).process.close()
            for who, pid in processes.items():
                if who not in self._watched:
                    try:
                        self._watched[who] = _Watched(HeldProcess(pid))
                    except OSError:  # it has ended already
                        continue

    def look(self) -> None:
        """Read their memory, if it is time."""
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
        """Return the last readings, and the current memory of the node."""
        with self._lock:
            found = {who: watched.memory for who, watched in self._watched.items() if watched.memory}
        return Memory(found, node_memory(self._root), self._store_bytes)

    def stacks(self, whose: Collection[str], wait_s: float = WAIT_S) -> dict[str, str]:
        """Return worker -> stack, in words; unwatched workers are left out."""
        with self._lock:
            asked = ask_stacks(
                {
                    who: (self._watched[who].process, self._log(who))
                    for who in whose
                    if who in self._watched
                }
            )
        return asked.answers(wait_s) if asked.logs else {}

    def ending(self, who: str, wait_s: float = EXIT_S, *, blamed: bool = False) -> str:
        """Describe how a process ended: exit code or signal, out of memory, and its memory over
        time. Empty if unknown.

        Args:
            who: The worker.
            wait_s: [s] Longest wait for its exit status.
            blamed: Whether the cause is known already.
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
                "the kernel reports no out-of-memory kill: a user or another program has sent the signal"
            )
        return "; ".join(part for part in (said_of(code), by_kernel, course(watched.readings)) if part)

    def _log(self, who: str) -> Path:
        return self._logs / log_name(who)

    def close(self) -> None:
        self.watch({})


def log_name(who: str) -> str:
    """Name of a worker's log.

    >>> log_name("rollout[0]")
    'rollout_0.log'
    """
    return f"{who.replace('[', '_').rstrip(']')}.log"
