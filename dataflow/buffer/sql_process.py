"""Program that answers one SQL query, as a subprocess of `queries.py`.

Queries run in their own process because DuckDB cannot be interrupted inside a function, the parser
or the binder. An alarm without a handler lets the kernel end the process in time. The process also
has a memory limit.

The process reads one line of JSON, prints `true`, and reads the tables of the query as Arrow
streams. Then it prints one line of JSON, and the answer as an Arrow stream. Until the first line
arrives, it ends when the pipe is closed, or after the number of seconds in its argument. It imports
no module of Weft.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

# The order matters: the last setting locks the others.
LOCKED = (
    "python_enable_replacements = false",  # no access to variables of this program
    "enable_external_access = false",  # no access to files, other databases, and extensions
    "lock_configuration = true",
)
SPARE_BYTES = 2 << 30
"""[bytes] Address space beyond DuckDB's limit, for thread stacks, malloc arenas, and the answer."""
PR_SET_PDEATHSIG = 1


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Without a handler, the kernel ends this process even inside DuckDB.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(sys.argv[1]))
    with contextlib.suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    source = sys.stdin.buffer
    line = source.readline()
    if not line:
        return
    signal.alarm(0)
    sys.stdout.buffer.write(b"true\n")
    sys.stdout.buffer.flush()
    asked = json.loads(line)
    tables = {name: pa.ipc.open_stream(source).read_all() for name in asked["tables"]}
    signal.setitimer(signal.ITIMER_REAL, asked["timeout_s"])
    limits = {} if asked["memory_bytes"] is None else {"memory_limit": f"{asked['memory_bytes']}B"}
    found, answer = {}, pa.table({})
    try:
        with duckdb.connect(config={"temp_directory": "", **limits}) as connection:
            if asked["memory_bytes"] is not None:
                # After reading the tables, because this is relative to the current size.
                _bound(asked["memory_bytes"] + SPARE_BYTES)
            for name, table in tables.items():
                connection.register(name, table)
            for setting in LOCKED:
                connection.execute(f"SET {setting}")
            found["cut"], answer = _cut(connection.sql(asked["sql"]), asked["max_rows"])
    except duckdb.Error as error:
        found["error"] = str(error)
    except (MemoryError, pa.ArrowMemoryError) as error:
        found["error"] = f"Out of Memory Error: {error}"
    sys.stdout.buffer.write(json.dumps(found).encode() + b"\n")
    with pa.ipc.new_stream(sys.stdout.buffer, answer.schema) as stream:
        stream.write_table(answer)
    sys.stdout.buffer.flush()


def _bound(more: int) -> None:
    """Limit this process's address space to its current size plus `more` bytes."""
    pages = (
        int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    )
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + more, resource.RLIM_INFINITY)
    )


def _cut(answer: Any, max_rows: int) -> tuple[bool, pa.Table]:
    """Return whether an answer has more than `max_rows` rows, and its first rows."""
    if answer is None:
        return False, pa.table({})
    table = answer.limit(max_rows + 1).to_arrow_table()
    for place, field in enumerate(table.schema):
        if not _is_readable(table.column(place)):
            text = (
                answer.limit(max_rows + 1).project(f"#{place + 1}::varchar").to_arrow_table().column(0)
            )
            table = table.set_column(place, field.name, text)
    return len(table) > max_rows, table.slice(0, max_rows)


def _is_readable(column: Any) -> bool:
    """Return whether Python can represent these values. Python's dates end with the year 9999."""
    if not (pa.types.is_temporal(column.type) or pa.types.is_nested(column.type)):
        return True
    try:
        column.to_pylist()
    except (OverflowError, ValueError):
        return False
    return True


if __name__ == "__main__":
    main()
