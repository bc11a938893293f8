"""SampleIndex: columns for filtering, sorting and searching samples.

A row has a sample's scalars, the length of its response, its number of turns, means of its token
columns, its oldest and newest version, and its texts, which are cut if they take too much memory.
Tokens stay in the files.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import xxhash

from ...dataflow.batch import Batch
from ...dataflow.buffer.staleness import VersionOf, row_versions
from ...dataflow.column import EPISODE_ID, RESPONSE_MASK, RESPONSE_VERSIONS, TURN_ENDS
from ...dataflow.graph import TRAIN
from ...dataflow.json_values import is_json
from ...dataflow.runs.files import SAMPLES, SAMPLES_ARCHIVE
from ...dataflow.runs.samples import NAME
from ...dataflow.runs.tables import read_parquet

compute: Any = pyarrow.compute  # its functions are created on import
TEXT_BYTES = 256 << 20
"""[bytes] Limit for complete texts, each stored twice (original and lower case). Beyond it, keep
only SHORT characters of each text."""
SHORT = 500
READ_S = 0.1
"""[s] Time that a request spends on new files; a thread reads the rest."""
FEW_PARTS = 64
"""Maximum number of tables to concatenate per query; more are combined permanently."""
TEXTS = ("prompt", "response", "answer")
LISTS_OF_TOKENS = ("response_ids", "chosen_ids", "rejected_ids")


class SampleIndex:
    """
    Args:
        version_of: returns the part of an episode whose policy version counts.
    """

    def __init__(self, run: Path, version_of: Callable[[], VersionOf] = lambda: "oldest_token") -> None:
        self._folder, self._archive = run / SAMPLES, run / SAMPLES_ARCHIVE
        self._version_of = version_of
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._files: list[Path] = []
        self._pending: list[str] = []
        """Unread files, sorted by step; read from the end."""
        self._parts: list[pa.Table] = []
        self._ids: dict[tuple[str, int], list[np.ndarray]] = {}
        """Maps (graph, step) to the sample ids of each file."""
        self._seen: object = None
        self._text_bytes = 0
        self._reader: threading.Thread | None = None
        self.version = 0
        """Increases whenever samples are added."""
        self.damage: list[str] = []

    @property
    def progress(self) -> dict[str, int]:
        return {"read": len(self._known) - len(self._pending), "files": len(self._known)}

    def table(self) -> pa.Table:
        """Return all known rows, after reading new files for at most READ_S."""
        with self._lock:
            self._look()
            self._read_until(time.monotonic() + READ_S)
            if self._pending and (self._reader is None or not self._reader.is_alive()):
                self._reader = threading.Thread(target=self._read_rest, name="samples", daemon=True)
                self._reader.start()
            if len(self._parts) > FEW_PARTS:
                self._parts = [
                    pa.concat_tables(self._parts, promote_options="permissive").combine_chunks()
                ]
            return pa.concat_tables(self._parts, promote_options="permissive") if self._parts else _EMPTY

    def wait(self, limit_s: float) -> bool:
        """Read files for up to `limit_s` seconds; return whether all have been read."""
        deadline = time.monotonic() + limit_s
        self.table()
        while self._pending and time.monotonic() < deadline:
            self.table()
        return not self._pending

    def _read_rest(self) -> None:
        while self._pending:
            with self._lock:
                self._read_until(time.monotonic() + READ_S)
            time.sleep(0.01)  # let requests take the lock

    def _look(self) -> None:
        try:
            now = os.stat(self._folder).st_mtime_ns
        except OSError:
            self._take_archive()
            return
        if now == self._seen:
            return
        try:
            with os.scandir(self._folder) as entries:
                found = {entry.name for entry in entries if NAME.fullmatch(entry.name)}
        except OSError as error:
            self.damage = [f"{self._folder}: {error}"]
            return
        # Folder times are coarse: another file may be added without changing the time.
        if time.time_ns() - now > 10**9:
            self._seen = now
        if self._known - found:
            # Files are missing because the run went back to an earlier step: start over.
            self._known, self._pending, self._files, self._parts, self._ids = set(), [], [], [], {}
            self._text_bytes, self.version, self.damage = 0, self.version + 1, []
        new = found - self._known
        self._known |= new
        self._pending = sorted([*self._pending, *new], key=_step)

    def _take_archive(self) -> None:
        if self._parts or not self._archive.is_file():
            return
        try:
            table = read_parquet(self._archive)
        except (OSError, pa.ArrowException) as error:
            self.damage = [f"{self._archive}: {error}"]
            return
        if table is not None:
            self._add(table, self._archive)

    def _read_until(self, deadline: float) -> None:
        while self._pending and time.monotonic() < deadline:
            name = self._pending.pop()
            path, found = self._folder / name, NAME.fullmatch(name)
            assert found is not None
            try:
                table = _read(path)
            except (OSError, ValueError, pa.ArrowException) as error:
                self.damage.append(f"{path}: {error}")
                continue
            graph, step = found["graph"], int(found["step"])
            # A recorder that died may have written samples twice.
            ids, held = table["sample_id"].to_numpy(), self._ids.setdefault((graph, step), [])
            new = ~np.isin(ids, np.concatenate([*held, np.empty(0, np.int64)]))
            held.append(ids[new])
            if new.any():
                table = table if new.all() else table.filter(pa.array(new))
                named = table.append_column("graph", pa.array([graph] * len(table), pa.string()))
                self._add(named.append_column("step", pa.array(np.full(len(table), step))), path)

    def _add(self, table: pa.Table, path: Path) -> None:
        made = _indexed(table, len(self._files), short=self._text_bytes > TEXT_BYTES)
        self._files.append(path)
        made = made.append_column("_version", _versions(table, self._version_of()))
        texts = (name for name in (*TEXTS, "_text") if name in made.column_names)
        self._text_bytes += sum(made[name].nbytes for name in texts)
        self._parts.append(made)
        self.version += 1

    def row(self, sample: int) -> dict[str, Any] | None:
        """Return all columns of a sample, including tokens; None for an unknown id."""
        found = self.rows("sample_id", sample, 1)
        return found[0].to_pylist()[0] if found else None

    def rows(self, column: str, value: int, most: int) -> list[pa.Table]:
        """Return up to `most` samples that have a value in an integer column, sorted by id, as
        tables of one row with all columns."""
        table = self.table()
        places = self.places(table, column, value)[:most]
        if not len(places):
            return []
        named = table.select(["sample_id", "_file", "graph", "step", "prompt_key"])
        wanted = sorted(named.take(pa.array(places)).to_pylist(), key=lambda row: row["sample_id"])
        sources: dict[int, pa.Table] = {}
        found: list[pa.Table] = []
        for own in wanted:
            if own["_file"] not in sources:
                sources[own["_file"]] = self._source(self._files[own["_file"]])
            source = sources[own["_file"]]
            at = int(np.flatnonzero(source["sample_id"].to_numpy() == own["sample_id"])[0])
            one = source.slice(at, 1)
            added = {name: own[name] for name in ("graph", "step", "prompt_key")}
            one = one.drop_columns([name for name in added if name in one.column_names])
            for name, its in added.items():
                one = one.append_column(name, pa.array([its], table.schema.field(name).type))
            found.append(one)
        return found

    @staticmethod
    def places(table: pa.Table, column: str, value: int) -> np.ndarray:
        """Return the indexes of the rows of a table that have a value in an integer column."""
        if column not in table.column_names or not pa.types.is_integer(table[column].type):
            return np.empty(0, np.int64)
        # Do not convert a column with nulls to numpy: its large ids would be rounded.
        is_equal = compute.equal(table[column].cast(pa.int64()), pa.scalar(value, pa.int64()))
        return np.flatnonzero(compute.fill_null(is_equal, False).to_numpy())

    @staticmethod
    def _source(path: Path) -> pa.Table:
        source = _read(path) if path.suffix == ".arrow" else read_parquet(path)
        assert source is not None
        return source


_EMPTY = pa.schema(
    {
        "sample_id": pa.int64(),
        "group_id": pa.int64(),
        "graph": pa.string(),
        "step": pa.int64(),
        "prompt_key": pa.string(),
    }
).empty_table()


def _step(name: str) -> tuple[int, str]:
    found = NAME.fullmatch(name)
    return (int(found["step"]), name) if found else (0, name)


def _read(path: Path) -> pa.Table:
    """Read and validate the rows of a file, to find damage here and not on access."""
    # A mapped file that is truncated later would kill this process.
    table = pa.ipc.open_file(pa.BufferReader(path.read_bytes())).read_all()
    table.validate(full=True)
    if "sample_id" not in table.column_names or "group_id" not in table.column_names:
        raise ValueError("it has no sample_id or group_id")
    return table


def _indexed(table: pa.Table, file: int, *, short: bool) -> pa.Table:
    kept: dict[str, Any] = {}
    all_rows = pa.array(np.arange(len(table)))  # take() copies, so the index keeps no file in memory
    for name, column in zip(table.column_names, table.columns, strict=True):
        if is_json(column.type):  # answers of other types are shown as JSON
            column = column.cast(pa.string())
        kind = column.type
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kept |= _of_tokens(name, column.combine_chunks())
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
            cut = short or name not in TEXTS
            kept[name] = compute.utf8_slice_codeunits(column, 0, SHORT) if cut else column.take(all_rows)
        elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
            kept[name] = column.take(all_rows)
    texts = [kept[name] for name in TEXTS if name in kept]
    if texts:
        joined = compute.binary_join_element_wise(
            *texts, "\n", null_handling="replace", null_replacement=""
        )
        kept["_text"] = compute.utf8_lower(joined)
    kept["prompt_key"] = pa.array(_prompt_keys(table), pa.string())
    kept["_file"] = pa.array(np.full(len(table), file, np.int32))
    return pa.table(kept)


def _versions(table: pa.Table, version_of: VersionOf) -> pa.Array:
    """Return the policy version of each row of the training graph, null for others."""
    found = np.full(len(table), -1, np.int64)
    if str(RESPONSE_VERSIONS) in table.column_names:
        of_train = compute.equal(table["graph"], TRAIN)
        own = compute.and_(of_train, compute.is_valid(table[str(RESPONSE_VERSIONS)])).to_numpy()
        read = map(str, (RESPONSE_VERSIONS, RESPONSE_MASK, TURN_ENDS, EPISODE_ID))
        rows = table.select([name for name in read if name in table.column_names]).filter(own)
        # Columns that only other graphs have are null.
        rows = rows.select([name for name in rows.column_names if not rows[name].null_count])
        if len(rows):
            found[own] = row_versions(Batch.of_table(rows), version_of)
    return pa.array(found, mask=found < 0)


def _of_tokens(name: str, column: Any) -> dict[str, Any]:
    """Return a token column's lengths, means, or minima and maxima."""
    lengths = compute.fill_null(compute.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    if name in LISTS_OF_TOKENS:
        return {
            "length" if name == "response_ids" else name.replace("_ids", "_length"): pa.array(lengths)
        }
    if name == "turn_ends":
        return {"turns": pa.array(lengths, mask=compute.is_null(column).to_numpy(zero_copy_only=False))}
    values, there = column.flatten(), lengths > 0
    ends = np.cumsum(lengths)
    if name == "response_versions":
        versions, starts = values.to_numpy(zero_copy_only=False), (ends - lengths)[there]
        found = np.zeros((2, len(lengths)), np.int64)
        if len(starts):
            # `reduceat` gives an element even for rows without tokens.
            found[:, there] = (
                np.minimum.reduceat(versions, starts),
                np.maximum.reduceat(versions, starts),
            )
        return {
            key: pa.array(own, mask=~there)
            for key, own in zip(("version_min", "version_max"), found, strict=True)
        }
    means = {"advantages": "advantage", "response_logprobs": "logprob"}
    if name in means and pa.types.is_floating(values.type):
        sums = np.cumsum(np.append(0.0, values.to_numpy(zero_copy_only=False)), dtype=np.float64)
        return {
            means[name]: pa.array(
                (sums[ends] - sums[ends - lengths]) / np.maximum(lengths, 1), mask=~there
            )
        }
    return {}


def _prompt_keys(table: pa.Table) -> list[str]:
    """Return a key for each row's prompt, equal for equal prompts."""
    # Rows of an episode share the prompt of the data, but the harness writes their token ids.
    names = ("prompt", "prompt_ids") if "episode_id" in table.column_names else ("prompt_ids", "prompt")
    name = next((name for name in names if name in table.column_names), None)
    if name is None:
        return [""] * len(table)
    groups, keys = table["group_id"].to_pylist(), dict[int, str]()
    for place, group in enumerate(groups):
        if group not in keys:
            keys[group] = xxhash.xxh3_64_hexdigest(repr(table[name][place].as_py()).encode())
    return [keys[group] for group in groups]
