"""Data of eight trainers loads unmodified: each format, in each of its forms."""

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "TRL prompt-only",
        "TRL prompt-completion",
        "TRL preference",
        "TRL preference, implicit prompt",
        "verl",
        "OpenRLHF",
        "slime",
        "prime-rl and verifiers",
    ],
)
def test_the_data_of_another_trainer_loads_unmodified(name: str, load: Any, tmp_path: Path):
    formats = load("tasks/formats")
    assert [mistake for case in formats.CASES[name] for mistake in formats.mistakes(tmp_path, case)] == []


def test_a_format_that_is_read_wrongly_does_not_count(load: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    formats = load("tasks/formats")
    assert formats.formats() == (8, 8)
    wrong = formats.Case("train.jsonl", {"prompt": "2 + 2?", "answer": "4"}, answer="5")
    monkeypatch.setitem(formats.CASES, "slime", [wrong])
    assert formats.formats() == (7, 8)
    assert capsys.readouterr().err == "slime: answer: '4', not '5'\n"
