"""`weft runs`: a line per run of a folder, in any state."""

import json
from pathlib import Path

import pytest
from recorded_runs import driver

from weft.__main__ import main
from weft.controllers.reports.step_line import clock
from weft.dataflow.runs.facts import facts_of


def test_runs_lists_each_run_with_its_state(done: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["runs"]) == 0
    header, one, two = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["run", "status", "step", "time", "reward", "loss", "trouble"]
    took = clock(facts_of(done / "one").last["time_s"])
    assert one[:5] == ["one", "done", "3/3", took, "1.5"] and two[0] == "two"
    assert main(["runs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["run"], run["status"], run["step"], run["steps"]) for run in found] == [
        ("one", "done", 3, 3),
        ("two", "done", 3, 3),
    ]
    assert main(["runs", "runs/two"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["run", "two"]


def test_runs_shows_why_a_run_ended_and_whether_it_was_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def fails(metrics: object) -> bool:
        raise RuntimeError("no more room\nand more")

    with pytest.raises(RuntimeError), driver(tmp_path, "failed", stop=fails) as made:
        made.run()
    (tmp_path / "killed").mkdir()
    holder = json.loads((tmp_path / "failed" / "lock" / "epoch_000001").read_text().splitlines()[0])
    (tmp_path / "killed" / "lock").mkdir()
    (tmp_path / "killed" / "lock" / "epoch_000001").write_text(
        json.dumps(holder | {"pid": 2**22 + 1}) + "\n"
    )
    (tmp_path / "no run").mkdir()
    (tmp_path / "a model").mkdir()
    (tmp_path / "a model" / "config.json").write_text('{"model_type": "llama"}')
    assert main(["runs", str(tmp_path), "--json"]) == 0
    failed, killed = json.loads(capsys.readouterr().out)["runs"]
    assert (failed["status"], failed["trouble"]) == ("failed", "RuntimeError: no more room")
    assert main(["watch", str(tmp_path / "failed")]) == 0
    assert "warning: ended at step 0: RuntimeError: no more room" in capsys.readouterr().out
    assert (killed["run"], killed["status"], killed["steps"]) == ("killed", "killed", None)


def test_a_loss_is_not_shown_as_a_reward(tmp_path: Path):
    facts = facts_of(tmp_path, {"step": 3.0, "actor/loss": 0.25, "eval/reward/mean": 1.0})
    assert facts.reward is None and facts.loss == 0.25
    rewarded = facts_of(tmp_path, {"step": 3.0, "actor/loss": 0.25, "judge/mean": 0.5})
    assert (rewarded.reward, rewarded.loss) == (0.5, 0.25)
    assert {"reward": None, "loss": 0.25}.items() <= facts.for_programs.items()


def test_a_folder_without_runs_and_a_missing_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}\n"
    assert main(["runs", str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err
