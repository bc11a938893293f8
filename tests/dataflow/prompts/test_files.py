"""Files of rows: Parquet, JSONL, JSON, CSV, Arrow, compressed files, and several files."""

from __future__ import annotations

import gzip
import json
import re
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tiny_tokenizers import CORPUS, complaint, jsonl, parquet

from weft.dataflow.prompts.prompts import Prompts
from weft.dataflow.prompts.tokenizer import Tokenizer


def test_files_are_read_one_after_the_other(tmp_path: Path, qwen: Path) -> None:
    first = parquet(
        tmp_path / "a.parquet", [{"prompt": [{"content": "0", "role": "user"}], "level": None}]
    )
    second = jsonl(
        tmp_path / "b.jsonl",
        [{"level": 1, "prompt": [{"role": "user", "content": str(i)}]} for i in (1, 2)],
    )
    prompts = Prompts.read([first, second], qwen)
    assert prompts.name == "a+b"
    assert [re.findall(r"\d", text) for text in prompts.table["prompt"].to_pylist()] == [
        ["0"],
        ["1"],
        ["2"],
    ]
    assert prompts.table["level"].to_pylist() == [None, 1, 1]
    assert all(column.num_chunks == 1 for column in prompts.table.columns)


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_limit_reads_the_first_rows_only(write: Any, tmp_path: Path, base: Path) -> None:
    files = [
        write(tmp_path / f"{n}.{write.__name__}", [{"prompt": f"{n} {i}"} for i in range(5)])
        for n in "ab"
    ]
    assert Prompts.read(files, base, limit=7).table["prompt"].to_pylist() == [
        *(f"a {i}" for i in range(5)),
        "b 0",
        "b 1",
    ]
    assert len(Prompts.read(files, base, limit=2)) == 2
    assert "limit: input should be greater than or equal to 1, not 0" in complaint(files, base, limit=0)


def test_a_json_file_may_hold_one_array(tmp_path: Path, qwen: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{"prompt": "2"}, {"prompt": "3", "hard": True}], indent=2))
    assert Prompts.read(file, qwen).table["hard"].to_pylist() == [None, True]
    jsonl(file, [{"prompt": "2"}])
    assert len(Prompts.read(file, qwen)) == 1


def test_text_that_looks_like_a_date_stays_text(tmp_path: Path, qwen: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": "2024-01-01"}],
            "answer": "2024-01-01 10:00:00",
            "n": [{"d": "1999-12-31"}],
        }
    ]
    prompts = Prompts.read(jsonl(tmp_path / "dates.jsonl", rows), qwen)
    assert "2024-01-01<|im_end|>" in prompts.table["prompt"].to_pylist()[0]
    assert prompts.table["answer"].to_pylist() == ["2024-01-01 10:00:00"]
    assert prompts.table["n"].to_pylist() == [[{"d": "1999-12-31"}]]


def test_rows_longer_than_pyarrows_block_and_blank_lines_are_read(tmp_path: Path, base: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(
        "\ufeff"
        + json.dumps({"prompt": "1", "book": "x" * 3_000_000})
        + '\n\n{"prompt": "2", "book": ""}\n\n'
    )
    assert Prompts.read(file, base).table["prompt"].to_pylist() == ["1", "2"]


def test_long_prompts_are_an_error_or_dropped_and_counted(tmp_path: Path, base: Path) -> None:
    file = jsonl(
        tmp_path / "p.jsonl",
        [{"prompt": "1"}, {"prompt": "1 2 3", "answer": "x"}, {"prompt": "1 2 3 4"}],
    )
    said = complaint(file, base, max_prompt_tokens=2)
    assert said == (
        "p.jsonl, line 2: the prompt has 5 tokens, max_prompt_tokens is 2 (2 of 3 rows are longer); "
        "raise max_prompt_tokens, or set too_long='drop'"
    )
    prompts = Prompts.read(file, base, max_prompt_tokens=2, too_long="drop")
    assert (prompts.table["prompt"].to_pylist(), prompts.dropped) == (["1"], 2)
    assert len(Prompts.read(file, base, max_prompt_tokens=7)) == 3  # the bound is inclusive
    many = jsonl(tmp_path / "many.jsonl", [{"prompt": "1 2 3"}])
    assert "1 of 1" in complaint(many, base, max_prompt_tokens=2, too_long="drop")
    assert "too_long: input should be 'error' or 'drop', not 'dropp'" in complaint(
        many, base, too_long="dropp"
    )
    assert "max_prompt_tokens: input should be greater than or equal to 1" in complaint(
        many, base, max_prompt_tokens=0
    )
    assert "no setting 'promt' (value 'x'); did you mean 'prompt'?" in complaint(many, base, promt="x")


@pytest.mark.slow
def test_a_hundred_thousand_prompts_take_little_more_than_the_library(
    tmp_path: Path, base: Path
) -> None:
    rows = [{"prompt": f"{CORPUS[i % 4]} {i}", "answer": str(i)} for i in range(100_000)]
    file = jsonl(tmp_path / "many.jsonl", rows)
    texts = [row["prompt"] for row in rows]
    backend = Tokenizer.load(base).backend
    started = time.perf_counter()
    expected = [encoding.ids for encoding in backend.encode_batch_fast(texts)]
    library_s = time.perf_counter() - started
    started = time.perf_counter()
    prompts = Prompts.read(file, base)
    weft_s = time.perf_counter() - started
    assert prompts.table["prompt_ids"].to_pylist() == expected
    assert weft_s < 1.5 * library_s + 1.0, (weft_s, library_s)


def test_csv_is_text_in_every_column(tmp_path: Path, base: Path) -> None:
    file = tmp_path / "sums.csv"
    file.write_text(
        '\ufeffquestion,answer,level\n"2 + 2,\nor more?",007,1\n"He said ""3""?",,2\n', encoding="utf-8"
    )
    rows = Prompts.read(file, base).table.select(["prompt", "answer", "level"]).to_pylist()
    assert rows == [
        {"prompt": "2 + 2,\nor more?", "answer": "007", "level": "1"},
        {"prompt": 'He said "3"?', "answer": "", "level": "2"},
    ]
    assert len(Prompts.read(file, base, limit=1)) == 1
    (tmp_path / "sums.tsv").write_text("question\tanswer\n2, or 3?\t5\n")
    assert Prompts.read(tmp_path / "sums.tsv", base).table["prompt"].to_pylist() == ["2, or 3?"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_text_files_may_be_compressed(name: str, tmp_path: Path, base: Path) -> None:
    text = "prompt\none\ntwo\n" if name.endswith("csv") else '{"prompt": "one"}\n{"prompt": "two"}\n'
    file = tmp_path / f"{name}.gz"
    file.write_bytes(gzip.compress(text.encode()))
    assert Prompts.read(file, base).table["prompt"].to_pylist() == ["one", "two"]
    assert Prompts.read(file, base, limit=1).name == "a"
    file.write_bytes(gzip.compress(text.replace("two", "").encode()))
    place = "a.jsonl.gz, line 2" if name == "a.jsonl" else f"{name}.gz, row 2"
    if not name.endswith("csv"):  # in CSV, a blank line is not a row
        assert complaint(file, base) == f"{place}: 'prompt' is \"\"; every row needs text there"
    whole = gzip.compress(text.encode() * 99)
    for damaged in (whole[:-20], whole[:12] + b"x" * 8 + whole[20:]):
        file.write_bytes(damaged)
        assert f"{name}.gz: not a gzip file" in complaint(file, base)
    file.write_bytes(b"no gzip")
    assert f"{name}.gz: not a gzip file" in complaint(file, base)


def test_a_json_array_is_read_like_json_lines(tmp_path: Path, base: Path) -> None:
    rows = [
        {"prompt": 'a "[{\\', "n": 1, "when": "2024-01-01"},
        {"prompt": "b\n,]", "n": 2.5, "when": None},
    ]
    file = tmp_path / "rows.json"
    file.write_text("\ufeff \n" + json.dumps(rows, indent=1), encoding="utf-8")
    table = Prompts.read(file, base).table
    assert table.select(["prompt", "n", "when"]).to_pylist() == rows
    file.write_text('[{"prompt": "a"}\n {"prompt": "b"}]')
    assert complaint(file, base).startswith("rows.json: not JSON (Expecting ',' delimiter: line 2")
    file.write_text('[{"prompt": "a"},')
    assert complaint(file, base).startswith("rows.json: not JSON (Expecting value")
    file.write_text('{\n "prompt": "a"\n}\n{"prompt": "b"}')  # objects one after another
    assert Prompts.read(file, base).table["prompt"].to_pylist() == ["a", "b"]


def test_a_folder_that_datasets_saved_is_read(tmp_path: Path, base: Path) -> None:
    table = pa.table({"prompt": ["one", "two"]})
    for split in ("train", "test"):
        folder = tmp_path / "saved" / split
        folder.mkdir(parents=True)
        with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
            stream.write_table(table)
        (folder / "state.json").write_text("{}")
    prompts = Prompts.read(tmp_path / "saved", base, split="test")
    assert (prompts.name, prompts.table["prompt"].to_pylist()) == ("saved_test", ["one", "two"])
    file = tmp_path / "broken.arrow"
    file.write_bytes(b"ARROW1 it is not")
    assert "broken.arrow: not an Arrow file" in complaint(file, base)
