"""Checkpoints: what a run needs to go on where it was, written while it goes on, and found again.

    runs/NAME/checkpoints/step_000012/run.json        step, policy versions, place in the log
    runs/NAME/checkpoints/step_000012/GROUP/...       model, optimizer and random states of each group that has any
    runs/NAME/checkpoints/step_000012/manifest.json   sizes and checksums of all of it; a folder under this name is whole

Rows in flight are in the buffer, whose log the checkpoint names a position of: to resume is to load the models, and to take
the log back to there.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from pydantic import Field

from ...dataflow.buffer.disk import Disk, is_full, make_folder, remove, set_aside
from ...dataflow.buffer.log import LogReader, Position
from ...dataflow.buffer.manifest import verify, write_manifest
from ...dataflow.buffer.rows import Ids
from ...dataflow.buffer.sample_buffer import BUFFER, LOG, SEGMENTS, BufferConfig, SampleBuffer, restore
from ...dataflow.buffer.samples import FOLDER as SAMPLES
from ...dataflow.config import Config
from ...dataflow.errors import DeadlineError, RunError, UserError, nearest
from ...dataflow.graph import Graph
from ...dataflow.handle import Handle
from ...workers.dispatch import Dispatch
from ...workers.remote import dispatch_of
from ..backends.backend import Event, this_node
from ..graph_run import CURSOR, Cursor
from ..group import Call, WorkerGroup
from ..run_directory import RunDirectory, check_name, check_rights, hold, is_used
from .run_lock import RunLock

FOLDER = "checkpoints"
BEFORE = ".before_"
"""What the name of a checkpoint begins with that another one of the same step takes the place of."""
RUN = "run.json"
POLL_S = 0.5
LOOK_S = 5.0
"""Seconds between two looks at how far a checkpoint is."""
WITHOUT_ROWS = "resume='weights' goes on from models, optimizers and the place in the data, without the rows in flight"


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
    """Its kind: rows in flight are as old as it allows."""
    evaluated: Mapping[str, int] = field(default_factory=dict)
    """Evaluation -> the step at which it was made last."""
    stopped: bool = False
    """The run was over, whatever its schedule says."""
    cursor: Cursor = field(default_factory=Cursor)
    """How far the training has come in its data. This and the next two are what a run knows without its log."""
    next_id: int = 0
    """The first sample id that is free."""
    next_group: int = 0
    """The first group id that is free."""

    def write(self, folder: Path) -> None:
        (folder / RUN).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> RunState:
        found = json.loads((folder / RUN).read_text())
        cursor = found.get("cursor", {"issued": 0, "again": ()})
        read = {"position": Position(**found["position"]), "cursor": Cursor(cursor["issued"], tuple(cursor["again"]))}
        return cls(**{**found, **read})


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


def has_state(handle: Handle) -> bool:
    """Whether the workers of a group know what no other could tell them."""
    return dispatch_of(handle.worker_class, "save_checkpoint") is Dispatch.ONE_TO_ALL


def check_saved(
    config: CheckpointConfig, graphs: Sequence[Graph], handles: Mapping[str, Handle], found: Found | None
) -> None:
    """Everybody who is updated can be saved, and is in the checkpoint that the run goes on from.

    Raises:
        UserError: naming the group.
    """
    updated = {n.group for graph in graphs for n in graph.nodes if n.operation.updates and n.group}
    for name in sorted(updated if config.every else ()):
        if not has_state(handles[name]):
            raise UserError(
                f"CheckpointConfig(every={config.every}): worker group {name!r} is updated, but {handles[name].worker_class.__name__} "
                "has no method save_checkpoint (with checkpoint_written and load_checkpoint; dispatch ONE_TO_ALL)"
            )
    for name, handle in handles.items():
        if found is not None and has_state(handle) and name not in found.groups:
            raise UserError(
                f"{found.path} has nothing of worker group {name!r}; it has {', '.join(found.groups) or 'none'}"
            )


class Hands(Protocol):
    """What the driver does for it."""

    def watch(self, call: Call, then: Callable[[Call], None]) -> None: ...
    def complete(self, call: Call) -> None: ...


class Checkpoints:
    """The checkpoints of one run. One is written at a time: one that falls due meanwhile waits for it."""

    def __init__(self, run: RunDirectory, config: CheckpointConfig, hands: Hands, patience_s: float) -> None:
        self.folder = run.path / FOLDER
        self._run = run
        self.config = config
        self._hands = hands
        self._path: Path | None = None
        """Where the one that is being written will be."""
        self._copying: set[str] = set()
        self._writing: dict[str, WorkerGroup] = {}
        """Groups that have not said that their part is on the disk."""
        self._naming: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        """Large files are read again there, and old ones removed, while the driver goes on."""
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
        self.no_room = ""
        """Why the latest could not be written; empty when it could."""
        self.pause_s = 0.0
        """Longest that a group was kept from training by the last one."""

    def is_due(self, step: int, last: bool) -> bool:
        return bool(self.config.every) and step > 0 and (last or bool(self.no_room) or step % self.config.every == 0)

    @property
    def under_way(self) -> bool:
        return self._path is not None

    def go_on_from(self, found: Found) -> None:
        """Let go of what was made after it, which no log goes with any more, and of what was never finished."""
        self.saved_step = found.state.step
        for path in [*checkpoints(self.folder), *self.folder.glob(".step_*"), *self.folder.glob(f"{BEFORE}*")]:
            if path.name.startswith(".") or step_of(path) > found.state.step:
                remove(path)

    def begin(self, state: RunState, groups: Sequence[WorkerGroup]) -> None:
        """Have each of these groups copy its state, and write it in the background."""
        assert not self.under_way
        path = self.folder / f"step_{state.step:06d}"
        unfinished = self._unfinished(path)
        shutil.rmtree(unfinished, ignore_errors=True)
        make_folder(self.folder)
        make_folder(unfinished)
        state.write(unfinished)
        self._path, self.no_room = path, ""
        self.saved_step = state.step
        self.pause_s = self._asked = 0.0
        self._looked = self._moved = time.monotonic()
        for group in groups:
            self._copying.add(group.name)
            self._writing[group.name] = group
            self._hands.watch(group.call("save_checkpoint", path=unfinished / group.name), self._copied)

    def _copied(self, call: Call) -> None:
        self._copying.discard(call.group.name)
        self.pause_s = max([self.pause_s, *call.results])

    def poll(self) -> None:
        """Ask those who are still writing and have nothing else to do whether it is done, twice a second at most.

        Raises:
            DeadlineError: nothing more was written for too long; the message says who was waited for.
        """
        now = time.monotonic()
        self._look(now)
        if self._copying or now - self._asked < POLL_S:
            return
        self._asked = now
        for group in self._writing.values():
            if not group.busy:
                self._hands.watch(group.call("checkpoint_written"), self._answered)

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

    def _answered(self, call: Call) -> None:
        if all(call.results):
            self._writing.pop(call.group.name, None)

    def failed(self, event: Event) -> bool:
        """See to a rank that could not write its part; False: it was not for want of room."""
        call, failure = event.call, event.reply.failure
        own = call.method in ("save_checkpoint", "checkpoint_written") and call.group.name in self._writing
        if failure is None or not failure.disk_full or not own:
            return False
        self.no_room = f"{call.describe(event.rank)}: {failure.message}"
        call.lose(event.rank)
        if call.done:
            self._hands.complete(call)
        return True

    def complete(self, values: Callable[[str], Mapping[int, float]]) -> None:
        """Give it its name when everybody has written, and let go of those that are not to be kept. One for which the disk
        has no room is given up, and `no_room` says so until the next is begun.

        Args:
            values: step -> a metric of this name; called in another thread.

        Raises:
            RunError: it could not be completed.
        """
        if self._path is None or self._writing:
            return
        if self._naming is None and not self.no_room:
            self._naming = self._thread.submit(self._name, self._path, values)
        if self._naming is not None:
            if not self._naming.done():
                return
            error, self._naming = self._naming.exception(), None
            if isinstance(error, RunError):  # another driver has taken the run over
                raise error
            if error is not None and not is_full(error):
                raise RunError(f"checkpoint {self._path} could not be completed: {error}") from error
            self.no_room = str(error or "")
        if self.no_room:
            shutil.rmtree(self._unfinished(self._path), ignore_errors=True)
            self.saved_step = -1
        self._path = None

    def _name(self, path: Path, values: Callable[[str], Mapping[int, float]]) -> None:
        write_manifest(self._unfinished(path), advance=self._has_hashed)
        self._run.check(sure=True)
        before = path.with_name(f"{BEFORE}{path.name}")
        if path.exists():  # of a run that was ended twice within a step
            path.rename(before)
        self._unfinished(path).rename(path)
        Disk().sync_folder(self.folder)
        if before.exists():
            remove(before)
        self._prune(values)

    def _has_hashed(self) -> None:
        self._hashed += 1

    def _unfinished(self, path: Path) -> Path:
        """Where a checkpoint is written until it is whole: in a folder that no driver before or after this one has."""
        return path.with_name(f".{path.name}.start_{self._run.starts}")

    def _prune(self, values: Callable[[str], Mapping[int, float]]) -> None:
        self._run.check(sure=True)
        found = checkpoints(self.folder)
        keep = {*found[: self.config.keep], self._best(found, values)}
        for path in found:
            if path not in keep:
                remove(path)

    def _best(self, found: Sequence[Path], values: Callable[[str], Mapping[int, float]]) -> Path | None:
        name = self.config.best or ""
        sign, name = (-1, name[1:]) if name.startswith("-") else (1, name)
        of_step = values(name) if name else {}
        known = {path: sign * of_step.get(step_of(path), math.nan) for path in found}
        known = {path: value for path, value in known.items() if math.isfinite(value)}
        return max(known, key=lambda path: known[path], default=None)

    def close(self) -> None:
        """Wait for what is being named, as long as for anything."""
        if self._naming is not None:
            wait([self._naming], timeout=self._patience_s)
        self._thread.shutdown(wait=False, cancel_futures=True)


def _sizes(folder: Path) -> dict[Path, int]:
    """Sizes of the files below a folder; none when it gets its name at this moment."""
    try:
        return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    except OSError:
        return {}


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, latest first."""
    return sorted((p for p in folder.glob("step_*") if re.fullmatch(r"step_\d+", p.name)), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


@dataclass(frozen=True)
class Found:
    """A sound checkpoint to go on from."""

    path: Path
    state: RunState
    damage: Sequence[str] = ()
    """What was wrong with later ones."""
    with_rows: bool = True
    """The run goes on with the rows that were in flight; else with the weights and the place in the data alone."""

    @property
    def run(self) -> Path:
        return self.path.parent.parent

    def reopen(self, lock: RunLock) -> RunDirectory:
        """The directory of the run as it was then, which this process holds."""
        directory = RunDirectory.reopen(self.run, self.state.step, self.state.time_s, self.state.position, lock)
        directory.origin = f"goes on after step {self.state.step}, from {self.path}"
        if not self.with_rows:
            directory.origin += f", with weights alone: {self.given_up}"
            for name in (BUFFER, SAMPLES):  # which samples count, the log said
                if (self.run / name).exists():
                    aside = set_aside(self.run / name, "given-up")
                    shutil.rmtree(aside / SEGMENTS, ignore_errors=True)
                    directory.origin += f"; {name} is in {aside.name}"
            directory.notes.append(directory.origin)
        return directory

    @property
    def given_up(self) -> str:
        """What is lost when the rows in flight are."""
        again = len(self.state.cursor.again)
        return (
            f"the log is given up, and what was generated for the {again} prompts in flight, which are issued again; "
            "rows that were finished before are proven no more"
        )

    @property
    def groups(self) -> list[str]:
        """Worker groups whose state is in it."""
        return sorted(p.name for p in self.path.iterdir() if p.is_dir())


def latest_sound(run: Path, *, with_rows: bool = True) -> Found | None:
    """The latest checkpoint of a run whose files are all as they were written, and whose place is in the log.

    Args:
        with_rows: False asks nothing of the log.

    Raises:
        UserError: there are checkpoints, and none is sound.
    """
    for before in (run / FOLDER).glob(f"{BEFORE}*"):  # it was ended while one took the place of another
        path = before.with_name(before.name.removeprefix(BEFORE))
        if not path.exists():
            before.rename(path)
    damage: list[str] = []
    weights_are_sound = False
    for path in checkpoints(run / FOLDER):
        wrong = _damaged_files(path)
        weights_are_sound |= not wrong
        if wrong := wrong or (_lost_rows(path) if with_rows else ""):
            damage.append(f"{path}: {wrong}")
        else:
            state = RunState.read(path)
            passed_over = [f"{one}; the checkpoint before it is used" for one in damage]
            before = _wrong_before(state.position, run / BUFFER / LOG) if with_rows else []
            return Found(path, state, [*passed_over, *before], with_rows)
    if damage:
        hint = f". {WITHOUT_ROWS}" if weights_are_sound else ""
        raise UserError("no checkpoint of the run is sound: " + "; ".join(damage) + hint)
    return None


def what_is_wrong(path: Path) -> str:
    """Of a checkpoint, naming each damaged file; empty when it is sound."""
    return _damaged_files(path) or _lost_rows(path)


def _damaged_files(path: Path) -> str:
    return ", ".join(str(one) for one in verify(path))


def _lost_rows(path: Path) -> str:
    """Why the rows that were in flight at a checkpoint are not known any more; empty when they are."""
    position = RunState.read(path).position
    buffer = path.parent.parent / BUFFER
    try:
        history = restore(buffer, at=position)
    except (UserError, RuntimeError, OSError) as error:
        return f"its rows cannot be restored: {error}"
    return (
        "" if history.end == position else "; ".join(history.damage) or f"{buffer} ends before byte {position.offset}"
    )


def _wrong_before(position: Position, log: Path) -> list[str]:
    """What is wrong with a log before a position at which the rows are known all the same: from a checkpoint of the ledgers."""
    reader = LogReader(log)
    for _ in reader:
        if reader.end.offset >= position.offset:
            return []
    return [
        f"{reader.damage}; the rows are known without it, but `weft buffer check` proves nothing of this run any more"
    ]


def open_run(
    resume: str | Path, root: Path, name: str | None, accept: Callable[[Found | None], None]
) -> tuple[RunDirectory, Found | None]:
    """Hold the run that a driver is to do: one that goes on from a checkpoint, or a new one (None). Its directory notes why.

    Args:
        resume: "none"; "latest", of the run `name` (default: the newest run that has any); "weights", the same without its rows in
            flight; or the folder of a run, or of one of its checkpoints.
        accept: raises UserError when what was found is of another kind.

    Raises:
        UserError: another driver holds the run, there is no such folder, or it is damaged.
    """
    if name is not None:
        check_name(name, "name")
        check_rights(root.resolve() / name)
    run, looked = _where(resume, root, name)
    if run is not None:
        check_rights(run)
        lock = hold(run)
        try:
            at = Path(resume)
            found = _at(at, run) if is_checkpoint(at) else latest_sound(run, with_rows=resume != "weights")
            accept(found)
            if found is not None:
                return found.reopen(lock), found
        except BaseException:
            lock.give_back()
            raise
        lock.give_back()
    accept(None)
    directory = RunDirectory.create(root, name, aside=resume == "latest")
    if looked:
        directory.origin = f"{looked}; the run begins with step 1"
        directory.notes.insert(0, directory.origin)
    return directory, None


def open_buffer(
    run: RunDirectory,
    found: Found | None,
    graphs: Mapping[str, Graph],
    *,
    config: BufferConfig,
    clock: Callable[[], float],
) -> SampleBuffer:
    """The sample buffer of a run: a new one, or as it was at a checkpoint, or, with weights alone, one that begins at its place in
    the data."""
    folder = run.path / BUFFER
    if found is not None and found.with_rows:
        at = found.state.position
        return SampleBuffer.recover(folder, graphs, config=config, node=this_node(), at=at, clock=clock, fence=run.lock)
    ids = None if found is None else Ids(found.state.next_id, found.state.next_group)
    buffer = SampleBuffer.create(folder, graphs, config=config, node=this_node(), clock=clock, fence=run.lock, ids=ids)
    if found is not None:
        buffer.note(CURSOR, asdict(found.state.cursor))
        buffer.note("step", found.state.step)
    return buffer


def is_checkpoint(path: Path) -> bool:
    """Whether it is the folder of one checkpoint of a run."""
    return path.resolve().parent.name == FOLDER and path.is_dir()


def _where(resume: str | Path, root: Path, name: str | None) -> tuple[Path | None, str]:
    """The run to go on with, if there is one; else what was looked for, and what there is."""
    if resume == "none":
        return None, ""
    if resume in ("latest", "weights"):
        run, looked = _latest_run(root.resolve(), name, str(resume))
        if run is None and resume == "weights":
            raise UserError(looked)
        return run, looked
    path = Path(resume).resolve()
    run = path.parent.parent if is_checkpoint(path) else path
    if not has_checkpoints(run):
        there = _checkpointed(run.parent)
        raise UserError(
            f"resume={str(resume)!r} is neither a run that has a checkpoint, nor a checkpoint of one"
            f"{nearest(run.name, [*(p.name for p in there), 'latest', 'weights', 'none'])}"
        )
    if name not in (None, run.name):
        raise UserError(f"resume={str(resume)!r} is of the run {run.name!r}, not of {name!r}")
    return run, ""


def _latest_run(root: Path, name: str | None, resume: str) -> tuple[Path | None, str]:
    there = _checkpointed(root)
    if name is None:
        return next(iter(there), None), f"resume={resume!r}: no run in {root} has a checkpoint"
    run = root / name
    if has_checkpoints(run):
        return run, ""
    others = ", ".join(f"{p.name!r} (step {step_of(checkpoints(p / FOLDER)[0])})" for p in there[:5])
    known = f"; checkpoints are in {others}" if others else "; no run there has one"
    if (run / FOLDER).exists() and not (run / FOLDER).is_dir():
        return (
            None,
            f"damaged: resume={resume!r}: {run / FOLDER} is not a folder, so nothing can be gone on from{known}",
        )
    what = "there is no checkpoint of run" if is_used(run) else "there is no run"
    return None, f"resume={resume!r}: {what} {name!r} in {root}{nearest(name, [p.name for p in there])}{known}"


def has_checkpoints(run: Path) -> bool:
    return bool(checkpoints(run / FOLDER)) or any((run / FOLDER).glob(f"{BEFORE}*"))


def _checkpointed(root: Path) -> list[Path]:
    """Runs that have checkpoints, newest first."""
    runs = [p for p in root.glob("*") if p.is_dir() and has_checkpoints(p)]
    return sorted(runs, key=lambda p: p.stat().st_mtime, reverse=True)


def _at(path: Path, run: Path) -> Found:
    """Find one checkpoint, which the user named."""
    path = run / FOLDER / path.resolve().name
    if wrong := what_is_wrong(path):
        raise UserError(f"checkpoint {path} is damaged: {wrong}")
    state = RunState.read(path)
    return Found(path, state, _wrong_before(state.position, run / BUFFER / LOG))
