"""The file of a checkpoint of the ledgers. It holds their state as records, which checksums chain as in a log."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..safe_files import open_file, parse_json
from .disk import Disk
from .log import LogReader, Position, Record, line_of

FORMAT = 2
"""Format of the records of a ledger's state. In format 1, which was not written down, a row was a list of its own. A state of another
format is passed over: the log says the same, and takes longer to read."""


def write_checkpoint(path: Path, position: Position, records: Iterable[Record], *, disk: Disk | None = None) -> None:
    """Write a state as records; `path` is replaced atomically.

    The first line names the position in the log that the state belongs to, and the last line gives the number of records.
    """
    checksum, lines = 0, []
    for record in [_start(position), *records]:
        lines.append(line_of(record, checksum))
        checksum = int(lines[-1][:8], 16)
    lines.append(line_of({"do": "end", "records": len(lines) - 1}, checksum))
    (disk or Disk()).write_whole(path, b"".join(lines))


def read_checkpoint(path: Path) -> tuple[Position, list[dict[str, Any]]]:
    """The position and the records of a checkpoint.

    Raises:
        ValueError: the checkpoint is damaged, or of another version of Weft; the message names the file and the place.
    """
    reader = LogReader(path)
    records = list(reader)
    if reader.damage:
        raise ValueError(reader.damage)
    if len(records) < 2 or records[0].get("do") != "checkpoint" or records[-1].get("do") != "end":
        raise ValueError(f"{path}: the checkpoint has no end after {reader.end.offset} bytes")
    first, *state, last = records
    _check_format(path, first)
    if last["records"] != len(state):
        raise ValueError(f"{path}: the checkpoint has {len(state)} records, not {last['records']}")
    return Position(first["offset"], first["checksum"]), state


def is_sound_checkpoint(path: Path, position: Position) -> bool:
    """Whether a file is the complete checkpoint of a position. Only its checksums are verified, and its first and last records parsed."""
    first = last = b""
    checksum, number = 0, 0
    try:
        with open_file(path) as file:
            for line in file:
                checksum = zlib.crc32(line[9:-1], checksum)
                if not line.endswith(b"\n") or line[:9] != b"%08x " % checksum:
                    return False
                first, last, number = first or line, line, number + 1
    except OSError:
        return False
    ended = {"do": "end", "records": number - 2}
    return number > 1 and parse_json(first[9:], path) == _start(position) and parse_json(last[9:], path) == ended


def checkpoint_position(path: Path) -> Position:
    """The position of a checkpoint. Only the first line of the file is read.

    Raises:
        ValueError: its first line is damaged, or of another version of Weft.
    """
    first = next(iter(LogReader(path)), {})
    if first.get("do") != "checkpoint":
        raise ValueError(f"{path} does not begin as a checkpoint does")
    _check_format(path, first)
    return Position(first["offset"], first["checksum"])


def _start(position: Position) -> Record:
    return {"do": "checkpoint", "offset": position.offset, "checksum": position.checksum, "format": FORMAT}


def _check_format(path: Path, start: Record) -> None:
    found = start.get("format", 1)
    if found != FORMAT:
        which = "an earlier" if found < FORMAT else "a later"
        raise ValueError(f"{path} has format {found}, of {which} version of Weft; this version reads format {FORMAT}")
