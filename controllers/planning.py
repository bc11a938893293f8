"""Planning: `weft plan` runs a script up to its driver, which is checked, and not started. Nothing is written meanwhile."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..dataflow.errors import Planned, UserError
from .run_spec import RunSpec
from .settings import Composed


@dataclass
class Planning:
    """What a script has said so far."""

    scratch: Path
    """The one folder that may be written to; it is removed afterwards."""
    settings: Composed | None = None
    """Settings of the script; None: it has none that `launch` reads."""
    spec: RunSpec | None = None
    """What its driver is to run; None: it made no driver."""


class _Present:
    planning: Planning | None = None
    listens = False


@contextmanager
def planning() -> Iterator[Planning]:
    """While a script is planned, the first driver that it makes ends it with `Planned`, and whatever it writes before is an error."""
    with tempfile.TemporaryDirectory(prefix="weft-plan-") as scratch:
        _Present.planning = made = Planning(Path(scratch))
        if not _Present.listens:
            _Present.listens = True
            sys.addaudithook(_refuse_to_write)  # it stays, and is silent outside of this block
        try:
            yield made
        finally:
            _Present.planning = None


def planning_folder() -> Path | None:
    """A folder for what a script makes before its driver (a small model, say), which is removed afterwards; None: nothing is planned."""
    return _Present.planning.scratch if _Present.planning else None


def note_settings(composed: Composed) -> None:
    """Settings were read."""
    if _Present.planning is not None:
        _Present.planning.settings = composed


def end_if_planned(spec: RunSpec) -> None:
    """A driver was made.

    Raises:
        Planned: this is what was to be known.
    """
    if _Present.planning is not None:
        _Present.planning.spec = spec
        raise Planned


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CACHES = ("__pycache__", ".cache", "huggingface", "torchinductor")
"""How the names of caches begin, which libraries may fill."""


def _refuse_to_write(event: str, arguments: tuple[Any, ...]) -> None:
    present = _Present.planning
    if present is None or event not in ("open", "os.mkdir", "os.rename", "subprocess.Popen"):
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITES):
        return
    what = arguments[0]
    if event != "subprocess.Popen":
        if not isinstance(what, str | bytes | os.PathLike):
            return  # an open file is opened anew
        path = Path(os.fsdecode(what)).absolute()
        if path.is_relative_to(present.scratch) or path.is_relative_to("/dev"):
            return
        if any(part.startswith(_CACHES) for part in path.parts) or (event == "os.mkdir" and path.is_dir()):
            return
    does = "starts" if event == "subprocess.Popen" else "writes"
    raise UserError(
        f"before it makes its driver, the script {does} {os.fsdecode(what) if isinstance(what, str | bytes | os.PathLike) else what}"
        f"{_place()}, and weft plan starts and writes nothing. Run the script once, so that it is there; or let it ask "
        "weft.controllers.planning.planning_folder() where to put it"
    )


def _place() -> str:
    """Where the script itself stands, in words; empty: not in it."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_filename != "<string>":
            return f" ({frame.f_code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back
    return ""
