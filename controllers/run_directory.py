"""RunDirectory: what a run leaves behind, under `runs/NAME/`."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..dataflow.config import Config
from ..dataflow.errors import UserError


class RunDirectory:
    """`config.json`, `graph.mmd`, `metrics.parquet`, `timeline.parquet`, `samples/`, `logs/`, `checkpoints/`."""

    flush_interval_s = 5.0
    """How old the metrics on disk may be while a run goes on."""

    def __init__(self, path: Path, starts: int = 0) -> None:
        self.path = path
        self.starts = starts
        """How often the run was started again."""
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
        if name is None:
            name = time.strftime("%Y%m%d-%H%M%S")
            taken, number = name, 2
            while (root / name).exists():
                name, number = f"{taken}-{number}", number + 1
        path = (root / name).resolve()
        used = path.exists() and any(path.iterdir())
        if used and aside:
            numbered = (path.with_name(f"{path.name}.begun-{number}") for number in itertools.count(1))
            path.rename(next(other for other in numbered if not other.exists()))
        elif used:
            raise UserError(f"run directory {root / name} is used already; give the run another name, or remove it")
        path.mkdir(parents=True, exist_ok=True)
        (path / "logs").mkdir(exist_ok=True)
        return cls(path)

    @classmethod
    def reopen(cls, path: Path, step: int, time_s: float) -> RunDirectory:
        """That of a run which goes on after `step`, `time_s` after its start: what came later is forgotten."""
        before = json.loads((path / "config.json").read_text())
        directory = cls(path, before.get("starts", 0) + 1)
        for samples in (path / "samples").glob("*.arrow"):
            if int(samples.stem.rpartition("_")[2]) > step:
                samples.unlink()
        directory._metrics = [row for row in _read(path / "metrics.parquet") if row["step"] <= step]
        directory._timeline = [call for call in _read(path / "timeline.parquet") if call["end_s"] <= time_s]
        return directory

    def samples_path(self, flow: str, step: int) -> Path:
        return self.path / "samples" / f"{flow}_{step:06d}.arrow"

    def write_config(self, config: Mapping[str, Any], drawing: str) -> None:
        described = {**config, "starts": self.starts}
        unfinished = self.path / ".config.json"
        unfinished.write_text(json.dumps(described, indent=2, default=_plain) + "\n")
        unfinished.rename(self.path / "config.json")
        (self.path / "graph.mmd").write_text(drawing)

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
                pq.write_table(pa.table(columns), self.path / f".{name}.parquet")
                (self.path / f".{name}.parquet").rename(self.path / f"{name}.parquet")
        self._flushed = time.monotonic()


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [{k: v for k, v in row.items() if v is not None} for row in pq.read_table(path).to_pylist()]


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
