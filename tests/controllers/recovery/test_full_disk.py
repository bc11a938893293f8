"""A full disk pauses a run without loss, on a small file system that fills up during the run."""

import errno
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from saved_runs import SCHEDULES, SavingActor, trained
from toy import SlowRollout, ToyReward, prompts, toy_grpo

from weft.controllers.driver import Driver
from weft.controllers.ranks import row_io
from weft.controllers.recovery import full_disk
from weft.controllers.recovery.checkpoints import CheckpointConfig, complete_checkpoints
from weft.controllers.recovery.full_disk import FullDisk
from weft.controllers.recovery.resume import find_checkpoint
from weft.controllers.reports.displays import Display
from weft.controllers.reports.progress import Progress
from weft.controllers.schedule import Training
from weft.controllers.signals import ask_to_end, can_be_ended
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.check import check_log
from weft.dataflow.errors import RunError
from weft.dataflow.graph import group
from weft.dataflow.metrics import Metrics
from weft.dataflow.runs.files import is_full


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 4 MiB, with fast retries of failed writes."""
    for module in (full_disk, row_io):
        monkeypatch.setattr(module, "PAUSE_S", 0.05)  # waited out, as often as it takes
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "weft", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> None:
    ballast = folder / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError as error:
                assert is_full(error)


class FillingReward(ToyReward):
    """Fills the disk while it scores."""

    filled = False

    def score(self, samples: Batch) -> tuple[Batch, Metrics]:
        if not self.filled and self.context.run_dir is not None:
            self.filled = True
            fill(self.context.run_dir.parent)
        return super().score(samples)


class BigActor(SavingActor):
    """Writes its checkpoint when asked whether it is written, as a background thread would.

    The first time, the disk is full.
    """

    tried = 0
    path = Path()

    def save_checkpoint(self, path: Path) -> float:
        self.path = path
        return super().save_checkpoint(path)

    def checkpoint_written(self, wait: bool = False) -> bool:
        self.tried += 1
        if self.tried == 1 and self.context.run_dir is not None:
            fill(self.context.run_dir.parent)
            (self.path / "big").write_bytes(bytes(1 << 21))
        return True


@pytest.mark.parametrize("schedule", SCHEDULES[1:3], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("who", ["step", "reward", "checkpoint"])
def test_a_full_disk_pauses_a_run_and_nothing_is_lost(
    small: Path,
    schedule: Training,
    who: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("weft.controllers.loop.start.FILE_BYTES", 1 << 14)  # the file system is small
    alert = Progress.alert

    def makes_room(self: Progress, name: str, text: str, **how: bool) -> None:
        alert(self, name, text, **how)
        if name == "disk_full":
            (small / "ballast").unlink(missing_ok=True)

    monkeypatch.setattr(Progress, "alert", makes_room)
    rollout = group(SlowRollout, name="rollout")
    actor = group(BigActor if who == "checkpoint" else SavingActor, name="actor")
    reward = group(FillingReward if who == "reward" else ToyReward, name="reward")
    rollout.follows(actor)

    def stop(metrics: Mapping[str, float]) -> bool:
        if who == "step" and metrics["step"] == 3:
            fill(small)
        return False

    with Driver(
        toy_grpo(prompts(10), rollout=rollout, reward=reward, actor=actor),
        schedule=schedule,
        checkpoint=CheckpointConfig(every=2),
        root=small,
        name="run",
        stop=stop,
    ) as driver:
        metrics = driver.run()
        weights = driver.call(actor, "weights")[0]
    assert "paused because the disk is full: " in capsys.readouterr().out
    assert [row["step"] for row in metrics] == list(range(schedule.steps + 1))
    assert len(weights) == 2 * len(trained(weights)) == 2 * 3 * schedule.steps
    assert not check_log(small / "run" / "buffer").violations
    found = find_checkpoint(small / "run")
    assert found is not None and found.state.step == schedule.steps and not found.damage
    assert len(complete_checkpoints(small / "run" / "checkpoints")) == 2


def test_space_that_was_freed_after_a_report_ends_the_wait_of_the_next_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    free = [0]
    monkeypatch.setattr(full_disk.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[0]))
    monkeypatch.setattr(
        full_disk.time, "sleep", lambda seconds: free.__setitem__(0, free[0] + (1 << 20))
    )
    disk = FullDisk(tmp_path, Progress(1, tmp_path, Display()))
    disk.report_pause("a rank waits")
    free[0] = 3 << 20
    disk.wait_for_more("another rank failed")
    assert free == [3 << 20]  # it did not sleep
    disk.wait_for_more("it failed again")
    assert free == [4 << 20]  # space that was not enough does not count twice


def test_a_pause_ends_when_the_run_is_asked_to_end(tmp_path: Path):
    def write() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.parquet")

    disk = FullDisk(tmp_path, Progress(1, tmp_path, Display()))
    with (
        can_be_ended(True),
        pytest.raises(
            RunError,
            match=r"No space left on device: 'metrics.parquet'; the run waited \d+ s for space in ",
        ),
    ):
        assert ask_to_end(signal.SIGTERM)
        disk.write(write)
