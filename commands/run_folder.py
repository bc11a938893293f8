"""Where a run lies, and the message where it does not."""

from __future__ import annotations

from pathlib import Path

from ..dataflow.errors import UserError, nearest
from ..dataflow.runs.files import LEFT, is_run

RUNS = Path("runs")
"""Where the name of a run is looked for."""


def run_path(name: str) -> Path:
    """The directory of a run, which need not be there: a path, or a name under `runs/`.

    >>> run_path("first"), run_path("elsewhere/first")
    (PosixPath('runs/first'), PosixPath('elsewhere/first'))
    """
    return Path(name) if Path(name).is_dir() or len(Path(name).parts) > 1 else RUNS / name


def find_run(name: str) -> Path:
    """The directory of a run.

    Raises:
        UserError: it is not there, or the folder is not one of a run; the message offers the nearest name that is.
    """
    path = run_path(name)
    if not path.is_dir():
        raise UserError(f"there is no run {path}{nearest(path.name, run_names(path.parent))}")
    if not is_run(path):
        runs = [name for name in run_names(path) if is_run(path / name)]
        if runs:
            raise UserError(f"{path} is a folder of runs: name one of them, such as {path / runs[0]}")
        found = f"has none of what a run leaves behind ({', '.join(LEFT)})" if _entries(path) else "is empty"
        raise UserError(f"{path} holds no run: it {found}")
    return path


def run_names(folder: Path) -> list[str]:
    """Names of the folders in a folder; none where it is not there, or may not be read."""
    return sorted(inside.name for inside in _entries(folder) if inside.is_dir())


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
