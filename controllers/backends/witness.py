"""Witness: what a node knows of the processes of ranks on it. One is in the driver, one in the server of segments of each other node."""

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

from ...dataflow.config import gib
from ...workers.device import NodeMemory, cgroup_folders, node_memory

# Process memory
#
# Memory of processes, as the kernel counts it. Reading a process costs about 30 us. That of the
# node is in `workers/device.py`.


ENDS = 4
"""Readings that are shown of a course, evenly spread."""


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of a process that is in RAM."""

    resident_bytes: int
    """Its own: the heap, and files that it has mapped."""
    shared_bytes: int
    """Shared memory that it has touched: segments of rows, weights on their way, Ray's object store. Others may count it, too."""


@dataclass(frozen=True)
class Memory:
    """The memory of a node, and of what of the run is on it."""

    processes: dict[str, ProcessMemory]
    """Worker, such as `rollout[0]` -> its memory."""
    node: NodeMemory | None = None
    object_store_bytes: int = 0
    """What Ray's object store takes of it."""


def memory_of(process: int | str, root: Path = Path("/")) -> ProcessMemory | None:
    """Memory of a process of this machine; None: it is gone.

    >>> memory_of("self").resident_bytes > 1 << 20, memory_of(-1)
    (True, None)

    Args:
        process: its number, or "self".
    """
    try:
        text = (root / f"proc/{process}/status").read_text()
    except OSError:
        return None
    found = {
        name: int(kib) << 10 for name, kib in re.findall(r"^(Rss\w+):\s+(\d+) kB$", text, re.MULTILINE)
    }
    if "RssAnon" not in found:  # it has ended, and nobody has taken notice
        return None
    return ProcessMemory(found["RssAnon"] + found.get("RssFile", 0), found.get("RssShmem", 0))


def object_store(root: Path = Path("/")) -> int:
    """Bytes that the object stores of the Ray nodes of this machine hold, as far as this user may see them."""
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
    """How memory went over time, in words; empty where there are no two readings.

    >>> course([(0.0, 1 << 30), (10.0, 2 << 30), (20.0, 4 << 30)])
    'its own memory in the last 20 s: 1.0 GiB, 2.0 GiB, 4.0 GiB'

    Args:
        readings: seconds and bytes, oldest first.
    """
    if len(readings) < 2:
        return ""
    last = len(readings) - 1
    shown = sorted({round(k * last / (ENDS - 1)) for k in range(ENDS)})
    return f"its own memory in the last {readings[-1][0] - readings[0][0]:.0f} s: " + ", ".join(
        gib(readings[k][1]) for k in shown
    )


# Exit status
#
# With which code or signal a process has ended, also one that is no child of this: the kernel
# keeps it for whoever holds its pidfd.
#
# Linux 6.15 and later answer this for any process. Earlier ones do not; then it is known of a
# process that nobody has waited for.


GET_INFO = 0xC040FF0B
"""PIDFD_GET_INFO of linux/pidfd.h, for its first 64 bytes."""
EXIT = 1 << 3
"""PIDFD_INFO_EXIT: the exit status is wanted, and is there."""
INFO = struct.Struct("=Q52xi")
"""The mask, and the exit status."""
EXIT_POLL_S = 0.02


class HeldProcess:
    """A process that is held: its number is given to no other as long as this lives.

    Args:
        pid: of the process, on this machine.

    Raises:
        OSError: there is none.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._held = os.pidfd_open(pid)

    def send(self, number: int) -> bool:
        """Send it a signal; returns whether it is there to get it."""
        with suppress(OSError):
            signal.pidfd_send_signal(self._held, number)
            return True
        return False

    def exit_code(self, wait_s: float) -> int | None:
        """Its exit code, or minus the signal that ended it; None: it lives, or the kernel does not say.

        Args:
            wait_s: longest wait for its end, and for the process that started it to take notice.
        """
        if not select.select([self._held], [], [], wait_s)[0]:
            return None
        status = self._status()
        while status is None and wait_s > 0:  # its parent has not waited for it yet
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
        with suppress(
            OSError, ValueError, IndexError
        ):  # nobody has waited for it: the last field but none is its status
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
            return int(fields[49]) if fields[0] in "ZX" else None
        return None

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._held)


def said_of(code: int | None) -> str:
    """An exit code, in words.

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


# Out of memory
#
# Out of memory: whether a process was ended because memory ran out, which it cannot say itself.
# The kernel counts the processes that it ends; the error of Ray's memory monitor says so.


FILES = ("memory.events", "memory.oom_control")
"""Files of a cgroup (versions 2 and 1) that count the processes ended because its memory ran out."""
ADVICE = (
    "give the worker more memory, or smaller microbatches, shorter responses, fewer ranks on its node"
)


def kills(root: Path = Path("/")) -> dict[str, int]:
    """File -> processes that the kernel has ended because memory ran out, as far as this process can see.

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
    """What the counts of the kernel say of a process that SIGKILL has ended; empty: nothing.

    Args:
        before: `kills()` when it was looked at last.
        now: `kills()` after the end of the process.
    """
    grown = [file for file, number in now.items() if number > before.get(file, number)]
    if not grown:
        return ""
    return f"out of memory: the kernel has ended a process of this machine meanwhile ({grown[0]} counts them); {ADVICE}"


def said_by_ray(error: str) -> str:
    """What Ray says of its memory monitor in an error; empty: nothing."""
    if (
        "OutOfMemoryError" not in error
        and "memory pressure" not in error
        and "memory monitor" not in error.lower()
    ):
        return ""
    was = re.search(r"was ([\d.]+ ?GB / [\d.]+ ?GB)", error)
    had = f" ({was[1]} were in use)" if was else ""
    return f"out of memory: Ray's memory monitor ended it, because its node had too little left{had}; {ADVICE}"


# Stacks
#
# Where a process stands: on a signal it writes the stacks of all of its threads to its log, also
# while it hangs in C.
#
# The driver, or the server of segments of another node, sends the signal, and reads what comes.
# The part that matters is the thread that carries out the calls; the log has all of them.


SIGNAL = signal.SIGURG
"""A process that does not know of it ignores it."""
WAIT_S = 2.0
"""Longest wait for the stacks of a process."""
SETTLED_S = 0.1
"""A log that does not grow for so long has all of them."""
POLL_S = 0.02
MAX_BYTES = 1 << 20
"""Most bytes of a log that are read."""
MAX_FRAMES = 12
"""Frames that are shown, the innermost."""
AT_WORK = "executor.py"
"""The file whose frame is in the stack of the thread that carries out calls."""
FRAME = re.compile(r'^  File "(.*)", line (\S+) in (.*)$')
STATES = {
    "T": "it is stopped, by SIGSTOP or from a terminal",
    "t": "a debugger has stopped it",
    "D": "it waits in the kernel for a device or a file system, which does not answer",
    "Z": "it has ended",
    "X": "it has ended",
}


def write_on_request(stream: int = 2) -> None:
    """From here on this process writes its stacks on request.

    Args:
        stream: descriptor of the file that they are written to.
    """
    faulthandler.register(SIGNAL, file=stream, all_threads=True)


@dataclass(frozen=True)
class Asked:
    """Processes of this machine that were asked for their stacks, all at once."""

    logs: Mapping[str, tuple[int, Path]]
    """Worker -> number of its process, and its log."""
    begun: Mapping[str, int]
    """Bytes of each log before."""
    known: Mapping[str, bool]
    """Whether the process was there."""

    def answers(self, wait_s: float = WAIT_S) -> dict[str, str]:
        """Where the processes stand, each in a few lines. Holds no process: others may end and forget them meanwhile.

        Args:
            wait_s: longest wait for all of them.

        Returns:
            Worker -> the innermost frames of the thread that carries out calls, or why there are none.
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
    """Have processes of this machine write their stacks.

    Args:
        processes: worker -> its process, and its log.
    """
    begun = {who: _size(log) for who, (_, log) in processes.items()}
    known = {who: process.send(SIGNAL) for who, (process, _) in processes.items()}
    return Asked({who: (process.pid, log) for who, (process, log) in processes.items()}, begun, known)


def _in_words(text: str, pid: int, *, known: bool) -> str:
    if not known:
        return "its process is gone"
    found = threads_in(text)
    if not found:
        return (
            f"its process does not say where it stands: {STATES.get(_state(pid), 'it answers no signal')}"
        )
    working = [
        frames
        for frames in found
        if any(Path(file).parts[-2:] == ("ranks", AT_WORK) for file, *_ in frames)
    ]
    return shown(working[0] if working else found[-1])


def threads_in(text: str) -> list[list[tuple[str, str, str]]]:
    """The stacks in what `faulthandler` wrote: of each thread the frames (file, line, function), the innermost first.

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
    """The frames above those of the executor; that it waits for a call, where there are none."""
    own: list[tuple[str, str, str]] = []
    for frame in frames:
        if Path(frame[0]).name == AT_WORK and Path(frame[0]).parent.name == "ranks":
            break
        own.append(frame)
    if not own or (len(own) < len(frames) and frames[len(own)][2] == "_serve"):
        return "it waits for a call, as if it had none"
    more = [f"  ... and {len(own) - MAX_FRAMES} more"] if len(own) > MAX_FRAMES else []
    lines = [f'  File "{file}", line {line}, in {name}' for file, line, name in own[:MAX_FRAMES]]
    return "\n".join(["it stands at (the innermost call first)", *lines, *more])


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
                {
                    who: (self._watched[who].process, self._log(who))
                    for who in whose
                    if who in self._watched
                }
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
            by_kernel = "the kernel counts nothing that it ended for want of memory: somebody, or another program, has sent it"
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
