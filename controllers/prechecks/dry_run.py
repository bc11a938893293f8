"""Planning: `weft plan` runs a script up to its driver, which is checked, and not started. Nothing is written meanwhile."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...dataflow.errors import Planned, UserError
from ..run_spec import RunSpec
from ..settings import Composed


@dataclass
class Planning:
    """What a script has said so far."""

    scratch: Path
    """The one folder that may be written to; it is removed afterwards."""
    settings: Composed | None = None
    """Settings of the script; None: it has none that `launch` reads."""
    spec: RunSpec | None = None
    """What its driver is to run; None: it made no driver."""
    sketched: list[Path] = field(default_factory=list)
    """What the run would make first, and has not made yet."""
    stands_for: dict[Path, Path] = field(default_factory=dict)
    """Folder of sketches -> the folder that it stands for."""
    passes: list[tuple[str, int]] = field(default_factory=list)
    """Graphs that would go once over their rows first, and how many these are."""


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


def prepared(made: str | Path, make: Callable[[], object], sketch: Callable[[Path], object]) -> Path:
    """What a script needs before its run (data, a model that was trained first), made on first use; returns where it is.

        model = weft.prepared(task / "model", make=lambda: warm_start(task), sketch=lambda path: make_model(path))

    `weft plan` makes nothing: of what is not there yet it has a sketch made, in a folder that is removed afterwards. A sketch has the
    sizes of the thing itself (a model with random weights, data of the same shape), and takes no training.

    Args:
        made: the file or folder. Once it exists it is complete: `make` gives it its name when it is done.
        make: makes it.
        sketch: makes a sketch of it at a path of the same name, in a folder that stands for its parent, and is shared by all
            that are prepared there.

    Raises:
        FileNotFoundError: `make` did not make it.
    """
    made = Path(made)
    if made.exists():
        return made
    present = _Present.planning
    if present is None:
        make()
        made.stat()
        return made
    path = (
        made if made.is_relative_to(present.scratch) else present.scratch / made.parent.name / made.name
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        sketch(path)
        if path != made:
            present.stands_for.setdefault(path.parent, made.parent)
        folder = next(folder for folder in present.stands_for if path.is_relative_to(folder))
        present.sketched.append(present.stands_for[folder] / path.relative_to(folder))
    return path


def is_planning() -> bool:
    """Whether the script is planned, and not run."""
    return _Present.planning is not None


def note_pass(graph: str, rows: int) -> None:
    """A graph would go once over its rows before the run.

    Args:
        graph: its name.
        rows: of its source.
    """
    if _Present.planning is not None:
        _Present.planning.passes.append((graph, rows))


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
        if any(part.startswith(_CACHES) for part in path.parts) or (
            event == "os.mkdir" and path.is_dir()
        ):
            return
    does = "starts" if event == "subprocess.Popen" else "writes"
    raise UserError(
        f"before it makes its driver, the script {does} {os.fsdecode(what) if isinstance(what, str | bytes | os.PathLike) else what}"
        f"{_place()}, and weft plan starts and writes nothing. Do it only where it is not done yet, and run the script "
        "once; or make it by weft.prepared(...), which also says how to sketch it"
    )


def _place() -> str:
    """Where the script itself stands, in words; empty: not in it."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_filename != "<string>":
            return f" ({frame.f_code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back
    return ""
