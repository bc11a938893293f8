"""Segments on one node: reads equal appends through crashes, recycling, damage and full disks."""

import fcntl
import json
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.dataflow.batch import Batch
from weft.dataflow.buffer.segments import (
    Segment,
    SegmentReader,
    SegmentStore,
    SegmentWriter,
    is_resident,
    spill,
    verify_segment,
)
from weft.dataflow.errors import DamagedSegment, UserError


def numbered(n: int, *, rows: int = 4, length: int = 100) -> Batch:
    """Rows filled with `n`, so that a byte of another message shows."""
    offsets = np.arange(rows + 1) * length
    return Batch.of(
        sample_id=np.full(rows, n),
        response_ids=(np.full(rows * length, n, np.int32), offsets),
        prompt=[f"prompt {n}"] * rows,
    )


def names(folder: Path) -> list[str]:
    """Return the files in a node's folder, including free ones."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.arrows"))


# Round trips


def test_a_reader_gets_appended_rows_and_the_reference_survives_json(tmp_path: Path):
    writer, reader = SegmentWriter(tmp_path, "n0", "w"), SegmentReader(tmp_path, "n0")
    segments = [writer.append(numbered(n)) for n in range(5)]
    assert [Segment.from_json(json.loads(json.dumps(s.to_json()))) for s in segments] == segments
    assert [reader.read(s) for s in segments] == [numbered(n) for n in range(5)]
    assert {s.file for s in segments} == {"w.0.000000.arrows"}


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "prompt": st.none() | st.text(max_size=3),
                "mine": st.none() | st.booleans(),
                "reward": st.floats(-1, 1, width=32),
                "response_ids": st.lists(st.integers(0, 9), max_size=4),
                "nested": st.lists(st.lists(st.text(max_size=2), max_size=2), max_size=2),
            }
        ),
        min_size=1,
        max_size=9,
    ),
    st.data(),
)
def test_any_slice_of_any_batch_is_read_unchanged(tmp_path_factory, rows, data):
    batch = Batch.from_rows(rows)
    start = data.draw(st.integers(0, len(rows)))
    part = batch.slice(start, data.draw(st.integers(0, len(rows) - start)))
    folder = tmp_path_factory.mktemp("node")
    writer = SegmentWriter(folder, "n0", "w")
    segment = writer.append(part)
    writer.close()
    assert SegmentReader(folder, "n0").read(segment).to_rows() == part.to_rows()


def test_only_the_rows_of_a_slice_are_written(tmp_path: Path):
    writer = SegmentWriter(tmp_path, "n0", "w")
    whole = numbered(3, rows=64)
    assert writer.append(whole.slice(10, 1)).num_bytes < 2 * writer.append(numbered(3, rows=1)).num_bytes
    assert SegmentReader(tmp_path, "n0").read(writer.append(whole.slice(10, 1))) == numbered(3, rows=1)


def test_a_batch_without_rows_or_columns_is_read_back(tmp_path: Path):
    writer, reader = SegmentWriter(tmp_path, "n0", "w"), SegmentReader(tmp_path, "n0")
    assert len(reader.read(writer.append(numbered(1).slice(0, 0)))) == 0
    empty = numbered(1).select([])
    assert reader.read(writer.append(empty)).columns == ()


def test_dictionary_encoded_columns_are_decoded(tmp_path: Path):
    words = pa.array(["a", "b", "a"]).dictionary_encode()
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 2, 3], pa.int32()), words)
    batch = Batch(pa.RecordBatch.from_arrays([words, lists], names=["mine", "many"]))
    writer = SegmentWriter(tmp_path, "n0", "w")
    read = SegmentReader(tmp_path, "n0").read(writer.append(batch))
    assert [str(field.type) for field in read.record.schema] == ["string", "list<item: string>"]
    assert read.to_rows() == batch.to_rows()


def test_a_message_of_more_buffers_than_one_system_call_takes(tmp_path: Path):
    batch = Batch.of(**{f"c{i}": [[i, i + 1], [i]] for i in range(700)})
    segment = SegmentWriter(tmp_path, "n0", "w").append(batch)
    assert SegmentReader(tmp_path, "n0").read(segment) == batch


def test_reading_copies_nothing(tmp_path: Path):
    segment = SegmentWriter(tmp_path, "n0", "w").append(numbered(7, rows=1000, length=1000))
    reader = SegmentReader(tmp_path, "n0")
    before = pa.total_allocated_bytes()
    first, second = reader.read(segment), reader.read(segment)
    assert pa.total_allocated_bytes() - before < 10_000
    addresses = {batch["response_ids"].values.buffers()[1].address for batch in (first, second)}
    assert len(addresses) == 1


# Files


def test_at_every_moment_a_file_is_an_arrow_stream(tmp_path: Path):
    writer = SegmentWriter(tmp_path, "n0", "w")
    for n in range(4):
        segment = writer.append(numbered(n))
        with pa.OSFile(str(tmp_path / segment.file)) as file:
            table = pa.ipc.open_stream(file).read_all()
        assert table["sample_id"].unique().to_pylist() == list(range(n + 1))


def test_each_schema_has_separate_files(tmp_path: Path):
    writer = SegmentWriter(tmp_path, "n0", "w")
    one, two = Batch.of(reward=[1.0]), Batch.of(answer=["x"])
    assert [writer.append(b).file for b in (one, two, one)] == [
        f"w.{k}.000000.arrows" for k in (0, 1, 0)
    ]


def test_a_full_file_is_left_for_the_next_and_a_large_message_has_its_own(tmp_path: Path):
    writer = SegmentWriter(tmp_path, "n0", "w", file_bytes=8000)
    sizes = [4, 4, 4, 100, 4]
    segments = [writer.append(numbered(n, rows=rows)) for n, rows in enumerate(sizes)]
    assert [int(s.file.split(".")[2]) for s in segments] == [0, 0, 0, 1, 2]
    left = segments[2]
    assert (tmp_path / left.file).stat().st_size == left.offset + left.num_bytes + 8, (
        "cut to what was written"
    )
    reader = SegmentReader(tmp_path, "n0")
    assert [reader.read(s) for s in segments] == [numbered(n, rows=rows) for n, rows in enumerate(sizes)]


def test_a_writer_name_is_used_once(tmp_path: Path):
    SegmentWriter(tmp_path, "n0", "w").append(numbered(1))
    with pytest.raises(UserError, match=r"the name 'w' was used before: .* has w\.0\.000000\.arrows"):
        SegmentWriter(tmp_path, "n0", "w")
    store = SegmentStore(tmp_path, "n0")
    store.writer_ended("w", "n0")
    with pytest.raises(UserError, match=r"has w\.0\.000000\.arrows of that writer"):
        SegmentWriter(tmp_path, "n0", "w")
    for bad in ("a/b", "a.b", ""):
        with pytest.raises(UserError, match="a writer's name is"):
            SegmentWriter(tmp_path, "n0", bad)


def test_published_segments_of_a_killed_writer_are_read(tmp_path: Path):
    program = """
import os, signal, sys
from pathlib import Path
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.segments import SegmentWriter
import json
writer = SegmentWriter(Path(sys.argv[1]), "n0", "w")
print(json.dumps(writer.append(Batch.of(reward=[1.0, 2.0])).to_json()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    segment = Segment.from_json(json.loads(done.stdout))
    verify_segment(tmp_path, segment)
    assert SegmentReader(tmp_path, "n0").read(segment) == Batch.of(reward=[1.0, 2.0])


# Damage


def damaged(folder: Path, segment: Segment, problem: str) -> None:
    for read in (
        lambda: SegmentReader(folder, "n0").read(segment),
        lambda: verify_segment(folder, segment),
    ):
        with pytest.raises(DamagedSegment, match=problem) as caught:
            read()
        assert caught.value.segment == segment
        assert str(folder / segment.file) in str(caught.value)
        assert f"offset {segment.offset}" in str(caught.value)


def test_every_flipped_bit_is_found_and_the_other_messages_are_read(tmp_path: Path):
    writer = SegmentWriter(tmp_path, "n0", "w")
    before, hit, after = (writer.append(numbered(n)) for n in range(3))
    writer.close()
    path = tmp_path / hit.file
    good = path.read_bytes()
    for at in (0, 7, hit.num_bytes // 2, hit.num_bytes - 1):
        bad = bytearray(good)
        bad[hit.offset + at] ^= 1 << (at % 8)
        path.write_bytes(bad)
        damaged(tmp_path, hit, "the checksum differs")
        reader = SegmentReader(tmp_path, "n0")
        assert [reader.read(before), reader.read(after)] == [numbered(0), numbered(2)]


def test_a_truncated_file_is_found_also_when_it_is_mapped_already(tmp_path: Path):
    writer = SegmentWriter(tmp_path, "n0", "w")
    first, second = (writer.append(numbered(n)) for n in range(2))
    writer.close()
    reader = SegmentReader(tmp_path, "n0")
    assert reader.read(first) == numbered(0)
    os.truncate(tmp_path / first.file, second.offset + second.num_bytes - 1)
    damaged(tmp_path, second, "the file is too short")
    with pytest.raises(DamagedSegment, match="the file is too short"):
        reader.read(second)
    assert reader.read(first) == numbered(0)


@pytest.mark.parametrize("size", [0, 5, 100])
def test_a_file_without_its_schema_is_found(tmp_path: Path, size: int):
    writer = SegmentWriter(tmp_path, "n0", "w")
    segment = writer.append(numbered(0))
    writer.close()
    os.truncate(tmp_path / segment.file, size)
    with pytest.raises(DamagedSegment, match=r"empty|schema"):
        SegmentReader(tmp_path, "n0").read(segment)


def test_a_missing_file_is_found(tmp_path: Path):
    segment = SegmentWriter(tmp_path, "n0", "w").append(numbered(0))
    (tmp_path / segment.file).unlink()
    damaged(tmp_path, segment, "the file is missing")


def test_a_file_that_cannot_be_opened_stops_no_recovery(tmp_path: Path):
    segment = SegmentWriter(tmp_path, "n0", "w").append(numbered(0))
    (tmp_path / segment.file).unlink()
    (tmp_path / segment.file).symlink_to(segment.file)
    with pytest.raises(DamagedSegment, match="it cannot be opened: "):
        verify_segment(tmp_path, segment)


def test_the_error_and_the_reference_cross_processes(tmp_path: Path):
    segment = Segment("n0", "w.0.000000.arrows", 0, 8, 1)
    with pytest.raises(DamagedSegment) as caught:
        verify_segment(tmp_path, segment)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.segment, str(copy)) == (segment, str(caught.value))


def test_a_half_written_message_is_found_and_arrow_tools_do_not_see_it(tmp_path: Path):
    writer = SegmentWriter(tmp_path, "n0", "w")
    first, second = (writer.append(numbered(n)) for n in range(2))
    with (tmp_path / first.file).open(
        "r+b"
    ) as file:  # as after a crash before the message's start was written
        file.seek(second.offset)
        file.write(b"\xff\xff\xff\xff\x00\x00\x00\x00")
    damaged(tmp_path, second, "the checksum differs")
    with pa.OSFile(str(tmp_path / first.file)) as file:
        assert pa.ipc.open_stream(file).read_all()["sample_id"].to_pylist() == [0] * 4


# No room


def limited_writes(folder: Path, limit: int) -> str:
    """Append in a separate process whose files may not exceed the limit."""
    program = """
import resource, sys
from pathlib import Path
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.segments import SegmentWriter
from weft.dataflow.buffer.segments import SegmentReader
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
writer, reader = SegmentWriter(folder, "n0", "w", file_bytes=limit // 2), SegmentReader(folder, "n0")
first = writer.append(Batch.of(sample_id=[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    writer.append(Batch.of(sample_id=list(range(limit))))
except OSError as error:
    print(error.errno, error)
assert [p.name for p in folder.rglob("*") if p.is_file()] == ["w.0.000000.arrows"], list(folder.rglob("*"))
second = writer.append(Batch.of(sample_id=[2]))
assert [reader.read(s).to_rows()[0]["sample_id"] for s in (first, second)] == [1, 2]
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), str(limit)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_file_that_cannot_grow_is_an_error_and_the_writer_continues(tmp_path: Path):
    assert f"in folder {tmp_path}, where" in limited_writes(tmp_path, 1 << 16)


def test_a_full_disk_is_an_error_and_the_next_append_overwrites_the_partial_one(tmp_path: Path):
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]).returncode
    ):
        pytest.skip("a small file system takes root")
    try:
        writer, reader = SegmentWriter(tmp_path, "n0", "w"), SegmentReader(tmp_path, "n0")
        first = writer.append(numbered(1))
        with pytest.raises(
            OSError, match=r"writer 'w' needs \d+ bytes in folder .*, where \d+ bytes are free"
        ):
            writer.append(numbered(2, rows=4000))
        with pa.OSFile(str(tmp_path / first.file)) as file:
            assert pa.ipc.open_stream(file).read_all().num_rows == 4, (
                "still a stream of the first message"
            )
        second = writer.append(numbered(3))
        assert second.offset == first.offset + first.num_bytes
        assert [reader.read(s) for s in (first, second)] == [numbered(1), numbered(3)]
        reader.close()
        writer.close()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


# Recycling


def test_a_complete_file_is_removed_with_its_last_segment(tmp_path: Path):
    gone: list[tuple[str, str]] = []
    store = SegmentStore(tmp_path, "n0", lambda node, file: gone.append((node, file)))
    writer = SegmentWriter(tmp_path, "n0", "w", file_bytes=5000)
    segments = [writer.append(numbered(n)) for n in range(4)]
    a, b, c, d = segments
    assert [s.file for s in segments] == ["w.0.000000.arrows"] * 2 + ["w.0.000001.arrows"] * 2
    store.published(a)
    store.published(b)
    store.freed([a, b])
    assert not gone, "the writer may append to it still"
    store.published(c)
    assert gone == [("n0", a.file)]
    assert names(tmp_path) == [f"free/{a.file}", c.file]
    store.published(d)
    store.writer_ended("w", "n0")
    store.freed([c])
    assert len(gone) == 1
    store.freed([d])
    assert gone[1:] == [("n0", c.file)]


def test_freeing_twice_or_the_unknown_is_an_error(tmp_path: Path):
    store = SegmentStore(tmp_path, "n0")
    segment = Segment("n0", "w.0.000000.arrows", 0, 8, 0)
    with pytest.raises(ValueError, match="never published"):
        store.freed([segment])
    store.published(segment)
    store.freed([segment])
    with pytest.raises(ValueError, match="freed before"):
        store.freed([segment])


def test_recovery_keeps_live_segments_and_removes_unpublished_ones_of_dead_writers(tmp_path: Path):
    store = SegmentStore(tmp_path, "n0")
    for name in ("w1", "w2", "w10"):
        SegmentWriter(tmp_path, "n0", name).append(numbered(1))
    store.writer_ended("w1", "n0")
    assert names(tmp_path) == ["free/w1.0.000000.arrows", "w10.0.000000.arrows", "w2.0.000000.arrows"]
    recovered = SegmentStore(tmp_path, "n0")
    recovered.published(Segment("n0", "w2.0.000000.arrows", 0, 8, 0))
    (tmp_path / "free" / "w3.0.000000.arrows.new").touch()
    assert recovered.sweep() == 1
    assert not list(tmp_path.rglob("*.new"))
    assert "w2.0.000000.arrows" in names(tmp_path)
    assert "w10.0.000000.arrows" not in names(tmp_path)


def test_free_files_are_kept_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("weft.dataflow.buffer.segments.MAX_FREE_BYTES", 10_000)
    store = SegmentStore(tmp_path, "n0")
    writer = SegmentWriter(tmp_path, "n0", "w", file_bytes=3000)
    segments = [writer.append(numbered(n)) for n in range(8)]
    for segment in segments:
        store.published(segment)
    store.freed(segments)
    store.writer_ended("w", "n0")
    free = [path.stat().st_size for path in (tmp_path / "free").iterdir()]
    assert 5_000 < sum(free) <= 10_000


def test_few_free_files_are_kept_however_small_they_are(tmp_path: Path):
    store = SegmentStore(tmp_path, "n0")
    for k in range(70):
        writer = SegmentWriter(tmp_path, "n0", f"w{k}")
        segment = writer.append(numbered(1))
        writer.close()
        store.published(segment)
        store.freed([segment])
        store.writer_ended(f"w{k}", "n0")
    assert len(list((tmp_path / "free").iterdir())) <= 64, (
        "so that to look through them costs the same at any time"
    )


def churn(
    folder: Path, rounds: int, *, hold: int, reader: SegmentReader
) -> tuple[list[tuple[int, Batch]], set[int]]:
    """Write, read and free; return the last `hold` batches, and all inodes ever written."""
    store = SegmentStore(folder, "n0")
    writer = SegmentWriter(folder, "n0", "churn", file_bytes=20_000)
    held: list[tuple[int, Batch]] = []
    inodes = set()
    for n in range(rounds):
        segment = writer.append(numbered(n))
        inodes.add((folder / segment.file).stat().st_ino)
        store.published(segment)
        held.append((n, reader.read(segment)))
        store.freed([segment])
        del held[:-hold]
        assert all(batch == numbered(k) for k, batch in held)
    return held, inodes


def test_files_are_recycled_and_arrays_read_before_never_change(tmp_path: Path):
    held, inodes = churn(tmp_path, 200, hold=12, reader=SegmentReader(tmp_path, "n0"))
    assert len(inodes) < 12, "a few files, overwritten again and again"
    assert all(batch == numbered(n) for n, batch in held)


def test_a_file_that_another_process_maps_is_not_overwritten(tmp_path: Path):
    writer = SegmentWriter(tmp_path, "n0", "first")
    segment = writer.append(numbered(77))
    writer.close()
    inode = (tmp_path / segment.file).stat().st_ino
    program = """
import json, sys
from pathlib import Path
from weft.dataflow.buffer.segments import Segment, SegmentReader
reader = SegmentReader(Path(sys.argv[1]), "n0")
values, _ = reader.read(Segment.from_json(json.loads(sys.argv[2]))).ragged_numpy("response_ids")
reader.close()  # the array alone keeps the mapping, and the lock
print(int(values.min()), int(values.max()), flush=True)
sys.stdin.readline()
print(int(values.min()), int(values.max()), flush=True)
"""
    command = [sys.executable, "-c", program, str(tmp_path), json.dumps(segment.to_json())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin and other.stdout
        assert other.stdout.readline() == "77 77\n"
        store = SegmentStore(tmp_path, "n0")
        store.published(segment)
        store.freed([segment])
        store.writer_ended("first", "n0")
        assert names(tmp_path) == [f"free/{segment.file}"]
        _, inodes = churn(tmp_path, 50, hold=2, reader=SegmentReader(tmp_path, "n0"))
        assert inode not in inodes
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "77 77\n"
    assert other.returncode == 0
    late = SegmentWriter(tmp_path, "n0", "late")
    late.append(numbered(1))
    found = {path.stat().st_ino for path in tmp_path.rglob("*.arrows")}
    assert inode in found, "now it may be used"


def test_writers_that_take_over_each_others_files_at_once_keep_them_apart(tmp_path: Path):
    store, one_at_a_time = SegmentStore(tmp_path, "n0"), threading.Lock()
    start = threading.Barrier(4)

    def work(k: int) -> set[int]:
        writer = SegmentWriter(tmp_path, "n0", f"w{k}", file_bytes=6000)
        reader = SegmentReader(tmp_path, "n0")
        held: list[tuple[int, Segment, Batch]] = []
        inodes = set()
        start.wait()
        for n in range(k, 600, 4):
            segment = writer.append(numbered(n))
            inodes.add((tmp_path / segment.file).stat().st_ino)
            with one_at_a_time:
                store.published(segment)
            held.append((n, segment, reader.read(segment)))
            if len(held) > 8:
                _, old, _ = held.pop(0)
                with one_at_a_time:
                    store.freed([old])
            assert all(batch == numbered(m) for m, _, batch in held)
        assert all(SegmentReader(tmp_path, "n0").read(s) == numbered(m) for m, s, _ in held)
        return inodes

    with ThreadPoolExecutor(4) as pool:
        used = list(pool.map(work, range(4)))
    assert len(set().union(*used)) < sum(map(len, used)), "files went from writer to writer"


def test_a_writer_that_is_believed_dead_cannot_spoil_a_recycled_file(tmp_path: Path):
    zombie = SegmentWriter(tmp_path, "n0", "zombie")
    segment = zombie.append(numbered(1))
    store = SegmentStore(tmp_path, "n0")
    store.published(segment)
    store.freed([segment])
    store.writer_ended("zombie", "n0")
    fresh = SegmentWriter(tmp_path, "n0", "fresh").append(numbered(2))
    zombie.append(numbered(3))
    assert SegmentReader(tmp_path, "n0").read(fresh) == numbered(2)


def test_a_reference_into_a_file_that_was_recycled_is_reported_as_missing(tmp_path: Path):
    writer = SegmentWriter(tmp_path, "n0", "w")
    segment = writer.append(numbered(1))
    writer.close()
    store = SegmentStore(tmp_path, "n0")
    store.published(segment)
    store.freed([segment])
    store.writer_ended("w", "n0")
    SegmentWriter(tmp_path, "n0", "next").append(numbered(2))
    damaged(tmp_path, segment, "the file is missing")


def test_a_reader_keeps_a_bounded_number_of_files_mapped(tmp_path: Path):
    writer, reader = SegmentWriter(tmp_path, "n0", "w", file_bytes=1000), SegmentReader(tmp_path, "n0")
    segments = [writer.append(numbered(n)) for n in range(reader.MAX_MAPPINGS + 9)]
    assert [reader.read(s) for s in segments] == [numbered(n) for n in range(len(segments))]
    assert len(reader._mappings) == reader.MAX_MAPPINGS
    with (tmp_path / segments[0].file).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the reader has released it


# Memory budget


def resident(path: Path) -> bool:
    with path.open("rb") as file:
        return is_resident(file.fileno())


def test_beyond_the_budget_the_oldest_files_leave_memory_and_are_read_from_disk(tmp_path: Path):
    file_bytes = 1 << 20
    writer = SegmentWriter(tmp_path, "n0", "w", file_bytes=file_bytes, memory_bytes=2 * file_bytes)
    segments = [writer.append(numbered(n, rows=500, length=500)) for n in range(6)]  # one per file
    if spill(tmp_path, 0) and resident(tmp_path / segments[0].file):
        pytest.skip("this file system keeps its files in memory")
    assert not any(resident(tmp_path / s.file) for s in segments)
    assert spill(tmp_path, 0) == 0, "nothing is left to evict"
    reader = SegmentReader(tmp_path, "n0")
    assert all(reader.read(s) == numbered(n, rows=500, length=500) for n, s in enumerate(segments))


def test_a_writer_spills_by_itself_when_it_leaves_a_file(tmp_path: Path):
    writer = SegmentWriter(tmp_path, "n0", "w", file_bytes=1 << 20, memory_bytes=2 << 20)
    segments = [writer.append(numbered(n, rows=500, length=500)) for n in range(6)]
    kept = [resident(tmp_path / s.file) for s in segments]
    if all(kept):
        pytest.skip("this file system keeps its files in memory")
    assert kept == sorted(kept), "the oldest went"
    assert kept[-1]
    assert not kept[0]
