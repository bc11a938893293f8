"""SampleNote: record which sample a rank works on, so that it is known if the process dies."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from ...dataflow.runs.files import make_file

_EIGHT = struct.Struct("<q")


class SampleNote:
    """Eight mapped bytes of a file, which outlive the process.

    The file is created when the worker first reports a sample (`Context.at`), and removed on close.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes: mmap.mmap | None = None
        path.unlink(missing_ok=True)  # left by an earlier process of the rank

    def __call__(self, sample_id: int | None) -> None:
        if self._bytes is None:
            make_file(self._path)
            self._path.write_bytes(_EIGHT.pack(-1))
            with self._path.open("r+b") as file:
                self._bytes = mmap.mmap(file.fileno(), _EIGHT.size)
        self._bytes[:] = _EIGHT.pack(-1 if sample_id is None else sample_id)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)

    @staticmethod
    def read(path: Path) -> int | None:
        """The last recorded sample, or None."""
        if not path.exists():
            return None
        written = path.read_bytes()
        (sample_id,) = _EIGHT.unpack(written) if len(written) == _EIGHT.size else (-1,)
        return None if sample_id < 0 else sample_id

    @staticmethod
    def path(logs: Path, group: str, rank: int) -> Path:
        return logs / f"{group}_{rank}.at"
