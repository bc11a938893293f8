"""What a job of a Ray cluster tells the run in it, by its environment: the folder in which it lies, and whether it goes on.

A job works in a package of the user's files, which Ray removes some time after the job. A relative `root` is therefore taken below
`WEFT_ROOT`, or below `~/weft` where Weft runs in such a package and nothing is said. `weft submit` sets both variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..dataflow.errors import UserError, nearest

ROOT = "WEFT_ROOT"
"""Folder below which relative roots lie."""
RESUME = "WEFT_RESUME"
"""`resume` of runs that write checkpoints and whose script says nothing of it: "latest" or "weights"."""
DEFAULT_ROOT = "~/weft"
_PACKAGES = ("runtime_resources", "working_dir_files")
"""Two folders, one in the other, below which Ray unpacks the files of jobs."""


def in_package(folder: Path) -> bool:
    """Whether a folder is, or is in, a package that Ray has unpacked for a job.

    >>> in_package(Path("/tmp/ray/session_x/runtime_resources/working_dir_files/_ray_pkg_0a2f/project"))
    True
    """
    return any(pair == _PACKAGES for pair in zip(folder.parts, folder.parts[1:], strict=False))


def root_of(root: str | Path, environment: Mapping[str, str] = os.environ, folder: Path | None = None) -> Path:
    """Where the folder of runs lies.

    Args:
        root: as the script gave it.
        environment: of this process.
        folder: in which this process works; None: as the system says.

    Returns:
        `root` itself, unless it is relative and a job moves it.

    >>> root_of("runs", {"WEFT_ROOT": "/shared/weft"}), root_of("/data/runs", {"WEFT_ROOT": "/shared/weft"}), root_of("runs", {})
    (PosixPath('/shared/weft/runs'), PosixPath('/data/runs'), PosixPath('runs'))
    """
    root = Path(root)
    below = environment.get(ROOT) or (DEFAULT_ROOT if in_package(folder or Path.cwd()) else "")
    return root if root.is_absolute() or not below else Path(below).expanduser().absolute() / root


def resume_of(resume: str | Path, environment: Mapping[str, str] = os.environ) -> str | Path:
    """What a run goes on from: as its script says, or, where that says "none", as its job says.

    Raises:
        UserError: the job says something else than "latest", "weights" or "none".

    >>> resume_of("none", {"WEFT_RESUME": "latest"}), resume_of("weights", {"WEFT_RESUME": "latest"}), resume_of("none", {})
    ('latest', 'weights', 'none')
    """
    said, allowed = environment.get(RESUME) or "none", ("none", "latest", "weights")
    if said not in allowed:
        raise UserError(
            f"{RESUME}={said!r} in the environment: it is one of {', '.join(allowed)}{nearest(said, allowed)}"
        )
    return said if resume == "none" else resume
