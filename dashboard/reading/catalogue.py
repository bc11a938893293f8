"""Catalogue: the runs below a folder, by name. A name is looked up among those that were found, never made into a path."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ...dataflow.errors import NoSuchRunError, nearest
from ...dataflow.runs.files import is_run
from .run_reader import RunReader

LOOK_S = 1.0
"""Seconds for which a list of runs is good."""
DEPTH = 3
"""Folders below the first in which runs are looked for: jobs of a cluster have a folder of runs each."""


class Catalogue:
    """The runs of a folder, or one run.

    Args:
        root: the folder of runs, or the directory of one.
        clock: seconds, which only grow.
    """

    def __init__(self, root: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.root = root
        self.single = is_run(root)
        """Whether it serves one run alone."""
        self._clock = clock
        self._lock = threading.Lock()
        self._looked = -LOOK_S
        self._readers: dict[str, RunReader] = {}

    @property
    def readers(self) -> dict[str, RunReader]:
        """Name -> reader of each run, by name. A run that is gone is left out."""
        with self._lock:
            now = self._clock()
            if now - self._looked >= LOOK_S:
                self._looked = now
                found = self._find()
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
        """The reader of a run.

        Raises:
            NoSuchRunError: there is none of that name; the message offers the nearest.
        """
        readers = self.readers
        if name not in readers:
            raise NoSuchRunError(f"there is no run {name!r}{nearest(name, list(readers))}")
        return readers[name]

    def chosen(self, names: str) -> list[RunReader]:
        """The readers of several runs.

        Args:
            names: with commas between them, as `parted` takes them apart.

        Raises:
            NoSuchRunError: there is no run of one of these names.
        """
        return [self[name] for name in dict.fromkeys(parted(names))]


def parted(names: str) -> list[str]:
    """Names that an address has with commas between them; a comma of a name is written %2C there, and a percent sign %25.

    >>> parted("lr=1%2Ckl=2,other")
    ['lr=1,kl=2', 'other']
    """
    return [name.replace("%2C", ",").replace("%25", "%") for name in names.split(",") if name]


def joined(names: Iterable[str]) -> str:
    """The contrary of `parted`."""
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
