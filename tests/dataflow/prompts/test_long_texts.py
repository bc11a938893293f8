"""Texts that no tokenizer finishes in time are refused before they are tokenised."""

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
    with pytest.raises(UserError, match=rf"row 2.*the {column} has 30,000,000 characters; at most 4,000,000 are read"):
        weft.Prompts.from_rows(rows, base)
    assert time.monotonic() - began < 60
