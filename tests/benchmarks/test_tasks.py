"""The task figures: what counts as correct."""

import json
from pathlib import Path
from typing import Any

import pytest


def test_the_labelled_answers_of_pure_graders_are_judged_rightly(load: Any):
    graded = load("tasks/graded")
    cases = graded.read()
    assert {case["kind"] for case in cases} == {"math", "gsm8k", "choice"} and len(cases) > 800
    assert len({case["source"] for case in cases} - {"own"}) >= 10, (
        "most of the forms are other projects'"
    )
    assert graded.wrong([case for case in cases if case["kind"] != "math"]) == []


@pytest.mark.slow
def test_the_labelled_answers_are_judged_rightly(load: Any):
    graded = load("tasks/graded")
    new = graded.FILE.with_name("graded_new.jsonl")
    assert (
        graded.graded_right() >= 0.99
        and graded.graded_right(new) >= 0.98
        and len(graded.read(new)) == 150
    )


def test_a_wrong_verdict_and_none_count_against_the_graders(
    load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    case = {"source": "own", "kind": "gsm8k", "answer": "4", "response": "4", "right": True}
    cases = [case, {**case, "right": False}, {**case, "answer": "none"}, case]
    (tmp_path / "cases.jsonl").write_text("\n".join(map(json.dumps, cases)))
    assert load("tasks/graded").graded_right(tmp_path / "cases.jsonl") == 0.5
    assert "no verdict (the answer 'none' has no number)" in capsys.readouterr().err


def test_a_reward_file_that_is_called_wrongly_does_not_count(
    load: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    signatures = load("tasks/signatures")
    functions = {
        "Weft": ("of_weft", "exact", [1.0, 0.0, 1.0]),
        "verl": ("of_verl", "my_reward_fn", [9.0, 0.0, 1.0]),
        "TRL": ("of_weft", "exact", [1.0, 0.0, 1.0]),
    }
    monkeypatch.setattr(signatures, "FUNCTIONS", functions)
    assert signatures.signatures() == (1, 3)
    said = capsys.readouterr().err
    assert "verl: [1.0, 0.0, 1.0], not [9.0, 0.0, 1.0]" in said and "TRL: it is taken for None" in said
