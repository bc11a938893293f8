"""The log: any damage to its bytes is found and named, and records before it are used."""

import errno
import tempfile
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.dataflow.buffer.recovery import read_checkpoint, write_checkpoint
from weft.dataflow.errors import TakenOverError
from weft.dataflow.runs.files import Disk
from weft.dataflow.runs.log import Log, LogReader, Position, damage_before, find_fork, has_position

RECORDS = [{"do": "note", "key": f"k{i}", "value": [i] * (i % 4)} for i in range(6)]


class CountingDisk(Disk):
    """Counts calls, and fills up on demand."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.room: int | None = None

    def write(self, descriptor: int, data: bytes) -> None:
        self.calls.append("write")
        if self.room is not None and len(data) > self.room:
            super().write(descriptor, data[: self.room])
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        self.calls.append("sync")
        super().sync(descriptor)

    def truncate(self, descriptor: int, size: int) -> None:
        self.calls.append("truncate")
        super().truncate(descriptor, size)


def write(
    path: Path, records: list[dict[str, Any]] = RECORDS, at: Position = Position()
) -> list[Position]:
    """Write records, and return the position of each and of the end."""
    log = Log(path, at=at)
    places = [log.position]
    for record in records:
        log.append(record)
        places.append(log.position)
    log.close()
    return places


def read(path: Path, start: Position = Position()) -> tuple[list[dict[str, Any]], LogReader]:
    reader = LogReader(path, start)
    return list(reader), reader


def damaged(path: Path, data: bytes, before: int, offset: int) -> str:
    """Check that a log with these bytes has `before` valid records, and return the complaint."""
    path.write_bytes(data)
    records, reader = read(path)
    assert records == RECORDS[:before] and reader.end.offset == offset
    assert reader.damage is not None and reader.damage.startswith(f"{path}, byte {offset}: ")
    return reader.damage


def test_appended_rows_are_read_back(tmp_path: Path):
    path = tmp_path / "log"
    places = write(path)
    records, reader = read(path)
    assert records == RECORDS and reader.damage is None and reader.end == places[-1]
    assert [read(path, place)[0] for place in places] == [RECORDS[k:] for k in range(len(places))]


def test_each_checksum_is_of_everything_up_to_it(tmp_path: Path):
    write(tmp_path / "one")
    write(tmp_path / "other", [{"do": "else"}, *RECORDS[1:]])
    ones, others = ((tmp_path / name).read_bytes().splitlines() for name in ("one", "other"))
    for one, other in zip(ones[1:], others[1:], strict=True):
        assert one[9:] == other[9:] and one[:8] != other[:8]


def test_any_changed_bit_is_found_and_earlier_records_are_used(tmp_path: Path):
    path = tmp_path / "log"
    places = [p.offset for p in write(path)]
    whole = path.read_bytes()
    for byte in range(len(whole)):
        before = max(k for k, place in enumerate(places) if place <= byte)
        for bit in range(8):
            changed = bytearray(whole)
            changed[byte] ^= 1 << bit
            damaged(path, bytes(changed), before, places[before])


def test_a_record_torn_at_any_byte_is_found(tmp_path: Path):
    path = tmp_path / "log"
    places = [p.offset for p in write(path)]
    whole = path.read_bytes()
    for size in range(len(whole)):
        before = max(k for k, place in enumerate(places) if place <= size)
        if size in places:
            path.write_bytes(whole[:size])
            assert read(path)[0] == RECORDS[:before], (
                "it ends between two records: that is where it ends"
            )
        else:
            found = damaged(path, whole[:size], before, places[before])
            assert found.endswith(f"the last record is torn after {size - places[before]} bytes")


def test_missing_repeated_and_swapped_records_are_found(tmp_path: Path):
    path = tmp_path / "log"
    places = [p.offset for p in write(path)]
    lines = path.read_bytes().splitlines(keepends=True)
    for k in range(len(lines)):
        if k + 1 < len(lines):
            damaged(path, b"".join(lines[:k] + lines[k + 1 :]), k, places[k])
            swapped = [*lines[:k], lines[k + 1], lines[k], *lines[k + 2 :]]
            damaged(path, b"".join(swapped), k, places[k])
        damaged(path, b"".join([*lines[: k + 1], *lines[k:]]), k + 1, places[k + 1])
    assert "checksum is" in damaged(path, b"".join([*lines, b"\0\0\0\0\n"]), len(lines), places[-1])


def test_a_log_continues_at_any_position_and_keeps_the_cut_tail(tmp_path: Path):
    path = tmp_path / "log"
    places = write(path)
    whole = path.read_bytes()
    for place in reversed(places[:-1]):
        path.write_bytes(whole)
        write(path, [{"do": "else"}], at=place)
        records, reader = read(path)
        assert records == [*RECORDS[: places.index(place)], {"do": "else"}] and reader.damage is None
        assert (tmp_path / f"log.cut-{place.offset}").read_bytes() == whole[place.offset :]


def test_every_tail_that_is_cut_off_at_one_place_is_kept(tmp_path: Path):
    path = tmp_path / "log"
    place, tails = write(path)[2], [path.read_bytes()]
    for number in range(3):
        write(path, [{"do": "else", "number": number}], at=place)
        tails.append(path.read_bytes())
    write(path, [], at=place)
    cut = [tmp_path / f"log.cut-{place.offset}{number}" for number in ("", "-2", "-3", "-4")]
    assert [p.read_bytes() for p in cut] == [tail[place.offset :] for tail in tails]
    assert not list(tmp_path.glob("log.cut-*-5")), "nothing was behind the place the last time"


def test_a_long_tail_that_is_cut_off_is_not_held_in_memory(tmp_path: Path):
    path = tmp_path / "log"
    place, tail = write(path)[2], b"x" * (32 << 20)
    before = path.read_bytes()
    for _ in range(2):  # the second pass compares with the cached part
        with path.open("ab") as file:
            file.write(tail)
        tracemalloc.start()
        Log(path, at=place).close()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < len(tail) / 2, f"{peak / 1e6:.0f} MB"
        path.write_bytes(before)
    assert [p.stat().st_size for p in tmp_path.glob("log.cut-*")] == [
        len(before) - place.offset + len(tail)
    ]


def test_a_cut_that_was_interrupted_is_made_again(tmp_path: Path):
    path = tmp_path / "log"
    place = write(path)[3]
    tail = path.read_bytes()[place.offset :]
    (tmp_path / f"log.cut-{place.offset}").write_bytes(tail[:10])
    write(path, [], at=place)
    assert [p.read_bytes() for p in tmp_path.glob("log.cut-*")] == [tail]


def test_records_are_written_together(tmp_path: Path):
    disk = CountingDisk()
    log = Log(tmp_path / "log", disk=disk, clock=lambda: 0.0)
    disk.calls.clear()
    for record in RECORDS * 100:
        log.append(record)
    assert disk.calls == [] and (tmp_path / "log").stat().st_size == 0
    log.commit()
    log.commit()
    assert disk.calls == ["write"] and read(tmp_path / "log")[0] == RECORDS * 100
    log.close()


def test_the_log_is_synced_on_request_or_after_the_interval(tmp_path: Path):
    now, disk = 0.0, CountingDisk()
    log = Log(tmp_path / "log", disk=disk, sync_interval_s=0.5, clock=lambda: now)
    disk.calls.clear()
    steps: list[tuple[float, bool, bool]] = [  # seconds to wait, sync requested, new record
        (0.2, False, True),
        (0.2, False, True),
        (0.2, False, True),  # 0.6 s after the record
        (0.4, False, True),
        (0.2, False, False),  # 0.6 s after the last sync
        (9.0, True, False),
        (0.1, False, True),  # 9.1 s
        (0.1, True, True),
    ]
    called: list[list[str]] = []
    for seconds, sync, new in steps:
        now += seconds
        if new:
            log.append(RECORDS[0])
        log.commit(sync=sync)
        called.append(list(disk.calls))
        disk.calls.clear()
    one, both = ["write"], ["write", "sync"]
    assert called == [one, one, both, one, ["sync"], [], both, both]
    log.close()
    assert disk.calls == [], "nothing was left to write or to sync"


def test_unsynced_records_of_another_writer_are_synced(tmp_path: Path):
    end, disk = write(tmp_path / "log")[-1], CountingDisk()
    Log(tmp_path / "log", at=end, disk=disk, clock=lambda: 0.0).close()
    assert disk.calls == ["write", "sync"]


def test_a_full_disk_loses_nothing_and_the_next_commit_completes(tmp_path: Path):
    for room in range(0, 200, 7):
        path, disk = tmp_path / f"log{room}", CountingDisk()
        log = Log(path, disk=disk)
        log.append(RECORDS[0])
        log.commit()
        size = path.stat().st_size
        for record in RECORDS[1:]:
            log.append(record)
        disk.room = room
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                log.commit()
            assert path.stat().st_size == size and read(path)[1].damage is None
        log.append({"do": "more"})
        disk.room = None
        log.close()
        records, reader = read(path)
        assert (
            records == [*RECORDS, {"do": "more"}]
            and reader.damage is None
            and reader.end == log.position
        )


class Interrupted(BaseException):
    """Ctrl-C at a place that the test chooses."""


class InterruptedDisk(CountingDisk):
    """Fails during or after a write, and optionally when truncating that write."""

    def __init__(self, size: int | None, truncates: bool) -> None:
        super().__init__()
        self.size, self.truncates, self.armed = size, truncates, False

    def write(self, descriptor: int, data: bytes) -> None:
        if not self.armed:
            return super().write(descriptor, data)
        super().write(descriptor, data[: self.size])
        raise Interrupted if self.truncates else OSError(errno.EIO, "Input/output error")

    def truncate(self, descriptor: int, size: int) -> None:
        if self.armed:
            raise OSError(errno.EIO, "Input/output error")
        super().truncate(descriptor, size)


@pytest.mark.parametrize("size", [None, 0, 1, 30, 100])
@pytest.mark.parametrize("by_signal", [True, False])
def test_a_commit_that_was_interrupted_is_made_once(tmp_path: Path, size: int | None, by_signal: bool):
    disk = InterruptedDisk(size, by_signal)
    log = Log(tmp_path / "log", disk=disk)
    log.append(RECORDS[0])
    log.commit()
    for record in RECORDS[1:]:
        log.append(record)
    disk.armed = True
    with pytest.raises((Interrupted, OSError)):
        log.commit()
    disk.armed = False
    log.close()
    records, reader = read(tmp_path / "log")
    assert records == RECORDS and reader.damage is None


def test_a_log_that_is_being_written_can_be_read(tmp_path: Path):
    path, over = tmp_path / "log", threading.Event()
    log = Log(path)
    seen: list[int] = []
    complaints: list[str] = []

    def watch() -> None:
        follower = LogReader(path)
        while True:
            last = over.is_set()
            numbers = [r["number"] for r in LogReader(path)]
            complaints.extend(["not the first records"] if numbers != list(range(len(numbers))) else [])
            seen.extend(r["number"] for r in follower)
            if last:
                complaints.extend([follower.damage] if follower.damage else [])
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for number in range(3000):
            log.append({"do": "note", "number": number, "value": "x" * (number % 900)})
            if number % 7 == 0:
                log.commit()
        log.close()
    finally:
        over.set()
        watcher.join()
    assert not complaints and seen == list(range(3000))


def test_a_reader_continues_once_a_torn_record_is_complete(tmp_path: Path):
    path = tmp_path / "log"
    write(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    reader = LogReader(path)
    assert list(reader) == RECORDS[:-1] and reader.damage is not None
    path.write_bytes(whole)
    assert list(reader) == RECORDS[-1:] and reader.damage is None


def test_a_position_is_of_one_history_only(tmp_path: Path):
    path = tmp_path / "log"
    long = [{"do": "note", "value": "x" * size} for size in (10, 5000, 20_000, 3)]
    places = write(path, long)
    assert all(has_position(path, place) for place in places)
    for place in places:
        assert not has_position(path, Position(place.offset, place.checksum ^ 1))
        assert not place.offset or not has_position(path, Position(place.offset - 1, place.checksum))
    assert not has_position(path, Position(places[-1].offset + 1, places[-1].checksum))
    write(path, [{"do": "note", "value": "y" * 5000}], at=places[1])
    assert [has_position(path, place) for place in places] == [True, True, False, False, False]


# Checkpoints


def test_a_checkpoint_is_read_back(tmp_path: Path):
    path, position = tmp_path / "checkpoint", Position(77, 1234)
    write_checkpoint(path, position, RECORDS)
    assert read_checkpoint(path) == (position, RECORDS)
    write_checkpoint(path, position, [])
    assert read_checkpoint(path) == (position, []) and list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_with_any_byte_changed_missing_or_too_many_is_refused(tmp_path: Path):
    path = tmp_path / "checkpoint"
    write_checkpoint(path, Position(77, 1234), RECORDS[:3])
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    broken = [whole[:size] for size in range(len(whole))]
    broken += [b"".join(lines[:k] + lines[k + 1 :]) for k in range(len(lines))]
    broken += [whole + b"x", whole + b"\n", whole + lines[-1]]
    for byte in range(len(whole)):
        changed = bytearray(whole)
        changed[byte] ^= 1 << byte % 8
        broken.append(bytes(changed))
    for data in broken:
        path.write_bytes(data)
        with pytest.raises(ValueError, match=str(path)):
            read_checkpoint(path)


def test_a_checkpoint_for_which_there_is_no_room_leaves_the_one_before(tmp_path: Path):
    path, disk = tmp_path / "checkpoint", CountingDisk()
    write_checkpoint(path, Position(1, 2), RECORDS[:2])
    disk.room = 50
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(path, Position(3, 4), RECORDS, disk=disk)
    assert read_checkpoint(path) == (Position(1, 2), RECORDS[:2])
    assert list(tmp_path.iterdir()) == [path], "what was written of it does not take the room"


# Two writers


class Overtaken(CountingDisk):
    """Calls a function just before a write, when the writer has already checked its ownership."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[Callable[[], None]] = []

    def write(self, descriptor: int, data: bytes) -> None:
        for act in [self.before.pop()] if self.before else []:
            act()
        super().write(descriptor, data)


@given(
    st.lists(st.sampled_from(["append", "commit", "take over", "take over in a commit"]), max_size=40)
)
@settings(max_examples=150, deadline=None)
def test_two_writers_that_commit_in_turns_never_share_a_file(moves: list[str]):
    """The last process to open the log owns it: only its commits are in the file, and others get an
    error."""
    with tempfile.TemporaryDirectory() as folder:
        path, disk = Path(folder, "log"), Overtaken()
        owner = Log(path, disk=disk)
        others: list[Log] = []
        committed: list[Any] = []
        pending: list[Any] = []

        def take_over() -> None:
            nonlocal owner
            others.append(owner)
            reader = LogReader(path)
            committed[:] = list(reader)
            pending.clear()
            owner = Log(path, at=reader.end, disk=disk)

        for number, move in enumerate(moves):
            for log in [*others, owner]:
                record = {"do": "note", "key": "k", "value": [number, len(others)]}
                if move == "append":
                    log.append(record)
                    pending += [record] * (log is owner)
                elif move == "commit" and log is owner:
                    log.commit()
                    committed += pending
                    pending.clear()
                elif move == "commit":
                    with pytest.raises(TakenOverError, match="another process took it over"):
                        log.commit(sync=True)
            if move == "take over":
                take_over()
            elif move == "take over in a commit":
                before, owes = owner, bool(pending)
                disk.before.append(take_over)
                before.commit()  # it has checked its ownership, and notices nothing
                disk.before.clear()
                assert (owner is not before) == owes
                if owes:
                    with pytest.raises(TakenOverError):
                        before.commit()
            found, reader = read(path)
            assert found == committed and reader.damage is None
        for log in others:
            with pytest.raises(TakenOverError):
                log.close()
        owner.close()
        assert read(path)[0] == committed + pending


def test_a_log_that_two_processes_appended_to_shows_where_they_parted(tmp_path: Path):
    write(tmp_path / "one", RECORDS)
    write(tmp_path / "other", [*RECORDS[:3], {"do": "else"}, *RECORDS[4:]])
    one, other = ((tmp_path / name).read_bytes().splitlines(keepends=True) for name in ("one", "other"))
    (tmp_path / "both").write_bytes(b"".join([*one[:5], *other[3:], *one[5:]]))
    records, reader = read(tmp_path / "both")
    assert records == RECORDS[:5] and reader.damage
    assert find_fork(tmp_path / "both", reader.end) == len(b"".join(one[:3]))
    assert find_fork(tmp_path / "one", read(tmp_path / "one")[1].end) is None


def test_a_changed_digit_of_a_checksum_is_found_before_any_position(tmp_path: Path):
    path = tmp_path / "log"
    places = write(path)
    whole = path.read_bytes()
    assert damage_before(path, places[-1]) is None
    for place in places[:-1]:
        for byte in (place.offset, place.offset + 7, place.offset + 8):
            path.write_bytes(whole[:byte] + bytes([whole[byte] ^ 1]) + whole[byte + 1 :])
            assert f"byte {place.offset}: a record's checksum is" in (
                damage_before(path, places[-1]) or ""
            )
