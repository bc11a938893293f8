"""Sandbox: run programs of a model, with no network and only a scratch directory.

    with Sandbox(Limits(cpu_s=5)) as sandbox:
        result = sandbox.run(["python", "main.py"], files={"main.py": code}, stdin=b"3 4")
    if result.ending is ProgramEnding.TIMED_OUT: ...

A sandbox is a process tree with its own processes, users, mounts, network and environment. gVisor
(`runsc`) isolates it if it is installed, otherwise bubblewrap (`bwrap`) with a system-call filter.

    this process ──requests──> launcher (runsc, bwrap) ──> process 1 (sandbox_program.py) ──> program
                 <──replies──                                 limits, output, clean-up

Process 1 enforces the limits even if this process is busy. If this process dies, the sandbox ends.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import json
import math
import os
import selectors
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO, Any

import pydantic

from ..dataflow.config import Config
from ..dataflow.errors import NoSandboxError, SandboxError
from .sandbox_engines import ENGINES, SCRATCH, START_S, SandboxPlan
from .sandbox_program import SIZE_DIGITS

REPLY_S = 30.0
"""[s] Additional time that process 1 has for a reply after the program's own time limit."""
_ENVIRONMENT = {
    "PATH": f"{sysconfig.get_path('scripts')}:/usr/local/bin:/usr/bin:/bin",
    "HOME": SCRATCH,
    "TMPDIR": SCRATCH,
    "LANG": "C.UTF-8",
    "USER": "sandbox",
    # Libraries that start a thread for each CPU would reach the limit of processes.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class Limits(Config):
    """Limits of each program that a sandbox runs, together with all processes that it starts."""

    cpu_s: float = pydantic.Field(default=10.0, gt=0)
    """[s] CPU time of all processes. Raise it for programs that compute for long."""
    wall_s: float = pydantic.Field(default=30.0, gt=0)
    """[s] Time on the clock. It is longer than `cpu_s`, because a busy machine slows programs down.
    Raise it for programs that wait."""
    memory_bytes: int = pydantic.Field(default=1 << 30, ge=16 << 20)
    """[bytes] Memory of all processes, without the scratch directory. Lower it to run more sandboxes
    on a machine."""
    processes: int = pydantic.Field(default=32, ge=1)
    """[processes] Number of processes and threads. Raise it for programs with many threads."""
    output_bytes: int = pydantic.Field(default=1 << 20, ge=0)
    """[bytes] Standard output and standard error together. Raise it for programs that print much."""
    disk_bytes: int = pydantic.Field(default=64 << 20, ge=1 << 20)
    """[bytes] Files in the scratch directory, which is in memory. Raise it for programs that write
    large files."""


class ProgramEnding(enum.StrEnum):
    """How a program ended: by itself, or at one of its limits."""

    EXITED = "exited"
    CRASHED = "crashed"
    """A signal that the program caused, such as a segmentation fault."""
    TIMED_OUT = "timed out"
    OUT_OF_CPU_TIME = "out of CPU time"
    OUT_OF_MEMORY = "out of memory"
    TOO_MANY_PROCESSES = "too many processes"
    TOO_MUCH_OUTPUT = "too much output"
    DISK_FULL = "disk full"


@dataclass(frozen=True)
class Result:
    """The result of a program."""

    ending: ProgramEnding
    exit_code: int | None
    """Exit code, or minus the number of the signal of a crash; None if the program reached a limit."""
    stdout: bytes
    stderr: bytes
    wall_s: float
    cpu_s: float

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0


class Sandbox:
    """Runs programs contained. Not thread-safe, and usable only while the thread that made it lives.

    Programs that run one after the other in the same sandbox share the scratch directory, as the
    calls of a shell tool do. When a program ends, all processes that it started are killed. The
    sandbox stays usable after a program that reached a limit.

    Args:
        limits: limits of each program.
        engine: "gvisor" or "bubblewrap"; by default the first that works here.
        readable: further files and folders that programs may read, at their own paths. They can read
            the system's programs and the Python environment of this process in any case.

    Raises:
        NoSandboxError: neither gVisor nor bubblewrap works here.
        SandboxError: the sandbox did not start.
    """

    def __init__(
        self, limits: Limits = Limits(), *, engine: str | None = None, readable: Sequence[Path] = ()
    ) -> None:
        self.limits = limits
        self.engine = engine or working_engine()
        if self.engine not in ENGINES:
            raise ValueError(f"engine={engine!r} is not one of {', '.join(ENGINES)}")
        self._launcher = _Launcher(self.engine, limits, readable)
        try:
            self._launcher.receive(START_S)
        except BaseException:
            self.close()
            raise

    def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] = {},
        environment: Mapping[str, str] = {},
        wall_s: float | None = None,
    ) -> Result:
        """Run a program until it ends, or until it reaches a limit.

        Args:
            command: program and arguments. `python` is the Python of this process, with its packages.
            stdin: standard input.
            files: files to write first; paths are relative to the scratch directory.
            environment: variables besides PATH, HOME, TMPDIR, LANG and USER. Programs see no others.
            wall_s: [s] another time limit for this program.

        Raises:
            ValueError: the command is empty or a text, `wall_s` is no time, or a path of `files` leaves the
                scratch directory.
            OSError: the program could not be started or a file not be written, as for `subprocess.run`.
            SandboxError: something outside ended the sandbox. The program is not to blame.
        """
        if isinstance(command, str) or not command:
            raise ValueError(
                f"command must be a program and its arguments, like ['ls'], not {command!r}"
            )
        if wall_s is not None and not 0 < wall_s < math.inf:
            raise ValueError(f"wall_s={wall_s} must be a positive number of seconds")
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise ValueError(
                    f"file {name!r} is not inside the scratch directory; use a relative path"
                )
        command = [os.fspath(each) for each in command]
        if command[0] == "python":  # a system may have only `python3`
            command[0] = sys.executable
        limits = self.limits.model_dump() | ({} if wall_s is None else {"wall_s": wall_s})
        request = {
            "command": command,
            "limits": limits,
            "environment": _ENVIRONMENT | dict(environment),
            "stdin": len(stdin),
            "files": {name: len(content) for name, content in files.items()},
            "count_processes": _kernel_counts_processes(),
        }
        text = json.dumps(request).encode()
        message = b"".join((b"%0*d" % (SIZE_DIGITS, len(text)), text, stdin, *files.values()))
        try:
            self._launcher.send(REPLY_S, message)
            reply, stdout, stderr = self._launcher.receive(limits["wall_s"] + REPLY_S)
        except BaseException:  # the next program must not read this one's reply
            self.close()
            raise
        if "error" in reply:
            raise OSError(reply["errno"], f"{reply['error']}, at the start of {command!r:.200}")
        return Result(
            ProgramEnding(reply["ending"]),
            reply["exit_code"],
            stdout,
            stderr,
            reply["wall_s"],
            reply["cpu_s"],
        )

    def close(self) -> None:
        """End all processes of the sandbox, and delete its scratch directory."""
        self._launcher.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@functools.cache
def working_engine() -> str:
    """Return the engine to use: the first that starts a sandbox on this machine.

    Raises:
        NoSandboxError: none does. The message says why, and how to install one.
    """
    problems: list[str] = []
    for engine, (program, _) in ENGINES.items():
        if shutil.which(program) is None:
            problems.append(f"{engine}: there is no {program!r} on PATH")
            continue
        try:
            with Sandbox(engine=engine) as sandbox:
                sandbox.run(["true"])
            return engine
        except SandboxError as error:
            problems.append(f"{engine}: {error}")
    raise NoSandboxError(
        "programs of a model run only in a sandbox, and none works on this machine:\n  "
        + "\n  ".join(problems)
        + "\nInstall gVisor (https://gvisor.dev/docs/user_guide/install) or bubblewrap (`apt-get install bubblewrap`, "
        "`dnf install bubblewrap`). Both need user namespaces: in a container, allow the system calls `unshare` and `mount`."
    )


# The launcher


class _Launcher:
    """The process that isolates the sandbox, and the connection to process 1 in it."""

    def __init__(self, engine: str, limits: Limits, readable: Sequence[Path]) -> None:
        self._engine = engine
        program, start = ENGINES[engine]
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="weft-sandbox-"))
            self._log = (self._folder / "log").open("w+b")
        except OSError as error:
            raise SandboxError(f"{program} could not be started: {error!r}") from error
        self._buffer = bytearray()
        try:
            self._process = start(
                program, SandboxPlan(limits.disk_bytes, readable, self._folder, self._log)
            )
        except BaseException as error:
            self._forget()
            if isinstance(error, OSError | KeyError):
                raise SandboxError(f"{program} could not be started: {error!r}") from error
            raise
        assert self._process.stdin and self._process.stdout
        self._requests, self._replies = self._process.stdin, self._process.stdout
        os.set_blocking(self._requests.fileno(), False)

    def send(self, deadline_s: float, message: bytes) -> None:
        """Send a request. Raises a SandboxError if the sandbox has ended or does not read it in time."""
        if self._requests.closed:
            raise self._ended()
        end_s = time.monotonic() + deadline_s
        pending = memoryview(message)
        while pending:
            self._wait(self._requests, selectors.EVENT_WRITE, end_s, deadline_s)
            try:
                pending = pending[os.write(self._requests.fileno(), pending) :]
            except BrokenPipeError:
                raise self._ended() from None

    def receive(self, deadline_s: float) -> tuple[dict[str, Any], bytes, bytes]:
        """Return the header of the next reply, standard output and standard error. Raises a
        SandboxError if the sandbox has ended or does not reply in time."""
        end_s = time.monotonic() + deadline_s
        while (newline := self._buffer.find(b"\n")) < 0:
            self._fill(end_s, deadline_s)
        header = json.loads(self._buffer[:newline])
        del self._buffer[: newline + 1]
        sizes = header.get("stdout", 0), header.get("stderr", 0)
        while len(self._buffer) < sum(sizes):
            self._fill(end_s, deadline_s)
        blobs = bytes(self._buffer[: sizes[0]]), bytes(self._buffer[sizes[0] : sum(sizes)])
        del self._buffer[: sum(sizes)]
        return header, *blobs

    def _fill(self, end_s: float, deadline_s: float) -> None:
        self._wait(self._replies, selectors.EVENT_READ, end_s, deadline_s)
        data = os.read(self._replies.fileno(), 1 << 16)
        if not data:
            raise self._ended()
        self._buffer += data

    def _wait(self, stream: IO[bytes], event: int, end_s: float, deadline_s: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(stream, event)
            if not selector.select(max(0.0, end_s - time.monotonic())):
                raise SandboxError(f"{self._engine}: the sandbox did not answer within {deadline_s:g} s")

    def _ended(self) -> SandboxError:
        try:
            code = self._process.wait(10)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            how = "still running"
        said = ""
        if not self._log.closed:
            self._log.seek(0)
            said = self._log.read()[-1000:].decode(errors="replace").strip()
        return SandboxError(
            f"{self._engine} ended the sandbox, or something outside it did ({how}){': ' if said else ''}{said}"
        )

    def close(self) -> None:
        if self._log.closed:
            return
        # Process 1 exits at the end of its input. A forked process may keep its own copy of that open, so
        # say it too.
        with contextlib.suppress(OSError):
            os.write(self._requests.fileno(), b"0" * SIZE_DIGITS)
        self._requests.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._replies.close()
        self._forget()

    def _forget(self) -> None:
        self._log.close()
        state = self._folder / "state"
        if any(state.glob("*")):  # a runsc that was killed leaves its container behind
            command = ["runsc", "--root", str(state), "delete", "--force", "weft"]
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, capture_output=True, timeout=10)
        shutil.rmtree(self._folder, ignore_errors=True)


def _kernel_counts_processes() -> bool:
    """Return whether the kernel counts the processes of a user per namespace (Linux 5.14). Older ones
    would count the user's processes outside of the sandbox too."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)
