"""Checkpoints are copied to remote storage during the run, and a run without local files resumes
there."""

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pf
import pytest
from saved_runs import SCHEDULES, Killed, run, trained

from weft.controllers.recovery.checkpoints import CheckpointConfig, RunState, complete_checkpoints
from weft.controllers.recovery.copies import Copies, _RemoteRun
from weft.dataflow.buffer.check import check_log
from weft.dataflow.errors import UserError
from weft.dataflow.runs.directory import RunDirectory, hold
from weft.dataflow.runs.files import CHECKPOINTS
from weft.dataflow.runs.log import Log, LogReader, Position


class Bucket(pf.FileSystemHandler):
    """A local folder as a file system that fails on demand.

    Like an object store, it has no names such as `.` or an empty one in a path.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.local = folder, pf.LocalFileSystem()
        self.fails: Callable[[str], bool] = lambda path: False
        self.loses: Callable[[str], bool] = lambda path: False
        folder.mkdir()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def at(self, path: str) -> str:
        if self.fails(path):
            raise OSError(f"the service is not available ({path})")
        if {"", ".", ".."}.intersection(path.removesuffix("/").split("/")):
            raise ValueError(f"not the name of an object: {path}")
        return str(self.folder / path.strip("/"))

    def _named(self, info: pf.FileInfo) -> pf.FileInfo:
        name = os.path.relpath(info.path, self.folder)
        return pf.FileInfo(name, info.type, size=info.size if info.is_file else None, mtime=info.mtime)

    def get_type_name(self) -> str:
        return "bucket"

    def get_file_info(self, paths: list[str]) -> list[pf.FileInfo]:
        return [
            self._named(info) for info in self.local.get_file_info([self.at(path) for path in paths])
        ]

    def get_file_info_selector(self, selector: Any) -> list[pf.FileInfo]:
        here = pf.FileSelector(self.at(selector.base_dir), selector.allow_not_found, selector.recursive)
        return [self._named(info) for info in self.local.get_file_info(here)]

    def create_dir(self, path: str, recursive: bool) -> None:
        self.local.create_dir(self.at(path), recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self.local.delete_dir(self.at(path))

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self.local.delete_dir_contents(self.at(path), missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def delete_file(self, path: str) -> None:
        self.local.delete_file(self.at(path))

    def move(self, src: str, dest: str) -> None:
        self.local.move(self.at(src), self.at(dest))

    def copy_file(self, src: str, dest: str) -> None:
        self.local.copy_file(self.at(src), self.at(dest))

    def open_input_stream(self, path: str) -> Any:
        return self.local.open_input_stream(self.at(path), compression=None)

    def open_input_file(self, path: str) -> Any:
        return self.local.open_input_file(self.at(path))

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        lost = self.loses(path)
        stream = self.local.open_output_stream(self.at(path), compression=None)
        if lost:  # writes are lost
            return pa.PythonFile(open(os.devnull, "wb"), mode="w")
        return stream

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        raise NotImplementedError

    def normalize_path(self, path: str) -> str:
        return path


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path / "bucket")


def remote_of(bucket: Bucket) -> _RemoteRun:
    return _RemoteRun(pf.PyFileSystem(bucket), "runs/run", "fake://runs/run")


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.02)


@pytest.mark.parametrize("schedule", SCHEDULES[:3], ids=lambda schedule: type(schedule).__name__)
def test_a_run_without_local_files_resumes_from_a_copy(
    tmp_path: Path, schedule: Any, capsys: pytest.CaptureFixture[str]
):
    every = CheckpointConfig(every=2, copy_to=str(tmp_path / "copies"))

    def see(metrics: Mapping[str, float]) -> None:
        if metrics["step"] == 7:
            until(lambda: 6 in _RemoteRun.at(str(tmp_path / "copies"), "run").steps())

    with pytest.raises(Killed):
        run(tmp_path, schedule, kill_at=7, at_step=see, checkpoint=every, record_every=1)
    shutil.rmtree(tmp_path / "run")
    weights, metrics = run(
        tmp_path, schedule, checkpoint=every, record_every=1, resume="latest", progress=True
    )
    said = capsys.readouterr().out
    assert f"the run was fetched from {tmp_path / 'copies'}/run, with its checkpoint of step 6" in said
    assert [row["step"] for row in metrics] == list(range(10)) and 2 * len(trained(weights)) == len(
        weights
    )
    assert not check_log(tmp_path / "run" / "buffer").violations
    assert "checkpoint of step 9 was copied to" in said
    assert _RemoteRun.at(str(tmp_path / "copies"), "run").steps()[0] == 9
    private = [p for p in (tmp_path / "run" / CHECKPOINTS).rglob("*") if p.stat().st_mode & 0o077]
    assert not private


def test_a_local_run_without_a_checkpoint_is_replaced_by_the_copy(tmp_path: Path):
    every = CheckpointConfig(every=2, copy_to=str(tmp_path / "copies"))
    run(tmp_path, SCHEDULES[0], checkpoint=every)
    (tmp_path / "run").rename(tmp_path / "first")
    with pytest.raises(Killed):
        run(tmp_path, SCHEDULES[0], kill_at=1, checkpoint=CheckpointConfig(every=5))
    run(tmp_path, SCHEDULES[0], checkpoint=every, resume="latest")
    assert (tmp_path / "run.begun-1").is_dir() and complete_checkpoints(tmp_path / "run" / CHECKPOINTS)
    assert not list(tmp_path.glob(".run*"))


def saved(tmp_path: Path) -> Path:
    run(tmp_path, SCHEDULES[0], checkpoint=CheckpointConfig(every=3, keep=3))
    return tmp_path / "run"


def test_a_failed_copy_is_reported_and_retried_until_it_succeeds(tmp_path: Path, bucket: Bucket):
    here = saved(tmp_path)
    left = [3]

    def fails(path: str) -> bool:
        left[0] -= path.endswith("rank_0.json") and left[0] > 0
        return path.endswith("rank_0.json") and left[0] > 0

    bucket.fails = fails
    copies = Copies(here, remote_of(bucket), first_pause_s=0.01)  # waited out
    copies.queue(9)
    copies.close(30.0)
    *failures, done = copies.take_notes()
    assert len(failures) == 2 and all(
        "the service is not available" in one and "retrying" in one for one in failures
    )
    assert "checkpoint of step 9 was copied to fake://runs/run" in done and copies.copied == [9]
    assert remote_of(bucket).steps() == [9] and copies.take_notes() == []


def test_a_dead_service_delays_no_run(tmp_path: Path, bucket: Bucket):
    here = saved(tmp_path)
    answers = threading.Event()
    bucket.fails = lambda path: answers.wait(60)
    copies = Copies(here, remote_of(bucket), first_pause_s=600.0)
    copies.queue(6)
    copies.queue(9)
    assert not copies.take_notes(), "the service has not answered yet"
    answers.set()
    until(lambda: any("step 9 could not be copied" in note for note in copies.take_notes()))
    copies.close(0.05)  # waited out: the next try is later
    [said] = copies.take_notes()
    assert "was not copied to fake://runs/run within 0 s" in said and str(here) in said


def test_a_later_checkpoint_does_not_wait_out_the_pause_of_one_that_failed(
    tmp_path: Path, bucket: Bucket
):
    bucket.fails = lambda path: True
    copies = Copies(saved(tmp_path), remote_of(bucket), first_pause_s=600.0)
    copies.queue(6)
    until(lambda: any("retrying in 600 s" in note for note in copies.take_notes()))
    bucket.fails = lambda path: False
    copies.queue(9)
    copies.close(60.0)
    assert copies.copied == [9]


def test_a_copy_is_not_made_again_because_an_old_one_cannot_be_removed(tmp_path: Path, bucket: Bucket):
    here, remote = saved(tmp_path), remote_of(bucket)
    remote.copy(here, 6)
    shutil.rmtree(here / CHECKPOINTS / "step_000006")
    bucket.delete_dir = bucket.delete_root_dir_contents  # pyright: ignore[reportAttributeAccessIssue]
    copies = Copies(here, remote, first_pause_s=0.01)  # waited out
    copies.queue(9)
    copies.close(30.0)
    done, said = copies.take_notes()
    assert "checkpoint of step 9 was copied" in done and "old checkpoints could not be removed" in said
    assert copies.copied == [9]


def test_the_end_reports_pending_work(tmp_path: Path, bucket: Bucket):
    bucket.fails = lambda path: True
    copies = Copies(saved(tmp_path), remote_of(bucket), first_pause_s=0.01)  # waited out
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if len({line.split()[0] for line in said}) == 2:
            bucket.fails = lambda path: False

    copies.queue(9)
    copies.close(60.0, say=say, say_s=0.05)  # polled: it ends after both messages
    assert any(
        re.match(r"waiting for the copy of the last checkpoint to fake://runs/run, \d+ s at most", s)
        for s in said
    )
    assert any("step 9 could not be copied" in line for line in said) and copies.copied == [9]


def test_a_checkpoint_that_cannot_be_read_does_not_end_the_copies(tmp_path: Path, bucket: Bucket):
    here = saved(tmp_path)
    state = here / CHECKPOINTS / "step_000006" / "run.json"
    sound = state.read_text()
    state.write_text("[")
    copies = Copies(here, remote_of(bucket), first_pause_s=0.01)  # waited out
    copies.queue(6)
    until(lambda: any("step 6 could not be copied" in note for note in copies.take_notes()))
    state.write_text(sound)
    copies.queue(9)
    copies.close(30.0)
    assert copies.copied[-1] == 9


def test_the_end_does_not_wait_for_a_copy_that_was_given_up(tmp_path: Path, bucket: Bucket):
    here = saved(tmp_path)
    bucket.fails = lambda path: True
    copies = Copies(here, remote_of(bucket), first_pause_s=600.0)
    shutil.rmtree(here / CHECKPOINTS / "step_000009")
    copies.queue(9)
    copies.close(60.0)
    [said] = copies.take_notes()
    assert "step 9 could not be copied" in said and "retrying" not in said


def test_a_new_run_does_not_take_the_place_of_the_copy_of_another(tmp_path: Path):
    every = CheckpointConfig(every=3, copy_to=str(tmp_path / "copies"))
    run(tmp_path, SCHEDULES[0], checkpoint=every)
    (tmp_path / "run").rename(tmp_path / "first")
    with pytest.raises(
        UserError, match=r"copies/run holds a copy of a run of that name already, .* step 9"
    ):
        run(tmp_path, SCHEDULES[0], checkpoint=every)
    assert (
        _RemoteRun.at(str(tmp_path / "copies"), "run").steps()[0] == 9
        and not (tmp_path / "run").exists()
    )


def test_bytes_that_a_service_loses_are_noticed(tmp_path: Path, bucket: Bucket):
    here = saved(tmp_path)
    bucket.loses = lambda path: path.endswith("run.json")
    with pytest.raises(OSError, match=r"run.json has 0 bytes, not the \d+ that were written"):
        remote_of(bucket).copy(here, 9)
    assert remote_of(bucket).steps() == [], "the manifest comes last"


def test_no_part_of_a_log_is_missing_that_is_cut_while_it_is_copied(tmp_path: Path, bucket: Bucket):
    here = saved(tmp_path)
    path = here / "buffer" / "ledger.log"
    reader = LogReader(path)
    ends = [reader.end for _ in reader]
    log = Log(path, at=ends[-1])

    def cut(at: Position) -> None:
        log.cut(log.prepare_cut(at)())

    cut(ends[2])
    later = [ends[4]]

    def cut_while_a_part_is_written(name: str) -> bool:
        if name.endswith(".log.zst") and later:
            cut(later.pop())
        return False

    bucket.fails = cut_while_a_part_is_written
    remote = remote_of(bucket)
    with pytest.raises(OSError, match="was cut while it was being packed"):
        remote.copy(here, 9)
    remote.copy(here, 9)
    log.close()
    assert remote.fetch(tmp_path / "again") == 9
    position = RunState.read(here / CHECKPOINTS / "step_000009").position
    fetched = LogReader(tmp_path / "again" / "buffer" / "ledger.log")
    assert len([*fetched]) == ends.index(position) + 1 and fetched.end == position and not fetched.damage


def test_a_log_that_is_cut_while_samples_are_copied_is_copied_at_once(tmp_path: Path, bucket: Bucket):
    run(tmp_path, SCHEDULES[0], checkpoint=CheckpointConfig(every=3, keep=3), record_every=1)
    here = tmp_path / "run"
    path = here / "buffer" / "ledger.log"
    reader = LogReader(path)
    ends = [reader.end for _ in reader]
    log = Log(path, at=ends[-1])
    later = [ends[2]]

    def cut_while_samples_are_written(name: str) -> bool:
        if name.endswith(".arrow") and later:
            log.cut(log.prepare_cut(later.pop())())
        return False

    bucket.fails = cut_while_samples_are_written
    remote_of(bucket).copy(here, 9)
    log.close()
    assert not later and remote_of(bucket).fetch(tmp_path / "again") == 9


def test_slashes_in_an_address_count_once(tmp_path: Path):
    remote = _RemoteRun.at("s3://bucket//runs/?region=us-east-1", "run")
    assert remote._files.base_path == "bucket/runs/run/"  # pyright: ignore[reportPrivateUsage]


def test_a_copy_that_broke_off_or_is_damaged_is_not_used(tmp_path: Path, bucket: Bucket):
    here = saved(tmp_path)
    remote = remote_of(bucket)
    for step in (3, 6, 9):
        remote.copy(here, step)
    at = bucket.folder / "runs" / "run" / CHECKPOINTS
    (at / "step_000009" / "manifest.json").unlink()
    (at / "step_000006" / "actor" / "rank_0.json").write_text("[0, []]")
    assert remote.steps() == [6, 3]
    assert remote.fetch(tmp_path / "again") == 3
    assert [p.name for p in complete_checkpoints(tmp_path / "again" / CHECKPOINTS)] == ["step_000003"]


def test_copies_of_checkpoints_that_are_not_kept_go(tmp_path: Path, bucket: Bucket):
    here = saved(tmp_path)
    remote = remote_of(bucket)
    for step in (3, 6, 9):
        remote.copy(here, step)
    shutil.rmtree(here / CHECKPOINTS / "step_000003")
    remote.prune(here)
    assert (
        remote.steps() == [9, 6]
        and not (bucket.folder / "runs" / "run" / CHECKPOINTS / "step_000003").exists()
    )
    assert len(list((bucket.folder / "runs" / "run" / "buffer").glob("*.checkpoint"))) == 2


def test_a_start_makes_copies_that_an_earlier_one_missed(tmp_path: Path, bucket: Bucket):
    copies = Copies(saved(tmp_path), remote_of(bucket))
    copies.resume()
    copies.close(30.0)
    assert copies.copied == [9]
    copies = Copies(tmp_path / "run", remote_of(bucket))
    copies.resume()
    copies.close(30.0)
    assert copies.copied == [], "it is there"


def test_a_mistyped_address_is_refused_rather_than_taken_for_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for address, says in (
        ("s3:/bucket/runs", r"begins with s3://, not with s3:/"),
        ("s3://", r"copy_to='s3://' names no bucket"),
        ("s3://[bucket", r"copy_to='s3://\[bucket' cannot be used"),
        ("~nobody-of-this-name/runs", r"copy_to='~nobody-of-this-name/runs' cannot be used: .*home"),
    ):
        with pytest.raises(UserError, match=says):
            _RemoteRun.at(address, "run")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "runs" / "run" / "checkpoints").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    there = _RemoteRun.at("~/runs", "run")
    assert "checkpoints" in there._names(""), "of the user's home"


def test_an_address_with_a_password_and_one_that_is_none_are_refused(tmp_path: Path):
    for address, says in (
        ("s3://me:secret@bucket/x", "through the environment"),
        ("s3://me:secret@[bucket/x", "through the environment"),
        ("", "is empty"),
        ("gopher://x/y", "cannot be used"),
    ):
        with pytest.raises(UserError, match=says) as refused:
            run(tmp_path, SCHEDULES[0], checkpoint=CheckpointConfig(every=3, copy_to=address))
        assert "secret" not in str(refused.value) and not (tmp_path / "run").exists()


def test_a_run_that_has_its_checkpoint_here_does_not_ask_elsewhere(tmp_path: Path):
    with pytest.raises(Killed):
        run(tmp_path, SCHEDULES[0], kill_at=7, checkpoint=CheckpointConfig(every=2))
    other = RunDirectory.create(tmp_path / "copies", "run")
    assert other.lock is not None
    other.lock.release()
    run(
        tmp_path,
        SCHEDULES[0],
        checkpoint=CheckpointConfig(every=2, copy_to=str(tmp_path / "copies")),
        resume="latest",
    )
    assert _RemoteRun.at(str(tmp_path / "copies"), "run").steps()[0] == 9


def copied(tmp_path: Path) -> CheckpointConfig:
    """A run whose last checkpoint is remote; the local run started without one."""
    every = CheckpointConfig(every=3, copy_to=str(tmp_path / "copies"))
    run(tmp_path, SCHEDULES[0], checkpoint=every)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(Killed):
        run(tmp_path, SCHEDULES[0], kill_at=1, checkpoint=CheckpointConfig(every=5))
    return every


def while_fetching(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Call `happens` after the last file of a copy was read."""
    fetch = _RemoteRun.fetch

    def fetched(self: _RemoteRun, into: Path, *more: Any) -> int | None:
        step = fetch(self, into, *more)
        happens()
        return step

    monkeypatch.setattr(_RemoteRun, "fetch", fetched)


def test_a_run_is_held_while_it_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    every = copied(tmp_path)
    refused: list[str] = []

    def another_begins() -> None:
        with pytest.raises(UserError, match="is held by") as error:
            run(tmp_path, SCHEDULES[0], checkpoint=CheckpointConfig(every=3), resume="latest")
        refused.append(str(error.value))

    while_fetching(monkeypatch, another_begins)
    run(tmp_path, SCHEDULES[0], checkpoint=every, resume="latest")
    assert len(refused) == 1 and (tmp_path / "run.begun-1" / "buffer").is_dir()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copies", "run", "run.begun-1"]


def test_a_fetch_that_fails_moves_nothing_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    every = copied(tmp_path)
    here = sorted(p for p in (tmp_path / "run").rglob("*") if "lock" not in p.parts)

    def fails() -> None:
        raise OSError("the service is not available")

    with (
        monkeypatch.context() as patched,
        pytest.raises(UserError, match="cannot be read: the service is not"),
    ):
        while_fetching(patched, fails)
        run(tmp_path, SCHEDULES[0], checkpoint=every, resume="latest")
    assert sorted(p for p in (tmp_path / "run").rglob("*") if "lock" not in p.parts) == here
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copies", "run"]
    run(tmp_path, SCHEDULES[0], checkpoint=every, resume="latest")


def test_the_epochs_of_a_fetched_run_continue(tmp_path: Path):
    every = copied(tmp_path)
    held = hold(tmp_path / "run")
    with pytest.raises(UserError, match="is held by"):
        run(tmp_path, SCHEDULES[0], checkpoint=every, resume="latest")
    held.release()
    assert held.epoch == 2
    run(tmp_path, SCHEDULES[0], checkpoint=every, resume="latest")
    [epoch] = [
        r["epoch"] for r in LogReader(tmp_path / "run" / "buffer" / "ledger.log") if r["do"] == "epoch"
    ][-1:]
    assert epoch > held.epoch, "each holder has an epoch of its own"


def test_samples_of_another_run_of_the_same_sizes_do_not_stay_in_a_copy(tmp_path: Path, bucket: Bucket):
    here, remote = saved(tmp_path), remote_of(bucket)
    remote.copy(here, 3)
    there = bucket.folder / "runs" / "run" / "samples"
    samples = sorted((here / "samples").glob("*.arrow"))
    changed, gone = samples[0], samples[-1]
    data = bytearray(changed.read_bytes())
    data[len(data) // 2] ^= 1
    changed.write_bytes(data)
    gone.unlink()
    remote_of(bucket).copy(here, 6)
    assert (there / changed.name).read_bytes() == bytes(data)
    assert not (there / gone.name).exists()


def test_a_copy_that_broke_off_while_it_replaced_a_file_is_not_taken_for_the_file(
    tmp_path: Path, bucket: Bucket
):
    here = saved(tmp_path)
    remote_of(bucket).copy(here, 3)
    changed = min((here / "samples").glob("*.arrow"))
    before = changed.read_bytes()
    changed.write_bytes(bytes(len(before)))

    def fails_when_it_is_written(path: str) -> bool:
        return (
            path.endswith("copied.json")
            and (bucket.folder / "runs/run/samples" / changed.name).read_bytes() != before
        )

    bucket.fails = fails_when_it_is_written
    with pytest.raises(OSError, match="the service is not available"):
        remote_of(bucket).copy(here, 6)
    changed.write_bytes(before)
    bucket.fails = lambda path: False
    remote_of(bucket).copy(here, 6)
    assert (bucket.folder / "runs/run/samples" / changed.name).read_bytes() == before


def test_a_file_of_an_earlier_copy_of_the_same_step_does_not_make_the_new_one_unsound(
    tmp_path: Path, bucket: Bucket
):
    here, remote = saved(tmp_path), remote_of(bucket)
    remote.copy(here, 9)
    at = bucket.folder / "runs" / "run" / CHECKPOINTS / "step_000009"
    (at / "actor" / "rank_1.json").write_text("[]")  # a leftover of a run with two ranks
    remote.copy(here, 9)
    assert not (at / "actor" / "rank_1.json").exists() and remote.fetch(tmp_path / "again") == 9


def test_copies_of_abandoned_checkpoints_are_not_resumed_from(tmp_path: Path, bucket: Bucket):
    here, remote = saved(tmp_path), remote_of(bucket)
    remote.copy(here, 6)
    remote.copy(here, 9)
    shutil.rmtree(here / CHECKPOINTS / "step_000009")  # the run goes back to step 6
    copies = Copies(here, remote_of(bucket))
    copies.resume()
    until(lambda: not copies._busy and copies._waiting is None)
    assert remote.steps() == [9, 6], "nothing is given up before there is something to go on from"
    bucket.fails = lambda path: path.endswith("step_000007/manifest.json")
    shutil.copytree(here / CHECKPOINTS / "step_000006", here / CHECKPOINTS / "step_000007")
    with pytest.raises(OSError, match="not available"):
        remote.copy(here, 7, went_back_to=6)
    bucket.fails = lambda path: False
    assert remote.steps() == [6]
    copies.close()


def test_the_copy_of_another_checkpoint_of_the_same_step_is_replaced_at_the_start(
    tmp_path: Path, bucket: Bucket
):
    here, remote = saved(tmp_path), remote_of(bucket)
    remote.copy(here, 9)
    state = bucket.folder / "runs" / "run" / CHECKPOINTS / "step_000009" / "manifest.json"
    state.write_text("{}")
    copies = Copies(here, remote)
    copies.resume()
    copies.close(30.0)
    assert copies.copied == [9] and remote.has(here, 9)


def test_a_damaged_copy_is_named_where_an_earlier_one_is_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    every = CheckpointConfig(every=3, keep=2, copy_to=str(tmp_path / "copies"))
    run(tmp_path, SCHEDULES[0], checkpoint=every)
    _RemoteRun.at(every.copy_to or "", "run").copy(tmp_path / "run", 6)
    (tmp_path / "copies" / "run" / CHECKPOINTS / "step_000009" / "actor" / "rank_0.json").write_text(
        "[]"
    )
    shutil.rmtree(tmp_path / "run")
    run(tmp_path, SCHEDULES[0], checkpoint=every, resume="latest", progress=True)
    said = capsys.readouterr().out
    assert (
        "with its checkpoint of step 6" in said and "step_000009: actor/rank_0.json is 2 bytes" in said
    )
