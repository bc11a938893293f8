"""`weft samples`: the recorded samples of a run."""

import json
from pathlib import Path

import pytest

from weft.__main__ import main


def test_samples_of_the_last_step_are_shown_with_their_rewards(
    done: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["samples", "one", "--limit", "2"]) == 0
    said = capsys.readouterr().out
    assert said.count("sample of step 3: reward ") == 2 and "  answer:   " in said
    assert main(["samples", "one", "--step", "1", "--graph", "train", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], len(found["rows"])) == (1, 5) and found["rows"][0]["step"] == 1


def test_sql_asks_about_all_samples(done: Path, capsys: pytest.CaptureFixture[str]):
    assert (
        main(
            [
                "samples",
                "one",
                "--sql",
                "select graph, count(*) as n from samples group by graph order by n",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.splitlines() == ["graph   n", "eval    6", "train  24"]


def test_sql_has_the_lengths_of_responses(done: Path, capsys: pytest.CaptureFixture[str]):
    asked = "select count(*) as n from samples where length = len(response_ids)"
    assert main(["samples", "one", "--sql", asked]) == 0
    assert capsys.readouterr().out.splitlines() == [" n", "30"]


def test_an_answer_in_sql_is_longer_than_the_samples_that_are_shown(
    done: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["samples", "one", "--sql", "select sample_id from samples"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 30
    assert main(["samples", "one", "--sql", "select sample_id from samples", "--limit", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "... 27 more"


def test_missing_samples_are_reported_with_the_existing_ones(
    done: Path, capsys: pytest.CaptureFixture[str]
):
    for words, says in (
        (["--step", "9"], "no samples of step 9; it has samples of steps 1 to 3"),
        (["--graph", "evl"], "no samples of a graph 'evl'; did you mean 'eval'?"),
        (["--sql", "select rewrd from samples"], "rewrd"),
    ):
        assert main(["samples", "one", *words]) == 2
        assert says in capsys.readouterr().err
