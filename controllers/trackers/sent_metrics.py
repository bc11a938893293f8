"""SentMetrics: which metrics a tracker has taken, kept in the run's directory, so that a run that goes on sends nothing twice.

A tracker takes each metric's steps in order, so one number for each metric says it all: the latest step that was sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ...dataflow.buffer.disk import make_folder, replacing
from ...dataflow.buffer.run_files import TRACKERS
from ...dataflow.safe_files import read_json


@dataclass
class SentMetrics:
    """What one tracker has taken of a run."""

    id: str = ""
    """The tracker's own id of the run."""
    logged: int = 0
    """Calls of `Tracker.log` so far."""
    steps: dict[str, int] = field(default_factory=dict)
    """Metric -> the latest step that was sent of it."""
    error: str = ""
    """Why the process of the tracker has ended; empty: it goes on, or ended well."""

    @classmethod
    def read(cls, path: Path) -> SentMetrics:
        """What was written there; nothing was sent where there is no such file, or it is damaged."""
        try:
            found = read_json(path)
            return cls(str(found["id"]), int(found["logged"]), {str(n): int(s) for n, s in found["steps"].items()})
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return cls()

    @staticmethod
    def error_in(path: Path) -> str:
        """The error that was written there; empty where there is none."""
        try:
            return str(read_json(path)["error"])
        except (OSError, ValueError, LookupError, TypeError):
            return ""

    def write(self, path: Path) -> None:
        """Replace the file."""
        make_folder(path.parent)
        with replacing(path) as partial:
            partial.write_text(json.dumps(asdict(self)))

    def go_back(self, step: int) -> None:
        """What was sent of later steps counts no more.

        >>> sent = SentMetrics(steps={"loss": 7, "eval/mean": 2})
        >>> sent.go_back(4)
        >>> sent.steps
        {'loss': 4, 'eval/mean': 2}
        """
        self.steps = {name: min(latest, step) for name, latest in self.steps.items()}

    def new(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Those of the metrics of a step that were not sent.

        >>> SentMetrics(steps={"loss": 7}).new(7, {"loss": 0.5, "eval/mean": 1.0})
        {'eval/mean': 1.0}
        """
        return {name: value for name, value in metrics.items() if step > self.steps.get(name, -1)}

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """These were sent."""
        self.steps |= dict.fromkeys(metrics, step)
        self.logged += 1


def path_of(run: Path, tracker: str) -> Path:
    """Where the tracker of a run keeps what it has sent.

    >>> path_of(Path("runs/sums"), "my_module:Mine").as_posix()
    'runs/sums/trackers/my_module-Mine.json'
    """
    return run / TRACKERS / f"{tracker.replace(':', '-')}.json"
