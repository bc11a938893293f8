"""A prepared process runs a query at once; if it has died, the query starts another."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from weft.dataflow.buffer import queries
from weft.dataflow.buffer.queries import _QueryProcess, ask, end_prepared, prepare

QUESTION = {
    "sql": "select max(x) as most from numbers",
    "max_rows": 10,
    "timeout_s": 30,
    "memory_bytes": None,
}
TABLES = {"numbers": pa.table({"x": [1, 3, 2]})}


@pytest.fixture(autouse=True)
def none_waits() -> Iterator[None]:
    end_prepared()
    yield
    end_prepared()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    pids: list[int] = []

    class Noted(_QueryProcess):
        def __init__(self) -> None:
            super().__init__()
            pids.append(self.pid)

    monkeypatch.setattr(queries, "_QueryProcess", Noted)
    return pids


def is_gone(pid: int) -> bool:
    """Return whether the process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_query_takes_the_process_that_waits_and_ends_it(started: list[int]):
    prepare()
    prepare()
    assert len(started) == 1, "one waits at most"
    for number in (1, 2):
        said, answer = ask(QUESTION, TABLES, 30)
        assert said == {"cut": False} and answer.to_pydict() == {"most": [3]}
        assert len(started) == number and is_gone(started[-1])


def test_a_process_that_was_killed_while_it_waited_is_replaced(started: list[int]):
    prepare()
    os.kill(started[0], signal.SIGKILL)
    assert ask(QUESTION, TABLES, 30)[1].to_pydict() == {"most": [3]}
    assert len(started) == 2
    prepare()
    os.kill(started[2], signal.SIGKILL)
    deadline = time.monotonic() + 30
    while len(started) < 4 and time.monotonic() < deadline:  # until its end is noticed
        prepare()
    assert len(started) == 4


def test_an_unused_process_ends_by_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(queries, "PREPARED_S", 1)  # waited out
    waiting = _QueryProcess()
    deadline = time.monotonic() + 30
    while waiting.exit_code is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert waiting.exit_code is not None
    assert waiting.run_query(QUESTION, TABLES, 30) is None


ENDS = """
import sys
sys.path[:0] = sys.argv[1:]
from weft.dataflow.buffer.queries import _QueryProcess
waiting = _QueryProcess()
print(waiting.pid)
"""


def test_it_ends_with_the_program_that_prepared_it():
    command = [sys.executable, "-c", ENDS, *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    pid, deadline = int(done.stdout), time.monotonic() + 30
    while not is_gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_gone(pid)


def test_nothing_is_prepared_without_duckdb(monkeypatch: pytest.MonkeyPatch, started: list[int]):
    monkeypatch.setattr(queries, "find_spec", lambda name: None)
    prepare()
    assert not started
