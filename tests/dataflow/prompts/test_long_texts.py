"""Texts that would take a tokenizer too long are refused before tokenisation."""

import time
from pathlib import Path

import pytest

import weft
from weft.dataflow.errors import UserError


@pytest.mark.parametrize("column", ["prompt", "response"])
def test_a_text_of_thirty_megabytes_is_refused_with_its_row(base: Path, column: str):
    rows = [
        {"prompt": "short", "response": "fine"},
        {"prompt": "short", "response": "fine", column: "ab " * 10_000_000},
    ]
    began = time.monotonic()
    with pytest.raises(
        UserError,
        match=rf"row 2.*the {column} has 30,000,000 characters; at most 4,000,000 are read.*too_long=.drop",
    ):
        weft.Prompts.from_rows(rows, base)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("column", ["prompt", "response"])
def test_such_a_text_is_dropped_and_counted_where_long_rows_are(base: Path, column: str):
    rows = [{"prompt": f"short {row}", "response": "fine", "answer": row} for row in range(4)]
    rows[1][column] = rows[3][column] = "ab " * 1_400_000
    prompts = weft.Prompts.from_rows(rows, base, too_long="drop")
    assert (prompts.dropped, prompts.table["prompt"].to_pylist()) == (2, ["short 0", "short 2"])
    assert prompts.table["answer"].to_pylist() == [0, 2]
    assert "2 of 4: longer than 4,000,000 characters" in str(prompts.understood)
    with pytest.raises(UserError, match="all 1 rows have texts of more than 4,000,000 characters"):
        weft.Prompts.from_rows(rows[1:2], base, too_long="drop")
    bounded = weft.Prompts.from_rows(rows, base, too_long="drop", max_prompt_tokens=50, limit=2)
    assert (bounded.dropped, len(bounded)) == (1, 1)


def test_a_turn_that_is_too_long_is_refused_with_the_row_of_the_file_that_it_is_in(qwen: Path):
    short = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>x</think>b"}] * 2
    long = [*short[:3], {"role": "assistant", "content": "ab " * 1_400_000}]
    rows = [{"messages": messages} for messages in (short, short, long)]
    with pytest.raises(UserError, match="rows, row 3: the response has"):
        weft.Prompts.from_rows(rows, qwen, train_on="all")
    kept = weft.Prompts.from_rows(rows, qwen, train_on="all", too_long="drop")
    assert (len(kept), kept.dropped) == (2, 1)
