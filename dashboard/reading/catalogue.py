"""Catalogue: the runs below a folder, by name. Requested names are never used as paths."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...dataflow.errors import NoSuchRunError, nearest
from ...dataflow.runs.files import is_run
from .run_reader import RunReader

LOOK_S = 1.0
"""[s] Maximum age of the list of runs before it is refreshed."""
DEPTH = 3
"""Folder levels to search for runs; each cluster job has a folder of runs."""


class Catalogue:
    """The runs below a folder, or one run if the folder is the directory of a run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.single = is_run(root)
        self._lock = threading.Lock()
        self._looked = -LOOK_S
        self._readers: dict[str, RunReader] = {}

    @property
    def readers(self) -> dict[str, RunReader]:
        """Maps run names, sorted, to readers."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked >= LOOK_S:
                self._looked = now
                found = self._find()
                # A new reader would read all files again.
                self._readers = {
                    name: self._readers.get(name) or RunReader(name, found[name])
                    for name in sorted(found)
                }
            return self._readers

    def _find(self) -> dict[str, Path]:
        if self.single:
            return {self.root.resolve().name: self.root} if self.root.is_dir() else {}
        return {str(path.relative_to(self.root)): path for path in _runs_below(self.root, DEPTH)}

    def __getitem__(self, name: str) -> RunReader:
        """Return the reader of a run. Raises NoSuchRunError for an unknown name."""
        readers = self.readers
        if name not in readers:
            raise NoSuchRunError(f"there is no run {name!r}{nearest(name, list(readers))}")
        return readers[name]

    def chosen(self, names: str) -> list[RunReader]:
        """Return the readers of several runs, whose names `parted` splits."""
        return [self[name] for name in dict.fromkeys(parted(names))]


def parted(names: str) -> list[str]:
    """Split comma-separated names, in which %2C is a comma and %25 a percent sign.

    >>> parted("lr=1%2Ckl=2,other")
    ['lr=1,kl=2', 'other']
    """
    # Percent signs come last, because a name may contain the text %2C.
    return [name.replace("%2C", ",").replace("%25", "%") for name in names.split(",") if name]


def joined(names: Iterable[str]) -> str:
    """Join names; the inverse of `parted`."""
    return ",".join(name.replace("%", "%25").replace(",", "%2C") for name in names)


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            folders = sorted(
                entry.path for entry in entries if entry.is_dir() and not entry.name.startswith(".")
            )
    except OSError:
        return
    for path in map(Path, folders):
        if is_run(path):
            yield path
        elif depth > 1:
            yield from _runs_below(path, depth - 1)
