"""`weft samples`: the recorded samples of a run."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from weft.__main__ import main
from weft.dataflow.runs.directory import RunDirectory


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


def test_the_rows_of_an_episode_are_shown_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    RunDirectory.create(Path("runs"), "agents").close()
    folder = Path("runs") / "agents" / "samples"
    folder.mkdir(exist_ok=True)
    big = (1 << 62) + 1
    for step, ids in ((1, [big, 7, big]), (2, [8, 8, None])):
        rows = {"sample_id": [1, 2, 3], "group_id": [0] * 3, "response": ["a", "b", "c"]}
        table = pa.table(rows | {"episode_id": pa.array(ids, pa.int64())})
        with pa.ipc.new_file(str(folder / f"train_00000{step}.1.0.arrow"), table.schema) as file:
            file.write_table(table)
    assert main(["samples", "agents", "--episode", str(big)]) == 0
    said = capsys.readouterr().out
    assert said.count(f"sample of step 1, episode {big}") == 2 and "response: b" not in said
    assert main(["samples", "agents", "--json"]) == 0
    assert [row["episode_id"] for row in json.loads(capsys.readouterr().out)["rows"]] == [8, 8, None]
    assert main(["samples", "agents", "--episode", "8", "--limit", "1"]) == 0
    assert capsys.readouterr().out.count("sample of step 2, episode 8") == 1
    for words in (["--episode", "9"], ["--episode", "8", "--step", "1"]):
        assert main(["samples", "agents", *words]) == 2
        assert f"no rows of episode {words[1]}" in capsys.readouterr().err
