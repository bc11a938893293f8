"""The first process of a sandbox: it starts programs, relays their output and enforces limits.

`sandbox.py` runs this file with `python -I -S` as process 1 of a sandbox, so it imports only the
standard library. A request on standard input is the size of a JSON object, the object, then the
standard input and the files of a program; size 0 ends the sandbox. The reply on standard output is a
line of JSON, then both outputs.

The program cannot harm this process. The kernel shields process 1 from signals of the sandbox, and
this process cannot be debugged, or read through `/proc`. If it runs as root of
the sandbox, it starts programs as another user.

    waiting ──request──> running ──program ended, or a limit was exceeded──> killing ──reply──> waiting
    any state ──end of input: the owner is gone──> exit, and the kernel kills all processes
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

CHECK_S = 0.02
"""[s] Time between two checks of the limits."""
SIZE_DIGITS = 10
PROGRAM_USER = 1000
SLACK_PROCESSES = 8
"""The kernel allows some more processes than the limit, so that a check can see that it is exceeded."""
MAX_FILES = 50_000
"""Files and folders in the scratch directory. Each takes about a kilobyte of the kernel's memory."""
OPEN_FILES = 128
RESERVED_BYTES = 8 << 30
"""[bytes] Addresses that a process may reserve beyond the memory limit."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


def main(scratch: str) -> None:
    if os.getpid() != 1:  # `_kill` would end all processes of the machine
        sys.exit(
            "sandbox_program.py runs only as process 1 of a sandbox; use weft.workers.sandbox.Sandbox"
        )
    os.closerange(3, 4096)  # descriptors that the launcher left open
    # If the machine runs out of memory, the kernel ends a sandbox first.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    prctl_set_dumpable = 4
    ctypes.CDLL(None).prctl(prctl_set_dumpable, 0, 0, 0, 0)
    requests, replies = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    _reply(replies, {"ready": True})
    while size := int(_exactly(requests, SIZE_DIGITS)):
        request = json.loads(_exactly(requests, size))
        stdin = _exactly(requests, request["stdin"])
        files = {name: _exactly(requests, size) for name, size in request["files"].items()}
        run = _Run(request, files, scratch)
        outputs = run.finish(stdin, requests.fileno(), woken) if run.error is None else (b"", b"")
        _reply(replies, run.result | {"stdout": len(outputs[0]), "stderr": len(outputs[1])}, *outputs)


class _Run:
    """One program, from its start until no process of it is left."""

    def __init__(self, request: dict[str, Any], files: dict[str, bytes], scratch: str) -> None:
        self._limits = request["limits"]
        self._scratch = scratch
        self._started_s = time.monotonic()
        self._cpu_before_s = _children_cpu_s()
        self._cpu_s = 0.0
        self._status: int | None = None
        self._ending: str | None = None
        os.chmod(scratch, 0o1777)  # an earlier program may have changed it
        stdin, out, err, failed = (os.pipe() for _ in range(4))
        self._child = os.fork()
        if self._child == 0:
            try:
                self._become(request, files, (stdin[0], out[1], err[1]))
            except BaseException as error:
                number = getattr(error, "errno", None) or errno.EINVAL
                os.write(
                    failed[1],
                    f"{number} {getattr(error, 'strerror', None) or error}".encode(errors="replace")[
                        :2000
                    ],
                )
            finally:
                os._exit(127)
        for end in (stdin[0], out[1], err[1], failed[1]):
            os.close(end)
        self._stdin, self._out, self._err = stdin[1], out[0], err[0]
        for end in (self._stdin, self._out, self._err):
            os.set_blocking(end, False)
        with os.fdopen(failed[0], "rb") as report:
            said = report.read()  # ends when the program starts
        self.error = said.decode(errors="replace") or None
        if self.error is not None:
            os.waitpid(self._child, 0)
            for end in (self._stdin, self._out, self._err):
                os.close(end)

    def _become(self, request: dict[str, Any], files: dict[str, bytes], ends: tuple[int, ...]) -> None:
        """Turn the forked child into the program."""
        limits = self._limits
        os.setsid()
        for number, end in enumerate(ends):
            os.dup2(end, number)
        # A check ends programs at the memory limit. This limit only bounds growth between two checks:
        # programs may reserve more addresses than they use.
        _limit(resource.RLIMIT_AS, limits["memory_bytes"] + RESERVED_BYTES)
        _limit(resource.RLIMIT_CPU, math.ceil(limits["cpu_s"]) + 1)
        _limit(resource.RLIMIT_NOFILE, OPEN_FILES)
        _limit(resource.RLIMIT_CORE, 0)
        if request["count_processes"]:
            _limit(resource.RLIMIT_NPROC, limits["processes"] + SLACK_PROCESSES)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if os.getuid() == 0:
            os.setgroups([])
            os.setresgid(PROGRAM_USER, PROGRAM_USER, PROGRAM_USER)
            os.setresuid(PROGRAM_USER, PROGRAM_USER, PROGRAM_USER)
        os.umask(0o022)
        os.chdir(self._scratch)
        for name, content in files.items():
            if folder := os.path.dirname(name):
                os.makedirs(folder, exist_ok=True)
            with open(name, "wb") as file:
                file.write(content)
        os.execvpe(request["command"][0], request["command"], request["environment"])

    def finish(self, stdin: bytes, owner: int, woken: int) -> tuple[bytes, bytes]:
        """Feed and watch the program until it ends, then kill all that it started. Returns its
        standard output and standard error."""
        outputs: dict[int, bytearray] = {self._out: bytearray(), self._err: bytearray()}
        pending, open_ends = memoryview(stdin), {self._out, self._err}
        feeding = True
        check_s = self._started_s
        while self._status is None and self._ending is None:
            if feeding and not pending:
                os.close(self._stdin)
                feeding = False
            ready, writable, _ = select.select(
                [owner, woken, *open_ends], [self._stdin] if feeding else [], [], CHECK_S
            )
            if owner in ready:  # it sends nothing during a run, so this is the end of its input
                sys.exit(0)
            if woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 4096)
            if writable:
                try:
                    pending = pending[os.write(self._stdin, pending[:65536]) :]
                except BrokenPipeError:
                    pending = pending[:0]
                except BlockingIOError:
                    pass
            self._read(outputs, open_ends, ready)
            self._reap()
            if self._ending is None and time.monotonic() >= check_s:
                self._ending = self._exceeded()
                check_s = time.monotonic() + CHECK_S
        if feeding:
            os.close(self._stdin)
        self._kill()
        while open_ends and self._read(outputs, open_ends, list(open_ends)):
            pass
        for end in (self._out, self._err):
            os.close(end)
        self._cpu_s = _children_cpu_s() - self._cpu_before_s
        if self._ending is None:
            self._ending = self._exceeded_at_end()
        kept = self._limits["output_bytes"]
        return bytes(outputs[self._out][:kept]), bytes(outputs[self._err][:kept])

    def _read(self, outputs: dict[int, bytearray], open_ends: set[int], ready: list[int]) -> bool:
        """Read what is there. Returns whether there was anything."""
        found = False
        for end in [end for end in ready if end in open_ends]:
            try:
                data = os.read(end, 65536)
            except BlockingIOError:
                continue
            if not data:
                open_ends.discard(end)
                continue
            outputs[end] += data
            found = True
        if sum(map(len, outputs.values())) > self._limits["output_bytes"]:
            self._ending = self._ending or "too much output"
            return False
        return found

    def _reap(self) -> bool:
        """Collect processes that have ended. Returns whether any are left."""
        try:
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self._child:
                    self._status = found[1]
        except ChildProcessError:
            return False
        return True

    def _kill(self) -> None:
        """Kill everything else in the sandbox, and wait until it is gone."""
        while self._reap():
            # On gVisor, a process may fork while the signal is on its way.
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            time.sleep(0.001)

    def _exceeded(self) -> str | None:
        """Return the limit that the running processes exceed."""
        limits, tasks, rss_bytes = self._limits, 0, 0
        cpu_s = _children_cpu_s() - self._cpu_before_s
        found = list(_processes())
        for _, fields in found:
            # Fields of /proc/PID/stat after the name: man 5 proc.
            cpu_s += sum(map(int, fields[11:15])) / _TICKS
            tasks += int(fields[17])
            rss_bytes += int(fields[21]) * _PAGE
        if time.monotonic() - self._started_s > limits["wall_s"]:
            return "timed out"
        if tasks > limits["processes"]:
            return "too many processes"
        if cpu_s > limits["cpu_s"]:
            return "out of CPU time"
        # Forked processes share pages. It takes longer to count each page once, so only do it near the
        # limit. A fork between two readings makes pages count twice, so both counts must exceed it.
        if rss_bytes > limits["memory_bytes"] and all(
            _used_bytes() > limits["memory_bytes"] for _ in range(2)
        ):
            return "out of memory"
        return "disk full" if self._disk_is_full() else None

    def _exceeded_at_end(self) -> str | None:
        assert self._status is not None
        if os.WIFSIGNALED(self._status) and os.WTERMSIG(self._status) == signal.SIGXCPU:
            return "out of CPU time"
        if self._cpu_s > self._limits["cpu_s"]:
            return "out of CPU time"
        return "disk full" if self._disk_is_full() else None

    def _disk_is_full(self) -> bool:
        for folder in (self._scratch, "/dev/shm"):  # bubblewrap's /dev/shm is a link to the other
            disk = os.statvfs(folder)
            used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
            if used > self._limits["disk_bytes"] or disk.f_files - disk.f_ffree > MAX_FILES:
                return True
        return False

    @property
    def result(self) -> dict[str, Any]:
        if self.error is not None:
            number, _, text = self.error.partition(" ")
            return {"errno": int(number), "error": text}
        assert self._status is not None
        code = os.waitstatus_to_exitcode(self._status)
        return {
            "ending": self._ending or ("exited" if code >= 0 else "crashed"),
            "exit_code": None if self._ending else code,
            "wall_s": time.monotonic() - self._started_s,
            "cpu_s": self._cpu_s,
        }


def _limit(which: int, value: int) -> None:
    resource.setrlimit(which, (value, value))


def _children_cpu_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _processes() -> Iterator[tuple[str, list[str]]]:
    """Yield the id of each process but this one, and the fields of its state from the third on."""
    for pid in os.listdir("/proc"):
        if pid.isdigit() and pid != "1":
            with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
                yield pid, file.read().rpartition(")")[2].split()


def _used_bytes() -> int:
    """Return the memory of all processes, with each shared page counted once."""
    return sum(_proportional_bytes(pid, int(fields[21]) * _PAGE) for pid, fields in _processes())


def _proportional_bytes(pid: str, rss_bytes: int) -> int:
    """Return the memory of a process, with shared pages divided by the number of their users."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("Pss:")) * 1024
    except OSError:
        # It has ended, hides itself, or the kernel has no such file.
        return rss_bytes if os.path.exists(f"/proc/{pid}") else 0


# Requests and replies


def _exactly(stream: IO[bytes], size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        if not (data := stream.read(size - len(found))):
            sys.exit(0)
        found += data
    return bytes(found)


def _reply(stream: IO[bytes], header: dict[str, Any], *blobs: bytes) -> None:
    for part in (json.dumps(header).encode() + b"\n", *blobs):
        stream.write(part)
    stream.flush()


if __name__ == "__main__":
    main(sys.argv[1])
