"""The scratch folder of a run: on the node's disk, private, and removed with its last user."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from buffer_graphs import GRAPHS

from weft.dataflow.batch import Batch
from weft.dataflow.buffer import scratch as scratch_module
from weft.dataflow.buffer.leases import Published
from weft.dataflow.buffer.sample_buffer import SampleBuffer
from weft.dataflow.buffer.scratch import (
    IN_USE,
    LEAST_BYTES,
    OVER,
    Scratch,
    file_system,
    is_network,
    noted_folder,
    notes,
)
from weft.dataflow.buffer.segments import SegmentWriter
from weft.dataflow.errors import UserError

MOUNTS = r"""overlay / overlay rw 0 0
proc /proc proc rw 0 0
server:/home /home nfs4 rw,vers=4.2 0 0
/dev/nvme0n1 /home/local ext4 rw 0 0
sshfs#x /mnt/with\040space fuse.sshfs rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
"""


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.05)


def test_the_file_system_of_a_path_is_that_of_the_deepest_mount(tmp_path: Path):
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    kinds = {
        path: file_system(Path(path), mounts)
        for path in ("/", "/home/me/x", "/home/local/x", "/homes", "/mnt/with space/a")
    }
    assert kinds == {
        "/": "overlay",
        "/home/me/x": "nfs4",
        "/home/local/x": "ext4",
        "/homes": "overlay",
        "/mnt/with space/a": "fuse.sshfs",
    }
    assert [is_network(kind) for kind in kinds.values()] == [False, True, False, False, True]
    assert file_system(tmp_path, tmp_path / "none") == ""


def test_a_full_or_network_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert LEAST_BYTES == 1 << 30
    [line] = notes(tmp_path / "not" / "yet", needed_bytes=1 << 60)
    assert (
        str(tmp_path / "not" / "yet") in line
        and "GB are free" in line
        and "BufferConfig(scratch=...)" in line
    )
    monkeypatch.setattr("weft.dataflow.buffer.scratch.file_system", lambda path: "lustre")
    assert "network file system (lustre)" in notes(tmp_path, needed_bytes=1)[0]


def test_a_run_has_the_same_folder_at_each_start_and_no_other_run_has_it(tmp_path: Path):
    first, second = tmp_path / "run" / "buffer", tmp_path / "other" / "buffer"
    one = Scratch.of(first, tmp_path / "s")
    assert one == Scratch.of(first, tmp_path / "s") and one.path.parent == tmp_path / "s"
    assert one.path != Scratch.of(second, tmp_path / "s").path and noted_folder(first) == one.path
    (first / "scratch.json").write_text('{"name": "../../etc"}')
    assert Scratch.of(first, tmp_path / "s").path.parent == tmp_path / "s"
    assert noted_folder(tmp_path) is None


def test_a_moved_run_keeps_its_name_and_is_found_in_the_new_place(tmp_path: Path):
    buffer = tmp_path / "run" / "buffer"
    first, moved = Scratch.of(buffer, tmp_path / "s"), Scratch.of(buffer, tmp_path / "t")
    assert moved.name == first.name and noted_folder(buffer) == moved.path == tmp_path / "t" / first.name


def test_a_run_resumed_after_its_end_is_not_over(tmp_path: Path):
    scratch = Scratch("weft-run-00000000-00000000", tmp_path)
    scratch.path.mkdir()
    (scratch.path / OVER).touch()
    assert not (scratch.hold() / OVER).exists()
    scratch.let_go(over=True)
    until(lambda: not scratch.path.exists())


def test_a_folder_that_its_watcher_removes_first_stops_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    earlier = Scratch.of(tmp_path / "run" / "buffer", tmp_path / "s")
    earlier.path.mkdir(parents=True)
    (tmp_path / "run" / "buffer" / "scratch.json").unlink()
    is_dir = Path.is_dir

    def just_before(path: Path) -> bool:
        there = is_dir(path)
        if path == earlier.path and there:
            path.rmdir()
        return there

    monkeypatch.setattr(Path, "is_dir", just_before)
    Scratch.of(tmp_path / "run" / "buffer", tmp_path / "s").remove_earlier(tmp_path / "run")
    assert not earlier.path.exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"scratch folder .* cannot be used"):
        Scratch("weft-x-00000000-00000000", tmp_path / "file").hold()


def test_the_folder_of_a_run_that_is_over_is_removed_at_once(tmp_path: Path):
    scratch = Scratch.of(tmp_path / "run" / "buffer", tmp_path / "s")
    folder = scratch.hold()
    (folder / "node").mkdir()
    assert folder.stat().st_mode & 0o777 == 0o700 and scratch.hold() == folder
    scratch.let_go(over=True)
    until(lambda: not folder.exists())


@pytest.mark.slow
def test_the_folder_of_a_resumable_run_stays_for_its_next_start(tmp_path: Path):
    scratch = Scratch("weft-run-00000000-00000000", tmp_path, grace_s=3.0)
    (scratch.hold() / "rows").touch()
    scratch.let_go(over=False)
    time.sleep(1.5)
    assert (scratch.hold() / "rows").exists()
    time.sleep(3.5)
    assert (scratch.path / "rows").exists(), "it is held again"
    scratch.let_go(over=False)
    until(lambda: not scratch.path.exists())


HOLDS = """
import sys, time
from pathlib import Path
from weft.dataflow.buffer.scratch import Scratch
folder = Scratch("weft-run-00000000-00000000", Path(sys.argv[1]), grace_s=1.0).hold()
(folder / "rows").touch()
print("held", flush=True)
time.sleep(60)
"""


def test_a_killed_process_leaves_no_folder(tmp_path: Path):
    # A name of Python's own, which the started process has imported before it looks here.
    (tmp_path / "types.py").write_text("raise ImportError")
    (tmp_path / "start.py").write_text(HOLDS)
    held = subprocess.Popen(
        [sys.executable, tmp_path / "start.py", tmp_path / "s"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert held.stdout is not None and held.stdout.readline() == b"held\n"
    os.killpg(held.pid, signal.SIGKILL)
    held.communicate()
    until(lambda: not list((tmp_path / "s").iterdir()))


def test_a_start_during_a_removal_keeps_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scratch = Scratch("weft-run-00000000-00000000", tmp_path)
    scratch.path.mkdir()
    (scratch.path / IN_USE).touch()
    really = shutil.rmtree

    def with_a_start_in_the_middle(path: Path, ignore_errors: bool) -> None:
        (path / IN_USE).unlink()
        (scratch.hold() / "node").mkdir()
        really(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(scratch_module.shutil, "rmtree", with_a_start_in_the_middle)
    scratch_module.watch(scratch.path, 0.0)
    monkeypatch.undo()
    assert (scratch.path / "node").is_dir() and [path.name for path in tmp_path.iterdir()] == [
        scratch.path.name
    ]
    scratch.let_go(over=True)
    until(lambda: not list(tmp_path.iterdir()))


def test_the_next_beginning_of_a_run_removes_the_folders_of_earlier_ones(tmp_path: Path):
    run = tmp_path / "run"
    ours, other = (
        Scratch.of(run / "buffer", tmp_path / "s"),
        Scratch.of(tmp_path / "else" / "buffer", tmp_path / "s"),
    )
    for scratch in (ours, other):
        scratch.path.mkdir(parents=True)
        (scratch.path / IN_USE).touch()
    (run / "buffer" / "scratch.json").unlink()
    begun_again = Scratch.of(run / "buffer", tmp_path / "s")
    begun_again.remove_earlier(run)
    assert not ours.path.exists() and other.path.exists()
    held = begun_again.hold()
    Scratch("weft-x-00000000-00000000", tmp_path / "s").remove_earlier(run)
    assert held.exists(), "it is held"
    begun_again.let_go(over=True)
    until(lambda: not held.exists())


def test_rows_with_a_lost_scratch_folder_are_reissued(tmp_path: Path):
    scratch = Scratch.of(tmp_path / "run" / "buffer", tmp_path / "s")

    def issued(buffer: SampleBuffer) -> list[int]:
        return sorted(buffer.ledgers["train"].live.groups)

    buffer = SampleBuffer.create(tmp_path / "run" / "buffer", GRAPHS, scratch=scratch)
    assert buffer.segments == scratch.path / "driver"
    writer = SegmentWriter(buffer.segments, "driver", "w")
    buffer.set_source("train", writer.append(Batch.of_table(pa.table({"prompt": ["a", "b"]}))))
    ledger = buffer.ledgers["train"]
    ledger.issue([0, 1], [2, 2], step=0)
    made = publish_children(buffer, writer)
    buffer.checkpoint()
    buffer.close(going_on=True)

    again = SampleBuffer.recover(tmp_path / "run" / "buffer", GRAPHS, scratch=scratch)
    assert issued(again) == [0, 1] and not again.damage and again.elsewhere() == []
    again.close(going_on=True)

    until(lambda: not (scratch.path / "in_use").exists() or remove(scratch.path))
    lost = SampleBuffer.recover(tmp_path / "run" / "buffer", GRAPHS, scratch=scratch)
    assert (
        issued(lost) == [1, 2] and "group 0 of graph 'train' is issued again" in lost.damage[0] and made
    )
    lost.close()
    until(lambda: not scratch.path.exists())


def publish_children(buffer: SampleBuffer, writer: SegmentWriter) -> bool:
    """Publish children of the first group by the first node, in a segment."""
    ledger = buffer.ledgers["train"]
    node = next(n for n in ledger.graph.nodes if n.makes_level is not None and n.level == 0)
    lease = ledger.claim(node, max_rows=1)
    assert lease is not None
    ids = lease.first_children[:, None] + np.arange(node.arguments["n"])
    written = writer.append(Batch.of(sample_id=ids.ravel(), response=["x"] * ids.size))
    ones = np.ones(ids.size, np.int64)
    parents = np.repeat(lease.ids, ids.shape[1])
    buffer.publish(ledger, lease, Published(ids.ravel(), ones, 0 * ones, parents, lease.ids), written)
    ledger.finish(lease)
    return True


def remove(folder: Path) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()
