"""Memory, stacks and exit reasons of a run's processes.

`ProcessWatch` watches one machine's processes, in the driver or in a node's segment server.
`ProcessDiagnostics` collects the findings of all nodes for the driver.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import signal
import struct
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from ...dataflow.byte_units import gib
from ...dataflow.cgroups import cgroup_folders
from ...dataflow.metric_names import DRIVER
from ...workers.cuda_driver import gpu_model
from ...workers.node_memory import NodeMemory, node_memory

# Memory of processes, as the kernel counts it (about 30 us per process)


@dataclass(frozen=True)
class _ProcessMemory:
    resident_bytes: int
    """Private memory: the heap and mapped files."""
    shared_bytes: int
    """Shared memory that the process has touched: row segments, weight transfers, Ray's object
    store. Several processes may count the same memory."""


@dataclass(frozen=True)
class Memory:
    processes: dict[str, _ProcessMemory]
    """Worker, such as `rollout[0]` -> its memory."""
    node: NodeMemory | None = None
    object_store_bytes: int = 0
    gpu: str = ""
    """Name of the node's GPUs, or "" without any."""


def memory_of(pid: int) -> _ProcessMemory | None:
    """Return the memory of a process on this machine, or None if the process has ended.

    Reads `/proc`, because psutil takes milliseconds to tell shared memory from mapped files.

    >>> memory_of(os.getpid()).resident_bytes > 1 << 20, memory_of(-1)
    (True, None)
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = {
        name: int(kib) << 10 for name, kib in re.findall(r"^(Rss\w+):\s+(\d+) kB$", text, re.MULTILINE)
    }
    if "RssAnon" not in found:  # a zombie
        return None
    return _ProcessMemory(found["RssAnon"] + found.get("RssFile", 0), found.get("RssShmem", 0))


def object_store() -> int:
    """Bytes in the object stores of this machine's Ray nodes that this user can see."""
    stores = [memory_of(p.pid) for p in psutil.process_iter(["name"]) if p.info["name"] == "raylet"]
    return sum(memory.shared_bytes for memory in stores if memory is not None)


def memory_course(readings: Sequence[tuple[float, int]]) -> str:
    """Describe memory over time by up to four readings; empty for fewer than two.

    >>> memory_course([(0.0, 1 << 30), (10.0, 2 << 30), (20.0, 4 << 30)])
    'its own memory in the last 20 s: 1.0 GiB, 2.0 GiB, 4.0 GiB'

    Args:
        readings: Pairs of seconds and bytes, oldest first.
    """
    if len(readings) < 2:
        return ""
    chosen = sorted({round(k * (len(readings) - 1) / 3) for k in range(4)})
    seconds, said = readings[-1][0] - readings[0][0], ", ".join(gib(readings[k][1]) for k in chosen)
    return f"its own memory in the last {seconds:.0f} s: {said}"


def memory_metrics(nodes: Mapping[str, Memory], segment_bytes: float) -> dict[str, float]:
    """Return memory metrics of processes and stores, and the free memory of the fullest node."""
    by_group: dict[str, list[_ProcessMemory]] = {}
    for node in nodes.values():
        for who, memory in node.processes.items():
            by_group.setdefault(who.partition("[")[0], []).append(memory)
    metrics: dict[str, float] = {}
    for group, own in by_group.items():
        # Ranks on one node share this memory, so a sum would count it several times.
        metrics[f"{group}/resident_bytes"] = float(sum(memory.resident_bytes for memory in own))
        metrics[f"{group}/shared_bytes"] = float(max(memory.shared_bytes for memory in own))
    metrics["segment_bytes"] = float(segment_bytes)
    metrics["object_store_bytes"] = float(sum(node.object_store_bytes for node in nodes.values()))
    limits = [node.node for node in nodes.values() if node.node is not None]
    if limits:
        fullest = max(limits, key=lambda limit: limit.share)
        metrics["host_free_bytes"] = float(fullest.free_bytes)
        metrics["host_limit_bytes"] = float(fullest.limit_bytes)
    return metrics


# Exit reasons: a pidfd gives the exit status of a process that need not be a child. Linux 6.15 and
# later report it for any process; earlier versions only until the parent has waited for it. The
# kernel also counts the processes that it kills when memory runs out.


GET_INFO = 0xC040FF0B
"""PIDFD_GET_INFO in linux/pidfd.h, for its first 64 bytes."""
EXIT = 1 << 3
"""PIDFD_INFO_EXIT: requests the exit status, or says that it is present."""
INFO = struct.Struct("=Q52xi")
"""Layout of these bytes: the mask, and the exit status."""
POLL_S = 0.02
OOM_COUNTS = ("memory.events", "memory.oom_control")
"""Files of a cgroup (versions 2 and 1) that count its out-of-memory kills."""
ADVICE = (
    "give the worker more memory, or smaller microbatches, shorter responses, fewer ranks on its node"
)


class _HeldProcess:
    """A pidfd, which keeps identifying its process even if the pid is reused. Raises OSError if
    there is no such process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def send(self, number: int) -> bool:
        """Send a signal. Return whether the process exists."""
        with suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, number)
            return True
        return False

    def exit_code(self, wait_s: float) -> int | None:
        """Return the exit code, or the negative number of the signal that ended the process; None
        if it still runs after `wait_s`, or if the code is unknown."""
        deadline = time.monotonic() + wait_s
        while (status := self._status()) is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return None if status is None else os.waitstatus_to_exitcode(status)

    def _status(self) -> int | None:
        info = bytearray(INFO.size)
        INFO.pack_into(info, 0, EXIT, 0)
        with suppress(OSError):
            fcntl.ioctl(self._pidfd, GET_INFO, info)
            mask, status = INFO.unpack(info)
            if mask & EXIT:
                return status
        with suppress(OSError, ValueError, IndexError):  # a zombie's stat file has the exit status
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
            # Field 52 of proc(5), exit_code. The split begins at field 3.
            return int(fields[49]) if fields[0] in "ZX" else None
        return None

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._pidfd)


def said_of(code: int | None) -> str:
    """Describe an exit code in words.

    >>> said_of(3), said_of(-9), said_of(None)
    ('exit code 3', 'signal SIGKILL', '')
    """
    if code is None:
        return ""
    if code >= 0:
        return f"exit code {code}"
    named = -code in {*signal.Signals}
    return f"signal {signal.Signals(-code).name if named else -code}"


def kills(root: Path = Path("/")) -> dict[str, int]:
    """Return file -> number of processes that the kernel killed because memory ran out."""
    found: dict[str, int] = {}
    counts = (folder / name for folder in cgroup_folders("memory", root) for name in OOM_COUNTS)
    for file in (*counts, root / "proc/vmstat"):
        with suppress(OSError):
            if number := re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE):
                found[str(file)] = int(number[1])
    return found


def said_by_kernel(before: dict[str, int], now: dict[str, int]) -> str:
    """Describe how the counts of `kills()` grew; empty if they did not."""
    grown = [file for file, number in now.items() if number > before.get(file, number)]
    if not grown:
        return ""
    return f"out of memory: the kernel has killed a process on this machine since the last check ({grown[0]} counts them); {ADVICE}"


def said_by_ray(error: str) -> str:
    """Describe a kill by Ray's memory monitor, given Ray's error; empty for other errors."""
    if not re.search(r"OutOfMemoryError|memory pressure|(?i:memory monitor)", error):
        return ""
    was = re.search(r"was ([\d.]+ ?GB / [\d.]+ ?GB)", error)
    had = f" ({was[1]} were in use)" if was else ""
    return f"out of memory: Ray's memory monitor ended it, because its node had too little left{had}; {ADVICE}"


# Stacks: on a signal, `faulthandler` writes the stacks of all threads of a process to its log, even
# while the process hangs in C code. Messages show only the thread that executes calls.


SIGNAL = signal.SIGURG
"""The signal that requests stacks. Processes without a handler ignore it."""
STACKS_S = 2.0
SETTLED_S = 0.1
"""[s] The stacks count as complete when the logs have not grown for this long."""
MAX_BYTES = 1 << 20
"""[bytes] Maximum part of a log to read."""
MAX_FRAMES = 12
EXECUTOR = ("ranks", "executor.py")
"""The thread that executes calls has a frame of this file."""
STATES = {
    psutil.STATUS_STOPPED: "it is stopped, by SIGSTOP or from a terminal",
    psutil.STATUS_TRACING_STOP: "a debugger has stopped it",
    psutil.STATUS_DISK_SLEEP: "it waits in the kernel for a device or a file system, which does not answer",
    psutil.STATUS_ZOMBIE: "it has ended",
    psutil.STATUS_DEAD: "it has ended",
}

Frame = tuple[str, str, str]


def write_on_request() -> None:
    """Let this process write its stacks to its standard error on request."""
    faulthandler.register(SIGNAL, file=2, all_threads=True)


def threads_in(text: str) -> list[list[Frame]]:
    """Parse `faulthandler`'s output into the frames of each thread, innermost first.

    >>> threads_in('noise\\nThread 0x01 (most recent call first):\\n  File "a.py", line 7 in f\\n  File "b.py", line 9 in g\\n')
    [[('a.py', '7', 'f'), ('b.py', '9', 'g')]]
    """
    threads = re.split(r"^(?:Thread|Current thread) 0x", text, flags=re.MULTILINE)[1:]
    found = [re.findall(r'^  File "(.*)", line (\S+) in (.*)$', one, re.MULTILINE) for one in threads]
    return [frames for frames in found if frames]


def shown(frames: Sequence[Frame]) -> str:
    """Describe the frames that the executor called, or say that the worker is idle."""
    at = next((k for k, frame in enumerate(frames) if _is_executor(frame)), len(frames))
    own = frames[:at]
    if not own or (at < len(frames) and frames[at][2] == "_serve"):
        return "it is idle: it waits for a call"
    lines = [f'  File "{file}", line {line}, in {name}' for file, line, name in own[:MAX_FRAMES]]
    more = [f"  ... and {len(own) - MAX_FRAMES} more"] if len(own) > MAX_FRAMES else []
    return "\n".join(["stack (innermost call first)", *lines, *more])


def _is_executor(frame: Frame) -> bool:
    return Path(frame[0]).parts[-2:] == EXECUTOR


def _written(pid: int, log: Path, begun: int) -> str:
    """Describe the stacks that a process wrote to its log after the first `begun` bytes."""
    text = ""
    with suppress(OSError), log.open("rb") as file:
        file.seek(begun)
        text = file.read(MAX_BYTES).decode(errors="replace")
    if found := threads_in(text):
        return shown(next((frames for frames in found if any(map(_is_executor, frames))), found[-1]))
    try:
        state = STATES.get(psutil.Process(pid).status(), "it does not respond to signals")
    except psutil.NoSuchProcess:
        state = STATES[psutil.STATUS_DEAD]
    return f"its process does not report its stack: {state}"


def _size(log: Path) -> int:
    with suppress(OSError):
        return log.stat().st_size
    return 0


# ProcessWatch: the processes of this machine

SAMPLE_S = 1.0
"""[s] Interval between readings of a process's memory."""
READINGS = 120
"""Number of readings to keep per process."""
STORE_S = 10.0
"""[s] Interval between readings of object stores. Each scans all processes."""
EXIT_S = 2.0
"""[s] Longest wait for the exit status of a process that is gone."""


@dataclass
class _Watched:
    process: _HeldProcess
    readings: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=READINGS))
    """Pairs of seconds and private bytes."""
    memory: _ProcessMemory | None = None


class ProcessWatch:
    """Watches this machine's processes.

    Args:
        logs: Folder of their logs.
        root: Root of the file system with the kernel's kill counts.
    """

    def __init__(self, logs: Path, root: Path = Path("/")) -> None:
        self._logs, self._root = logs, root
        self._watched: dict[str, _Watched] = {}
        self._kills = kills(root)
        self._gpu = gpu_model(root)
        self._sampled = self._stored = float("-inf")
        self._store_bytes = 0
        self._lock = threading.Lock()
        """A segment server answers on one thread and takes readings on another."""

    def watch(self, processes: Mapping[str, int]) -> None:
        """Watch only the processes of these workers (worker -> pid)."""
        with self._lock:
            for who in list(self._watched):
                if processes.get(who) != self._watched[who].process.pid:
                    self._watched.pop(who).process.close()
            for who, pid in processes.items():
                if who not in self._watched:
                    with suppress(OSError):  # it has ended already
                        self._watched[who] = _Watched(_HeldProcess(pid))

    def take_readings(self) -> None:
        now = time.monotonic()
        if now - self._sampled < SAMPLE_S:
            return
        with self._lock:
            self._sampled = now
            for watched in self._watched.values():
                if (memory := memory_of(watched.process.pid)) is not None:
                    watched.memory = memory
                    watched.readings.append((now, memory.resident_bytes))
            if now - self._stored >= STORE_S:
                self._stored, self._store_bytes = now, object_store()

    def memory(self) -> Memory:
        with self._lock:
            found = {who: watched.memory for who, watched in self._watched.items() if watched.memory}
        return Memory(found, node_memory(self._root), self._store_bytes, self._gpu)

    def stacks(self, whose: Collection[str], wait_s: float = STACKS_S) -> dict[str, str]:
        """Return worker -> innermost frames of its executor's thread, or why there are none."""
        with self._lock:
            asked = {who: self._watched[who].process for who in whose if who in self._watched}
            logs = {who: self._logs / log_name(who) for who in asked}
            # Measure the logs before the signal, so as not to read older stacks.
            begun = {who: _size(log) for who, log in logs.items()}
            alive = [who for who, process in asked.items() if process.send(SIGNAL)]
        last, deadline = time.monotonic(), time.monotonic() + wait_s
        sizes = begun
        while asked and time.monotonic() < deadline:
            now = {who: _size(log) for who, log in logs.items()}
            if now != sizes:
                sizes, last = now, time.monotonic()
            if all(now[who] > begun[who] for who in alive) and time.monotonic() - last > SETTLED_S:
                break
            time.sleep(POLL_S)
        return {
            who: _written(process.pid, logs[who], begun[who]) if who in alive else "its process is gone"
            for who, process in asked.items()
        }

    def ending(self, who: str, wait_s: float = EXIT_S, *, blamed: bool = False) -> str:
        """Describe how a process ended, with its memory over time; empty if it was not watched.

        Args:
            blamed: Whether the cause is already known; skips the kernel's counts.
        """
        with self._lock:
            watched = self._watched.pop(who, None)
            if watched is None:
                return ""
            code = watched.process.exit_code(wait_s)
            watched.process.close()
            before, self._kills = self._kills, kills(self._root)
        # When memory runs out, the kernel sends SIGKILL. An unknown status may be one, too.
        by_kernel = said_by_kernel(before, self._kills) if code in (None, -9) and not blamed else ""
        if code == -9 and not by_kernel and not blamed:
            by_kernel = (
                "the kernel reports no out-of-memory kill: a user or another program has sent the signal"
            )
        return "; ".join(filter(None, (said_of(code), by_kernel, memory_course(watched.readings))))


def log_name(who: str) -> str:
    """Return the file name of a worker's log.

    >>> log_name("rollout[0]")
    'rollout_0.log'
    """
    return f"{who.replace('[', '_').rstrip(']')}.log"


# ProcessDiagnostics: the processes of all nodes

ASK_S = 10.0
"""[s] Interval between requests to other nodes."""
ANSWER_S = 8.0
"""[s] Longest wait for another node to report stacks or an exit reason."""
K = TypeVar("K")


def take_answers(promises: dict[Any, K], timeout_s: float = 0.0) -> list[tuple[K, Any]]:
    """Remove settled promises from `promises`. Return (value, result) of those that succeeded."""
    import ray
    from ray.exceptions import RayError

    found: list[tuple[K, Any]] = []
    if promises:
        for promise in ray.wait(list(promises), num_returns=len(promises), timeout=timeout_s)[0]:
            key = promises.pop(promise)
            with suppress(RayError):
                found.append((key, ray.get(promise)))
    return found


class ProcessDiagnostics:
    """Collects memory, stacks and exit reasons of the processes of all nodes. Runs in the driver,
    on `node`; other threads may use it."""

    def __init__(self, node: str, logs: Path) -> None:
        self._here = node
        self._own = ProcessWatch(logs)
        self._lock = threading.RLock()
        """Protects the fields below. No thread holds it while waiting for an answer."""
        self._coming: dict[Any, str] = {}
        """Promise of a process's node and pid -> its worker."""
        self._processes: dict[str, tuple[str, int]] = {DRIVER: (node, os.getpid())}
        """Worker -> name of its node, and its pid there."""
        self._asked: dict[Any, str] = {}
        """Promise of a node's memory -> the node."""
        self._told: dict[str, dict[str, int]] = {}
        """Other node -> processes that it was told to watch."""
        self._elsewhere: dict[str, Memory] = {}
        """Other node -> its last known memory."""
        self._looked = self._asked_at = float("-inf")

    def meet(self, who: str, process: Any) -> None:
        """Start watching a worker's new process, given a promise of its node and pid."""
        with self._lock:
            self.forget(who)
            self._coming[process] = who

    def forget(self, who: str) -> None:
        with self._lock:
            self._coming = {promise: other for promise, other in self._coming.items() if other != who}
            self._processes.pop(who, None)

    def look(self, hosts: Mapping[str, Any]) -> None:
        """Process answers, and take or request new readings. Does not wait."""
        now = time.monotonic()
        if now - self._looked < SAMPLE_S:
            return
        self._looked = now
        self._watch()
        self._own.take_readings()
        self._elsewhere |= take_answers(self._asked)
        told = {node: self._on(node) for node in hosts}
        if hosts and not self._asked and (now - self._asked_at >= ASK_S or told != self._told):
            self._asked_at, self._told = now, told
            self._asked = {host.memory.remote(told[node]): node for node, host in hosts.items()}

    def _watch(self) -> None:
        with self._lock:
            self._processes |= take_answers(self._coming)
            self._own.watch(self._on(self._here))

    def _on(self, node: str) -> dict[str, int]:
        with self._lock:
            return {who: pid for who, (at, pid) in self._processes.items() if at == node}

    def memory(self) -> dict[str, Memory]:
        return {self._here: self._own.memory(), **self._elsewhere}

    def stacks(self, whose: Collection[str], hosts: Mapping[str, Any]) -> dict[str, str]:
        with self._lock:
            self._watch()
            nodes = {self._processes[who][0] for who in whose if who in self._processes}
            asked = {
                host.stacks.remote(self._on(node), list(whose)): node
                for node, host in hosts.items()
                if node in nodes
            }
        found = self._own.stacks(whose)
        for _, answer in take_answers(asked, ANSWER_S):
            found |= answer
        return found

    def ending(self, who: str, error: BaseException, hosts: Mapping[str, Any]) -> str:
        by_ray = said_by_ray(f"{type(error).__name__}: {error}")
        with self._lock:
            self._processes |= take_answers(self._coming)
            node, _ = self._processes.pop(who, ("", 0))
        if node == self._here:
            said = self._own.ending(who, blamed=bool(by_ray))
        else:
            asked = {hosts[node].ending.remote(who, blamed=bool(by_ray)): node} if node in hosts else {}
            said = next((answer for _, answer in take_answers(asked, ANSWER_S)), "")
        return "; ".join(filter(None, (by_ray, said))) or type(error).__name__

    def close(self) -> None:
        self._own.watch({})
