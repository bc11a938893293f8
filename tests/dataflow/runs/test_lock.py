"""A run has one driver: others are refused while it lives, and it ends after a takeover."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from saved_runs import begun, run, wait_for_steps  # pyright: ignore[reportMissingImports]

from weft.controllers.recovery.checkpoints import CheckpointConfig
from weft.controllers.schedule import Synchronous
from weft.dataflow.buffer.check import check_log
from weft.dataflow.errors import TakenOverError, UserError
from weft.dataflow.runs import lock as run_lock
from weft.dataflow.runs.facts import facts_of
from weft.dataflow.runs.lock import DEAD_AFTER_S, Life, RunLock, epochs, life_of

SCHEDULE = Synchronous(steps=4, prompts_per_step=3)
NEVER, EVERY = CheckpointConfig(), CheckpointConfig(every=1)


def file_of(run: Path) -> Path:
    return max(epochs(run).items())[1]


def rewrite(path: Path, **changes: Any) -> None:
    """Change the content of a holder's file without changing its inode."""
    holder = json.loads(path.read_text().splitlines()[0])
    path.write_text(json.dumps(holder | changes) + "\n")


def cut_off(run: Path) -> None:
    """Make the lock look as if its holder, on another machine, had been silent for too long."""
    rewrite(file_of(run), host="elsewhere")
    long_ago = time.time() - DEAD_AFTER_S - 1
    os.utime(file_of(run), (long_ago, long_ago))


# The lock


def test_each_time_that_a_run_is_held_has_a_larger_epoch(tmp_path: Path):
    for epoch in range(1, 4):
        lock = RunLock.take(tmp_path)
        lock.check(sure=True)
        assert lock.epoch == epoch and list(epochs(tmp_path)) == [epoch]
        lock.release()
    assert RunLock.take(tmp_path, after=7).epoch == 8, "and larger than what is known otherwise"


def test_a_held_run_is_refused_with_holder_time_and_advice(tmp_path: Path):
    lock = RunLock.take(tmp_path / "run")
    since = str(lock.record()["since"])
    began = time.monotonic()
    with pytest.raises(
        UserError, match=rf"run .*run is held by host '.*', process {os.getpid()}, since {since}"
    ) as caught:
        RunLock.take(tmp_path / "run")
    assert time.monotonic() - began < DEAD_AFTER_S and "resume='latest'" in str(caught.value)
    assert list(epochs(tmp_path / "run")) == [1]
    lock.check(sure=True)
    lock.release()


def test_one_of_many_concurrent_drivers_gets_the_run(tmp_path: Path):
    for round in range(10):
        held: list[RunLock] = []
        refused: list[UserError] = []
        ready = threading.Barrier(6)

        def take(
            held: list[RunLock] = held, refused: list[UserError] = refused, ready: Any = ready
        ) -> None:
            ready.wait()
            try:
                held.append(RunLock.take(tmp_path))
            except UserError as error:
                refused.append(error)

        threads = [threading.Thread(target=take) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(held) == 1 and len(refused) == 5 and held[0].epoch > round
        held[0].check(sure=True)
        held[0].release()
    assert len(list((tmp_path / "lock").iterdir())) == 1, "nothing is left behind"


def test_a_holder_of_this_machine_that_was_killed_is_known_at_once(tmp_path: Path):
    program = (
        "import sys, time; from pathlib import Path; from weft.dataflow.runs.lock import RunLock\n"
        "lock = RunLock.take(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=rf"process {process.pid}, .*end it \(kill {process.pid}\)"):
            RunLock.take(tmp_path)
        os.kill(process.pid, signal.SIGSTOP)  # alive, but without heartbeats
        os.utime(file_of(tmp_path), (1e9, 1e9))
        with pytest.raises(UserError, match="is held by"):
            RunLock.take(tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(
            os.P_PID, process.pid, os.WEXITED | os.WNOWAIT
        )  # a zombie: no process has read its exit code
        assert RunLock.take(tmp_path).epoch == 2


def test_unfinished_lock_files_of_dead_processes_are_removed(tmp_path: Path):
    RunLock.take(tmp_path).release()
    ended, elsewhere, fresh = (
        tmp_path / "lock" / f".{name}" for name in ("ended", "elsewhere", "fresh")
    )
    for path in (ended, elsewhere, fresh):
        path.write_text(file_of(tmp_path).read_text())
    rewrite(ended, started="12345")
    long_ago = time.time() - DEAD_AFTER_S - 1
    os.utime(elsewhere, (long_ago, long_ago))
    lock = RunLock.take(tmp_path)
    assert {path.name for path in (tmp_path / "lock").iterdir()} == {"epoch_000002", ".fresh"}
    lock.release()


def test_a_lock_that_is_not_a_folder_of_files_is_named(tmp_path: Path):
    (tmp_path / "lock").write_text("mine")
    with pytest.raises(UserError, match=r"cannot be held: .*lock is not a folder"):
        RunLock.take(tmp_path)
    (tmp_path / "lock").unlink()
    (tmp_path / "lock" / "epoch_000001").mkdir(parents=True)
    with pytest.raises(UserError, match=r"cannot be held: .*epoch_000001"):
        RunLock.take(tmp_path)


def test_a_process_with_the_number_of_a_dead_holder_is_not_taken_for_it(tmp_path: Path):
    lock = RunLock.take(tmp_path)
    rewrite(file_of(tmp_path), started="12345")
    assert RunLock.take(tmp_path).epoch == 2
    with pytest.raises(TakenOverError):
        lock.check()


@pytest.mark.parametrize(
    "elsewhere", [{"host": "elsewhere"}, {"machine": "another boot, another namespace"}]
)
def test_a_holder_on_another_machine_is_dead_when_it_is_silent_for_long(
    tmp_path: Path, elsewhere: Mapping[str, str]
):
    lock = RunLock.take(tmp_path)
    rewrite(file_of(tmp_path), **elsewhere)
    with pytest.raises(
        UserError,
        match=rf"process {os.getpid()}, .*heard of \d+ s ago\. .*start again in {DEAD_AFTER_S:.0f} s",
    ):
        RunLock.take(tmp_path)
    lock.check(sure=True)
    long_ago = time.time() - DEAD_AFTER_S - 1
    os.utime(file_of(tmp_path), (long_ago, long_ago))
    other = RunLock.take(tmp_path)
    with pytest.raises(
        TakenOverError, match=r"is held by host .*\(epoch 2\); this driver held it as .*\(epoch 1\)"
    ):
        lock.check()
    with pytest.raises(TakenOverError):
        lock.renew()
    lock.release()
    other.check(sure=True)
    with pytest.raises(UserError, match="is held by"):
        RunLock.take(tmp_path)


def test_a_holder_shows_signs_of_life_until_it_is_taken_over_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_lock, "BEAT_S", 0.005)  # waited out, again and again
    lock = RunLock.take(tmp_path)
    path = file_of(tmp_path)
    os.utime(path, (1e9, 1e9))
    deadline = time.monotonic() + 60
    while path.stat().st_mtime < 2e9 and time.time() - path.stat().st_mtime > 60:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    path.unlink()
    with pytest.raises(TakenOverError, match="has no lock any more"):
        lock.check()


def test_a_run_that_was_moved_or_removed_is_not_held_any_more(tmp_path: Path):
    lock = RunLock.take(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(TakenOverError, match="the run moved") as caught:
        lock.check()
    assert "If the run's folder was moved, continue there with resume=PATH" in caught.value.text
    other = RunLock.take(tmp_path / "run")
    assert other.epoch == lock.epoch, "which file it is counts, not what it is called"
    with pytest.raises(TakenOverError, match="is held by"):
        lock.check()


def test_a_lock_file_without_a_holder_counts_until_it_is_old(tmp_path: Path):
    (tmp_path / "lock").mkdir()
    (tmp_path / "lock" / "epoch_000004").touch()
    with pytest.raises(UserError, match=r"held by an unknown driver .*epoch_000004 is damaged"):
        RunLock.take(tmp_path)
    os.utime(tmp_path / "lock" / "epoch_000004", (1e9, 1e9))
    assert RunLock.take(tmp_path).epoch == 5


def test_a_file_system_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def link(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    lock = RunLock.take(tmp_path)
    with pytest.raises(UserError, match="is held by"):
        RunLock.take(tmp_path)
    lock.check(sure=True)
    lock.release()
    assert RunLock.take(tmp_path).epoch == 2


def test_an_unreferenced_run_is_released(tmp_path: Path):
    lock = RunLock.take(tmp_path)
    del lock
    assert RunLock.take(tmp_path).epoch == 2


# Drivers


@pytest.mark.parametrize("checkpoint", [NEVER, EVERY], ids=["without checkpoints", "with checkpoints"])
def test_a_second_driver_on_a_live_run_is_refused(tmp_path: Path, checkpoint: CheckpointConfig):
    said: list[str] = []

    def second(metrics: Mapping[str, float]) -> None:
        for resume in ("latest", "none", str(tmp_path / "run")) if metrics["step"] == 3 else ():
            with pytest.raises(UserError) as refused:
                run(tmp_path, SCHEDULE, evaluate=False, checkpoint=checkpoint, resume=resume)
            said.append(str(refused.value))

    _, metrics = run(tmp_path, SCHEDULE, evaluate=False, checkpoint=checkpoint, at_step=second)
    held = sum("is held by host" in why for why in said)
    # without checkpoints there is nothing to resume from
    assert held == 3 - (checkpoint is NEVER), said
    assert [row["step"] for row in metrics] == list(range(5))
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "nothing was moved aside"
    assert not check_log(tmp_path / "run" / "buffer").violations


@pytest.mark.parametrize("checkpoint", [NEVER, EVERY], ids=["without checkpoints", "with checkpoints"])
def test_a_driver_that_was_taken_over_from_ends_and_has_spoilt_nothing(
    tmp_path: Path, checkpoint: CheckpointConfig
):
    expected, _ = run(tmp_path / "whole", SCHEDULE, evaluate=False, checkpoint=checkpoint)
    outcome: list[Any] = []

    def second(metrics: Mapping[str, float]) -> None:
        if metrics["step"] == 3:
            cut_off(tmp_path / "run")
            outcome.extend(
                run(tmp_path, SCHEDULE, evaluate=False, checkpoint=checkpoint, resume="latest")
            )

    with pytest.raises(TakenOverError, match=rf"is held by host .*, process {os.getpid()}"):
        run(tmp_path, SCHEDULE, evaluate=False, checkpoint=checkpoint, at_step=second)
    weights, metrics = outcome
    assert weights == expected and [row["step"] for row in metrics] == list(range(5))
    report = check_log(tmp_path / "run" / "buffer")
    assert not report.violations and report.restarts == (checkpoint is EVERY)
    again, _ = run(tmp_path, SCHEDULE, evaluate=False, checkpoint=EVERY, resume="latest")
    assert again == expected


def test_a_driver_that_is_refused_leaves_the_run_to_others(tmp_path: Path):
    run(tmp_path, SCHEDULE, evaluate=False, checkpoint=EVERY)
    with pytest.raises(UserError, match="seed=0, not 1"):
        run(tmp_path, SCHEDULE, evaluate=False, checkpoint=EVERY, resume="latest", seed=1)
    with pytest.raises(UserError, match="used already"):
        run(tmp_path, SCHEDULE, evaluate=False, checkpoint=EVERY)
    longer = SCHEDULE.model_copy(update={"steps": 5})
    _, metrics = run(tmp_path, longer, evaluate=False, checkpoint=EVERY, resume="latest")
    assert len(metrics) == 6
    assert json.loads((tmp_path / "run" / "config.json").read_text())["starts"] == 1


@pytest.mark.slow
def test_a_second_driver_is_refused_and_a_killed_one_replaced_at_once(tmp_path: Path):
    first = begun(tmp_path, "--every", "2")
    wait_for_steps(first, tmp_path)
    said, _ = (second := begun(tmp_path, "--resume", "latest")).communicate(timeout=60)
    assert second.returncode == 2 and f"process {first.pid}" in said, said
    first.kill()
    first.communicate()
    (tmp_path / "run" / "metrics.arrows").write_bytes(b"")
    third = begun(tmp_path, "--every", "2", "--resume", "latest", "--steps", "100000")
    deadline = time.monotonic() + 60
    while not third.stdout or "goes on after step" not in third.stdout.readline():
        assert third.poll() is None and time.monotonic() < deadline
    third.kill()
    third.communicate()
    assert not check_log(tmp_path / "run" / "buffer").violations


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return each file below a folder with its bytes and modification time."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    "settings", [{}, {"resume": "latest", "seed": 1}], ids=["again", "with another seed"]
)
@pytest.mark.parametrize("killed", [False, True], ids=["finished", "killed"])
def test_a_driver_that_is_refused_changes_no_file_of_the_run(
    tmp_path: Path, killed: bool, settings: dict[str, Any]
):
    run(tmp_path, SCHEDULE, evaluate=False, checkpoint=EVERY)
    if killed:
        name = file_of(tmp_path / "run").name
        rewrite(tmp_path / "run" / "lock" / name, started="12345")
        lines = (tmp_path / "run" / "lock" / name).read_bytes().splitlines()
        (tmp_path / "run" / "lock" / name).write_bytes(lines[0] + b"\n")
    before = contents(tmp_path)
    with pytest.raises(UserError):
        run(tmp_path, SCHEDULE, evaluate=False, checkpoint=EVERY, **settings)
    assert contents(tmp_path) == before
    assert facts_of(tmp_path / "run").status == ("killed" if killed else "done")


def test_a_lock_that_is_given_back_leaves_no_folder_where_there_was_none(tmp_path: Path):
    RunLock.take(tmp_path).give_back()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damage", ['"x"', "true", "0", "[" * 100_000, "1e999"], ids=lambda text: text[:5]
)
def test_a_lock_with_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: str):
    RunLock.take(tmp_path).release()
    path = file_of(tmp_path)
    path.write_text(path.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {damage}'))
    assert life_of(tmp_path)[0] is Life.UNKNOWN
    with pytest.raises(UserError, match=r"held by an unknown driver .*epoch_000001 is damaged"):
        RunLock.take(tmp_path)


def test_a_lock_that_is_a_named_pipe_is_refused_by_name(tmp_path: Path):
    RunLock.take(tmp_path).release()
    path = file_of(tmp_path)
    path.unlink()
    os.mkfifo(path)
    assert life_of(tmp_path)[0] is Life.UNKNOWN
    with pytest.raises(UserError, match="epoch_000001 is a named pipe, not a file"):
        RunLock.take(tmp_path)
