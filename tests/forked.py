"""Processes for tests with torch, forked from a server that has imported it once.

A new process takes 5 s of CPU to import torch, transformers and the workers. A forked one has them
at once, and is otherwise just as fresh. The server is single-threaded, has computed nothing, and
ends with the tests.
"""

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest


@cache
def server() -> ForkServerContext:
    """Return the server with the imports of `preloaded.py`; the first call starts it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(Path(__file__).parent))
        forkserver.ensure_running()
    return context


class Forked:
    """A process that calls a function, with its output. It leads a process group, like a shell's
    job."""

    def __init__(
        self,
        output: Path,
        function: Callable[..., object],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it in the current folder, with the current environment plus `environment`.

        Args:
            output: file for its standard output; standard error goes to a file next to it.
        """
        self.output, self.errors = output, output.with_name(f"{output.name}.errors")
        streams = str(self.output), str(self.errors)
        target = (streams, os.getcwd(), {**os.environ, **(environment or {})}, function, arguments)
        self.process: ForkServerProcess = server().Process(target=_call, args=target)  # pyright: ignore[reportAttributeAccessIssue]
        self.process.start()

    @property
    def said(self) -> str:
        """The end of its output so far, errors last."""
        return "\n".join(
            file.read_text()[-4000:] for file in (self.output, self.errors) if file.exists()
        )

    def finish(self, timeout_s: float = 300) -> str:
        """Wait for its end, and return its output.

        Raises:
            AssertionError: it exited with another code than 0, or did not end in time.
        """
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, f"no end after {timeout_s} s: {self.said}"
        assert self.process.exitcode == 0, f"exit code {self.process.exitcode}: {self.said}"
        return self.output.read_text()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def kill_when(self, there: Path, timeout_s: float = 300) -> None:
        """Kill it as soon as a file or folder exists."""
        deadline = time.monotonic() + timeout_s
        while not there.exists():
            assert self.process.is_alive() and time.monotonic() < deadline, self.said
            time.sleep(0.01)
        self.kill()


def program(
    output: Path, path: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> Forked:
    return Forked(output, _run_program, str(path), arguments, environment=environment)


def _call(
    streams: tuple[str, str],
    folder: str,
    environment: dict[str, str],
    function: Callable[..., object],
    arguments: tuple[Any, ...],
) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, file in enumerate(streams, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    function(*arguments)


def _run_program(path: str, arguments: tuple[str, ...]) -> None:
    sys.argv = [path, *arguments]
    sys.path[:0] = [
        str(Path(path).parent),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    runpy.run_path(path, run_name="__main__")
