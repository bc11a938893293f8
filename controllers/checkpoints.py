"""Checkpoints: what a run needs to go on where it was, written while it goes on, and found again.

    runs/NAME/checkpoints/step_000012/run.json        step, policy versions, place in the log
    runs/NAME/checkpoints/step_000012/GROUP/...       model, optimizer and random states of each group that has any
    runs/NAME/checkpoints/step_000012/manifest.json   sizes and checksums of all of it; a folder under this name is whole

Rows in flight are in the buffer, whose log the checkpoint names a position of: to resume is to load the models, and to take
the log back to there.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from pydantic import Field

from ..dataflow.buffer import restore
from ..dataflow.config import Config
from ..dataflow.errors import UserError
from ..dataflow.log import Position
from ..dataflow.manifest import verify, write_manifest
from ..workers.dispatch import Dispatch
from ..workers.remote import dispatch_of
from .group import Call, WorkerGroup

FOLDER = "checkpoints"
RUN = "run.json"
POLL_S = 0.5


class CheckpointConfig(Config):
    """When a run saves what it needs to go on, and what it keeps of that."""

    every: int = Field(default=0, ge=0)
    """Steps from one checkpoint to the next, and one after the last step; 0: none."""
    keep: int = Field(default=2, ge=1)
    """Latest checkpoints that are kept."""
    best: str | None = None
    """A metric, such as "eval/reward/mean": the checkpoint of the step at which it was largest is kept too. With a "-" in front,
    smallest."""


@dataclass(frozen=True)
class RunState:
    """What the driver itself knows at the end of a step."""

    step: int
    seed: int
    time_s: float
    """Seconds since the run was started, those of earlier starts among them."""
    versions: Mapping[str, int]
    """Group -> policy version of its weights."""
    position: Position
    """In the buffer's log."""

    def write(self, folder: Path) -> None:
        (folder / RUN).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> RunState:
        found = json.loads((folder / RUN).read_text())
        return cls(**{**found, "position": Position(**found["position"])})


class _Ending:
    """Between a signal and the run that it is to end."""

    runs = 0
    """Runs of this process that can save themselves."""
    asked = False


def ask_to_end() -> bool:
    """Have the run that goes on write a checkpoint and leave; False when there is none that could, or it was asked already."""
    if _Ending.asked or not _Ending.runs:
        return False
    _Ending.asked = True
    return True


@contextmanager
def can_be_ended(able: bool) -> Iterator[Callable[[], bool]]:
    """While a run goes on: whether it was asked to end."""
    _Ending.runs += able
    try:
        yield lambda: _Ending.asked
    finally:
        _Ending.runs -= able
        _Ending.asked = False


def has_state(group: WorkerGroup) -> bool:
    """Whether the workers of a group know what no other could tell them."""
    return dispatch_of(group.handle.worker_class, "save_checkpoint") is Dispatch.ONE_TO_ALL


class Hands(Protocol):
    """What the driver does for it."""

    def watch(self, call: Call, then: Callable[[Call], None]) -> None: ...


class Checkpoints:
    """The checkpoints of one run. One is written at a time: one that falls due meanwhile waits for it."""

    def __init__(self, run: Path, config: CheckpointConfig, hands: Hands) -> None:
        self.folder = run / FOLDER
        self.config = config
        self._hands = hands
        self._unfinished: tuple[Path, int] | None = None
        """Where the one that is being written will be, and its step."""
        self._copying: set[str] = set()
        self._writing: dict[str, WorkerGroup] = {}
        """Groups that have not said that their part is on the disk."""
        self._asked = 0.0
        self.pause_s = 0.0
        """Longest that a group was kept from training by the last one."""

    def is_due(self, step: int, last: bool) -> bool:
        return bool(self.config.every) and step > 0 and (last or step % self.config.every == 0)

    @property
    def under_way(self) -> bool:
        return self._unfinished is not None

    def begin(self, state: RunState, groups: Sequence[WorkerGroup]) -> None:
        """Have each of these groups copy its state, and write it in the background."""
        assert not self.under_way
        path = self.folder / f"step_{state.step:06d}"
        unfinished = _unfinished(path)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        state.write(unfinished)
        self._unfinished = path, state.step
        self.pause_s = self._asked = 0.0
        for group in groups:
            self._copying.add(group.name)
            self._writing[group.name] = group
            self._hands.watch(group.call("save_checkpoint", path=unfinished / group.name), self._copied)

    def _copied(self, call: Call) -> None:
        self._copying.discard(call.group.name)
        self.pause_s = max(self.pause_s, *call.results)

    def poll(self, *, wait: bool = False) -> None:
        """Ask those who are still writing and have nothing else to do whether it is done, twice a second at most."""
        now = time.monotonic()
        if self._copying or not (wait or now - self._asked > POLL_S):
            return
        self._asked = now
        for group in self._writing.values():
            if not group.busy:
                self._hands.watch(group.call("checkpoint_written", wait=wait), self._answered)

    def _answered(self, call: Call) -> None:
        if all(call.results):
            self._writing.pop(call.group.name, None)

    def complete(self, metrics: Sequence[Mapping[str, float]]) -> Path | None:
        """Give it its name when everybody has written, and let go of those that are not to be kept."""
        if self._unfinished is None or self._writing:
            return None
        path, _ = self._unfinished
        self._unfinished = None
        write_manifest(_unfinished(path))
        shutil.rmtree(path, ignore_errors=True)  # of a run that was taken back to before it
        _unfinished(path).rename(path)
        self._prune(metrics)
        return path

    def _prune(self, metrics: Sequence[Mapping[str, float]]) -> None:
        found = checkpoints(self.folder)
        keep = {*found[: self.config.keep], self._best(found, metrics)}
        for path in found:
            if path not in keep:
                shutil.rmtree(path)

    def _best(self, found: Sequence[Path], metrics: Sequence[Mapping[str, float]]) -> Path | None:
        name = self.config.best or ""
        sign, name = (-1, name[1:]) if name.startswith("-") else (1, name)
        values = {int(row["step"]): sign * row[name] for row in metrics if name in row}
        known = {path: values[step_of(path)] for path in found if step_of(path) in values}
        return max(known, key=lambda path: known[path], default=None)


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}")


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, latest first."""
    return sorted((p for p in folder.glob("step_*") if p.is_dir()), reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


@dataclass(frozen=True)
class Found:
    """A sound checkpoint to go on from."""

    path: Path
    state: RunState
    damage: Sequence[str] = ()
    """What was wrong with later ones."""

    @property
    def run(self) -> Path:
        return self.path.parent.parent

    @property
    def groups(self) -> list[str]:
        """Worker groups whose state is in it."""
        return sorted(p.name for p in self.path.iterdir() if p.is_dir())


def latest_sound(run: Path) -> Found | None:
    """The latest checkpoint of a run whose files are all as they were written, and whose place is in the log."""
    damage: list[str] = []
    for path in checkpoints(run / FOLDER):
        if wrong := what_is_wrong(path):
            damage.append(f"{path}: {wrong}; the checkpoint before it is used")
        else:
            return Found(path, RunState.read(path), damage)
    if damage:
        raise UserError("no checkpoint of the run is sound: " + "; ".join(damage))
    return None


def what_is_wrong(path: Path) -> str:
    """Of a checkpoint, naming each damaged file; empty when it is sound."""
    if wrong := [str(one) for one in verify(path)]:
        return ", ".join(wrong)
    position = RunState.read(path).position
    buffer = path.parent.parent / "buffer"
    try:
        history = restore(buffer, at=position)
    except (UserError, RuntimeError, OSError) as error:
        return f"its rows cannot be restored: {error}"
    return (
        "" if history.end == position else "; ".join(history.damage) or f"{buffer} ends before byte {position.offset}"
    )


def find(resume: str | Path, root: Path, name: str | None) -> Found | None:
    """Where to go on; None: a new run.

    Args:
        resume: "none"; "latest", of the run `name` (default: the newest run that has any); or the folder of a run, or of one
            of its checkpoints.

    A run `name` that has no checkpoint yet begins again with "latest"; what it left is moved aside.

    Raises:
        UserError: there is no such folder, or it is damaged.
    """
    if resume == "none":
        return None
    if resume == "latest":
        runs = [root / name] if name else sorted(root.glob("*"), key=lambda p: p.stat().st_mtime, reverse=True)
        for run in runs:
            if found := latest_sound(run.resolve()):
                return found
        if name and (root / name).exists():
            _move_aside(root / name)
        return None
    path = Path(resume).resolve()
    if path.parent.name == FOLDER and path.is_dir():
        if wrong := what_is_wrong(path):
            raise UserError(f"checkpoint {resume} is damaged: {wrong}")
        return Found(path, RunState.read(path))
    if found := latest_sound(path):
        return found
    raise UserError(f"resume={str(resume)!r} is neither a run that has a checkpoint, nor a checkpoint of one")


def _move_aside(run: Path) -> None:
    number = 1
    while (aside := run.with_name(f"{run.name}.begun-{number}")).exists():
        number += 1
    run.rename(aside)
