"""Resuming a run: find an intact checkpoint, lock the run, and reopen its directory and buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...dataflow.buffer.recovery import checkpoint_path, is_sound_checkpoint, restore
from ...dataflow.errors import UserError, nearest
from ...dataflow.runs.directory import RunDirectory, check_rights, check_run_name, hold, is_used
from ...dataflow.runs.files import BUFFER, CHECKPOINTS, LOG
from ...dataflow.runs.lock import RunLock
from ...dataflow.runs.log import LogReader, Position, damage_before, described_graph, has_position
from ...dataflow.runs.manifest import verify_manifest
from ...dataflow.source import Cursor
from .checkpoints import RUN, RunState, complete_checkpoints, has_checkpoints, restore_replaced, step_of
from .copies import fetch_run

WITHOUT_ROWS = "resume='weights' continues from models, optimizers and the place in the data, without the rows in flight"


@dataclass(frozen=True)
class ResumePoint:
    path: Path
    state: RunState
    damage: Sequence[str] = ()
    """Reasons why later checkpoints could not be used, a line each."""
    with_rows: bool = True
    """Whether to restore the rows in flight as well."""
    from_first_row: bool = False
    """Whether training begins at the first row, because the data or their order changed."""

    @property
    def run(self) -> Path:
        return self.path.parent.parent

    def reopen(self, lock: RunLock) -> RunDirectory:
        origin = f"goes on after step {self.state.step}, from {self.path}"
        if not self.with_rows:
            origin += f", with weights alone: {self.given_up}"
        state = self.state
        directory = RunDirectory.reopen(
            self.run, state.step, state.time_s, state.position, lock, origin=origin
        )
        if not self.with_rows:
            directory.give_up_rows()
        return directory

    @property
    def given_up(self) -> str:
        """Description of what is lost when a run resumes without the rows in flight."""
        if self.from_first_row:
            return (
                "the log and the responses in flight are discarded; the training data or their order changed, so training begins with "
                "their first row; `weft buffer check` cannot verify the rows finished earlier"
            )
        again = len(self.state.cursor.again)
        return (
            f"the log and the responses of the {again} prompts in flight are discarded, and these prompts are issued again; "
            "`weft buffer check` cannot verify the rows finished earlier"
        )

    def at_first_row(self) -> ResumePoint:
        """Return the same point for other training data, at their first row."""
        return replace(self, state=replace(self.state, cursor=Cursor()), from_first_row=True)

    @property
    def groups(self) -> list[str]:
        return sorted(p.name for p in self.path.iterdir() if p.is_dir())


def find_checkpoint(run: Path, *, with_rows: bool = True) -> ResumePoint | None:
    """Return the latest intact checkpoint of a run, or None without checkpoints.

    Args:
        with_rows: Whether the log must be able to restore the rows in flight.

    Raises:
        UserError: There are checkpoints, but none is intact.
    """
    # The run may have been killed while it replaced a checkpoint.
    restore_replaced(run / CHECKPOINTS)
    damage: list[str] = []
    weights_are_sound = False
    for path in complete_checkpoints(run / CHECKPOINTS):
        wrong = _damaged_files(path)
        weights_are_sound |= not wrong
        if wrong := wrong or (_lost_rows(path) if with_rows else ""):
            damage.append(f"{path}: {wrong}")
        else:
            state = RunState.read(path)
            passed_over = [f"{one}; the checkpoint before it is used" for one in damage]
            before = _wrong_before(state.position, run / BUFFER / LOG) if with_rows else []
            return ResumePoint(path, state, [*passed_over, *before], with_rows)
    if damage:
        hint = f". {WITHOUT_ROWS}" if weights_are_sound else ""
        raise UserError("no checkpoint of the run is sound: " + "; ".join(damage) + hint)
    return None


def _damaged_files(path: Path) -> str:
    """Describe the damage to the files of a checkpoint; empty for an intact one."""
    if damage := verify_manifest(path):
        return ", ".join(damage)
    try:
        step = RunState.read(path).step
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"{RUN} cannot be read: {error!r}"
    return "" if step == step_of(path) else f"it is a copy of another checkpoint: {RUN} has step {step}"


def _lost_rows(path: Path) -> str:
    """Return why the rows in flight cannot be restored, or an empty string."""
    position = RunState.read(path).position
    buffer = path.parent.parent / BUFFER
    try:
        snapshot = checkpoint_path(buffer, position)
        # A sound snapshot needs no replay of the log.
        if is_sound_checkpoint(snapshot, position) and has_position(buffer / LOG, position):
            described_graph(next(record for record in LogReader(snapshot) if record["do"] == "graph"))
            return ""
        history = restore(buffer, at=position)
    except (UserError, RuntimeError, OSError) as error:
        return f"its rows cannot be restored: {error}"
    if history.end == position:
        return ""
    return "; ".join(history.damage) or f"{buffer} ends before byte {position.offset}"


def _wrong_before(position: Position, log: Path) -> list[str]:
    """Describe damage to the log before a position. The rows in flight are safe in a snapshot."""
    damage = damage_before(log, position)
    known = "the rows in flight are not affected, but `weft buffer check` can no longer verify this run"
    return [f"{damage}; {known}"] if damage else []


def open_run(
    resume: str | Path,
    root: Path,
    name: str | None,
    accept: Callable[[ResumePoint | None], ResumePoint | None],
    copy_to: str | None = None,
) -> tuple[RunDirectory, ResumePoint | None]:
    """Open and lock the run for a driver: a new run, or one that resumes from a checkpoint.

    Args:
        resume: "none" for a new run; "latest" for the latest checkpoint of the run `name` (by
            default, the newest run with a checkpoint); "weights" for the same without rows in
            flight; or the folder of a run or of one of its checkpoints.
        accept: Function of the point that was found. Returns the point to resume from, or raises
            UserError if the driver cannot use it.
        copy_to: The address of copies, from which Weft fetches the run `name` to resume it if it
            has no checkpoint here.

    Returns:
        The run's directory, and the point that it resumes from (None for a new run).

    Raises:
        UserError: Another driver holds the run, the folder does not exist, or the run is damaged.
    """
    if name is not None:
        check_run_name(name, "name")
        check_rights(root.resolve() / name)
    fetched = fetch_run(resume, root.resolve(), name, copy_to) if copy_to is not None else ""
    run, looked = _where(resume, root, name)
    if run is not None:
        check_rights(run)
        lock = hold(run)
        try:
            with_rows, at = resume != "weights", Path(resume)
            point = _at(at, run) if is_checkpoint(at) else find_checkpoint(run, with_rows=with_rows)
            point = accept(point)
            if point is not None:
                directory = point.reopen(lock)
                directory.notes += [fetched] if fetched else []
                return directory, point
        except BaseException:
            # A refused driver leaves the run as its last holder left it.
            lock.give_back()
            raise
        lock.give_back()
    # Check before creating the directory.
    accept(None)
    return RunDirectory.create(root, name, aside=resume == "latest", why=looked), None


def is_checkpoint(path: Path) -> bool:
    return path.resolve().parent.name == CHECKPOINTS and path.is_dir()


def _where(resume: str | Path, root: Path, name: str | None) -> tuple[Path | None, str]:
    """Return the run to resume, or None and a message about what was looked for and found."""
    if resume == "none":
        return None, ""
    if resume in ("latest", "weights"):
        run, looked = _latest_run(root.resolve(), name, str(resume))
        if run is None and resume == "weights":
            raise UserError(looked)
        return run, looked
    try:
        path = Path(resume).resolve()
    except RuntimeError as loop:  # a loop of symbolic links
        raise UserError(f"resume={str(resume)!r} cannot be followed: {loop}") from None
    if path.parent.name == CHECKPOINTS:
        check_rights(path.parent.parent)
    run = path.parent.parent if is_checkpoint(path) else path
    if not has_checkpoints(run):
        there = _checkpointed(run.parent)
        raise UserError(
            f"resume={str(resume)!r} is neither a run that has a checkpoint, nor a checkpoint of one"
            f"{nearest(run.name, [*(p.name for p in there), 'latest', 'weights', 'none'])}"
        )
    if name not in (None, run.name):
        raise UserError(f"resume={str(resume)!r} belongs to the run {run.name!r}, not to {name!r}")
    return run, ""


def _latest_run(root: Path, name: str | None, resume: str) -> tuple[Path | None, str]:
    there = _checkpointed(root)
    if name is None:
        return next(iter(there), None), f"resume={resume!r}: no run in {root} has a checkpoint"
    run = root / name
    if has_checkpoints(run):
        return run, ""
    latest = [(p.name, step_of(complete_checkpoints(p / CHECKPOINTS)[0])) for p in there[:5]]
    others = ", ".join(f"{run!r} (step {step})" for run, step in latest)
    known = f"; checkpoints are in {others}" if others else "; no run there has one"
    folder = run / CHECKPOINTS
    if folder.exists() and not folder.is_dir():
        looked = f"{folder} is not a folder, so there is nothing to resume from{known}"
        return None, f"damaged: resume={resume!r}: {looked}"
    what = "there is no checkpoint of run" if is_used(run) else "there is no run"
    near = nearest(name, [p.name for p in there])
    return None, f"resume={resume!r}: {what} {name!r} in {root}{near}{known}"


def _checkpointed(root: Path) -> list[Path]:
    runs = [p for p in root.glob("*") if p.is_dir() and has_checkpoints(p)]
    return sorted(runs, key=lambda p: p.stat().st_mtime, reverse=True)


def _at(path: Path, run: Path) -> ResumePoint:
    path = run / CHECKPOINTS / path.resolve().name
    if wrong := _damaged_files(path) or _lost_rows(path):
        raise UserError(f"checkpoint {path} is damaged: {wrong}")
    state = RunState.read(path)
    return ResumePoint(path, state, _wrong_before(state.position, run / BUFFER / LOG))
