"""RunDirectory: what a run leaves behind, under `runs/NAME/`."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..dataflow.config import Config
from ..dataflow.disk import PARTIAL, Disk, is_full, set_aside
from ..dataflow.errors import UserError
from ..dataflow.inspection import BUFFER, steps_in_log
from ..dataflow.log import Position

FILES = ("config.json", "graph.mmd", "metrics.parquet", "timeline.parquet")
"""What a run leaves behind for people. None of it is needed to go on."""
FOLDERS = ("buffer", "checkpoints", "logs", "samples", "skipped")
SAMPLES = re.compile(r"(?P<flow>.+)_(?P<step>\d+)\.arrow")


class RunDirectory:
    """`config.json`, `graph.mmd`, `metrics.parquet`, `timeline.parquet`, `samples/`, `logs/`, `checkpoints/`."""

    flush_interval_s = 5.0
    """How old the metrics on disk may be while a run goes on."""

    def __init__(self, path: Path, starts: int = 0) -> None:
        self.path = path
        self.starts = starts
        """How often the run was started again."""
        self.notes: list[str] = []
        """What was found damaged and set aside, said at the start."""
        self._disk = Disk()
        self._metrics: list[dict[str, float]] = []
        self._timeline: list[dict[str, Any]] = []
        self._flushed = time.monotonic()

    @classmethod
    def create(cls, root: Path, name: str | None, *, aside: bool = False) -> RunDirectory:
        """A new directory; a used one is never written into.

        Args:
            aside: move a used one of that name to `NAME.begun-1` (or -2, ...).

        Raises:
            UserError: when `name` is taken already.
        """
        make_folder(root, f"root {str(root)!r}")
        if name is None:
            name = time.strftime("%Y%m%d-%H%M%S")
            taken, number = name, 2
            while (root / name).exists():
                name, number = f"{taken}-{number}", number + 1
        path = (root / name).resolve()
        used = path.exists() and any(path.iterdir())
        if used and aside:
            set_aside(path, "begun")
        elif used:
            raise UserError(f"run directory {root / name} is used already; give the run another name, or remove it")
        make_folder(path / "logs", f"run directory {str(root / name)!r}")
        return cls(path)

    @classmethod
    def reopen(cls, path: Path, step: int, time_s: float, position: Position) -> RunDirectory:
        """The directory of a run which goes on after `step`, `time_s` after its start and at this position of its log; what came
        later is forgotten. What is damaged is set aside and named in `notes`: none of it is needed to go on."""
        directory = cls(path)
        directory._set_aside_what_is_no_file()
        directory.starts = directory._starts_before() + 1
        for samples in (path / "samples").glob("*.arrow"):
            name = SAMPLES.fullmatch(samples.name)
            if name and int(name["step"]) > step and samples.is_file():
                samples.unlink()
        metrics, timeline = directory._read("metrics.parquet", "step"), directory._read("timeline.parquet", "end_s")
        directory._metrics = [row for row in metrics if row["step"] <= step]
        directory._timeline = [call for call in timeline if call["end_s"] <= time_s]
        if not directory._metrics:
            directory._metrics = steps_in_log(path / BUFFER, step, position)
        return directory

    def _set_aside_what_is_no_file(self) -> None:
        """Each name must be of its kind: a file, or a folder. (A link counts as what it points to.)"""
        for name in (*FILES, *(name + PARTIAL for name in FILES)):
            if (self.path / name).exists() and not (self.path / name).is_file():
                self._set_aside(name, "it is not a file")
        for name in FOLDERS:
            if (self.path / name).exists() and not (self.path / name).is_dir():
                self._set_aside(name, "it is not a folder")

    def _set_aside(self, name: str, why: object) -> None:
        aside = set_aside(self.path / name, "damaged")
        self.notes.append(f"damaged: {self.path / name} ({why}); it is set aside as {aside.name}")

    def _starts_before(self) -> int:
        """How often the run was started again before. A damaged `config.json` does not say it; names of segments do."""
        config = self.path / "config.json"
        try:
            return int(json.loads(config.read_text())["starts"])
        except FileNotFoundError:
            self.notes.append(f"{config} is gone; it is written again")
        except (OSError, ValueError, TypeError, KeyError) as error:
            self._set_aside(config.name, error)
        names = (re.match(r".*-(\d+)\.\d+\.arrow", p.name) for p in (self.path / BUFFER).glob("segments/*/*"))
        return max((int(name[1]) for name in names if name), default=0)

    def _read(self, name: str, key: str) -> list[dict[str, Any]]:
        """The rows of a Parquet file, each of which has this column; none, and a note, where it is damaged or gone."""
        try:
            rows = pq.read_table(self.path / name).to_pylist()
            return [{k: v for k, v in row.items() if v is not None} for row in rows if row[key] is not None]
        except FileNotFoundError:
            self.notes.append(f"{self.path / name} is gone; it begins anew")
        except (OSError, ValueError, KeyError) as error:  # pyarrow's errors are among them
            self._set_aside(name, error)
        return []

    def samples_path(self, flow: str, step: int) -> Path:
        return self.path / "samples" / f"{flow}_{step:06d}.arrow"

    def write_config(self, config: Mapping[str, Any], drawing: str) -> None:
        described = json.dumps({**config, "starts": self.starts}, indent=2, default=_plain) + "\n"
        self._disk.write_whole(self.path / "config.json", described.encode())
        self._disk.write_whole(self.path / "graph.mmd", drawing.encode())

    def add_metrics(self, row: Mapping[str, float]) -> None:
        self._metrics.append(dict(row))

    def add_call(self, **entry: Any) -> None:
        self._timeline.append(entry)

    @property
    def metrics(self) -> list[dict[str, float]]:
        return self._metrics

    @property
    def timeline(self) -> list[dict[str, Any]]:
        return self._timeline

    def flush(self, *, when_due: bool = False) -> None:
        """Write metrics and timeline whole, each by a rename: a reader never sees half a file.

        Args:
            when_due: only if what is on the disk is older than `flush_interval_s`.
        """
        if when_due and time.monotonic() - self._flushed <= self.flush_interval_s:
            return
        for name, rows in (("metrics", self._metrics), ("timeline", self._timeline)):
            if rows:
                columns = {key: [row.get(key) for row in rows] for key in dict.fromkeys(k for row in rows for k in row)}
                written = pa.BufferOutputStream()
                pq.write_table(pa.table(columns), written)
                self._disk.write_whole(self.path / f"{name}.parquet", written.getvalue().to_pybytes())
        self._flushed = time.monotonic()


def make_folder(path: Path, what: str) -> None:
    """Make a folder, and those above it.

    Raises:
        UserError: it cannot be made; `what` the user said names it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if is_full(error):
            raise
        at = next((p for p in (path, *path.parents) if os.path.lexists(p)), path)
        why = f"{at} is no folder" if not at.is_dir() else f"nothing can be written into {at} ({error.strerror})"
        raise UserError(f"{what} cannot be used: {why}") from None


def _plain(value: object) -> Any:
    """Configuration values as JSON: models by field, functions and classes by name, paths as text."""
    if isinstance(value, Config):
        return {name: getattr(value, name) for name in type(value).model_fields}
    if hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}"
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in getattr(value, "__dataclass_fields__", {})}
    return repr(value)
