"""Processes of the tests that need torch: forked from a server that has imported it once, and else as fresh as any.

A process of its own imports torch, transformers and the workers in 5 s of a CPU; a forked one has them at once. The server is
single-threaded, has computed nothing, and ends with the tests.
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
    """The server, which has imported what is in `preloaded.py`. It is started by the first who needs it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(Path(__file__).parent))
        forkserver.ensure_running()
    return context


class Forked:
    """A process that calls a function, and what it prints. It leads a process group of its own, as what a shell starts does."""

    def __init__(
        self,
        output: Path,
        function: Callable[..., object],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it in the present folder, with the present environment and what is given here.

        Args:
            output: file for what it prints; what it prints as errors goes to another one beside it.
        """
        self.output, self.errors = output, output.with_name(f"{output.name}.errors")
        streams = str(self.output), str(self.errors)
        target = (streams, os.getcwd(), {**os.environ, **(environment or {})}, function, arguments)
        self.process: ForkServerProcess = server().Process(target=_call, args=target)  # pyright: ignore[reportAttributeAccessIssue]
        self.process.start()

    @property
    def said(self) -> str:
        """The end of what it has printed so far, errors last."""
        return "\n".join(file.read_text()[-4000:] for file in (self.output, self.errors) if file.exists())

    def finish(self, timeout_s: float = 300) -> str:
        """Wait for its end, and return what it printed.

        Raises:
            AssertionError: it ended otherwise than with exit code 0, or not in time.
        """
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, f"no end after {timeout_s} s: {self.said}"
        assert self.process.exitcode == 0, f"exit code {self.process.exitcode}: {self.said}"
        return self.output.read_text()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self.process.kill()
        self.process.join()

    def kill_when(self, there: Path, timeout_s: float = 300) -> None:
        """Kill it as soon as a file or folder is there."""
        deadline = time.monotonic() + timeout_s
        while not there.exists():
            assert self.process.is_alive() and time.monotonic() < deadline, self.said
            time.sleep(0.01)
        self.kill()


def program(
    output: Path, path: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> Forked:
    """Start `python path arguments`."""
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
