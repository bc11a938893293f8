"""Trackers that write their inputs to a file in the run's directory, and trackers that
misbehave."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from weft.controllers.reports.trackers import TrackedRun


class Kept:
    """Appends one line per call to `kept.jsonl`."""

    overwrites = False
    keeps_in = "kept.jsonl"

    def open(self, run: TrackedRun) -> str:
        self.file = run.folder / self.keeps_in
        self._write(
            {"open": run.id, "after": run.after, "logged": run.logged, "config": dict(run.config)}
        )
        return run.id or "first"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write({"step": step, **metrics})

    def flush(self) -> None:
        pass

    def close(self, *, failed: bool) -> None:
        self._write({"closed": "failed" if failed else "well"})

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Sampled(Kept):
    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._write({"samples_of": step, "rows": [dict(row) for row in rows]})


class Overwriting(Kept):
    overwrites = True


class Misbehaving(Kept):
    keeps_in = "misbehaving.jsonl"
    """A separate file: others may finish theirs before this one starts."""


class Raising(Misbehaving):
    """Raises an error that contains a secret of the environment."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ConnectionError(f"refused with the key {os.environ.get('TRACKER_API_KEY')}")


class Leaving(Misbehaving):
    """Some packages end the program where they cannot log in."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise SystemExit(1)


class Hanging(Misbehaving):
    def open(self, run: TrackedRun) -> str:
        self.folder = run.folder
        return super().open(run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        (self.folder / "hangs_later").touch()
        time.sleep(1e6)


class HangingAtOnce(Misbehaving):
    def open(self, run: TrackedRun) -> str:
        (run.folder / "hangs").touch()
        time.sleep(1e6)
        return ""
