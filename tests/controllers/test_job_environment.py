"""In a cluster job, a run lives where it survives the job, and resumes if the job asks for it."""

from pathlib import Path

import pytest
from saved_runs import SCHEDULES, Killed, run

from weft.controllers.backends.jobs import resume_of, root_of
from weft.controllers.recovery.checkpoints import CheckpointConfig
from weft.dataflow.errors import UserError


def test_a_relative_root_is_never_below_the_package_of_a_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("HOME", str(tmp_path))
    package = Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1")
    assert (
        root_of("runs", {}, package)
        == root_of("runs", {}, package / "below")
        == tmp_path / "weft" / "runs"
    )
    assert root_of("runs", {"WEFT_ROOT": "~/all/a"}, package) == tmp_path / "all" / "a" / "runs"
    assert root_of("/data/runs", {}, package) == Path("/data/runs")
    assert root_of("runs", {}, tmp_path) == Path("runs"), "no job"


def test_a_resubmitted_job_resumes_unless_the_script_sets_resume(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WEFT_ROOT", str(tmp_path))
    monkeypatch.setenv("WEFT_RESUME", "latest")
    every = CheckpointConfig(every=2)
    with pytest.raises(Killed):
        run(Path("runs"), SCHEDULES[0], kill_at=5, checkpoint=every, name=None, progress=True)
    _, metrics = run(Path("runs"), SCHEDULES[0], checkpoint=every, name=None, progress=True)
    said = capsys.readouterr().out
    assert f"the run's directory is {tmp_path}/runs/2" in said and "goes on after step 4" in said
    assert [row["step"] for row in metrics] == list(range(10)) and len(
        [*(tmp_path / "runs").iterdir()]
    ) == 1
    run(Path("runs"), SCHEDULES[0], checkpoint=CheckpointConfig(), name=None)
    assert len([*(tmp_path / "runs").iterdir()]) == 2, "a run without checkpoints is none that goes on"


def test_mistakes_in_a_job_are_refused():
    with pytest.raises(
        UserError, match=r"WEFT_RESUME='lates' in the environment .*did you mean 'latest'"
    ):
        resume_of("none", {"WEFT_RESUME": "lates"})
