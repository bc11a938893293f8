"""The directory of a run: damaged files, names, and checkpoints to resume from."""

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from saved_runs import Killed, SavingActor, run  # pyright: ignore[reportMissingImports]
from toy import (  # pyright: ignore[reportMissingImports]
    SlowRollout,
    ToyReward,
    prompts,
    toy_evaluation,
    toy_grpo,
)

from weft.controllers.driver import Driver, Evaluation
from weft.controllers.recovery.checkpoints import CheckpointConfig, complete_checkpoints
from weft.controllers.schedule import Synchronous
from weft.dataflow.errors import UserError
from weft.dataflow.graph import group
from weft.dataflow.runs.directory import check_name
from weft.dataflow.runs.tables import (
    VALUES,
    begin_again,
    present,
    read_metrics,
    read_timeline,
    values_from,
)

SCHEDULE = Synchronous(steps=4, prompts_per_step=3)
EVERY = CheckpointConfig(every=2)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was killed after a checkpoint."""
    root = tmp_path_factory.mktemp("ended")
    with pytest.raises(Killed):
        run(root, SCHEDULE, kill_at=3, evaluate=False, checkpoint=EVERY)
    return root / "run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[dict[str, float]]]:
    """Results of the same run without a kill."""
    return run(tmp_path_factory.mktemp("whole"), SCHEDULE, evaluate=False, checkpoint=EVERY)


@pytest.fixture
def run_dir(ended: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ended, tmp_path / "run"))


def go_on(run_dir: Path) -> tuple[list[Any], list[dict[str, float]]]:
    return run(
        run_dir.parent, SCHEDULE, evaluate=False, checkpoint=EVERY, resume="latest", progress=True
    )


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "emptied": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "a folder": _replace_by_folder,
}
NOT_NEEDED = ("config.json", "graph.mmd", "metrics.parquet", "timeline.parquet")


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_of_files_that_are_not_needed_is_named_and_stops_no_recovery(
    run_dir: Path,
    whole: tuple[list[Any], list[dict[str, float]]],
    how: str,
    capsys: pytest.CaptureFixture[str],
):
    starts = json.loads((run_dir / "config.json").read_text())["starts"]
    for name in NOT_NEEDED:
        DAMAGE[how](run_dir / name)
    weights, metrics = go_on(run_dir)
    said = capsys.readouterr().out
    for name in ("config.json", "metrics.parquet", "timeline.parquet"):
        assert f"run/{name}" in said
        assert how == "gone" or (run_dir / f"{name}.damaged-1").exists()
    assert weights == whole[0] and [row["step"] for row in metrics] == list(range(5))
    assert [row.get("samples") for row in metrics] == [row.get("samples") for row in whole[1]], (
        "the log knows them"
    )
    assert pq.read_table(run_dir / "timeline.parquet").num_rows
    assert json.loads((run_dir / "config.json").read_text())["starts"] > starts, (
        "no writer's name comes twice"
    )


@pytest.mark.parametrize("how", ["truncated", "emptied", "gone"])
def test_a_killed_run_resumes_from_torn_streams(
    run_dir: Path, whole: tuple[list[Any], list[dict[str, float]]], how: str
):
    metrics, timeline = read_metrics(run_dir), read_timeline(run_dir)
    assert metrics is not None and timeline is not None
    values = [value for row in metrics.to_pylist() for value in values_from(present(row))]
    for name, table in (("metrics", pa.Table.from_pylist(values, VALUES)), ("timeline", timeline)):
        begin_again(run_dir, name, table)  # the state after a kill: no Parquet files
        DAMAGE[how](run_dir / f"{name}.arrows")
    weights, rows = go_on(run_dir)
    assert weights == whole[0] and [row["step"] for row in rows] == list(range(5))
    assert [row.get("samples") for row in rows] == [row.get("samples") for row in whole[1]], (
        "the log knows them"
    )
    assert (
        not list(run_dir.glob("[mt]*.arrows")) and pq.read_table(run_dir / "timeline.parquet").num_rows
    )


def test_stray_files_stop_no_recovery(run_dir: Path):
    (run_dir / "samples" / "notes.arrow").write_text("mine")
    (run_dir / "samples" / "train_000009.4.0.arrow").mkdir()
    (run_dir / "checkpoints" / "step_000009").write_text("no folder")
    (run_dir / "config.json.partial").mkdir()
    (run_dir / "buffer" / "ledger.log.partial").mkdir()
    (run_dir / "buffer" / "ledger-000000000009.checkpoint").mkdir()
    unfinished = run_dir / "samples" / "train_000002.7.0.arrow.partial"
    unfinished.write_text("of a recorder that was killed")
    go_on(run_dir)
    assert not unfinished.exists() and not list(run_dir.rglob("*.partial"))
    assert (run_dir / "samples" / "notes.arrow").read_text() == "mine"
    assert complete_checkpoints(run_dir / "checkpoints")[0].is_dir()


@pytest.mark.parametrize("folder", [".", "lock", "checkpoints", "samples"])
def test_a_run_with_unreadable_folders_is_refused_and_not_restarted(
    run_dir: Path, folder: str, monkeypatch: pytest.MonkeyPatch
):
    closed, access = run_dir / folder, os.access  # root may write everywhere, so access is faked
    monkeypatch.setattr(
        os, "access", lambda path, *args, **named: path != closed and access(path, *args, **named)
    )
    with pytest.raises(UserError, match=f"this user may not read and write {closed}"):
        go_on(run_dir)
    assert not run_dir.with_name("run.begun-1").exists()


def test_a_file_in_the_place_of_a_folder_is_set_aside(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("samples", "logs", "skipped"):
        if (run_dir / name).exists():
            shutil.rmtree(run_dir / name)
        (run_dir / name).write_text("no folder")
    go_on(run_dir)
    said = capsys.readouterr().out
    for name in ("samples", "logs", "skipped"):
        assert f"run/{name} (it is not a folder)" in said
        assert (run_dir / f"{name}.damaged-1").read_text() == "no folder"


@pytest.mark.parametrize("name", ["samples", "logs", "buffer/segments"])
def test_a_loop_of_links_in_the_place_of_a_folder_is_set_aside(
    run_dir: Path, name: str, capsys: pytest.CaptureFixture[str]
):
    shutil.rmtree(run_dir / name, ignore_errors=True)
    (run_dir / name).symlink_to(run_dir / name)
    go_on(run_dir)
    assert f"run/{name} (it is not a folder)" in capsys.readouterr().out
    assert (run_dir / f"{name}.damaged-1").is_symlink() and not (run_dir / name).is_symlink()


def test_a_loop_of_links_cannot_be_resumed_from(tmp_path: Path):
    (tmp_path / "round").symlink_to(tmp_path / "round")
    with pytest.raises(UserError, match=r"^resume='.*/round' cannot be followed: Symlink loop"):
        run(tmp_path, SCHEDULE, evaluate=False, resume=tmp_path / "round")


def test_a_checkpoint_that_is_closed_to_this_user_is_set_aside_and_an_earlier_one_used(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = run_dir / "checkpoints"
    closed = folder / "step_000004"
    closed.mkdir()
    remove = shutil.rmtree

    # root may write everywhere, so the error is faked
    def removed(path: Path, *args: Any, **named: Any) -> None:
        if path == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        remove(path, *args, **named)

    monkeypatch.setattr(shutil, "rmtree", removed)
    weights, _ = go_on(run_dir)
    assert weights and not (run_dir / "checkpoints.later").exists(), "the step was written again"
    assert [path.name for path in complete_checkpoints(folder)] == ["step_000004", "step_000002"]


def test_other_users_cannot_read_a_run(run_dir: Path):
    go_on(run_dir)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (run_dir, *run_dir.rglob("*"))}
    wrong = {
        path: oct(mode) for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)
    }
    assert not wrong and len(modes) > 20


# Names


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../../x",
        "a/b",
        "/tmp/x",
        "a\\b",
        ".hidden",
        "a\nb",
        " a",
        "x" * 250,
        "--help",
        "-n",
    ],
)
@pytest.mark.parametrize("resume", ["latest", "none"])
def test_a_name_that_leads_out_of_the_root_is_refused_and_nothing_is_touched(
    tmp_path: Path, name: str, resume: str
):
    (tmp_path / "root" / "other").mkdir(parents=True)
    with pytest.raises(UserError, match=r"^name='.*' cannot name a folder"):
        run(tmp_path / "root", SCHEDULE, evaluate=False, resume=resume, name=name)
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")) == [
        "root",
        "root/other",
    ]


@pytest.mark.parametrize("name", ["latest", "none", "weights", "None", "LATEST"])
@pytest.mark.parametrize("resume", ["latest", "none"])
def test_a_value_of_resume_names_no_run(tmp_path: Path, name: str, resume: str):
    with pytest.raises(UserError, match=rf"^name='{name}' cannot name a run: .*such as '{name}-run'"):
        run(tmp_path / "root", SCHEDULE, evaluate=False, resume=resume, name=name)
    assert not list(tmp_path.iterdir())


def test_a_wrong_name_gets_the_nearest_correct_one():
    with pytest.raises(UserError, match=r"did you mean 'runs-mine'\?"):
        check_name("../runs/mine", "name")
    for name in ("my-run", "2026-11-22T04:20", "run.begun-1", "lr=1e-3, seed 1", "Übung"):
        check_name(name, "name")


def test_names_of_groups_and_evaluations_lead_nowhere_else(tmp_path: Path):
    rollout, actor = group(SlowRollout, name="rollout"), group(SavingActor, name="../actor")
    rollout.follows(actor)
    reward = group(ToyReward, name="reward")
    graph = toy_grpo(prompts(10), rollout=rollout, reward=reward, actor=actor)
    with pytest.raises(UserError, match=r"^weft.group\(..., name='../actor' cannot name"):
        Driver(graph, schedule=SCHEDULE, root=tmp_path / "runs")
    other = toy_evaluation(prompts(2, "held_out"), rollout=rollout, reward=reward)
    with pytest.raises(UserError, match=r"^Evaluation\(..., name='../x' cannot name"):
        Driver(
            graph,
            schedule=SCHEDULE,
            root=tmp_path / "runs",
            evaluations=[Evaluation(other, name="../x")],
        )
    assert not list(tmp_path.iterdir())


def test_a_link_in_place_of_a_run_is_moved_aside_without_its_target(tmp_path: Path):
    (tmp_path / "root").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    (tmp_path / "root" / "run").symlink_to(tmp_path / "mine")
    run(tmp_path / "root", SCHEDULE, evaluate=False, resume="latest")
    assert (tmp_path / "root" / "run.begun-1").is_symlink() and not (
        tmp_path / "root" / "run"
    ).is_symlink()
    assert (tmp_path / "mine" / "notes").read_text() == "mine"


# Resuming


def origin(run_dir: Path) -> str:
    return json.loads((run_dir / "config.json").read_text())["origin"]


def test_a_misspelt_name_is_reported_in_the_first_line_with_a_suggestion(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
):
    root = run_dir.parent
    run(root, SCHEDULE, evaluate=False, resume="latest", name="rnu", progress=True)
    first = capsys.readouterr().out.splitlines()[0]
    assert (
        first
        == origin(root / "rnu")
        == (
            f"resume='latest': there is no run 'rnu' in {root}; did you mean 'run'?; checkpoints are in 'run' (step 2); "
            "the run begins with step 1"
        )
    )


def test_a_requeued_job_without_a_run_starts_one_with_a_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(Killed):
        run(tmp_path, SCHEDULE, evaluate=False, resume="latest", kill_at=1, progress=True)
    said = capsys.readouterr().out.splitlines()[0]
    assert (
        said
        == f"resume='latest': there is no run 'run' in {tmp_path}; no run there has one; the run begins with step 1"
    )
    (tmp_path / "run" / "checkpoints").write_text("no folder")
    run(tmp_path, SCHEDULE, evaluate=False, resume="latest", progress=True)
    said = capsys.readouterr().out.splitlines()[0]
    assert "run/checkpoints is not a folder" in said and (tmp_path / "run.begun-1").is_dir()


def test_the_resume_point_is_kept_in_the_configuration(run_dir: Path):
    go_on(run_dir)
    assert origin(run_dir) == f"goes on after step 2, from {run_dir / 'checkpoints' / 'step_000002'}"


def test_a_misspelt_run_path_gets_the_nearest_existing_one(run_dir: Path):
    with pytest.raises(UserError, match=r"neither a run that has a checkpoint, .*did you mean 'run'\?"):
        run(run_dir.parent, SCHEDULE, evaluate=False, resume=run_dir.parent / "rum", name=None)
