"""Child processes: start a Python program, exchange lines of JSON with it, and end it.

    child = ChildProcess("weft.algorithms.graders.math_program")
    child.receive(START_S)  # {"ready": True}
    reply = child.ask({"response": "4", "answer": "4"}, deadline_s=10)
    child.kill()

`receive` kills a process that misses its deadline:

    starting ──> running ──ask──> running ──> ended
                    └── deadline or kill() ────^
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

EXIT_S = 0.05
"""[s] Time that `kill` gives a process to end by itself, to report its own exit code."""


class ChildProcess:
    """A Python program in its own process. Not thread-safe.

    Args:
        program: a module to run with `python -m`, or the path of a Python file.
        log: file to append all output to. Without it, standard output carries JSON for `receive`.
        errors: file descriptor for standard error without a log. Default: this process's.
        environment: additional variables.
        detached: start a new session, out of reach of the terminal's signals.
        descriptors: inherited file descriptors.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        program: str | Path,
        *arguments: str,
        log: Path | None = None,
        errors: int | None = None,
        environment: Mapping[str, str] | None = None,
        detached: bool = False,
        descriptors: Sequence[int] = (),
    ) -> None:
        start = [str(program)] if isinstance(program, Path) else ["-m", program]
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        output = None if log is None else log.open("ab")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", *start, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if output is None else output,
                stderr=errors if output is None else subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
                start_new_session=detached,
                pass_fds=descriptors,
            )
        finally:
            if output is not None:
                output.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, or minus the number of the signal that ended it; None while running."""
        return self._process.poll()

    @property
    def status(self) -> str:
        """State: "running", or the end of the process, such as "exit code 1" or "signal 9"."""
        code = self.exit_code
        return "running" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"

    @property
    def stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def ask(self, request: Any, deadline_s: float) -> Any:
        """Send a request and return the reply. Raises the errors of `send` and `receive`."""
        self.send(request)
        return self.receive(deadline_s)

    def send(self, value: Any) -> None:
        """Write a value as a line of JSON. Raises an EOFError if the process has ended."""
        try:
            self.stdin.write(json.dumps(value).encode() + b"\n")
            self.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise EOFError(self.status) from None

    def receive(self, deadline_s: float) -> Any:
        """Read the next line of JSON. Skips other lines, such as messages of libraries.

        Args:
            deadline_s: [s] time after which to kill the process. Otherwise, its late reply would
                look like the reply to the next request.

        Raises:
            TimeoutError: no line of JSON came in time.
            EOFError: the process ended or closed its output.
        """
        late = threading.Event()

        def expire() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(deadline_s, expire)
        timer.daemon = True
        timer.start()
        found = None
        try:
            while found is None and (line := self.stdout.readline()):
                with suppress(ValueError):
                    found = (json.loads(line),)
        finally:
            timer.cancel()
            # The timer may be killing the process right now. Once it has ended, `late` is final.
            timer.join()
        if late.is_set():  # the process is dead, even if a line came at the last moment
            raise TimeoutError(f"no reply within {deadline_s:g} s")
        if found is None:
            raise EOFError(self.status)
        return found[0]

    def wait(self, seconds: float | None) -> bool:
        """Wait at most `seconds` for the process to end. Return whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.exit_code is not None

    def close_input(self) -> None:
        """Close the process's standard input, which makes many programs end."""
        with suppress(OSError):
            self.stdin.close()

    def kill(self) -> str:
        """Kill the process unless it ends within `EXIT_S`. Return its `status`."""
        self.wait(EXIT_S)
        self._process.kill()
        self._process.wait()
        # Closing a pipe flushes it, which fails if the process did not read everything.
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        return self.status
