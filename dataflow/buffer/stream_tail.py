"""StreamTail: what was appended to an Arrow stream since one looked last. The cost of a look is that of what is new."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa

from ..safe_files import open_file


class StreamTail:
    """A stream that another process appends to (`run_tables.TableStream`).

    Args:
        path: of the stream, which need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._file: tuple[int, int] | None = None
        """Device and number of the file that the offset is of."""
        self.begun = 0
        """How often it was read from the beginning: what was read before counts no more when this has grown."""
        self._schema: pa.Schema | None = None

    def read(self) -> list[pa.RecordBatch]:
        """The complete messages that are new; none where there is no file. Where the file was replaced, or cut, all of them are.

        Raises:
            pyarrow.ArrowException: what is there is no stream.
        """
        try:
            with open_file(self._path) as file:
                found = os.fstat(file.fileno())
                this = found.st_dev, found.st_ino
                if this != self._file or found.st_size < self._offset:
                    self._file, self._offset, self._schema = this, 0, None
                    self.begun += 1
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        return self._take(data)

    def _take(self, data: bytes) -> list[pa.RecordBatch]:
        batches: list[pa.RecordBatch] = []
        reader, start = pa.BufferReader(data), self._offset
        while True:
            try:
                message = pa.ipc.read_message(reader)
            except (EOFError, pa.ArrowInvalid, OSError):  # the rest of it is being written
                return batches
            if self._schema is None:
                self._schema = pa.ipc.read_schema(message)
            else:
                batches.append(pa.ipc.read_record_batch(message, self._schema))
            self._offset = start + reader.tell()
