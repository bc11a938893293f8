"""The checkpoints of a run on its disk: where each lies, when it is complete, and which are kept.

    runs/NAME/checkpoints/step_000012/run.json        `RunState`: step, policy versions, position in the log
    runs/NAME/checkpoints/step_000012/GROUP/...       model, optimizer and random states of each group that has any
    runs/NAME/checkpoints/step_000012/manifest.json   sizes and checksums of all of it; a folder of this name is complete

`saving.py` writes them while the run goes on, and `resume.py` goes on from one.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

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

# Run state
#
# RunState: what the driver knows at a checkpoint, as it is written beside the states of the worker
# groups.
#
# Rows in flight are in the buffer, and the checkpoint names a position in its log. To resume is to
# load the models and to take the log back to that position.


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
        read = {
            "position": Position(**fields["position"]),
            "cursor": Cursor(cursor["issued"], tuple(cursor["again"])),
        }
        return cls(**{**fields, **read})


MAX_NOT_EVALUATED = 4
"""Checkpoints that are kept beyond the latest until it is known whether they are the best."""
REPLACED = ".before_"
"""Prefix of a checkpoint that is being replaced by another one of the same step."""
Values = Callable[[str], Mapping[int, float]]
"""Metric -> step -> its value."""


class CheckpointConfig(Config):
    """When a run saves what it needs to go on, and what it keeps of that."""

    every: int = Field(default=0, ge=0)
    """[steps] How many there are from one checkpoint to the next; another one is written after the last step. 0: none, unless `every_s`
    or `best` is given. Lower it where a crash may cost less, raise it where `checkpoint_pause_s` shows."""
    every_s: float | None = Field(default=None, gt=0)
    """[s] Time from one checkpoint to the next, which is that of the step that is under way then, and of the last step; None: by steps
    alone. With `every` whichever comes first. Set it where steps take very different times."""
    keep: int = Field(default=2, ge=1)
    """[checkpoints] How many of the latest are kept. Raise it to be able to go further back, lower it where the disk is small."""
    best: str | None = None
    """A metric, such as "eval/pass@1": the checkpoint of the step at which it was largest is kept too, whatever `keep` says. With a "-"
    in front, smallest. Each step that its evaluation evaluates has a checkpoint, besides those of `every` and `every_s`. Set it where the
    last model need not be the best."""
    copy_to: str | None = None
    """An address, such as "s3://bucket/runs" or "gs://bucket/runs", or a path. Each checkpoint is copied to a folder of the run's name
    there, in the background, with what is needed to go on from it on another machine. `resume="latest"` looks there if there is no
    checkpoint of the run under `root`. Credentials come from the environment. Set it where a machine may be lost with its disk."""

    @property
    def writes(self) -> bool:
        """Whether the run writes checkpoints at all."""
        return bool(self.every or self.every_s or self.best)

    @property
    def best_source(self) -> str:
        """The evaluation, or the worker group, whose metric `best` is; empty: there is none, or it is the run's own."""
        return (self.best or "").removeprefix("-").rpartition("/")[0].partition("/")[0]


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint that is kept because a metric was best at its step."""

    path: Path
    metric: str
    value: float

    def __str__(self) -> str:
        return f"{self.path} ({self.metric} {self.value:.4g})"


def has_state(handle: Handle) -> bool:
    """Whether the workers of a group have a state of their own, which checkpoints save."""
    return dispatch_of(handle.worker_class, "save_checkpoint") is Dispatch.ONE_TO_ALL


class CheckpointFolder:
    """The folder `checkpoints/` of one run.

    Args:
        run: the directory of the run.
        config: which checkpoints are kept.
        on_complete: called in another thread with the step of each checkpoint that is complete.
    """

    def __init__(
        self,
        run: RunDirectory,
        config: CheckpointConfig,
        on_complete: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._on_complete = on_complete
        self.path = run.path / CHECKPOINTS
        self.later = run.path / f"{CHECKPOINTS}.later"
        """Folder for later checkpoints after a resume from an earlier step."""
        self._run = run
        self._config = config

    def path_of(self, step: int) -> Path:
        """Where the complete checkpoint of a step lies."""
        return self.path / f"step_{step:06d}"

    def unfinished(self, step: int) -> Path:
        """Where the checkpoint of a step is written until it is complete: a folder that no other start of the run uses."""
        path = self.path_of(step)
        return path.with_name(f".{path.name}.start_{self._run.starts}")

    def begin(self, state: RunState) -> Path:
        """Make the folder of an unfinished checkpoint, with the state of the driver in it.

        Args:
            state: of the driver at the end of the step that is saved.

        Returns:
            The folder, in which each group makes a folder named after itself.

        Raises:
            OSError: the disk is full, say. To begin again is allowed.
        """
        path = self.unfinished(state.step)
        shutil.rmtree(path, ignore_errors=True)
        make_folder(self.path)
        make_folder(path)
        state.write(path)
        return path

    def complete(self, step: int, values: Values, advance: Callable[[], None]) -> None:
        """Give an unfinished checkpoint, whose files are all on the disk, its manifest and its name; remove those not kept.

        Args:
            step: of the checkpoint.
            values: metric -> step -> its value, for the best checkpoint.
            advance: called after each piece of a file that is read for the manifest.

        Raises:
            TakenOverError: another driver goes on with the run.
            OSError: the disk is full, say.
        """
        path, unfinished = self.path_of(step), self.unfinished(step)
        write_manifest(unfinished, advance=advance)
        self._run.check(sure=True)
        replaced = path.with_name(f"{REPLACED}{path.name}")
        if path.exists():  # the run was ended twice within a step
            path.rename(replaced)
        unfinished.rename(path)
        Disk().sync_folder(self.path)
        if replaced.exists():
            remove(replaced)
        self._remove_replaced(step)
        self.prune(values)
        self._on_complete(step)

    def discard(self, step: int) -> None:
        """Remove an unfinished checkpoint."""
        shutil.rmtree(self.unfinished(step), ignore_errors=True)

    def sizes(self, step: int) -> dict[Path, int]:
        """Bytes of each file of an unfinished checkpoint; empty while it is being renamed."""
        try:
            return {
                path: path.stat().st_size for path in self.unfinished(step).rglob("*") if path.is_file()
            }
        except OSError:
            return {}

    @property
    def positions(self) -> list[Position]:
        """Positions in the log of the buffer that complete checkpoints refer to."""
        found: list[Position] = []
        for path in complete_checkpoints(self.path):
            with suppress(OSError, ValueError, LookupError, TypeError):  # damaged: nobody goes back to it
                found.append(RunState.read(path).position)
        return found

    def forget_after(self, step: int) -> list[Path]:
        """Move the checkpoints of later steps to `checkpoints.later`, and remove unfinished ones. The run deletes a moved checkpoint when
        it has written the same step again, so a resume by mistake loses nothing.

        Returns:
            The new paths of the moved checkpoints.
        """
        for path in [*self.path.glob(".step_*"), *self.path.glob(f"{REPLACED}*")]:
            _remove(path)
        later = [path for path in complete_checkpoints(self.path) if step_of(path) > step]
        if later:
            make_folder(self.later)
        return [self._set_later_aside(path) for path in later]

    def _set_later_aside(self, path: Path) -> Path:
        aside = self.later / path.name
        if aside.exists():
            set_aside(aside, "before")
        return path.rename(aside)

    def _remove_replaced(self, step: int) -> None:
        """Remove the later checkpoints of this step and of earlier steps from `checkpoints.later`."""
        for path in self.later.glob("step_*"):
            if (name := re.match(r"step_(\d+)", path.name)) and int(name[1]) <= step:
                _remove(path)
        with suppress(OSError):  # there is no such folder, or later ones are in it
            self.later.rmdir()

    def prune(self, values: Values) -> None:
        """Remove the checkpoints that are not kept.

        Args:
            values: metric -> step -> its value.

        Raises:
            TakenOverError: another driver goes on with the run.
        """
        self._run.check(sure=True)
        present = complete_checkpoints(self.path)
        best = self.best(values)
        keep = {
            *present[: self._config.keep],
            *self._not_evaluated(present, values),
            *([best.path] if best else []),
        }
        for path in present:
            if path not in keep:
                _remove(path)

    def best(self, values: Values) -> BestCheckpoint | None:
        """The complete checkpoint that `CheckpointConfig.best` names; None: it names none, or no step that has one was measured.

        Args:
            values: metric -> step -> its value.
        """
        if not self._config.best:
            return None
        name = self._config.best.removeprefix("-")
        sign = -1 if self._config.best.startswith("-") else 1
        of_step = values(name)
        known = {p: of_step.get(step_of(p), math.nan) for p in complete_checkpoints(self.path)}
        known = {path: value for path, value in known.items() if math.isfinite(value)}
        path = max(known, key=lambda path: sign * known[path], default=None)
        return None if path is None else BestCheckpoint(path, name, known[path])

    def _not_evaluated(self, present: Sequence[Path], values: Values) -> list[Path]:
        """Checkpoints of steps that may still be evaluated, where evaluations come late; not more than MAX_NOT_EVALUATED."""
        of_step = values((self._config.best or "").removeprefix("-"))
        return [path for path in present if of_step and step_of(path) > max(of_step)][:MAX_NOT_EVALUATED]


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, latest first."""
    return sorted(
        (p for p in folder.glob("step_*") if re.fullmatch(r"step_\d+", p.name)), key=step_of, reverse=True
    )


def restore_replaced(folder: Path) -> None:
    """Give a checkpoint its name back whose replacement was interrupted."""
    for replaced in folder.glob(f"{REPLACED}*"):
        path = replaced.with_name(replaced.name.removeprefix(REPLACED))
        if not path.exists():
            replaced.rename(path)


def has_checkpoints(run: Path) -> bool:
    """Whether a run has a complete checkpoint, or one that was being replaced."""
    return bool(complete_checkpoints(run / CHECKPOINTS)) or any((run / CHECKPOINTS).glob(f"{REPLACED}*"))


def _remove(path: Path) -> None:
    """Remove a checkpoint, or set it aside where this user may not look into it."""
    try:
        remove(path)
    except PermissionError:
        set_aside(path, "closed")


def step_of(path: Path) -> int:
    """The step whose checkpoint lies in a folder `step_N`."""
    return int(path.name.removeprefix("step_"))
