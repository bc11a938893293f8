"""_StreamTail reads only the new part of a stream."""

from pathlib import Path

import pyarrow as pa

from weft.dataflow.runs.follow import _StreamTail
from weft.dataflow.runs.tables import TableStream

NUMBERS = pa.schema([("number", pa.int64())])


def test_each_read_returns_rows_appended_since_the_last(tmp_path: Path):
    path = tmp_path / "numbers.arrows"
    tail, stream = _StreamTail(path), TableStream(path, NUMBERS)

    def seen() -> list[int]:
        return [number for batch in tail.new_batches() for number in batch["number"].to_pylist()]

    def append(*numbers: int) -> None:
        for number in numbers:
            stream.add(number=number)
        stream.flush()

    assert seen() == []
    append(1, 2)
    assert (seen(), seen()) == ([1, 2], [])
    append(3)
    append(4)
    assert seen() == [3, 4]
    whole = path.read_bytes()
    append(5)
    torn = path.read_bytes()[: len(whole) + 9]
    stream.close()
    complete = path.read_bytes()
    path.write_bytes(torn)
    assert seen() == [], "a message that is being written is left for later"
    path.write_bytes(complete)
    assert seen() == [5]


def test_a_stream_that_is_replaced_is_read_from_its_beginning(tmp_path: Path):
    path = tmp_path / "numbers.arrows"
    tail = _StreamTail(path)
    for name, number in (("first", 1), ("second", 2)):
        stream = TableStream(tmp_path / name, NUMBERS)
        stream.add(number=number)
        stream.close()
        (tmp_path / name).replace(path)
        assert [batch["number"].to_pylist() for batch in tail.new_batches()] == [[number]]


def test_a_file_that_is_not_a_stream_reads_as_empty(tmp_path: Path):
    (tmp_path / "garbled").write_bytes(b"\xff\x00 not a stream" * 40)
    assert _StreamTail(tmp_path / "garbled").new_batches() == []
