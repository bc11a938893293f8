"""RunPages: the content of each page of one run."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa

from ...dataflow.buffer.queries import buffer_folder, query, why
from ...dataflow.errors import UserError
from ...dataflow.runs.files import BUFFER, LOG
from ...dataflow.runs.lock import Life
from ...dataflow.runs.requests import request_stacks, request_stop
from .call_log import CallLog
from .graph_page import RECEIVE, buffer_page, graph_page
from .lanes import Lanes, Window
from .metrics import MetricLog
from .run_reader import RunReader, read_graphs, read_live
from .workers_page import log_part, workers_page

# The weights page: each version, its transfer time, and the pause of generation.


MOST = 2000
"""Most versions to send, latest first."""


def weights_page(
    calls: CallLog, metrics: MetricLog, edges: Sequence[Mapping[str, Any]], began_at: float | None
) -> dict[str, Any]:
    """Return the versions that followers received.

    Args:
        edges: leader and follower of each weight edge, with their current versions.
        began_at: start of the run in seconds since 1970, if known.
    """
    c, nodes, groups = calls.columns, calls.words("node"), calls.words("group")
    pauses = {edge["to"]: metrics.series(f"{edge['to']}/weights_pause_s") for edge in edges}
    sizes = {edge["to"]: metrics.series(f"{edge['from']}/weights_bytes") for edge in edges}
    versions: list[dict[str, Any]] = []
    if RECEIVE in nodes:
        for row in np.flatnonzero(c["node"] == nodes.index(RECEIVE))[-MOST:].tolist():
            follower, step = groups[int(c["group"][row])], int(c["step"][row])
            versions.append(
                {
                    "version": step,
                    "step": step,
                    "to": follower,
                    "at_s": round(float(c["end_s"][row]), 4),
                    "at": None if began_at is None else began_at + float(c["end_s"][row]),
                    "took_s": round(float(c["end_s"][row] - c["start_s"][row]), 6),
                    "transfer_s": round(float(c["worker_s"][row]), 6),
                    "pause_s": _at(step, pauses.get(follower)),
                    "bytes": _at(step, sizes.get(follower)),
                }
            )
    names = [
        name
        for name in metrics.names
        if name.endswith(("weights_transfer_s", "weights_pause_s", "changed_share"))
    ]
    return {"edges": [*edges], "versions": versions, "metrics": names, "ranks": []}


def _at(step: int, series: tuple[np.ndarray, np.ndarray] | None) -> float | None:
    """Return the value at a step, or None."""
    steps, values = series or (np.empty(0), np.empty(0))
    at = np.searchsorted(steps, step)
    return float(values[at]) if at < len(steps) and steps[at] == step else None


# Run pages

SQL_ROWS, SQL_S, SQL_BYTES = 1000, 10.0, 10**9
"""Limits of a SQL query: rows, seconds, bytes of memory."""
TOKEN_COLUMNS = re.compile(
    r"\b(prompt_ids|response_ids|response_logprobs|response_versions|advantages|\w+_ids|\w+_logprobs)\b"
)
"""Token columns, which only the sample files have."""
MOST_LOG = 16 << 20
"""[bytes] Largest log to read in full while a page waits."""
MOST_CELL = 20_000
"""Most characters of a value in a SQL answer."""


class RunPages:
    """The pages of one run."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._path = reader.path

    def graph(self) -> dict[str, Any]:
        facts = self._reader.facts
        graphs, live = read_graphs(self._path), read_live(self._path)
        with self._reader.parts() as (metrics, calls):
            return graph_page(
                graphs, live, calls, metrics, facts.config, goes_on=facts.life is Life.ALIVE
            )

    def timeline(
        self,
        start: float | None,
        end: float | None,
        width: int,
        unfolded: Collection[str] = (),
        steps: tuple[float, float] | None = None,
    ) -> dict[str, Any]:
        """Return the lanes of a time window.

        Args:
            start: start of the window, in seconds since the start of the run; None for the
                beginning.
            end: end of the window, in the same unit; None for the end.
            width: width of the screen in pixels.
            unfolded: groups to show with a lane for each rank.
            steps: use the window of these steps instead, if the run has any of them.
        """
        graphs, config = read_graphs(self._path), self._reader.facts.config
        with self._reader.parts() as (_, calls):
            lanes = Lanes(calls, graphs, config)
            total = lanes.total_s
            if steps is not None:
                start, end = lanes.window_of(*steps)
            first = 0.0 if start is None else max(0.0, start)
            last = total if end is None else min(end, total)
            return lanes.of(Window(min(first, last), last, width), unfolded)

    def buffer(self) -> dict[str, Any]:
        live = read_live(self._path)
        return buffer_page(self._path, live, self._reader.samples.table(), self._reader.facts.config)

    def workers(self) -> dict[str, Any]:
        facts = self._reader.facts
        return workers_page(self._path, read_live(self._path), facts.config, facts.alerts, facts.life)

    def log(self, worker: str, after: int) -> dict[str, Any]:
        """Return the log of a worker after a byte offset."""
        return log_part(self._path, worker, after)

    def weights(self) -> dict[str, Any]:
        live, edges = read_live(self._path), self.graph()["weights"]
        began_at = live["at"] - live["time_s"] if "time_s" in live and "at" in live else None
        with self._reader.parts() as (metrics, calls):
            return weights_page(calls, metrics, edges, began_at)

    def group(self, group: int) -> dict[str, Any]:
        """Return the samples of a group. If none are recorded, return the reason why it waits.

        Raises:
            UserError: there is no such group.
        """
        try:
            return self._reader.sample_pages.group(group, self._reader.facts.config)
        except UserError:
            with suppress(UserError):
                return {"group": group, "waits": self.why(group)["why"]}
            raise

    def why(self, group: int) -> dict[str, Any]:
        """Return what a group waits for, from the driver's last report or from the log.

        Raises:
            UserError: there is no such group, or the log is larger than MOST_LOG.
        """
        graphs = read_live(self._path).get("graphs", {})
        for graph in graphs.values():
            for one in graph.get("oldest", ()):
                if one.get("group") == group:
                    return {"group": group, "why": one["waits"]}
        log = self._path / BUFFER / LOG
        if log.is_file() and (size := log.stat().st_size) > MOST_LOG:
            raise UserError(
                f"the log of the run's rows has {size / 1e6:.0f} MB, too much for this page; run: weft buffer why {self._path} {group}"
            )
        return {"group": group, "why": why(buffer_folder(self._path), group).splitlines()}

    def sql(self, text: str) -> dict[str, Any]:
        """Answer a SQL query in the locked DuckDB of `weft buffer sql`.

        Raises:
            UserError: DuckDB is not installed, cannot answer, or takes too long.
        """
        notes: list[str] = []
        # Queries without token columns use the index, which is much faster than the files.
        known = {} if TOKEN_COLUMNS.search(text) else {"samples": self._light_samples}
        limits = {"max_rows": SQL_ROWS, "timeout_s": SQL_S, "memory_bytes": SQL_BYTES}
        table = query(self._path, text, notes, known=known, **limits)
        rows = [[_cell(value) for value in row.values()] for row in _rows(table)]
        return {
            "columns": table.column_names,
            "rows": rows,
            "cut": any(note.endswith("the others are left out") for note in notes),
            "notes": notes,
        }

    def _light_samples(self) -> pa.Table | None:
        """Return the samples without token columns, or None without samples."""
        table = self._reader.samples.table()
        if not len(table):
            return None
        return table.drop_columns([name for name in table.column_names if name.startswith("_")])

    # Requests to the driver

    def stop(self) -> dict[str, Any]:
        """Ask the driver to save and end the run.

        Raises:
            UserError: the run is not alive, or its directory cannot be written.
        """
        self._request(lambda epoch: request_stop(self._path, epoch), "end")
        return {"asked": True}

    def stacks(self, worker: str) -> dict[str, Any]:
        """Ask the driver for a worker's stack; the answer appears in `live.json`."""
        known = [one["rank"] for one in self.workers()["workers"]]
        if worker not in known:
            raise UserError(f"there is no worker {worker!r}; there are {', '.join(known)}")
        self._request(lambda epoch: request_stacks(self._path, epoch, worker), "show its stack")
        return {"asked": True}

    def _request(self, write: Any, what: str) -> None:
        facts = self._reader.facts
        if facts.life is not Life.ALIVE or facts.holder is None:
            raise UserError(f"run {self._reader.name!r} is not running: it is {facts.status}")
        try:
            write(facts.holder.epoch)
        except OSError as error:
            raise UserError(f"run {self._reader.name!r} cannot be asked to {what}: {error}") from None


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows keyed by column number, since two columns may have the same name."""
    names = [f"{number}" for number in range(table.num_columns)]
    return table.rename_columns(names).to_pylist()


def _cell(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MOST_CELL:
        return f"{value[:MOST_CELL]} … ({len(value):,} characters)"
    if isinstance(value, list) and len(value) > MOST_CELL:
        return [*value[:MOST_CELL], "…"]
    return (
        value
        if value is None or isinstance(value, int | float | str | bool | list | dict)
        else str(value)
    )
