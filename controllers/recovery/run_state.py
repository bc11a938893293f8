"""RunState: what the driver knows at a checkpoint; and how the checkpoints of a run lie in its directory.

    runs/NAME/checkpoints/step_000012/run.json        `RunState`: step, policy versions, position in the log
    runs/NAME/checkpoints/step_000012/GROUP/...       model, optimizer and random states of each group that has any
    runs/NAME/checkpoints/step_000012/manifest.json   sizes and checksums of all of it; a folder of this name is complete

Rows in flight are in the buffer, and the checkpoint names a position in its log. To resume is to load the models and to take the log
back to that position.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ...dataflow.buffer.log import Position
from ..cursor import Cursor

FOLDER = "checkpoints"
BEFORE = ".before_"
"""Prefix of a checkpoint that is being replaced by another one of the same step."""
RUN = "run.json"


@dataclass(frozen=True)
class RunState:
    """What the driver itself knows when no update is under way."""

    step: int
    seed: int
    time_s: float
    """Seconds since the run was started, those of earlier starts among them."""
    versions: Mapping[str, int]
    """Group -> policy version of its weights."""
    position: Position
    """In the buffer's log."""
    schedule: str = ""
    """Kind of the schedule, which bounds the age of the rows in flight."""
    evaluated: Mapping[str, int] = field(default_factory=dict)
    """Evaluation -> latest step that it evaluated."""
    stopped: bool = False
    """The run was over, whatever its schedule says."""
    cursor: Cursor = field(default_factory=Cursor)
    """How far the training has come in its data. This and the next two are enough to go on without the log."""
    next_id: int = 0
    """The first sample id that is free."""
    next_group: int = 0
    """The first group id that is free."""

    def write(self, folder: Path) -> None:
        (folder / RUN).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> RunState:
        fields = json.loads((folder / RUN).read_text())
        cursor = fields.get("cursor", {"issued": 0, "again": ()})
        read = {"position": Position(**fields["position"]), "cursor": Cursor(cursor["issued"], tuple(cursor["again"]))}
        return cls(**{**fields, **read})


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, latest first."""
    return sorted((p for p in folder.glob("step_*") if re.fullmatch(r"step_\d+", p.name)), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))
