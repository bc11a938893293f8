"""The process of one query in SQL, seen from the process that asks. `sql_process.py` is its program.

    prepared ──ask──> asked ──> answered, or ended by the kernel
        └── nobody asks for PREPARED_S, or whoever started it ends: gone

A process takes a third of a second to start. One can be started before it is needed (`prepare`); it costs its memory (about 100 MB) for
as long as it waits, and each query takes the one that waits, or a new one.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..errors import UserError

PREPARED_S = 600
"""Seconds that a process waits for a query."""
GRACE_S = 5.0
"""Seconds that the process of a query has to end after its time."""
_PROGRAM = Path(__file__).with_name("sql_process.py")


class QueryProcess:
    """A process that answers one query, and ends."""

    def __init__(self) -> None:
        path = os.pathsep.join(place for place in sys.path if place)
        environment = {**os.environ, "PYTHONPATH": path, "MALLOC_ARENA_MAX": "2"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), str(PREPARED_S)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(
        self, asked: Mapping[str, Any], tables: Mapping[str, pa.Table], timeout_s: float
    ) -> tuple[dict[str, Any], pa.Table] | None:
        """Ask the query, wait for the answer, and end the process.

        Args:
            asked: the query and its limits.
            tables: that it may name.
            timeout_s: seconds that it may take.

        Returns:
            What the process says of the query, and the answer; None if the process was gone before it had the query.

        Raises:
            UserError: the kernel ended it: it took too long, or too much memory.
        """
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        late, taken = threading.Timer(timeout_s + GRACE_S, process.kill), False
        try:
            with suppress(BrokenPipeError), process.stdin as sink:
                sink.write(json.dumps({**asked, "tables": list(tables)}).encode() + b"\n")
                sink.flush()
                taken = bool(process.stdout.readline())
                for table in tables.values() if taken else ():
                    with pa.ipc.new_stream(sink, table.schema) as stream:
                        stream.write_table(table)
            if not taken:
                return None
            late.start()
            line = process.stdout.readline()
            if line:
                with suppress(pa.ArrowInvalid):  # it was killed while it printed the answer
                    return json.loads(line), pa.ipc.open_stream(process.stdout).read_all()
            process.wait()
        finally:
            late.cancel()
            self.close()
        if process.returncode in (-signal.SIGALRM, -signal.SIGKILL):
            raise UserError(
                f"the query was stopped after {timeout_s:g} s; ask for less (where ..., limit ...), or allow more time"
            )
        raise UserError(
            f"the query ended its process (exit code {process.returncode}): most likely it takes too much memory; "
            "ask for less (where ..., limit ...)"
        )

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def ask(asked: Mapping[str, Any], tables: Mapping[str, pa.Table], timeout_s: float) -> tuple[dict[str, Any], pa.Table]:
    """Ask the process that waits, or a new one; see `QueryProcess.ask`."""
    waiting = _waiting.taken()
    answered = None if waiting is None else waiting.ask(asked, tables, timeout_s)
    if answered is None:
        answered = QueryProcess().ask(asked, tables, timeout_s)
    if answered is None:
        raise UserError("the process of the query ended before it had read it; is there memory left on this machine?")
    return answered


def prepare() -> None:
    """Have a process wait for the next query, if DuckDB is installed and none waits. It ends by itself after PREPARED_S."""
    if find_spec("duckdb") is not None:
        _waiting.fill()


def end_prepared() -> None:
    """End the process that waits for a query, if there is one."""
    waiting = _waiting.taken()
    if waiting is not None:
        waiting.close()


class _Waiting:
    """At most one process that waits for a query."""

    def __init__(self) -> None:
        self._lock, self._process = threading.Lock(), None

    _process: QueryProcess | None

    def fill(self) -> None:
        with self._lock:
            if self._process is not None and not self._process.is_alive:
                self._process.close()
                self._process = None
            if self._process is None:
                self._process = QueryProcess()

    def taken(self) -> QueryProcess | None:
        with self._lock:
            process, self._process = self._process, None
        return process


_waiting = _Waiting()
atexit.register(end_prepared)
