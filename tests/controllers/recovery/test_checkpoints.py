"""A run killed at any point resumes from its last checkpoint; no row is lost or trained twice."""

import itertools
import json
import os
import pty
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from saved_runs import PROGRAM, SCHEDULES, Killed, SavingActor, begun, run, trained, wait_for_steps
from toy import SlowRollout, ToyReward, prompts, toy_grpo

from weft.controllers.driver import Driver
from weft.controllers.loop.run import Run
from weft.controllers.recovery.checkpoints import CheckpointConfig, complete_checkpoints
from weft.controllers.recovery.resume import find_checkpoint
from weft.controllers.recovery.saving import Saving
from weft.controllers.schedule import Asynchronous, Training
from weft.controllers.signals import ask_to_end, asked_to_end
from weft.dataflow.buffer.check import check_log
from weft.dataflow.errors import DeadlineError, UserError, WorkerDied
from weft.dataflow.graph import group
from weft.dataflow.metric_names import untimed
from weft.dataflow.runs.alerts import read_alerts
from weft.dataflow.runs.log import LogReader
from weft.dataflow.source import Cursor, positions
from weft.workers.dispatch import Dispatch
from weft.workers.worker import remote


class EndlessActor(SavingActor):
    """Never reports that its part of a checkpoint is on disk."""

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool = False) -> bool:
        return False


def test_a_checkpoint_that_does_not_grow_hits_a_deadline_that_names_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock = itertools.count(0.0, 20.0).__next__  # each reading is 20 s later
    monkeypatch.setattr("weft.controllers.loop.run.Saving", partial(Saving, clock=clock))
    rollout, actor = group(SlowRollout, name="rollout"), group(EndlessActor, name="actor")
    rollout.follows(actor)
    graph = toy_grpo(prompts(10), rollout=rollout, reward=group(ToyReward, name="reward"), actor=actor)
    driver = Driver(
        graph,
        schedule=SCHEDULES[0],
        checkpoint=CheckpointConfig(every=1),
        root=tmp_path,
        progress=False,
    )
    with (
        driver,
        pytest.raises(
            DeadlineError,
            match=r"checkpoint .*step_000001: nothing more was written for 600 s .*actor, which",
        ),
    ):
        driver.run()


def test_an_evaluation_interrupted_by_a_kill_is_repeated_for_its_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    every = CheckpointConfig(every=1)
    schedule = Asynchronous(steps=9, prompts_per_step=3, max_staleness=3)
    with pytest.raises(Killed):
        run(tmp_path, schedule, kill_at=4, checkpoint=every)
    _, metrics = run(tmp_path, schedule, checkpoint=every, resume="latest", progress=True)
    said = capfd.readouterr().out
    report = check_log(tmp_path / "run" / "buffer")
    assert not report.violations
    given_up = report.graphs["eval"].dropped.get("given up", 0)
    assert given_up and "was still running, and is discarded" in said
    assert [row["step"] for row in metrics if "eval/reward/mean" in row][-1] == 9
    assert all(row["eval/rollout/tokens"] >= 2 for row in metrics if "eval/reward/mean" in row), (
        "none is of half its rows"
    )


@pytest.mark.parametrize("schedule", SCHEDULES[:2], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize(
    "kill_at", [1, 3, *(pytest.param(step, marks=pytest.mark.slow) for step in (2, 6, 8))]
)
def test_a_synchronous_run_resumes_as_if_never_stopped(tmp_path: Path, schedule: Training, kill_at: int):
    expected, metrics = run(tmp_path / "whole", schedule)
    with pytest.raises(Killed):
        run(tmp_path / "ended", schedule, kill_at=kill_at)
    weights, again = run(tmp_path / "ended", schedule, resume="latest")
    assert weights == expected
    assert [untimed(row) for row in again] == [untimed(row) for row in metrics]
    assert [row["time_s"] for row in again] == sorted(row["time_s"] for row in again)
    report = check_log(tmp_path / "ended" / "run" / "buffer")
    assert not report.violations


@pytest.mark.parametrize("schedule", SCHEDULES[2:], ids=lambda s: s.partial_rollouts)
@pytest.mark.parametrize(
    "kills", [(1,), (4, 4, 8), *(pytest.param(at, marks=pytest.mark.slow) for at in ((3,), (5, 7)))]
)
def test_an_asynchronous_run_loses_nothing_and_trains_nothing_twice(
    tmp_path: Path, schedule: Asynchronous, kills: tuple[int, ...]
):
    for number, kill_at in enumerate(kills):
        with pytest.raises(Killed):
            run(tmp_path, schedule, kill_at=kill_at, resume="latest" if number else "none")
    weights, metrics = run(tmp_path, schedule, resume="latest")
    assert [row["step"] for row in metrics] == list(range(10))
    groups = [group for group, _ in weights]
    assert len(groups) == 2 * len(set(groups)) == 2 * 27, "nobody is trained on twice, nor by half"
    assert all(row.get("actor/lag", 0) <= schedule.max_staleness for row in metrics)
    report = check_log(tmp_path / "run" / "buffer")
    assert not report.violations


def test_the_latest_checkpoints_are_kept_and_the_best(tmp_path: Path):
    run(tmp_path, SCHEDULES[0], checkpoint=CheckpointConfig(every=1, keep=2, best="-step_s"))
    folder = tmp_path / "run" / "checkpoints"
    names = [p.name for p in complete_checkpoints(folder)]
    assert names[:2] == ["step_000009", "step_000008"] and 2 <= len(names) <= 3
    assert not list(folder.glob(".*")), "nothing unfinished is left"


def test_a_run_without_a_checkpoint_restarts_and_old_files_are_moved_aside(tmp_path: Path):
    with pytest.raises(Killed):
        run(tmp_path, SCHEDULES[0], kill_at=1)
    _, metrics = run(tmp_path, SCHEDULES[0], resume="latest")
    assert len(metrics) == 10
    assert (tmp_path / "run.begun-1" / "buffer").is_dir()


def test_a_finished_run_can_be_made_longer(tmp_path: Path):
    run(tmp_path, SCHEDULES[0], checkpoint=CheckpointConfig(every=4))
    weights, metrics = run(tmp_path, SCHEDULES[0].model_copy(update={"steps": 12}), resume="latest")
    assert len(metrics) == 13 and len(trained(weights)) == 36


DAMAGE = {
    "truncated": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "flipped": lambda p: p.write_bytes(bytes([p.read_bytes()[0] ^ 1]) + p.read_bytes()[1:]),
    "missing": lambda p: p.unlink(),
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize(
    "file",
    [
        "run.json",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("actor/rank_0.json", "manifest.json")
        ),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    tmp_path: Path, how: str, file: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(Killed):
        run(tmp_path, SCHEDULES[0], kill_at=7)
    DAMAGE[how](tmp_path / "run" / "checkpoints" / "step_000006" / file)
    with pytest.raises(UserError, match=f"step_000006.*{file}"):
        run(tmp_path, SCHEDULES[0], resume=tmp_path / "run" / "checkpoints" / "step_000006")
    run(tmp_path, SCHEDULES[0], resume="latest", progress=True)
    said = capsys.readouterr().out
    assert file in said and "the checkpoint before it is used" in said and "after step 4" in said


def test_a_checkpoint_that_is_a_copy_of_another_is_passed_over_and_no_intact_one_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(Killed):
        run(tmp_path, SCHEDULES[0], kill_at=7)
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(folder / "step_000004", folder / "step_000008")
    with pytest.raises(
        UserError,
        match=r"step_000008 is damaged: it is a copy of another checkpoint: run.json has step 4",
    ):
        run(tmp_path, SCHEDULES[0], resume=folder / "step_000008")
    with pytest.raises(Killed):
        run(tmp_path, SCHEDULES[0], resume="latest", progress=True, kill_at=7)
    said = capsys.readouterr().out
    assert "step_000008: it is a copy of another checkpoint" in said and "goes on after step 6" in said
    assert "later checkpoints (step_000008) are kept in" in said
    assert [path.name for path in (tmp_path / "run" / "checkpoints.later").iterdir()] == ["step_000008"]
    assert (folder / "step_000006").is_dir()


def test_checkpoints_that_a_run_went_back_behind_are_kept_until_it_has_others(tmp_path: Path):
    with pytest.raises(Killed):
        run(tmp_path, SCHEDULES[0], kill_at=7)
    folder, later = tmp_path / "run" / "checkpoints", tmp_path / "run" / "checkpoints.later"
    with pytest.raises(Killed):
        run(tmp_path, SCHEDULES[0], resume=folder / "step_000004", kill_at=5)
    assert [path.name for path in later.iterdir()] == ["step_000006"]
    run(tmp_path, SCHEDULES[0], resume="latest")
    assert not later.exists()


def test_a_run_without_an_intact_checkpoint_reports_that_and_why_it_needed_one(
    tmp_path: Path,
):
    def kill() -> NoReturn:
        for path in (tmp_path / "run" / "checkpoints").glob("step_*/run.json"):
            path.unlink(missing_ok=True)  # an older checkpoint may be disappearing right now
        raise WorkerDied("rank 1 of 'rollout' is gone")

    with pytest.raises(UserError, match=r"(?s)run\.json.*rank 1 of 'rollout' is gone"):
        run(tmp_path, SCHEDULES[0], kill_at=7, kill=kill)


def test_a_log_that_ends_too_early_is_named_and_an_earlier_checkpoint_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(Killed):
        run(tmp_path, SCHEDULES[0], kill_at=7)
    folder = tmp_path / "run" / "checkpoints"
    state = json.loads((folder / "step_000006" / "run.json").read_text())
    log = tmp_path / "run" / "buffer" / "ledger.log"
    log.write_bytes(log.read_bytes()[: state["position"]["offset"] - 10])
    run(tmp_path, SCHEDULES[0], resume="latest", progress=True)
    said = capsys.readouterr().out
    assert "ledger.log" in said and "after step 4" in said


def test_damage_before_a_checkpoint_is_named_and_its_rows_are_still_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(Killed):
        run(tmp_path, SCHEDULES[0], kill_at=7)
    log = tmp_path / "run" / "buffer" / "ledger.log"
    data = bytearray(log.read_bytes())
    data[len(data) // 4] ^= 1
    log.write_bytes(data)
    weights, metrics = run(tmp_path, SCHEDULES[0], resume="latest", progress=True)
    said = capsys.readouterr().out
    assert "damaged:" in said and "ledger.log" in said and "after step 6" in said
    assert len(metrics) == 10 and len(weights) == 2 * len(trained(weights)) == 2 * 27


def test_a_run_that_cannot_be_resumed_is_refused(tmp_path: Path):
    with pytest.raises(Killed):
        run(tmp_path, SCHEDULES[0], kill_at=3)
    with pytest.raises(UserError, match="used already"):
        run(tmp_path, SCHEDULES[0])
    with pytest.raises(UserError, match="seed=0, not 1"):
        run(tmp_path, SCHEDULES[0], resume="latest", seed=1)
    with pytest.raises(UserError, match="neither a run that has a checkpoint"):
        run(tmp_path, SCHEDULES[0], resume=tmp_path / "rnu")
    with pytest.raises(UserError, match="the run has a graph 'eval', which is not given"):
        run(tmp_path, SCHEDULES[0], resume="latest", evaluate=False)
    shutil.rmtree(tmp_path / "run" / "buffer")
    with pytest.raises(UserError, match="no checkpoint of the run is sound"):
        run(tmp_path, SCHEDULES[0], resume="latest")


@pytest.mark.parametrize("schedule", [SCHEDULES[0], SCHEDULES[2]], ids=lambda s: type(s).__name__)
def test_a_stopped_run_saves_itself_at_any_point(
    tmp_path: Path, schedule: Training, monkeypatch: pytest.MonkeyPatch
):
    """The stop comes in the middle of a step, whose generated rows are in the buffer."""
    waits = 0
    settle = Run._settle

    def settle_and_ask(run: Run) -> None:
        nonlocal waits
        settle(run)
        waits += run.graph_runs.train.step >= 3
        if waits == 4:
            assert ask_to_end(signal.SIGTERM) and not ask_to_end(signal.SIGTERM)

    monkeypatch.setattr(Run, "_settle", settle_and_ask)
    with pytest.raises(SystemExit) as left:
        run(tmp_path, schedule, checkpoint=CheckpointConfig(every=100))
    assert left.value.code == 0 and not ask_to_end(signal.SIGTERM)
    weights, metrics = run(tmp_path, schedule, resume="latest")
    assert [row["step"] for row in metrics] == list(range(10))
    assert (
        sorted(group for group, _ in weights) == sorted(2 * trained(weights))
        and len(trained(weights)) == 27
    )
    assert not check_log(tmp_path / "run" / "buffer").violations


def test_a_run_killed_while_it_replaced_a_checkpoint_keeps_the_old_one(
    tmp_path: Path,
):
    run(tmp_path, SCHEDULES[0])
    folder = tmp_path / "run" / "checkpoints"
    latest, earlier = complete_checkpoints(folder)
    latest.rename(folder / f".before_{latest.name}")
    found = find_checkpoint(tmp_path / "run")
    assert (
        found is not None and found.path == latest and complete_checkpoints(folder) == [latest, earlier]
    )


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGINT, 130)]
)
def test_a_run_outside_of_launch_heeds_signals_as_well(
    tmp_path: Path,
    number: signal.Signals,
    code: int,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """This covers notebooks, and scripts that call the driver directly."""
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, usual)
    settle = Run._settle

    def settle_and_signal(run: Run) -> None:
        settle(run)
        if run.graph_runs.train.step == 3 and not asked_to_end():
            signal.raise_signal(number)

    monkeypatch.setattr(Run, "_settle", settle_and_signal)
    try:
        with pytest.raises(SystemExit) as left:
            run(tmp_path, SCHEDULES[0], checkpoint=CheckpointConfig(every=100))
        assert signal.getsignal(number) is usual
    finally:
        signal.signal(number, before)
    found = find_checkpoint(tmp_path / "run")
    assert left.value.code == code and found is not None and found.state.step >= 3
    assert (
        f"{'Ctrl-C' if number == signal.SIGINT else number.name}: the run writes a checkpoint and ends"
        in capfd.readouterr().err
    )
    assert [alert.name for alert in read_alerts(tmp_path / "run")] == ["ended_early"]


@pytest.mark.thorough
def test_sigterm_has_a_run_save_itself_and_leave_with_0(tmp_path: Path):
    process = begun(tmp_path)
    wait_for_steps(process, tmp_path)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "saved in" in said, said
    (path,) = complete_checkpoints(tmp_path / "run" / "checkpoints")
    step = json.loads((path / "run.json").read_text())["step"]
    assert step >= 3
    again, _ = begun(tmp_path, "--steps", str(step + 2), "--resume", "latest").communicate(timeout=60)
    assert f"goes on after step {step}" in again and f"step {step + 2}/{step + 2}" in again, again


@pytest.mark.thorough
@pytest.mark.ray
def test_a_driver_that_is_killed_leaves_no_process_and_no_folder(tmp_path: Path):
    process = begun(tmp_path, "--backend", "ray")
    wait_for_steps(process, tmp_path)
    (reaper,) = (p for p in psutil.Process(process.pid).children() if "reap" in p.cmdline())
    folder = Path(reaper.cmdline()[-2])
    family = psutil.Process(process.pid).children(recursive=True)
    assert folder.exists() and len(family) > 5
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    process.kill()
    process.communicate()
    _, left = psutil.wait_procs(family, timeout=60)
    assert not left and not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_without_checkpoints_at_once_with_a_word(
    tmp_path: Path, number: signal.Signals
):
    process = begun(tmp_path, "--every", "0")
    wait_for_steps(process, tmp_path)
    process.send_signal(number)
    said, _ = process.communicate(timeout=120)
    assert (
        process.returncode == 128 + number
        and f"{number.name}: the run ends without a checkpoint" in said
    )


def test_a_run_with_a_closed_terminal_saves_itself(tmp_path: Path):
    terminal, inside = pty.openpty()
    script = str(PROGRAM)
    command = [
        sys.executable,
        "-c",
        OF_A_TERMINAL,
        str(inside),
        sys.executable,
        script,
        "--root",
        str(tmp_path),
    ]
    process: Any = subprocess.Popen(command, pass_fds=[inside])
    os.close(inside)
    log = tmp_path / "run" / "buffer" / "ledger.log"
    deadline = time.monotonic() + 60
    while not log.exists() or log.read_bytes().count(b'"key":"step"') < 3:
        assert process.poll() is None and time.monotonic() < deadline
        if select.select([terminal], [], [], 0.02)[0]:
            os.read(terminal, 65536)
    os.close(terminal)
    assert process.wait(timeout=120) == 0
    assert find_checkpoint(tmp_path / "run") is not None


OF_A_TERMINAL = """
import os, sys
os.setsid()
import fcntl, termios
inside = int(sys.argv[1])
fcntl.ioctl(inside, termios.TIOCSCTTY, 0)
for stream in (0, 1, 2):
    os.dup2(inside, stream)
os.close(inside)
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.0, 0.5, 2.0])
def test_a_signal_while_ray_starts_ends_the_run_cleanly_with_one_code_and_a_word(
    tmp_path: Path, after_s: float
):
    process = begun(tmp_path, "--backend", "ray")
    deadline = time.monotonic() + 60
    while not any("reap" in p.cmdline() for p in psutil.Process(process.pid).children()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(after_s)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 143, said
    assert "SIGTERM: the run ends" in said and "Traceback" not in said
    _, left = psutil.wait_procs(family, timeout=30)
    assert not left


# Weights only


def issued(log: Path) -> list[int]:
    """Return the source rows issued for training, in order."""
    records = (r for r in LogReader(log) if r["do"] == "issue" and r["graph"] == "train")
    return [position for record in records for position in record["positions"]]


@pytest.mark.parametrize("schedule", [SCHEDULES[0], SCHEDULES[2]], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize(
    "loss", ["gone", *(pytest.param(loss, marks=pytest.mark.thorough) for loss in ("emptied", "folder"))]
)
def test_a_run_without_its_log_resumes_weights_and_data_position(
    tmp_path: Path, schedule: Training, loss: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(Killed):
        run(tmp_path, schedule, kill_at=7)
    log = tmp_path / "run" / "buffer" / "ledger.log"
    before = issued(log)
    state = find_checkpoint(tmp_path / "run")
    assert state is not None
    if loss == "emptied":
        log.write_bytes(b"")
    else:
        log.unlink() if loss == "gone" else shutil.rmtree(log.parent)
    with pytest.raises(
        UserError, match=r"no checkpoint of the run is sound: .*\. resume='weights' continues"
    ):
        run(tmp_path, schedule, resume="latest")
    weights, metrics = run(tmp_path, schedule, resume="weights", progress=True)
    first = capsys.readouterr().out.splitlines()[0]
    assert "with weights alone: the log and the responses" in first
    assert first == json.loads((tmp_path / "run" / "config.json").read_text())["origin"]
    assert [row["step"] for row in metrics] == list(range(10))
    groups = [group for group, _ in weights]
    assert len(groups) == 2 * len(set(groups)) == 2 * 27, "the ids of groups go on"
    trained_on = before[: 3 * state.state.step] + issued(log)[: 27 - 3 * state.state.step]
    if schedule is SCHEDULES[0]:
        order = positions(10, 0, shuffle=schedule.shuffle)
        assert trained_on == [next(order) for _ in range(27)], "no prompt is lost, none comes twice"
    assert not check_log(tmp_path / "run" / "buffer").violations


def test_a_run_under_another_schedule_explains_how_to_resume(tmp_path: Path):
    with pytest.raises(Killed):
        run(tmp_path, SCHEDULES[0], kill_at=3)
    with pytest.raises(
        UserError, match=r"under Synchronous, not Pipelined, .* resume='weights' continues"
    ):
        run(tmp_path, SCHEDULES[1], resume="latest")


def test_a_weights_only_resume_reissues_rows_in_flight_also_after_an_interruption():
    order = [3, 1, 4, 0, 2]

    def rest(cursor: Cursor, issued: int, number: int) -> list[int]:
        return list(itertools.islice(cursor.rest(iter(order * 3), issued), number))

    cursor = Cursor().after(4, untrained=[4, 0])
    assert (
        cursor == Cursor(4, (4, 0))
        and rest(cursor, 0, 5) == [4, 0, 2, 3, 1]
        and rest(cursor, 1, 2) == [0, 2]
    )
    assert cursor.after(1, untrained=[4]) == Cursor(4, (4, 0)), (
        "one of them is issued, and nobody was trained on it"
    )
    assert cursor.after(1, untrained=[]) == Cursor(4, (0,))
    assert cursor.after(5, untrained=[0, 3]) == Cursor(7, (0, 3))


def test_a_weights_only_resume_makes_a_checkpoint_and_allows_another_schedule(
    tmp_path: Path,
):
    with pytest.raises(Killed):
        run(tmp_path, SCHEDULES[2], kill_at=5)
    (tmp_path / "run" / "buffer" / "ledger.log").unlink()
    with pytest.raises(Killed):  # before its first step is over
        run(tmp_path, SCHEDULES[0], resume="weights", kill_at=5)
    found = find_checkpoint(tmp_path / "run")
    assert found is not None and found.state.schedule == "Synchronous"
    weights, metrics = run(tmp_path, SCHEDULES[0], resume="latest")
    assert len(metrics) == 10 and len(weights) == 2 * len(trained(weights)) == 2 * 27
    assert not check_log(tmp_path / "run" / "buffer").violations


def test_weights_alone_of_a_run_that_has_none_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="resume='weights': there is no run 'run' in"):
        run(tmp_path, SCHEDULES[0], resume="weights")
    assert not list(tmp_path.iterdir())
