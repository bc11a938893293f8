"""The weights page, a group of samples, SQL queries, and requests to a run's driver."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from ...dataflow.buffer import queries
from ...dataflow.buffer.queries import query
from ...dataflow.errors import UserError
from ...dataflow.runs.files import BUFFER, LOG
from ...dataflow.runs.lock import Life
from ...dataflow.runs.requests import request_stacks, request_stop
from .graph_page import graph_page, received
from .run_reader import RunReader, read_live
from .sample_pages import exact
from .workers_page import workers_page

MOST_VERSIONS = 2000
"""Maximum number of weight versions to send, latest first."""
SQL_ROWS, SQL_S, SQL_BYTES = 1000, 10.0, 10**9
"""Limits of a SQL query: rows, seconds, bytes of memory."""
TOKEN_COLUMNS = re.compile(
    r"\b(response_versions|response_mask|advantages|turn_ends|turn_rewards|\w+_ids|\w+_logprobs)\b"
)
"""Token columns, which only the sample files have."""
MOST_LOG = 16 << 20
"""[bytes] Largest log to read while a page waits."""
MOST_CELL = 20_000
"""Maximum characters of a value in a SQL answer."""


def weights(run: RunReader) -> dict[str, Any]:
    """Return the weight versions that followers received, with the time and bytes of the transfer
    and the pause of generation."""
    live, edges = read_live(run.path), graph_page(run)["weights"]
    began_at = live["at"] - live["time_s"] if live else None
    with run.parts() as (metrics, calls):
        c, groups = calls.columns, calls.words("group")
        pauses = {edge["to"]: metrics.series(f"{edge['to']}/weights_pause_s") for edge in edges}
        sizes = {edge["to"]: metrics.series(f"{edge['from']}/weights_bytes") for edge in edges}
        versions: list[dict[str, Any]] = []
        for row in received(calls)[-MOST_VERSIONS:].tolist():
            follower, step, ended = (
                groups[int(c["group"][row])],
                int(c["step"][row]),
                float(c["end_s"][row]),
            )
            versions.append(
                {
                    "version": step,
                    "step": step,
                    "to": follower,
                    "at": None if began_at is None else began_at + ended,
                    "transfer_s": round(float(c["worker_s"][row]), 6),
                    "pause_s": _value_at(step, pauses.get(follower)),
                    "bytes": _value_at(step, sizes.get(follower)),
                }
            )
    return {"versions": versions}


def _value_at(step: int, series: tuple[np.ndarray, np.ndarray] | None) -> float | None:
    steps, values = series or (np.empty(0), np.empty(0))
    at = np.searchsorted(steps, step)
    return float(values[at]) if at < len(steps) and steps[at] == step else None


def group(run: RunReader, number: int) -> dict[str, Any]:
    """Return a group's samples, or what it waits for if none are recorded. Raises UserError if
    there is no such group."""
    try:
        return run.sample_pages.group(number, run.facts.config)
    except UserError:
        return {"group": number, "waits": why(run, number)}


def why(run: RunReader, number: int) -> list[str]:
    """Return what a group waits for, from the driver's last report or else from the log. Raises
    UserError if there is no such group, or the log is larger than MOST_LOG."""
    for state in read_live(run.path).get("graphs", {}).values():
        for oldest in state["oldest"]:
            if oldest["group"] == number:
                return oldest["waits"]
    log = run.path / BUFFER / LOG
    if log.is_file() and (size := log.stat().st_size) > MOST_LOG:
        raise UserError(
            f"the log of the run's rows has {size / 1e6:.0f} MB, too much for this page; run: weft buffer why {run.path} {number}"
        )
    return queries.why(queries.buffer_folder(run.path), number).splitlines()


def sql(run: RunReader, text: str) -> dict[str, Any]:
    """Answer a SQL query in the restricted DuckDB of `weft buffer sql`. Raises UserError if DuckDB
    is not installed, fails, or takes too long."""
    notes: list[str] = []

    def light_samples() -> pa.Table | None:
        table = run.samples.table()
        return (
            table.drop_columns([n for n in table.column_names if n.startswith("_")])
            if len(table)
            else None
        )

    # The index, which lacks token columns, is much faster than the files.
    known = {} if TOKEN_COLUMNS.search(text) else {"samples": light_samples}
    limits = {"max_rows": SQL_ROWS, "timeout_s": SQL_S, "memory_bytes": SQL_BYTES}
    table = query(run.path, text, notes, known=known, **limits)
    columns = [[_cell(value) for value in column.to_pylist()] for column in table.columns]
    rows = [list(row) for row in zip(*columns, strict=True)]
    cut = any(note.endswith("the others are left out") for note in notes)
    return {"columns": table.column_names, "rows": rows, "cut": cut, "notes": notes}


def _cell(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MOST_CELL:
        return f"{value[:MOST_CELL]} … ({len(value):,} characters)"
    if isinstance(value, list) and len(value) > MOST_CELL:
        return [*value[:MOST_CELL], "…"]
    plain = value is None or isinstance(value, int | float | str | list | dict)
    return exact(value) if plain else str(value)


# Requests to the driver


def stop(run: RunReader) -> dict[str, Any]:
    """Ask the driver to save and end the run. Raises UserError if the run is not alive or its
    directory cannot be written."""
    return _request(run, lambda epoch: request_stop(run.path, epoch), "end")


def stacks(run: RunReader, worker: str) -> dict[str, Any]:
    """Ask the driver for a worker's stack; the answer appears in `live.json`."""
    known = [one["rank"] for one in workers_page(run)["workers"]]
    if worker not in known:
        raise UserError(f"there is no worker {worker!r}; there are {', '.join(known)}")
    return _request(run, lambda epoch: request_stacks(run.path, epoch, worker), "show its stack")


def _request(run: RunReader, write: Callable[[int], None], what: str) -> dict[str, Any]:
    facts = run.facts
    if facts.life is not Life.ALIVE or facts.holder is None:
        raise UserError(f"run {run.name!r} is not running: it is {facts.status}")
    try:
        write(facts.holder.epoch)
    except OSError as error:
        raise UserError(f"run {run.name!r} cannot be asked to {what}: {error}") from None
    return {"asked": True}
