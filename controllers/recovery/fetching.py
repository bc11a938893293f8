"""Fetching a run that is to go on and has no checkpoint here, from its copy elsewhere, while this process holds the run.

runs/NAME/.fetched       what is read from the copy, until its checkpoint is known to be intact
runs/NAME.begun-1        what was here before; it moves only then
runs/NAME                what was fetched. Checkpoints come last: without one, an interrupted start fetches the run again
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ...dataflow.buffer.run_files import CHECKPOINTS, LOCK
from ...dataflow.errors import UserError
from ..run_directory import hold, make_aside, require_folder, set_run_aside
from .checkpoints import has_checkpoints
from .remote_run import FAILURES, RemoteRun

_FETCHED = ".fetched"


def fetch_run(resume: str | Path, root: Path, name: str | None, address: str) -> str:
    """Fetch a run that is to go on and has no checkpoint here, if there is a copy of it.

    Args:
        resume: see `open_run`.
        root: the folder of all runs.
        name: of the run.
        address: where checkpoints are copied to.

    Returns:
        What was done; empty if nothing was.

    Raises:
        UserError: another driver holds the run, the copy cannot be read, or it is of another run, which one that begins would replace.
        TakenOverError: another driver took the run over while it was fetched. Nothing of the run has moved.
    """
    remote = RemoteRun.at(address, name or "run")
    if resume not in ("none", "latest", "weights") or name is None or has_checkpoints(root / name):
        return ""
    run = root / name
    try:
        steps = remote.steps()
        if steps and resume == "none":
            raise UserError(
                f"name={name!r}: {remote} holds a copy of a run of that name already, with its checkpoint of step {steps[0]}; "
                "give the run another name, or go on with that one (resume='latest')"
            )
        return _fetch(remote, run) if steps else ""
    except FAILURES as error:
        raise UserError(f"the copy of the run at {remote} cannot be read: {error}") from error


def _fetch(remote: RemoteRun, run: Path) -> str:
    require_folder(run.parent, f"root {str(run.parent)!r}", private=False)
    aside = ""
    if run.exists() and not run.is_dir():
        aside = f"; what was there is in {set_run_aside(run).name}"
    require_folder(run, f"run directory {str(run)!r}")
    lock, fetched = hold(run), run / _FETCHED
    try:
        if has_checkpoints(run):  # another driver has fetched it meanwhile
            return ""
        damage: list[str] = []
        step = remote.fetch(fetched, damage.append)
        if step is None:
            raise UserError(f"no copy of the run at {remote} is sound: {'; '.join(damage)}")
        lock.check(sure=True)
        before = [path for path in run.iterdir() if path.name not in (LOCK, _FETCHED)]
        if before:
            folder = make_aside(run)
            aside = f"; what was there is in {folder.name}"
            for path in before:
                path.rename(folder / path.name)
        for path in sorted(fetched.iterdir(), key=lambda path: path.name == CHECKPOINTS):
            path.rename(run / path.name)
    finally:
        shutil.rmtree(fetched, ignore_errors=True)
        lock.give_back()  # the next epoch follows the one that the fetched run names
    passed_over = "".join(f"; damaged: {one}; an earlier one is used" for one in damage)
    return f"the run was fetched from {remote}, with its checkpoint of step {step}{aside}{passed_over}"
