"""Metrics of a run are read once as they are added, and once more from the Parquet file of the finished run."""

from pathlib import Path

import pytest

from weft.controllers.reports.tracker_threads import new_values
from weft.dataflow.runs.files import METRICS, STREAM
from weft.dataflow.runs.follow import FollowedTable
from weft.dataflow.runs.tables import VALUES, TableStream, to_parquet, values_from

ROWS = [{"step": float(step), "loss": 1.0 / step, "reward/mean": step / 10} for step in range(1, 7)]


def stream(run: Path) -> TableStream:
    return TableStream(run / f"{METRICS}{STREAM}", VALUES)


def add(to: TableStream, *rows: dict[str, float]) -> None:
    for row in rows:
        for value in values_from(row):
            to.add(**value)
    to.flush()


def read(table: FollowedTable, **sent: int) -> list[dict[str, float]]:
    return [{"step": float(step), **metrics} for step, metrics in new_values(table, sent)]


def test_each_new_value_is_read_once(tmp_path: Path):
    values, writer = FollowedTable(tmp_path, METRICS), stream(tmp_path)
    assert read(values) == [], "nothing is there yet"
    add(writer, *ROWS[:2])
    assert read(values) == ROWS[:2] and read(values) == []
    add(writer, ROWS[2], {"step": 1.0, "eval/reward/mean": 0.25})
    assert read(values) == [ROWS[2], {"step": 1.0, "eval/reward/mean": 0.25}]
    writer.close()


def test_a_message_that_is_being_written_is_read_when_it_is_complete(tmp_path: Path):
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    for folder in (whole, torn):
        folder.mkdir()
    writer = stream(whole)
    for row in ROWS[:3]:
        add(writer, row)
    writer.close()
    data, found, values = writer.path.read_bytes(), [], FollowedTable(torn, METRICS)
    for end in [*range(1, len(data), 7), len(data)]:
        (torn / writer.path.name).write_bytes(data[:end])  # the same file, longer
        found += read(values)
    assert found == ROWS[:3]


@pytest.mark.parametrize("opened", [True, False])
def test_a_finished_run_is_read_whole_from_its_parquet_file(tmp_path: Path, opened: bool):
    values, writer = FollowedTable(tmp_path, METRICS), stream(tmp_path)
    add(writer, *ROWS[:2])
    assert not opened or read(values) == ROWS[:2]
    add(writer, *ROWS[2:])
    writer.close()
    to_parquet(tmp_path)
    assert not writer.path.exists()
    assert read(values, loss=2) == [
        {name: value for name, value in row.items() if name != "loss" or row["step"] > 2} for row in ROWS
    ]
    assert read(values) == []
