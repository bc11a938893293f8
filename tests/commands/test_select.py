"""`weft select` takes the formats of `Prompts.read`, writes the rows unchanged, and reports dropped rows."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from weft.__main__ import main
from weft.dataflow.prompts.files import read_rows

APPLES = "Anna has three apples and buys four more at the market. How many apples has she now?"
PEARS = "Ben eats two pears every day of the week. How many pears does he eat in one week?"
PLUMS = "A tree has ninety plums and a third of them fall down. How many plums are left on it?"
ROWS = [
    {"question": APPLES, "answer": "7", "tags": ["sums"], "solve_rate": 0.5},
    {"question": PEARS, "answer": "14", "tags": ["products"], "solve_rate": 0.25},
    {"question": APPLES.upper(), "answer": "7", "tags": ["sums"], "solve_rate": 0.5},
    {"question": APPLES.lower(), "answer": "8", "tags": ["sums", "wrong"], "solve_rate": 0.0},
    {"question": PLUMS, "answer": "60", "tags": [], "solve_rate": 0.0},
]


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("test.jsonl").write_text(json.dumps({"problem": PEARS, "solution": "14"}) + "\n")
    return tmp_path


def selected(*words: str, out: str = "out.jsonl") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the kept rows, and the lines of the report."""
    assert main(["select", "train.jsonl", "--out", out, *words]) == 0
    report = Path(out).with_name(f"{Path(out).stem}.dropped.jsonl")
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    return read_rows(out, None, None, None).table.to_pylist(), lines


def test_duplicates_and_leaks_are_dropped_with_reasons(capsys: pytest.CaptureFixture[str]):
    kept, report = selected("--held-out", "test.jsonl")
    assert kept == [ROWS[0], ROWS[3], ROWS[4]], "the third has another answer"
    like = {"like_file": "train.jsonl", "like_row": 1, "similarity": 1.0}
    held_out = {"like_file": "test.jsonl", "like_row": 1, "similarity": 1.0}
    assert report == [
        {"file": "train.jsonl", "row": 2, "reason": "held_out", **held_out},
        {"file": "train.jsonl", "row": 3, "reason": "near_duplicate", **like},
    ]
    said = capsys.readouterr().out
    assert "5 rows, read as GSM8K questions" in said
    assert "dropped   1: like a held-out prompt" in said
    assert "row 3 'ANNA HAS THREE" in said and "100% like row 1" in said
    assert "kept      3 rows, in out.jsonl; the others are in out.dropped.jsonl" in said


def test_json_has_the_counts_and_the_information(capsys: pytest.CaptureFixture[str]):
    selected("--rows", "2", "--labels", "tags", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 5 and found["kept"] == 2
    assert found["dropped"] == {"held_out": 0, "near_duplicate": 1, "redundant": 2}
    assert 0 < found["random_information"] <= 1 and 0 < found["information"] <= 1
    assert found["file"] == "out.jsonl" and found["report"] == "out.dropped.jsonl"


def test_labels_and_quality_choose_the_rows():
    kept, report = selected("--rows", "1", "--labels", "tags", "--quality", "solve_rate")
    assert [row["question"] for row in kept] == [APPLES]
    assert [line["row"] for line in report if line["reason"] == "redundant"] == [2, 4, 5]


def test_a_parquet_file_keeps_every_value_and_prompts_read_it():
    rows = [{"prompt": APPLES, "extra": {"a": 1}}, {"prompt": PEARS, "extra": {"b": "x"}}]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept, _ = selected(out="out.parquet")
    assert kept == rows


def test_several_files_are_named_in_the_report():
    Path("more.jsonl").write_text(json.dumps({**ROWS[4], "question": PLUMS + "!"}) + "\n")
    assert main(["select", "train.jsonl", "more.jsonl", "--out", "out.jsonl"]) == 0
    lines = [json.loads(line) for line in Path("out.dropped.jsonl").read_text().splitlines()]
    found = {key: lines[-1][key] for key in ("file", "row", "like_file", "like_row")}
    assert found == {"file": "more.jsonl", "row": 1, "like_file": "train.jsonl", "like_row": 5}


def test_the_test_split_of_a_folder_is_held_out():
    Path("set").mkdir()
    Path("test.jsonl").rename("set/test.jsonl")
    Path("set/train.jsonl").write_text(json.dumps({"problem": PLUMS, "solution": "60"}) + "\n")
    kept, _ = selected("--held-out", "set")
    assert [row["question"] for row in kept] == [APPLES, APPLES.lower(), PLUMS]


def test_values_without_a_form_in_json_need_a_parquet_file(capsys: pytest.CaptureFixture[str]):
    pq.write_table(pa.table({"prompt": [APPLES], "image": [b"\xff"]}), "data.parquet")
    assert main(["select", "data.parquet", "--out", "out.jsonl"]) == 2
    assert "data.parquet, row 1: a value has no form in JSON" in capsys.readouterr().err
    assert not Path("out.jsonl").exists()
    assert main(["select", "data.parquet", "--out", "out.parquet"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.jsonl", "--out", "test.jsonl"], "test.jsonl exists already; name a new file"),
        (["train.jsonl", "--out", "o.csv"], "--out o.csv: the file ends in .jsonl or .parquet"),
        (["train.jsonl", "--out", "o.jsonl", "--rows", "0"], "--rows 0: it must be at least 1"),
        (
            ["train.jsonl", "--out", "o.jsonl", "--similarity", "0.5"],
            "similarity 0.5: it must be from 0.7",
        ),
        (
            ["train.jsonl", "--out", "o.jsonl", "--labels", "tag"],
            "no column 'tag' (labels='tag'); did you",
        ),
        (
            ["train.jsonl", "--out", "o.jsonl", "--labels", "solve_rate"],
            "line 1: --labels solve_rate: 0.5",
        ),
        (
            ["train.jsonl", "--out", "o.jsonl", "--quality", "answer"],
            "--quality answer: '7' is not a number",
        ),
        (["tran.jsonl", "--out", "o.jsonl"], "'tran.jsonl' does not exist; did you mean 'train.jsonl'?"),
        (["test.jsonl", "--out", "o.jsonl", "--held-out", "test.jsonl"], "every row is like a held-out"),
    ],
)
def test_mistakes_are_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["select", *words]) == 2
    assert said in capsys.readouterr().err
    assert not Path("o.jsonl").exists()
