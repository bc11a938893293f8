"""RunState: what the driver knows at a checkpoint, as it is written beside the states of the worker groups.

Rows in flight are in the buffer, and the checkpoint names a position in its log. To resume is to load the models and to take the log
back to that position.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ...dataflow.buffer.log import Position
from ...dataflow.safe_files import read_json
from ..cursor import Cursor

RUN = "run.json"


@dataclass(frozen=True)
class RunState:
    """State of the driver between two updates."""

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
    """The training's place in its data. This field and the next two are enough to resume without the log."""
    next_id: int = 0
    """The first sample id that is free."""
    next_group: int = 0
    """The first group id that is free."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of the run, as `changed_settings.py` records them. Empty in a checkpoint of an older version of Weft."""

    def write(self, folder: Path) -> None:
        """Write it into the folder of a checkpoint."""
        (folder / RUN).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> RunState:
        """Read the state that `write` left in the folder of a checkpoint; states written by earlier versions of Weft are read too."""
        fields = read_json(folder / RUN)
        cursor = fields.get("cursor", {"issued": 0, "again": ()})
        read = {"position": Position(**fields["position"]), "cursor": Cursor(cursor["issued"], tuple(cursor["again"]))}
        return cls(**{**fields, **read})
