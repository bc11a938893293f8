"""Columns return the values of the file: numbers, objects with their keys, text that looks like
JSON."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tiny_tokenizers import jsonl, parquet

from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.dataflow.prompts.prompts import Prompts
from weft.dataflow.source import TableSource, fingerprint

VALUES: dict[str, list[Any]] = {
    "integers": [5, 0, -3],
    "an integer beside a float": [1, 1.0, 2.5],
    "booleans": [True, False, None],
    "a boolean beside numbers": [True, 1, 0.0],
    "numbers beside text": [5, "5", "five"],
    "lists": [[1, 2], [], None],
    "mixed lists": [[1, "a"], [2.5], [[None]]],
    "objects with different keys": [{"target": 98, "numbers": [1, 2]}, {"target": 5}, {}],
    "objects with nulls": [{"a": None}, {"a": 1}, {}],
    "objects in lists": [[{"input": "1", "output": 2}], [{"input": "1"}], []],
    "large integers": [2**53 + 1, 2**64, -(10**40)],
    "JSON text": ['{"target": 98}', "[1, 2]", "5"],
    "JSON text beside objects": ['{"a": 1}', {"a": 1}, "null"],
    "nulls": [None, None, None],
    "text": ["5", "", "a"],
    "dates as text": ["2024-01-01", "2024-01-01 10:00:00", None],
    "floats": [1.0, 1e300, 0.1],
    "nothing but zeros": [0, 0, 0],
}


def alike(one: Any, other: Any) -> bool:
    """Compare values and types: 1 is neither 1.0 nor True."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@pytest.mark.parametrize("column", ["answer", "extra_info", "level"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "rows", "two files"])
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_values_are_those_of_the_file(
    values: list[Any], name: str, column: str, tmp_path: Path, base: Path
) -> None:
    rows = [{"prompt": "1", column: value} for value in values]
    if name == "rows":
        prompts = Prompts.from_rows(rows, base)
    elif name == "a.json":
        (tmp_path / name).write_text(json.dumps(rows))
        prompts = Prompts.read(tmp_path / name, base)
    elif name == "two files":
        prompts = Prompts.read(
            [jsonl(tmp_path / f"{k}.jsonl", [row]) for k, row in enumerate(rows)], base
        )
    else:
        prompts = Prompts.read(jsonl(tmp_path / "a.jsonl", rows), base)
    assert alike(prompts.table[column].to_pylist(), [row[column] for row in rows])
    assert fingerprint(TableSource("a", prompts.table))
    batch = Batch.of_table(prompts.table)
    for copy in (
        batch,
        Batch.concat([batch, batch]).slice(0, len(batch)),
        batch.take(range(len(batch))),
    ):
        assert alike(copy[column].to_pylist(), [row[column] for row in rows])


def test_a_value_of_another_type_far_down_changes_none_before_it(tmp_path: Path, base: Path) -> None:
    rows = [{"prompt": "1", "answer": 1, "x": {"a": 1}}] * 8200 + [
        {"prompt": "1", "answer": 2.5, "x": {"b": 1}, "y": 1}
    ]
    table = Prompts.read(jsonl(tmp_path / "a.jsonl", rows), base).table
    assert alike(table["answer"].to_pylist()[-2:], [1, 2.5])
    assert table["x"].to_pylist()[-2:] == [{"a": 1}, {"b": 1}]
    assert table["y"].to_pylist()[-2:] == [None, 1]


@pytest.mark.parametrize("key", ["ground_truth", "style"])
def test_a_ground_truth_within_an_object_is_that_of_the_file(
    key: str, tmp_path: Path, base: Path
) -> None:
    for values in VALUES.values():
        rows = [{"prompt": "1", "reward_model": {"style": "rule", key: value}} for value in values]
        prompts = Prompts.read(jsonl(tmp_path / "a.jsonl", rows), base, answer=f"reward_model.{key}")
        assert alike(prompts.table["answer"].to_pylist(), values)
        assert alike(prompts.table["reward_model"].to_pylist(), [row["reward_model"] for row in rows])
    rows = [
        {"prompt": "1", "reward_model": {"ground_truth": {"target": 5}}},
        {"prompt": "2", "reward_model": {}},
    ]
    found = Prompts.read(jsonl(tmp_path / "a.jsonl", rows), base)
    assert found.table["answer"].to_pylist() == [{"target": 5}, None]


def test_parquet_has_its_own_types(tmp_path: Path, base: Path) -> None:
    day = datetime.date(2024, 1, 2)
    rows = [
        {"prompt": "1", "answer": day, "n": 1, "x": 1.5},
        {"prompt": "2", "answer": None, "n": 2, "x": 2.0},
    ]
    table = Prompts.read(parquet(tmp_path / "a.parquet", rows), base).table
    assert table.select(["answer", "n", "x"]).to_pylist() == [
        {"answer": day, "n": 1, "x": 1.5},
        {"answer": None, "n": 2, "x": 2.0},
    ]
    numbers = parquet(tmp_path / "b.parquet", [{"prompt": "1", "answer": 7}])
    assert Prompts.read(numbers, base).table["answer"].to_pylist() == [7]
    floats = parquet(tmp_path / "c.parquet", [{"prompt": "1", "answer": 7.0}])
    assert alike(Prompts.read([numbers, floats], base).table["answer"].to_pylist(), [7, 7.0])


def test_a_solution_with_a_number_is_shortened_and_keeps_the_number(tmp_path: Path, base: Path) -> None:
    rows = [{"question": "1", "answer": "It is\n#### 4"}, {"question": "2", "answer": 5}]
    table = Prompts.read(jsonl(tmp_path / "a.jsonl", rows), base).table
    assert table["answer"].to_pylist() == ["4", 5] and table["full_answer"].to_pylist() == [
        "It is\n#### 4",
        5,
    ]


def test_messages_keep_their_own_keys(tmp_path: Path, qwen: Path) -> None:
    messages = [
        [{"role": "user", "content": "2 + 2?"}],
        [{"role": "user", "content": "3?", "name": "Ann"}],
    ]
    table = Prompts.read(
        jsonl(tmp_path / "a.jsonl", [{"prompt": each} for each in messages]), qwen
    ).table
    assert table["prompt_messages"].to_pylist() == messages


def test_rows_of_other_libraries_are_read(base: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rows = [{"prompt": "1", "answer": {"a": 1}, "n": 1}, {"prompt": "2", "answer": 5, "n": 2}]
    frame = pandas.DataFrame(rows, index=["x", "y"])
    for given in (frame, rows, tuple(rows)):
        table = Prompts.from_rows(given, base).table
        assert table.select(["prompt", "answer", "n"]).to_pylist() == rows
    arrow = pa.table({"prompt": ["1", "2"], "answer": [5, 6]})
    for given in (arrow, arrow.to_batches()[0]):
        assert Prompts.from_rows(given, base, limit=1).table["answer"].to_pylist() == [5]
    missing = pandas.DataFrame({"prompt": ["1", "2"], "answer": [None, "b"]})
    assert Prompts.from_rows(missing, base).table["answer"].to_pylist() == [None, "b"]


def test_cells_of_a_frame_may_be_arrays_and_missing_values_of_any_kind(base: Path) -> None:
    pandas = pytest.importorskip("pandas")
    cells: list[list[Any]] = [
        [np.array([1, 2]), np.array([3])],
        [pandas.NA, "x"],
        [pandas.NaT, 1],
        [float("nan"), {"a": 1}],
    ]
    frame = pandas.DataFrame({"prompt": ["1", "2"]})
    for number, column in enumerate(cells):
        frame[f"c{number}"] = pandas.Series(column, dtype=object)
    table = Prompts.from_rows(frame, base).table
    read = [table[f"c{number}"].to_pylist() for number in range(len(cells))]
    assert read == [[[1, 2], [3]], [None, "x"], [None, 1], [None, {"a": 1}]]


def test_a_frame_that_cannot_be_read_is_refused_by_column(base: Path) -> None:
    pandas = pytest.importorskip("pandas")
    refused = {
        "the name of a column is text, not 0": pandas.DataFrame({0: ["1"], "prompt": ["1"]}),
        "there are two columns 'prompt'": pandas.DataFrame([["1", "2"]], columns=["prompt", "prompt"]),
        "column 'z' of type complex128 cannot be read": pandas.DataFrame({"prompt": ["1"], "z": [1j]}),
    }
    for message, frame in refused.items():
        with pytest.raises(UserError, match=message):
            Prompts.from_rows(frame, base)


@pytest.mark.parametrize("other", [1, datetime.datetime(2020, 1, 1, 3), "x"])
def test_dates_mixed_with_other_types_are_refused(other: Any, base: Path) -> None:
    dates = [datetime.date(2020, 1, 1), None]
    assert (
        Prompts.from_rows([{"prompt": "1", "day": day} for day in dates], base).table["day"].to_pylist()
        == dates
    )
    for mixed in ([dates[0], other], [other, dates[0]]):
        with pytest.raises(UserError, match="'day' is a date"):
            Prompts.from_rows([{"prompt": "1", "day": day} for day in mixed], base)


def test_numbers_of_both_kinds_are_floats_in_numpy(base: Path) -> None:
    rows = [{"prompt": "1", "weight": 1, "x": 1}, {"prompt": "2", "weight": 0.5, "x": {"a": 1}}]
    batch = Batch.of_table(Prompts.from_rows(rows, base).table)
    assert batch.numpy("weight").tolist() == [1.0, 0.5] and batch.numpy("weight").dtype == "float64"
    assert batch.numpy("x").tolist() == [1, {"a": 1}]
