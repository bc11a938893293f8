"""NewValues: what was added to the metrics of a run since the last look. Its cost does not depend on how long the run has gone on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from ...dataflow.buffer.run_files import METRICS, STREAM
from ...dataflow.buffer.run_tables import VALUES, by_step, present, read_metrics


class NewValues:
    """Reads the metrics of a run while another process appends to them.

    The stream that they are appended to becomes a Parquet file when the run ends. Whoever has opened the stream reads it to its end;
    whoever comes later reads the Parquet file.

    Args:
        run: directory of the run.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._file: BinaryIO | None = None
        self._read = 0
        """Bytes of the stream that were read: complete messages."""
        self._over = False

    def __iter__(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Step and metrics, of what was added since the last time; a step comes again when more of its metrics were measured."""
        if self._over:
            return
        if self._file is None:
            try:
                self._file = (self._run / f"{METRICS}{STREAM}").open("rb")
            except FileNotFoundError:
                yield from self._of_parquet()
                return
        yield from _by_step(by_step(pa.Table.from_batches(self._batches(self._file), VALUES)))

    def _batches(self, file: BinaryIO) -> Iterator[pa.RecordBatch]:
        """The messages that are complete. One that is being written is read another time."""
        file.seek(self._read)
        reader = pa.ipc.MessageReader.open_stream(file)
        while True:
            try:
                message = reader.read_next_message()
            except (StopIteration, pa.ArrowException, OSError):
                return
            self._read = file.tell()
            if message.type == "record batch":
                yield pa.ipc.read_record_batch(message, VALUES)

    def _of_parquet(self) -> Iterator[tuple[int, dict[str, float]]]:
        table = read_metrics(self._run)
        if table is not None:
            self._over = True
            yield from _by_step([present(row) for row in table.to_pylist()])

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _by_step(rows: list[dict[str, float]]) -> Iterator[tuple[int, dict[str, float]]]:
    for row in rows:
        yield int(row["step"]), {name: value for name, value in row.items() if name != "step"}
