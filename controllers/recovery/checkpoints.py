"""Checkpoints: a run writes what it needs to go on, while it goes on.

    copying ──every group has copied its state──> writing ──every group's part is on the disk──> naming ──> complete
       └──────────── the disk is full ────────────────┴────────────────────────────────────────────┴──> given up

`run_state.py` says what is in a checkpoint, `resume.py` finds one and goes on from it.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from pydantic import Field

from ...dataflow.buffer.disk import Disk, is_full, make_folder, remove
from ...dataflow.buffer.manifest import write_manifest
from ...dataflow.config import Config
from ...dataflow.errors import DeadlineError, RunError
from ...dataflow.handle import Handle
from ...workers.dispatch import Dispatch
from ...workers.remote import dispatch_of
from ..backends.backend import Event
from ..group import Call, WorkerGroup
from ..request import Request
from ..run_directory import RunDirectory
from .run_state import BEFORE, FOLDER, RunState, checkpoints, step_of

POLL_S = 0.5
"""Seconds between two questions to a group whether its part is on the disk."""
LOOK_S = 5.0
"""Seconds between two looks at how far a checkpoint is."""


class CheckpointConfig(Config):
    """When a run saves what it needs to go on, and what it keeps of that."""

    every: int = Field(default=0, ge=0)
    """Steps from one checkpoint to the next; another one is written after the last step. 0: none."""
    keep: int = Field(default=2, ge=1)
    """Latest checkpoints that are kept."""
    best: str | None = None
    """A metric, such as "eval/reward/mean": the checkpoint of the step at which it was largest is kept too. With a "-" in front,
    smallest."""


def has_state(handle: Handle) -> bool:
    """Whether the workers of a group have a state of their own, which checkpoints save."""
    return dispatch_of(handle.worker_class, "save_checkpoint") is Dispatch.ONE_TO_ALL


class Checkpoints:
    """The checkpoints of one run. One is written at a time.

    Args:
        run: the directory of the run.
        config: when to write one, and which to keep.
        patience_s: how long a checkpoint may not grow.
    """

    def __init__(self, run: RunDirectory, config: CheckpointConfig, patience_s: float) -> None:
        self.folder = run.path / FOLDER
        self._run = run
        self.config = config
        self._path: Path | None = None
        """Where the one that is being written will be."""
        self._copying: set[str] = set()
        """Groups that have not copied their state."""
        self._writing: dict[str, WorkerGroup] = {}
        """Groups that have not said that their part is on the disk."""
        self._naming: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        """Reads large files again and removes old ones, while the driver goes on."""
        self._asked = 0.0
        self._patience_s = patience_s
        self._hashed = 0
        """Pieces of files that were read for the manifest."""
        self._looked = self._moved = 0.0
        """When it was last looked at, and when it had last grown."""
        self._extent: object = None
        """How far it was then: sizes of files, pieces that were read, groups that write."""
        self.saved_step = -1
        """Step of the latest that was begun."""
        self.full_disk = ""
        """Why the latest could not be written; empty when it could."""
        self._pause_s = 0.0
        """Longest time for which a group was kept from training by the last one."""

    def is_due(self, step: int, last: bool) -> bool:
        """Whether a checkpoint is to be written of a step that is over; `last`: no step comes after it."""
        return bool(self.config.every) and step > 0 and (last or bool(self.full_disk) or step % self.config.every == 0)

    @property
    def under_way(self) -> bool:
        """Whether one is being written."""
        return self._path is not None

    def resume_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, for which there is no log any more, and those that were never completed."""
        self.saved_step = step
        for path in [*checkpoints(self.folder), *self.folder.glob(".step_*"), *self.folder.glob(f"{BEFORE}*")]:
            if path.name.startswith(".") or step_of(path) > step:
                remove(path)

    def begin(self, state: RunState, groups: Sequence[WorkerGroup]) -> list[Request]:
        """Begin a checkpoint; each of these groups is to copy its state, and writes it in the background."""
        assert not self.under_way
        path = self.folder / f"step_{state.step:06d}"
        unfinished = self._unfinished(path)
        shutil.rmtree(unfinished, ignore_errors=True)
        make_folder(self.folder)
        make_folder(unfinished)
        state.write(unfinished)
        self._path, self.full_disk = path, ""
        self.saved_step = state.step
        self._pause_s = self._asked = 0.0
        self._looked = self._moved = time.monotonic()
        self._copying = {group.name for group in groups}
        self._writing = {group.name: group for group in groups}
        return [
            Request(group, "save_checkpoint", {"path": unfinished / group.name}, then=self._copied) for group in groups
        ]

    def _copied(self, call: Call) -> Iterable[Request]:
        self._copying.discard(call.group.name)
        self._pause_s = max([self._pause_s, *call.results])
        return ()

    def take_pause_s(self) -> float:
        """Seconds for which the last one kept a group from training, at most; 0 when that was asked before."""
        pause_s, self._pause_s = self._pause_s, 0.0
        return pause_s

    def poll(self) -> list[Request]:
        """Ask idle groups, at most every POLL_S, whether their part is on the disk.

        Raises:
            DeadlineError: nothing more was written for too long; the message says who was waited for.
        """
        now = time.monotonic()
        self._look(now)
        if self._copying or now - self._asked < POLL_S:
            return []
        self._asked = now
        return [Request(g, "checkpoint_written", then=self._answered) for g in self._writing.values() if not g.busy]

    def _look(self, now: float) -> None:
        """See whether the checkpoint grows, however long it takes."""
        if self._path is None or now - self._looked < min(LOOK_S, self._patience_s / 2):
            return
        paused, self._looked = now - self._looked > self._patience_s, now
        extent = (_sizes(self._unfinished(self._path)), self._hashed, {*self._writing})
        # Calls have a deadline of their own; and if nobody has looked for so long, the driver itself was waiting.
        if extent != self._extent or paused or self._copying:
            self._extent, self._moved = extent, now
        elif now - self._moved > self._patience_s:
            who = [f"{name}, which has not said that its part is on the disk" for name in self._writing]
            who = who or [
                "the driver's own thread, which reads the files again, names the checkpoint and removes old ones"
            ]
            raise DeadlineError(
                f"checkpoint {self._path}: nothing more was written for {self._patience_s:g} s (call_timeout_s). "
                f"Waited for: {'; '.join(who)}"
            )

    def _answered(self, call: Call) -> Iterable[Request]:
        if all(call.results):
            self._writing.pop(call.group.name, None)
        return ()

    def failed(self, event: Event) -> bool:
        """Take note of a rank that found the disk full when it wrote its part; False: the event is something else."""
        call, failure = event.call, event.reply.failure
        own = call.method in ("save_checkpoint", "checkpoint_written") and call.group.name in self._writing
        if failure is None or not failure.disk_full or not own:
            return False
        self.full_disk = f"{call.describe(event.rank)}: {failure.message}"
        call.lose(event.rank)
        return True

    def complete(self, values: Callable[[str], Mapping[int, float]]) -> bool:
        """Name the checkpoint when every group has written its part, and remove those that are not kept.

        Args:
            values: metric -> step -> its value; called in another thread.

        Returns:
            Whether the checkpoint was given up because the disk is full; `full_disk` says so until the next is begun.

        Raises:
            RunError: it could not be completed.
        """
        if self._path is None or self._writing:
            return False
        if self._naming is None and not self.full_disk:
            self._naming = self._thread.submit(self._name, self._path, values)
        if self._naming is not None:
            if not self._naming.done():
                return False
            error, self._naming = self._naming.exception(), None
            if isinstance(error, RunError):  # another driver has taken the run over
                raise error
            if error is not None and not is_full(error):
                raise RunError(f"checkpoint {self._path} could not be completed: {error}") from error
            self.full_disk = str(error or "")
        if self.full_disk:
            shutil.rmtree(self._unfinished(self._path), ignore_errors=True)
            self.saved_step = -1
        self._path = None
        return bool(self.full_disk)

    def _name(self, path: Path, values: Callable[[str], Mapping[int, float]]) -> None:
        write_manifest(self._unfinished(path), advance=self._has_hashed)
        self._run.check(sure=True)
        before = path.with_name(f"{BEFORE}{path.name}")
        if path.exists():  # the run was ended twice within a step
            path.rename(before)
        self._unfinished(path).rename(path)
        Disk().sync_folder(self.folder)
        if before.exists():
            remove(before)
        self._prune(values)

    def _has_hashed(self) -> None:
        self._hashed += 1

    def _unfinished(self, path: Path) -> Path:
        """Where a checkpoint is written until it is complete: in a folder that no other start of the run uses."""
        return path.with_name(f".{path.name}.start_{self._run.starts}")

    def _prune(self, values: Callable[[str], Mapping[int, float]]) -> None:
        self._run.check(sure=True)
        present = checkpoints(self.folder)
        keep = {*present[: self.config.keep], self._best(present, values)}
        for path in present:
            if path not in keep:
                remove(path)

    def _best(self, present: Sequence[Path], values: Callable[[str], Mapping[int, float]]) -> Path | None:
        name = self.config.best or ""
        sign, name = (-1, name[1:]) if name.startswith("-") else (1, name)
        of_step = values(name) if name else {}
        known = {path: sign * of_step.get(step_of(path), math.nan) for path in present}
        known = {path: value for path, value in known.items() if math.isfinite(value)}
        return max(known, key=lambda path: known[path], default=None)

    def close(self) -> None:
        """Wait, for at most `patience_s`, until the checkpoint that is being named has its name."""
        if self._naming is not None:
            wait([self._naming], timeout=self._patience_s)
        self._thread.shutdown(wait=False, cancel_futures=True)


def _sizes(folder: Path) -> dict[Path, int]:
    """Sizes of the files below a folder; none when it is being named."""
    try:
        return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    except OSError:
        return {}
