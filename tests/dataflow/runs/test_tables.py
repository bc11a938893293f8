"""Tables of a run: appended to, readable at any time, complete files at the end."""

import errno
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from weft.dataflow.runs.files import Disk
from weft.dataflow.runs.tables import (
    CALLS,
    VALUES,
    TableStream,
    begin_again,
    read_metrics,
    read_timeline,
    to_parquet,
    values_from,
)


def call(step: int, end_s: float, rows: int = 8) -> dict[str, Any]:
    times = {"start_s": end_s - 0.5, "end_s": end_s, "worker_s": 0.25}
    return {
        "step": step,
        "graph": "train",
        "group": "actor",
        "node": "actor.update",
        **times,
        "rows": rows,
        "tokens": 9,
    }


def timeline(run: Path, calls: int, flush_every: int = 1, first: int = 0) -> TableStream:
    stream = TableStream(run / "timeline.arrows", CALLS)
    for k in range(first, first + calls):
        stream.add(**call(k, float(k)))
        if k % flush_every == 0:
            stream.flush()
    stream.flush()
    return stream


def metrics(run: Path, *rows: dict[str, float]) -> TableStream:
    stream = TableStream(run / "metrics.arrows", VALUES)
    for row in rows:
        for value in values_from(row):
            stream.add(**value)
        stream.flush()
    return stream


def test_a_flush_writes_new_rows_only(tmp_path: Path):
    def cost(of: int) -> int:
        (tmp_path / str(of)).mkdir()
        stream = timeline(tmp_path / str(of), of, flush_every=500)
        before = stream.path.stat()
        stream.add(**call(of, float(of)))
        stream.flush()
        after = stream.path.stat()
        assert after.st_ino == before.st_ino, "the file was written whole"
        return after.st_size - before.st_size

    assert cost(10) == cost(5000) < 2000


def test_a_reader_sees_flushed_rows_during_the_run(tmp_path: Path):
    stream = timeline(tmp_path, 3)
    stream.add(**call(3, 3.0))
    table = read_timeline(tmp_path)
    assert table is not None and table["step"].to_pylist() == [0, 1, 2]
    assert stream.read()["step"].to_pylist() == [0, 1, 2, 3], "its writer sees all"
    with pa.OSFile(str(stream.path)) as file:
        assert pa.ipc.open_stream(file).read_all() == table, "and so does any Arrow tool"


def test_every_torn_end_is_passed_over(tmp_path: Path):
    whole = timeline(tmp_path, 3).path.read_bytes()
    sizes = [len(timeline_file(tmp_path / str(k), k)) for k in range(1, 4)]
    assert sizes[-1] == len(whole)
    for size in sorted(
        {*range(0, len(whole), 41), *(s + k for s in sizes for k in (-1, 0, 1) if s + k <= len(whole))}
    ):
        (tmp_path / "timeline.arrows").write_bytes(whole[:size])
        table = read_timeline(tmp_path)
        assert table is not None and len(table) == sum(size >= s for s in sizes), size
    (tmp_path / "timeline.arrows").write_bytes(
        whole[: sizes[1]] + bytes(4096)
    )  # the state after a power failure
    table = read_timeline(tmp_path)
    assert table is not None and len(table) == 2


def timeline_file(run: Path, calls: int) -> bytes:
    run.mkdir()
    return timeline(run, calls).path.read_bytes()


def test_a_metric_that_comes_later_joins_the_row_of_its_step(tmp_path: Path):
    metrics(
        tmp_path,
        {"step": 0},
        {"step": 1, "loss": math.nan},
        {"step": 0, "eval": 0.5},
        {"step": 1, "eval": 0.75},
    )
    table = read_metrics(tmp_path)
    assert table is not None and table.column_names == ["step", "eval", "loss"]
    first, second = table.to_pylist()
    assert first == {"step": 0, "loss": None, "eval": 0.5}
    assert second["eval"] == 0.75 and math.isnan(second["loss"]), "not a number is no missing number"


def test_a_run_that_is_over_has_parquet_files(tmp_path: Path):
    metrics(tmp_path, {"step": 0}, {"step": 1, "loss": 0.5}).close()
    timeline(tmp_path, 3).close()
    before = read_metrics(tmp_path), read_timeline(tmp_path)
    to_parquet(tmp_path)
    to_parquet(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.parquet", "timeline.parquet"]
    assert (read_metrics(tmp_path), read_timeline(tmp_path)) == before
    assert pq.read_table(tmp_path / "metrics.parquet")["loss"].to_pylist() == [None, 0.5]


def test_a_resumed_run_appends_to_its_records(tmp_path: Path):
    timeline(tmp_path, 5).close()
    kept = read_timeline(tmp_path)
    to_parquet(tmp_path)
    assert kept is not None
    begin_again(tmp_path, "timeline", kept.slice(0, 3))
    timeline(tmp_path, 2, first=3).close()
    assert [p.name for p in tmp_path.iterdir()] == ["timeline.arrows"]
    assert read_timeline(tmp_path) == kept


class FullFor(Disk):
    """A disk with room for only a part of each of the next writes, then for all."""

    def __init__(self, writes: int) -> None:
        self._full: Iterator[None] = iter([None] * writes)

    def write(self, descriptor: int, data: bytes) -> None:
        for _ in self._full:
            super().write(descriptor, data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(descriptor, data)


def test_writes_to_a_full_disk_wait_for_room(tmp_path: Path):
    stream = TableStream(tmp_path / "timeline.arrows", CALLS, disk=FullFor(2))
    for k in range(2):
        stream.add(**call(k, float(k)))
        with pytest.raises(OSError, match="No space left"):
            stream.flush()
        assert stream.path.stat().st_size == 0
    stream.close()
    table = read_timeline(tmp_path)
    assert table is not None and table["step"].to_pylist() == [0, 1]
