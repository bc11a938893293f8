"""SampleNote: the sample that a rank works on, noted so that it can be blamed when its process ends."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from ...dataflow.runs.files import make_file

_EIGHT = struct.Struct("<q")


class SampleNote:
    """Eight bytes of a file of the run, mapped: what is written there outlives the process. The file is made when the worker first says
    which sample it works on (`Context.at`), and removed when it is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes: mmap.mmap | None = None
        path.unlink(missing_ok=True)  # of an earlier process of the rank

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
        """The sample that was noted last; None: there is none."""
        if not path.exists():
            return None
        written = path.read_bytes()
        (sample_id,) = _EIGHT.unpack(written) if len(written) == _EIGHT.size else (-1,)
        return None if sample_id < 0 else sample_id

    @staticmethod
    def path(logs: Path, group: str, rank: int) -> Path:
        return logs / f"{group}_{rank}.at"
