"""Origin: the file and the line or row that each row of a table came from, for messages."""

from __future__ import annotations

import codecs
import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

COMPRESSED = ".gz"


@dataclass(frozen=True)
class Origin:
    """Where each row of a table came from: runs of rows, each from one file (or data set)."""

    runs: tuple[tuple[str, int], ...]
    """(file, its first row), in order."""
    start: int = 0
    """The row that is number 0 here, where only a part of the rows is looked at."""
    rows: Sequence[int] | None = None
    """Row behind each number, counted from `start`. None: the number itself."""

    def __call__(self, row: int) -> str:
        """The place of a row: `train.jsonl, line 7`, or `train.parquet, row 7` (both count from 1)."""
        row = self.start + (row if self.rows is None else self.rows[row])
        file, first = next(run for run in reversed(self.runs) if run[1] <= row)
        if file_kind(Path(file)) == ".jsonl":
            for index, (line, _) in enumerate(lines(Path(file))):
                if index == row - first:
                    return f"{file}, line {line}"
        return f"{file}, row {row - first + 1}"

    def at(self, start: int) -> Origin:
        """For a part of the rows, which begins at row `start`."""
        return replace(self, start=self.start + start)

    def of(self, rows: Sequence[int] | None) -> Origin:
        """For rows that were made of these rows."""
        return replace(self, rows=rows)

    @property
    def files(self) -> str:
        return ", ".join(file for file, _ in self.runs)


def file_kind(path: Path) -> str:
    """The ending that says how a file is read: `.jsonl` for `train.jsonl` and for `train.jsonl.gz`."""
    return Path(path.stem).suffix if path.suffix == COMPRESSED else path.suffix


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, each with its number, from 1."""
    with gzip.open(path) if path.suffix == COMPRESSED else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield number, line
