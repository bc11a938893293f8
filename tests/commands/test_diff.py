"""`weft diff`: settings, versions, data, metrics, and the first token that differs."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from recorded_runs import run

from weft.__main__ import main
from weft.dashboard.reading.comparison import compare_configs, compare_metrics
from weft.dataflow.runs.samples import sample_files


def test_a_run_does_not_differ_from_itself(done: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["diff", "one", "one"]) == 0
    parts = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if ": the same" in line]
    assert parts == ["settings", "versions", "data", "metrics", "samples"]


def test_another_seed_is_seen_in_the_settings_and_in_the_first_sample(
    done: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["diff", "one", "two", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == {"seed": [0, 1], "checkpoint.every": [0, 2]} and found["data"] == {}
    assert (found["sample"]["step"], found["sample"]["what"], found["sample"]["place"]) == (
        1,
        "prompt_ids",
        0,
    )


def test_other_data_is_seen(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    other = run(tmp_path, "other", rows=12)
    assert main(["diff", "one", str(other)]) == 0
    said = capsys.readouterr().out
    assert "sources.train.rows: 8 | 12" in said and "sources.train.checksum: " in said


def change(run: Path, step: int, column: str, at: int, change_one: object) -> int:
    """Change the values of one row in a step's samples, and return its sample id."""
    [part] = [p for p in sample_files(run) if (p.graph, p.step) == ("train", step)]
    table = part.rows().drop_columns(["graph", "step"])
    values = table[column].to_pylist()
    values[at] = change_one(values[at])  # pyright: ignore[reportCallIssue]
    index = table.column_names.index(column)
    changed = table.set_column(index, column, pa.array(values, table.schema.field(column).type))
    part.path.unlink()
    with pa.ipc.new_file(part.path, changed.schema) as writer:
        writer.write_table(changed)
    return table["sample_id"][at].as_py()


def test_the_first_token_that_differs_is_found_among_the_others(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = Path(shutil.copytree(done / "one", tmp_path / "other"))
    at = change(other, 2, "response_ids", 1, lambda ids: [*ids[:-1], 99])
    change(other, 3, "response_ids", 0, lambda ids: [98])
    assert main(["diff", "one", str(other)]) == 0
    said = capsys.readouterr().out
    assert (
        f"the first difference is in sample {at} of graph 'train', step 2: response_ids, from token 1 on"
        in said
    )
    [marked] = [line.split() for line in said.splitlines() if line.startswith("  >")]
    assert marked[1] == "1" and marked[-2] == "99"


def test_a_different_logprob_is_reported_where_tokens_are_equal(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = Path(shutil.copytree(done / "one", tmp_path / "other"))
    change(other, 1, "response_logprobs", 1, lambda values: [values[0], -1.5])
    assert main(["diff", "one", str(other), "--json"]) == 0
    sample = json.loads(capsys.readouterr().out)["sample"]
    assert (sample["what"], sample["place"]) == ("response_logprobs", 1)
    assert sample["tokens"][1]["logprob_b"] == -1.5


def test_a_part_that_one_run_lacks_is_one_line():
    held_out = {"path": "a.jsonl", "format": "rows", "rows": 3}
    settings, _, data = compare_configs(
        {"data": {"hard": held_out}, "settings": None}, {"settings": {"x": 1}}
    )
    assert settings == {"settings": [None, {"x": 1}]} and data == {
        "data.hard": [held_out, "(not there)"]
    }


def test_graphs_are_compared_node_by_node():
    lines = [
        "graph grpo",
        "  source train: prompt_ids",
        "  1. reward.score  [map; takes rows]",
        "       writes reward",
    ]
    other = [
        *lines[:2],
        "  1. reward.keep  [filter; takes rows]",
        "  2. reward.score  [map; takes rows]",
        "       writes r",
    ]
    settings, _, _ = compare_configs({"graphs": {"train": lines}}, {"graphs": {"train": other}})
    assert settings == {
        "graphs.train.reward.score.writes": ["reward", "r"],
        "graphs.train.reward.keep": ["(not there)", {"kind": "filter; takes rows"}],
    }


def test_versions_are_separate_and_times_are_skipped():
    a = {"versions": {"torch": "2.6"}, "schedule": {"steps": 3}, "origin": "x"}
    b = {"versions": {"torch": "2.7"}, "schedule": {"steps": 3}, "origin": "y", "seed": 1}
    settings, versions, data = compare_configs(a, b)
    assert (
        settings == {"seed": ["(not there)", 1]} and versions == {"torch": ["2.6", "2.7"]} and data == {}
    )
    step, values = compare_metrics(
        {1: {"loss": 1.0, "step_s": 1}, 2: {"loss": 1.0, "kl": 2.0}},
        {1: {"loss": 1.0, "step_s": 2}, 2: {"loss": 1.1, "kl": 4.0}},
    )
    assert (step, list(values)) == (2, ["kl", "loss"])


def test_all_that_a_clock_measures_is_passed_over():
    a = {
        "step_s": 1.0,
        "rollout/weights_transfer_s": 0.1,
        "rollout/idle_share": 0.5,
        "tokens_per_s": 9.0,
        "steps": 2.0,
    }
    assert compare_metrics({1: a}, {1: dict.fromkeys(a, 2.0)}) == (None, {})


def test_metrics_that_cannot_be_read_are_not_called_the_same(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = Path(shutil.copytree(done / "one", tmp_path / "other"))
    (other / "metrics.parquet").write_text("garbage")
    assert main(["diff", "one", str(other)]) == 0
    assert "metrics: not compared" in capsys.readouterr().out
