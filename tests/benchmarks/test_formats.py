"""Rows of common data sets and trainers load unmodified, in each form of each format."""

from pathlib import Path
from typing import Any

import pytest

DATA_SETS = (
    "UltraFeedback",
    "UltraChat",
    "ShareGPT",
    "Alpaca",
    "Orca pairs",
    "HH-RLHF",
    "OpenAssistant pairs",
    "GSM8K",
    "MATH",
    "verl's parquet",
)
TRAINERS = (
    "TRL prompt-only",
    "TRL prompt-completion",
    "TRL preference",
    "TRL preference, implicit prompt",
    "verl",
    "OpenRLHF",
    "slime",
    "prime-rl",
)


@pytest.mark.parametrize("name", DATA_SETS + TRAINERS)
def test_rows_load_unmodified(name: str, load: Any, tmp_path: Path):
    formats = load("tasks/formats")
    assert [
        mistake for case in formats.CASES[name] for mistake in formats.mistakes(tmp_path, case)
    ] == []


def test_a_format_that_is_read_wrongly_does_not_count(
    load: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    formats = load("tasks/formats")
    assert formats.formats() == (18, 18)
    wrong = formats.Case("train.jsonl", {"prompt": "2 + 2?", "answer": "4"}, answer="5")
    monkeypatch.setitem(formats.CASES, "slime", [wrong])
    assert formats.formats() == (17, 18)
    assert capsys.readouterr().err == "slime: answer: '4', not '5'\n"
