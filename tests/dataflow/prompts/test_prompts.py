"""Prompts as a source: functions select and order rows, and ambiguous columns are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_tokenizers import USER

from weft.dataflow.errors import UserError
from weft.dataflow.prompts.prompts import Prompts
from weft.dataflow.source import fingerprint


def questions(base: Path, levels: list[Any]) -> Prompts:
    rows = [
        {"question": f"{k} + {k}", "answer": str(2 * k), "level": level}
        for k, level in enumerate(levels)
    ]
    return Prompts.from_rows(rows, base, name="sums")


def test_filter_keeps_rows_in_their_order_and_counts_the_others(base: Path) -> None:
    def easy(row: dict[str, Any]) -> bool:
        assert set(row) == {"prompt_ids", "prompt", "answer", "question", "level"}
        return row["level"] < 3

    prompts = questions(base, [3, 1, 2, 5])
    kept = prompts.filter(easy)
    assert kept.table["answer"].to_pylist() == ["2", "4"] and (len(kept), kept.dropped) == (2, 2)
    assert "left out  2 of 4: filter(easy)" in str(kept.understood)
    assert len(prompts) == 4 and prompts.filter(lambda row: True) is prompts
    assert kept.table["level"].num_chunks == 1


def test_sort_is_stable_and_goes_both_ways(base: Path) -> None:
    prompts = questions(base, [2, 1, 2, 1])
    assert prompts.sort(lambda row: row["level"]).table["answer"].to_pylist() == ["2", "6", "0", "4"]
    assert prompts.sort(lambda row: row["level"], reverse=True).table["answer"].to_pylist() == [
        "0",
        "4",
        "2",
        "6",
    ]
    assert prompts.sort(lambda row: (row["level"], -int(row["answer"]))).table["answer"].to_pylist() == [
        "6",
        "2",
        "4",
        "0",
    ]


def test_a_run_tells_filtered_and_sorted_rows_from_the_others(base: Path) -> None:
    prompts = questions(base, [2, 1, 3])
    same = questions(base, [2, 1, 3])
    ordered, fewer = prompts.sort(lambda row: row["level"]), prompts.filter(lambda row: row["level"] > 1)
    assert fingerprint(prompts) == fingerprint(same)
    assert len({fingerprint(each) for each in (prompts, ordered, fewer)}) == 3
    assert fingerprint(ordered) == fingerprint(same.sort(lambda row: row["level"]))


def test_functions_that_give_no_answer_are_named(base: Path) -> None:
    prompts = questions(base, [2, None, 3])

    def hard(row: dict[str, Any]) -> Any:
        return row["level"]

    with pytest.raises(UserError, match=r"sums, row 1: filter\(hard\) returned 2; it must return True"):
        prompts.filter(hard)
    with pytest.raises(UserError, match=r"sums: filter\(<lambda>\) keeps none of 3 rows"):
        prompts.filter(lambda row: False)
    with pytest.raises(UserError, match=r"sums: the keys of sort\(hard\) cannot be compared"):
        prompts.sort(hard)
    with pytest.raises(UserError, match=r"sums, row 1: the key of sort\(<lambda>\) is nan"):
        prompts.sort(lambda row: math.nan)
    with pytest.raises(TypeError) as caught:
        prompts.filter(lambda row: row["level"] > 2)
    assert caught.value.__notes__ == ["sums, row 2"]


def test_columns_with_names_that_weft_uses_are_kept_by_another(base: Path, qwen: Path) -> None:
    names = (
        "parent_id",
        "group_id",
        "sample_id",
        "draw_path",
        "made_before",
        "expected_tokens",
        "response_mask",
        "chosen_mask",
        "rejected_mask",
    )
    prompts = Prompts.from_rows([{"prompt": "1", **dict.fromkeys(names, "own")}], base)
    assert prompts.columns == ("prompt_ids", "prompt", *(f"file_{name}" for name in names))
    assert "file_parent_id (text)" in str(prompts.understood)
    beside = Prompts.from_rows([{"prompt": "Hi", "messages": [USER]}], qwen)
    assert beside.table.to_pylist()[0]["file_prompt"] == "Hi"


def test_two_columns_of_one_name_are_refused(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "twice.parquet"
    pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], ["prompt", "prompt"]), file)
    with pytest.raises(
        UserError, match=r"twice.parquet: there are two columns 'prompt'; rename one of them"
    ):
        Prompts.read(file, base)
