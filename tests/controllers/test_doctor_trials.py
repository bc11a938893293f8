"""Trials of the doctor: each has its process, deadline and record."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from weft.__main__ import main
from weft.controllers import doctor_trials
from weft.controllers.doctor_trials import _Trial, run_trial, run_trials, table_of

sys.path.append(str(Path(__file__).parent))
import doctored


def check(run: Callable[..., object], deadline_s: float = 60) -> _Trial:
    return _Trial(run.__name__, "a claim (docs/gpu.md)", run, deadline_s)  # pyright: ignore[reportArgumentType]


def test_a_check_that_fails_or_crashes_stops_no_other(capsys: pytest.CaptureFixture[str]):
    skipped = replace(check(doctored.hangs), name="skips", skipped_on_cpu="needs a GPU")
    tried = [check(doctored.fails), check(doctored.crashes), skipped, check(doctored.passes)]
    records = run_trials(False, tried)
    assert [record.outcome for record in records] == ["failed", "failed", "skipped", "passed"]
    assert records[0].why == "AssertionError: two is not three"
    assert records[1].why == "its process ended with exit code 7"
    assert records[3].figures["gpu"] == "False"
    said = capsys.readouterr()
    assert (said.out, said.err.split(" ...\n")[:-1]) == ("", ["fails", "crashes", "skips", "passes"])
    table = table_of(records)
    assert "skipped skips" in table and "supports: a claim (docs/gpu.md)" in table


@pytest.mark.thorough
def test_a_hanging_check_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DOCTORED", str(tmp_path / "child"))
    for deadline_s in (3, 12, 60):  # retry until the check has had time to begin
        record = run_trial(check(doctored.hangs, deadline_s), False)
        assert (record.outcome, record.why) == ("failed", f"it did not end in {deadline_s} s")
        if (tmp_path / "child").exists():
            break
    child = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    deadline = time.monotonic() + 20
    while child.exists() and not child.read_text().split(") ")[1].startswith(
        "Z"
    ):  # signals take time on a busy machine
        assert time.monotonic() < deadline, f"the child of the check lives on: {child.read_text()}"
        time.sleep(0.05)


def test_the_error_of_a_rank_is_reported_while_the_others_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(doctor_trials, "_collect", doctored.first_rank_fails)
    with pytest.raises(AssertionError, match="rank 0: a wrong sum"):
        doctor_trials.collectives(tmp_path, False)


def test_without_a_gpu_the_command_reports_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["doctor", "--gpu"]) == 2
    assert "finds no GPU here" in capsys.readouterr().err


def test_all_deadlines_are_ten_minutes_and_each_claim_names_a_page_that_exists():
    assert sum(one.deadline_s for one in doctor_trials.TRIALS) <= 600
    for one in doctor_trials.TRIALS:
        page = one.claim.rpartition("(")[2].partition(".md")[0]
        assert (Path(__file__).parents[2] / f"{page}.md").is_file()


@pytest.mark.slow
def test_the_checks_pass_on_a_cpu():
    outcomes = {one.name: run_trial(one, False).outcome for one in doctor_trials.TRIALS}
    assert outcomes.pop("colocated") == "skipped"
    assert set(outcomes.values()) == {"passed"}
    assert "CUDA_VISIBLE_DEVICES" not in os.environ or os.environ["CUDA_VISIBLE_DEVICES"] != ""
