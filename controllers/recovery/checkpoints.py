"""Checkpoints of a run on its disk: their paths, when they are complete, and which are kept.

    runs/NAME/checkpoints/step_000012/
        run.json        `RunState`: step, policy versions, position in the log
        forecasts.arrow forecasts of response lengths (`../forecast.py`)
        prompts.arrow   `PromptQueue`: solve rates, queues and retired prompts of a curriculum
        GROUP/...       model, optimizer and random states of each group with state
        manifest.json   sizes and checksums of all files

`saving.py` writes checkpoints, and `resume.py` resumes from one.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from ...dataflow.config import Config
from ...dataflow.graph import Handle
from ...dataflow.runs.directory import RunDirectory
from ...dataflow.runs.files import CHECKPOINTS, Disk, make_folder, remove, set_aside
from ...dataflow.runs.log import Position
from ...dataflow.runs.manifest import write_manifest
from ...dataflow.safe_files import read_json
from ...dataflow.source import Cursor
from ...workers.dispatch import Dispatch
from ...workers.worker import dispatch_of

# The driver's state at a checkpoint. Rows in flight stay in the buffer; the checkpoint has a
# position in the buffer's log. Resuming loads the models, and takes the log back to that position.


RUN = "run.json"


@dataclass(frozen=True)
class RunState:
    """State of the driver between two updates."""

    step: int
    seed: int
    time_s: float
    """[s] Time of the run so far, including earlier starts."""
    versions: Mapping[str, int]
    """Group -> policy version of its weights."""
    position: Position
    """Position in the buffer's log."""
    schedule: str = ""
    """Kind of the schedule, which bounds the staleness of the rows in flight."""
    evaluated: Mapping[str, int] = field(default_factory=dict)
    """Evaluation -> latest evaluated step."""
    stopped: bool = False
    """Whether the run was stopped before the end of its schedule."""
    cursor: Cursor = field(default_factory=Cursor)
    """Place in the training data. With the next two fields, enough to resume without the log."""
    pending: tuple[int, ...] = ()
    """Source rows whose order in `rounds` is fixed, and that are not issued yet."""
    next_id: int = 0
    """First free sample id."""
    next_group: int = 0
    """First free group id."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of the run (`changed_settings.py`); empty in old checkpoints."""

    @classmethod
    def read(cls, folder: Path) -> RunState:
        """Read the state from a checkpoint's folder, even of an older version of Weft."""
        fields = read_json(folder / RUN)
        cursor = fields.get("cursor", {"issued": 0, "again": ()})
        read = {
            "position": Position(**fields["position"]),
            "cursor": Cursor(cursor["issued"], tuple(cursor["again"])),
            "pending": tuple(fields.get("pending", ())),
        }
        return cls(**{**fields, **read})


# Checkpoints

MAX_NOT_EVALUATED = 4
"""Maximum number of checkpoints to keep while their evaluations are not finished."""
REPLACED = ".before_"
"""Prefix of a checkpoint while a new one of the same step replaces it."""
Values = Callable[[str], Mapping[int, float]]
"""Function of a metric's name that returns step -> value."""


class CheckpointConfig(Config):
    """When to write checkpoints, and which ones to keep."""

    every: int = Field(default=0, ge=0)
    """[steps] Write a checkpoint after every n-th step, and after the last one. 0 disables this
    interval, but not `every_s` and `best`. Lower it to lose less work in a crash; raise it if
    `checkpoint_pause_s` is large."""
    every_s: float | None = Field(default=None, gt=0)
    """[s] Time between checkpoints. Weft writes each at the end of the current step, and one after
    the last step. None disables this interval. With `every`, whichever comes first triggers a
    checkpoint. Set it if step times vary a lot."""
    keep: int = Field(default=2, ge=1)
    """[checkpoints] Number of latest checkpoints to keep. Raise it to be able to resume from
    earlier steps; lower it on a small disk."""
    best: str | None = None
    """Metric, such as "eval/pass@1", of the best checkpoint, which Weft keeps in addition to the
    `keep` latest. The largest value wins; put "-" before the name to select the smallest. Each step
    with this evaluation also gets a checkpoint. Set it if the last model need not be the best."""
    copy_to: str | None = None
    """Path, or address such as "s3://bucket/runs" or "gs://bucket/runs". Weft copies each
    checkpoint in the background to a subfolder with the run's name; the run can resume from there
    on another machine. `resume="latest"` looks there if the run has no checkpoint in `root`.
    Credentials come from the environment. Set it if a machine and its disk can be lost."""

    @property
    def writes(self) -> bool:
        return bool(self.every or self.every_s or self.best)

    @property
    def best_source(self) -> str:
        """The evaluation or worker group of `best`; empty for none, or for a metric of the run."""
        return (self.best or "").removeprefix("-").rpartition("/")[0].partition("/")[0]


class _BestCheckpoint(NamedTuple):
    path: Path
    metric: str
    value: float

    def __str__(self) -> str:
        return f"{self.path} ({self.metric} {self.value:.4g})"


def has_state(handle: Handle) -> bool:
    return dispatch_of(handle.worker_class, "save_checkpoint") is Dispatch.ONE_TO_ALL


class CheckpointFolder:
    """The folder `checkpoints/` of one run. Calls `on_complete`, on another thread, with the step
    of each complete checkpoint."""

    def __init__(
        self,
        run: RunDirectory,
        config: CheckpointConfig,
        on_complete: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._run = run
        self._config = config
        self._on_complete = on_complete
        self.path = run.path / CHECKPOINTS
        self.later = run.path / f"{CHECKPOINTS}.later"

    def path_of(self, step: int) -> Path:
        return self.path / f"step_{step:06d}"

    def unfinished(self, step: int) -> Path:
        """Return the path of a step's unfinished checkpoint, unique to this start of the run."""
        path = self.path_of(step)
        return path.with_name(f".{path.name}.start_{self._run.starts}")

    def make_unfinished(self, state: RunState, write: Callable[[Path], None] = lambda _: None) -> Path:
        """Make the folder of an unfinished checkpoint, with the driver's state; `write` adds further
        files. Raises OSError if a write failed, for example on a full disk; the caller may try again."""
        path = self.unfinished(state.step)
        shutil.rmtree(path, ignore_errors=True)
        make_folder(self.path)
        make_folder(path)
        (path / RUN).write_text(json.dumps(asdict(state), indent=2) + "\n")
        write(path)
        return path

    def complete(self, step: int, values: Values, advance: Callable[[], None]) -> None:
        """Write the manifest of a checkpoint whose files are on the disk, rename the checkpoint,
        and remove old ones.

        Raises:
            TakenOverError: Another driver has taken over the run.
            OSError: A write failed, for example because the disk is full.
        """
        path, unfinished = self.path_of(step), self.unfinished(step)
        write_manifest(unfinished, advance=advance)
        # Another driver may have taken over the run meanwhile.
        self._run.check(sure=True)
        replaced = path.with_name(f"{REPLACED}{path.name}")
        if path.exists():  # the run was ended twice within this step
            path.rename(replaced)
        unfinished.rename(path)
        # The new name must survive a power failure before the old checkpoint is removed.
        Disk().sync_folder(self.path)
        if replaced.exists():
            remove(replaced)
        self._remove_replaced(step)
        self.prune(values)
        self._on_complete(step)

    def discard(self, step: int) -> None:
        shutil.rmtree(self.unfinished(step), ignore_errors=True)

    def sizes(self, step: int) -> dict[Path, int]:
        """Return path -> size [bytes] of an unfinished checkpoint's files; empty while renaming."""
        with suppress(OSError):
            return {p: p.stat().st_size for p in self.unfinished(step).rglob("*") if p.is_file()}
        return {}

    @property
    def positions(self) -> list[Position]:
        found: list[Position] = []
        for path in complete_checkpoints(self.path):
            with suppress(
                OSError, ValueError, LookupError, TypeError
            ):  # damaged: cannot be resumed from
                found.append(RunState.read(path).position)
        return found

    def forget_after(self, step: int) -> list[Path]:
        """Move later checkpoints to `checkpoints.later`, remove unfinished ones, and return the new
        paths.

        A moved checkpoint stays until the run has written its step again, so that a resume by
        mistake loses nothing.
        """
        for path in [*self.path.glob(".step_*"), *self.path.glob(f"{REPLACED}*")]:
            _remove(path)
        moved: list[Path] = []
        for path in complete_checkpoints(self.path):
            if step_of(path) <= step:
                continue
            make_folder(self.later)
            if (aside := self.later / path.name).exists():
                set_aside(aside, "before")
            moved.append(path.rename(aside))
        return moved

    def _remove_replaced(self, step: int) -> None:
        """Remove moved checkpoints up to this step from `checkpoints.later`."""
        for path in self.later.glob("step_*"):
            if (name := re.match(r"step_(\d+)", path.name)) and int(name[1]) <= step:
                _remove(path)
        with suppress(OSError):  # the folder does not exist, or has later checkpoints
            self.later.rmdir()

    def prune(self, values: Values) -> None:
        self._run.check(sure=True)
        present = complete_checkpoints(self.path)
        of_step = values((self._config.best or "").removeprefix("-"))
        not_evaluated = [path for path in present if of_step and step_of(path) > max(of_step)]
        best = self.best(values)
        keep = {
            *present[: self._config.keep],
            *not_evaluated[:MAX_NOT_EVALUATED],
            *([best.path] if best else []),
        }
        for path in present:
            if path not in keep:
                _remove(path)

    def best(self, values: Values) -> _BestCheckpoint | None:
        if not self._config.best:
            return None
        name = self._config.best.removeprefix("-")
        sign = -1 if self._config.best.startswith("-") else 1
        of_step = values(name)
        known = {p: of_step.get(step_of(p), math.nan) for p in complete_checkpoints(self.path)}
        known = {path: value for path, value in known.items() if math.isfinite(value)}
        path = max(known, key=lambda path: sign * known[path], default=None)
        return None if path is None else _BestCheckpoint(path, name, known[path])


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, latest first."""
    return sorted(
        (p for p in folder.glob("step_*") if re.fullmatch(r"step_\d+", p.name)),
        key=step_of,
        reverse=True,
    )


def restore_replaced(folder: Path) -> None:
    """Rename a checkpoint back if its replacement was interrupted."""
    for replaced in folder.glob(f"{REPLACED}*"):
        path = replaced.with_name(replaced.name.removeprefix(REPLACED))
        if not path.exists():
            replaced.rename(path)


def has_checkpoints(run: Path) -> bool:
    """Return whether a run has a complete checkpoint, or one that was being replaced."""
    return bool(complete_checkpoints(run / CHECKPOINTS)) or any((run / CHECKPOINTS).glob(f"{REPLACED}*"))


def _remove(path: Path) -> None:
    """Remove a checkpoint, or set it aside if that is not permitted."""
    try:
        remove(path)
    except PermissionError:
        set_aside(path, "closed")


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))
