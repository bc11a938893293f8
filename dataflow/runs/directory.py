"""RunDirectory: creates, reopens and writes a run's directory, `runs/NAME/`."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..config import Config
from ..errors import UserError
from ..graph import TRAIN, Graph
from ..safe_files import read_json
from ..untrusted_text import redacted, without_secrets
from .files import (
    BUFFER,
    CHECKPOINTS,
    CONFIG,
    GRAPH,
    LOCK,
    LOG,
    LOGS,
    MERMAID,
    METRICS,
    PARQUET,
    PARTIAL,
    SAMPLES,
    SEGMENTS,
    SKIPPED,
    STREAM,
    TIMELINE,
    Disk,
    is_full,
    make_folder,
    set_aside,
)
from .lock import RunLock, epochs
from .log import Position, last_epoch
from .samples import sample_files, samples_by_step, unfinished_files
from .tables import (
    BY_RANK,
    CALLS,
    VALUES,
    TableStream,
    begin_again,
    by_step,
    calls_kept,
    present,
    read_metrics,
    read_timeline,
    to_parquet,
    values_from,
    values_of,
)

TABLES = tuple(name + ending for name in (METRICS, TIMELINE) for ending in (PARQUET, STREAM))
FILES = (CONFIG, MERMAID, GRAPH, *TABLES)
"""Files for people and the dashboard. A run can resume without them."""
FOLDERS = (BUFFER, f"{BUFFER}/{SEGMENTS}", CHECKPOINTS, LOGS, SAMPLES, SKIPPED)
RESUMES = ("none", "latest", "weights")
"""Special values of `resume`, which cannot be names of runs."""
MAX_NAME_BYTES = 200
"""[bytes] Maximum length of a run's name. File systems allow 255 with suffixes."""
RECENT = 64
"""Number of recent steps whose metrics stay in memory, because some metrics arrive late."""


class RunDirectory:
    """The directory of a run: `config.json`, `graph.mmd`, metrics and timeline (`tables.py`),
    `samples/`, `logs/` and `checkpoints/`."""

    flush_interval_s = 0.5
    """[s] Minimum time between flushes with `when_due`."""

    def __init__(
        self, path: Path, lock: RunLock | None = None, *, origin: str = "begins with step 1"
    ) -> None:
        self.path = path
        self.lock = lock
        """Lock of the run; None for a directory that is only read."""
        self.notes: list[str] = []
        """Lines to print at the start: why the run starts or resumes at this step, and which
        damaged files were set aside."""
        self.origin = origin
        """The step where the run starts or resumes, and why, as text."""
        self._disk = Disk()
        self._metrics = TableStream(path / f"{METRICS}{STREAM}", VALUES, disk=self._disk)
        self._timeline = TableStream(path / f"{TIMELINE}{STREAM}", CALLS, disk=self._disk)
        self._recent: dict[float, dict[str, float]] = {}
        self._flushed = time.monotonic()

    @classmethod
    def create(cls, root: Path, name: str | None, *, aside: bool = False, why: str = "") -> RunDirectory:
        """Create a run directory in the folder of all runs, `root`.

        Args:
            name: name of the run. Default: the current time.
            aside: move an existing run with this name to `NAME.begun-1` (or -2, ...).
            why: why a run that was meant to resume starts from the beginning.

        Raises:
            UserError: a run with this name exists, and `aside` is false.
        """
        require_folder(root, f"root {str(root)!r}", private=False)
        path = _unused(root.resolve()) if name is None else root.resolve() / name
        if aside and is_used(path):
            set_run_aside(path)
        require_folder(path, f"run directory {str(root / path.name)!r}")
        # Take the lock first, so that two drivers cannot both start here.
        lock = hold(path)
        if is_used(path):
            lock.give_back()
            raise UserError(
                f"run directory {path} is used already; give the run another name, or remove it"
            )
        require_folder(path / LOGS, f"run directory {str(path)!r}")
        if not why:
            return cls(path, lock)
        directory = cls(path, lock, origin=f"{why}; the run begins with step 1")
        directory.notes.append(directory.origin)
        return directory

    @classmethod
    def reopen(
        cls, path: Path, step: int, time_s: float, position: Position, lock: RunLock, *, origin: str
    ) -> RunDirectory:
        """Open the directory of a run that resumes. Sets damaged files aside and lists them in
        `notes`; the run does not need them.

        Args:
            step: last step to keep in the metrics and the timeline.
            time_s: [s] time from the start of the run to the end of that step.
            position: log position where the run resumes.
            origin: where the run resumes and why, as text.
        """
        directory = cls(path, lock, origin=origin)
        # Links to files are allowed.
        for name in (*FILES, *(name + PARTIAL for name in FILES)):
            if os.path.lexists(path / name) and not (path / name).is_file():
                directory._set_aside(name, "it is not a file")
        for name in FOLDERS:
            if os.path.lexists(path / name) and not (path / name).is_dir():
                directory._set_aside(name, "it is not a folder")
        try:
            read_json(path / CONFIG)
        except FileNotFoundError:
            directory.notes.append(f"{path / CONFIG} is gone; it is written again")
        except (OSError, ValueError) as error:
            directory._set_aside(CONFIG, error)
        metrics = directory._read(METRICS, read_metrics, ("step",))
        found = metrics.to_pylist() if metrics else []
        rows = {row["step"]: present(row) for row in found if row["step"] is not None}
        # If the metrics of some steps are lost, fill the gaps from the log.
        if any(earlier not in rows for earlier in range(step + 1)):
            logged = samples_by_step(path / BUFFER / LOG, step, position)
            rows = {row["step"]: row for row in logged} | rows
        kept = [value for at in sorted(rows) if at <= step for value in values_from(rows[at])]
        begin_again(path, METRICS, pa.Table.from_pylist(kept, VALUES))
        columns = [name for name in CALLS.names if name != BY_RANK]
        calls = directory._read(TIMELINE, read_timeline, columns)
        begin_again(path, TIMELINE, CALLS.empty_table() if calls is None else calls_kept(calls, time_s))
        return directory

    def give_up_rows(self) -> None:
        """Set the log and the samples aside, so that the run resumes without its rows in flight."""
        # Without the log, the finished leases of the samples are unknown.
        for name in (BUFFER, SAMPLES):
            if (self.path / name).exists():
                aside = set_aside(self.path / name, "given-up")
                # Segments are useless without the log, and large.
                shutil.rmtree(aside / SEGMENTS, ignore_errors=True)
                self.origin += f"; {name} is in {aside.name}"
        self.notes.append(self.origin)

    def _set_aside(self, name: str, why: object) -> None:
        aside = set_aside(self.path / name, "damaged")
        self.notes.append(f"damaged: {self.path / name} ({why}); it is set aside as {aside.name}")

    @property
    def starts(self) -> int:
        """Number of restarts of the run, which makes the names of segment writers unique."""
        return self.lock.epoch - 1 if self.lock else 0

    def check(self, *, sure: bool = False) -> None:
        """Raise a TakenOverError if another driver took over the run (see `RunLock.check`)."""
        if self.lock is not None:
            self.lock.check(sure=sure)

    def _read(
        self, name: str, read: Callable[[Path], pa.Table | None], columns: Sequence[str]
    ) -> pa.Table | None:
        """Read a table with these columns. If it is missing or damaged, add a note; return None."""
        stream, path = self.path / f"{name}{STREAM}", self.path / f"{name}{PARQUET}"
        path = stream if stream.exists() else path
        try:
            table = read(self.path)
            if table is None:
                self.notes.append(f"{path} is gone; it begins anew")
            elif missing := [column for column in columns if column not in table.column_names]:
                raise ValueError(f"it has no column {missing[0]!r}")
            return table
        except (OSError, ValueError) as error:  # includes errors of pyarrow
            self._set_aside(path.name, error)
            return None

    def forget_samples(self, is_void: Callable[[str, int], bool]) -> None:
        """Remove unfinished sample files, and files of leases with `is_void(graph, number)`."""
        for part in sample_files(self.path):
            if is_void(part.graph, part.lease):
                part.path.unlink()
        for path in unfinished_files(self.path):
            path.unlink(missing_ok=True)

    def write_config(self, config: Mapping[str, Any], graphs: Mapping[str, Graph]) -> None:
        """Write `config.json`, `graph.mmd` (the training graph) and `graph.json`, without secrets.
        Raises a TakenOverError if another driver took over the run."""
        self.check()
        started = {**config, "starts": self.starts, "origin": self.origin}
        # Convert to JSON first, so that secrets in nested models become named fields.
        plain = without_secrets(json.loads(json.dumps(started, default=_plain)))
        structure = {name: graph.structure() for name, graph in graphs.items()}
        for name, text in (
            (CONFIG, json.dumps(plain, indent=2) + "\n"),
            (MERMAID, redacted(graphs[TRAIN].mermaid())),
            (GRAPH, json.dumps(without_secrets(structure, by_name=False))),
        ):
            self._disk.write_whole(self.path / name, text.encode())

    def add_metrics(self, row: Mapping[str, float]) -> Mapping[str, float]:
        """Add metrics of step `row["step"]`. Return all metrics of the step so far."""
        for value in values_from(row):
            self._metrics.add(**value)
        known = self._recent.setdefault(row["step"], {})
        known |= row
        if len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]
        return known

    def add_call(self, **entry: Any) -> None:
        """Add a finished call, with the columns of `tables.CALLS`, to the timeline."""
        self._timeline.add(**entry)

    @property
    def metrics(self) -> list[dict[str, float]]:
        # After `close`, only the Parquet file exists.
        table = None if (rows := by_step(self._metrics.read())) else read_metrics(self.path)
        return rows if table is None else [present(row) for row in table.to_pylist()]

    def values(self, name: str) -> dict[int, float]:
        """Return the values of a metric, keyed by step. Thread-safe."""
        return values_of(self._metrics.read(), name)

    @property
    def timeline(self) -> list[dict[str, Any]]:
        table = None if len(calls := self._timeline.read()) else read_timeline(self.path)
        return (calls if table is None else table).to_pylist()

    def flush(self, *, when_due: bool = False) -> None:
        """Append new metrics and calls to their files. `when_due` skips this until
        `flush_interval_s` after the last flush.

        Raises:
            TakenOverError: another driver took over the run.
            OSError: for example, the disk is full. A later flush tries again.
        """
        if when_due and time.monotonic() - self._flushed <= self.flush_interval_s:
            return
        self.check()
        self._metrics.flush()
        self._timeline.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """End the run: convert metrics and timeline to Parquet."""
        self.check()
        for stream in (self._metrics, self._timeline):
            stream.close()
        to_parquet(self.path)


def check_name(name: object, what: str) -> None:
    """Raise a UserError if a name is unsafe as part of a path. The message suggests a valid name.
    `what` is the setting's name."""
    text = str(name)
    leads_on = not text.isprintable() or text != text.strip() or text.startswith((".", "-"))
    leads_on = leads_on or bool({*text} & {"/", "\\"})
    if isinstance(name, str) and name and not leads_on and len(text.encode()) <= MAX_NAME_BYTES:
        return
    # Allow four bytes for each character.
    plain = re.sub(r"[^\w.=,+@ -]+", "-", text).strip(" .-")[: MAX_NAME_BYTES // 4]
    raise UserError(
        f"{what}={name!r} cannot name a folder: a name has at least one character and at most {MAX_NAME_BYTES} bytes, no slash, "
        "no control character, and neither a dot, a dash nor a space at its beginning"
        + (f"; did you mean {plain!r}?" if plain else "")
    )


def check_run_name(name: object, what: str) -> None:
    """Raise a UserError if a name is invalid for a run or is a special value of `resume`."""
    check_name(name, what)
    if str(name).casefold() in RESUMES:
        raise UserError(
            f"{what}={name!r} cannot name a run: resume={str(name).casefold()!r} has another meaning; choose another name, such as "
            f"'{name}-run'"
        )


def check_rights(run: Path) -> None:
    """Raise a UserError if this user may not read and write a folder of an existing run."""
    # By default, `os.access` checks the real user, but the effective user opens files.
    rights, effective = os.R_OK | os.W_OK | os.X_OK, os.access in os.supports_effective_ids
    for folder in (run, *(run / name for name in (LOCK, *FOLDERS))):
        if folder.is_dir() and not os.access(folder, rights, effective_ids=effective):
            raise UserError(f"run {run} cannot be used: this user may not read and write {folder}")


def hold(run: Path) -> RunLock:
    """Take the lock of a run, with a new epoch. Raises a UserError if it is held."""
    after = 0
    # The lock folder is gone, so get the last epoch from other files.
    if not epochs(run):
        try:
            after = int(read_json(run / CONFIG)["starts"]) + 1
        except (OSError, ValueError, TypeError, KeyError):
            after = last_epoch(run / BUFFER / LOG)
    return RunLock.take(run, after=after)


def set_run_aside(path: Path) -> Path:
    """Move a run to `NAME.begun-1` (or -2, ...). Raises a UserError if its driver is alive."""
    lock = hold(path) if path.is_dir() else None
    aside = set_aside(path, "begun")
    if lock is not None:
        lock.release()
    return aside


def make_aside(run: Path) -> Path:
    """Create a private folder `NAME.begun-1` (or -2, ...) next to a run."""
    return _first_new(run.with_name(f"{run.name}.begun-{number}") for number in itertools.count(1))


def _first_new(paths: Iterator[Path]) -> Path:
    """Create the first folder that does not exist. Concurrent calls get different folders."""
    for path in paths:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path
    raise AssertionError


def is_used(path: Path) -> bool:
    return path.exists() and (not path.is_dir() or any(inside.name != LOCK for inside in path.iterdir()))


def _unused(root: Path) -> Path:
    """Create a new folder named after the current time."""
    name = time.strftime("%Y%m%d-%H%M%S")
    return _first_new(root / name if k == 1 else root / f"{name}-{k}" for k in itertools.count(1))


def require_folder(path: Path, what: str, *, private: bool = True) -> None:
    """Create a folder and its parents if needed; `private` denies access to other users. Raises a
    UserError, which calls the folder `what`, if that fails."""
    try:
        if private:
            make_folder(path)
        else:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        # Leave a full disk to the caller.
        if is_full(error):
            raise
        at = next((p for p in (path, *path.parents) if os.path.lexists(p)), path)
        why = (
            f"nothing can be written into {at} ({error.strerror})"
            if at.is_dir()
            else f"{at} is no folder"
        )
        raise UserError(f"{what} cannot be used: {why}") from None


def _plain(value: object) -> Any:
    """Convert a value to JSON types: a model to its fields, a function or class to its name."""
    if isinstance(value, Config):
        return {name: getattr(value, name) for name in type(value).model_fields}
    if hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}"
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in getattr(value, "__dataclass_fields__", {})}
    return repr(value)
