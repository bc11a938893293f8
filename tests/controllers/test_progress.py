"""What a person sees of a run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from weft.controllers.progress import Progress


def steps(progress: Progress, number: int, then: Callable[[int], object] = lambda step: None) -> None:
    for step in range(number + 1):
        progress.stepped({"step": float(step), "reward/mean": step / 10})
        then(step)
    progress.ended()


def test_where_there_is_no_terminal_each_step_has_a_line_and_none_has_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    steps(Progress(4, tmp_path), 4)
    said = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in said] == [f"step {k}/4" for k in range(1, 5)]


def test_an_evaluation_after_the_last_step_is_still_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    progress = Progress(2, tmp_path)
    steps(progress, 2, lambda step: step == 2 and progress.evaluated("eval", 2, {"eval/reward/mean": 0.75}))
    said = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in said] == ["step 1/2", "step 2/2", "step 2/2"] and "eval 0.750" in said[-1]


def test_on_a_terminal_one_line_is_rewritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    steps(Progress(300, tmp_path), 300)
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and said.endswith("\n") and said.count("\r") < 10, "no more than five times a second"
    assert "step 300/300" in said.split("\r")[-1]
