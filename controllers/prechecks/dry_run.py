"""Planning: `weft plan` runs a script until it makes its driver, and checks the driver without
starting it. Until then, the script must write no files and start no processes."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from ...dataflow.config import Config
from ...dataflow.errors import Planned, UserError
from ..run_spec import RunSpec


@dataclass
class Planning:
    """Facts about a script, collected during planning."""

    scratch: Path
    """The only folder that the script may write to; removed afterwards."""
    settings: Sequence[tuple[str, str, str]] | None = None
    """(name, value, origin) of each setting, or None if the script does not call `launch`."""
    spec: RunSpec | None = None
    """The run that the script's driver describes, or None if it made no driver."""
    sketched: list[Path] = field(default_factory=list)
    """Paths given to `prepared` that do not exist, so that a run would make them."""
    stands_for: dict[Path, Path] = field(default_factory=dict)
    """Folder of sketches -> the folder that it replaces."""
    passes: list[tuple[str, int]] = field(default_factory=list)
    """(graph, number of rows) of graphs that would make one pass over their rows before the run."""


class _Present:
    planning: Planning | None = None
    listens = False


@contextmanager
def planning() -> Iterator[Planning]:
    """Plan the script that runs in the block: its first driver ends it with `Planned`. Writing
    files or starting processes before that is an error."""
    with tempfile.TemporaryDirectory(prefix="weft-plan-") as scratch:
        _Present.planning = made = Planning(Path(scratch))
        if not _Present.listens:
            _Present.listens = True
            # Python cannot remove a hook. Outside of this block, it does nothing.
            sys.addaudithook(_refuse_to_write)
        try:
            yield made
        finally:
            _Present.planning = None


@contextmanager
def not_planning() -> Iterator[None]:
    """In the block, drivers run, and files may be written: for simulations of a planned script."""
    before, _Present.planning = _Present.planning, None
    try:
        yield
    finally:
        _Present.planning = before


def prepared(made: str | Path, make: Callable[[], object], sketch: Callable[[Path], object]) -> Path:
    """Make a file or folder that a script needs before its run, unless it exists. Return its path.

        model = weft.prepared(task / "model", make=lambda: warm_start(task), sketch=lambda path:
        make_model(path))

    `weft plan` does not call `make`. If the path does not exist, it calls `sketch` in a temporary
    folder. A sketch has the same sizes without training: for example, a model with random weights.

    Args:
        made: the file or folder. It counts as complete once it exists, so `make` must create it
            under another name and rename it last.
        make: makes the file or folder.
        sketch: makes a sketch at the given path, which has the same name in a temporary folder.
            Sketches of one parent folder share a temporary folder.

    Raises:
        FileNotFoundError: `make` did not create the file or folder.
    """
    made = Path(made)
    if made.exists():
        return made
    present = _Present.planning
    if present is None:
        make()
        made.stat()
        return made
    inside = made.is_relative_to(present.scratch)
    path = made if inside else present.scratch / made.parent.name / made.name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        sketch(path)
        if path != made:
            present.stands_for.setdefault(path.parent, made.parent)
        folder = next(folder for folder in present.stands_for if path.is_relative_to(folder))
        present.sketched.append(present.stands_for[folder] / path.relative_to(folder))
    return path


def is_planning() -> bool:
    return _Present.planning is not None


def note_pass(graph: str, rows: int) -> None:
    if _Present.planning is not None:
        _Present.planning.passes.append((graph, rows))


def note_settings(settings: Config, origins: Mapping[str, str]) -> None:
    if _Present.planning is not None:
        given = [(name, str(attrgetter(name)(settings)), at) for name, at in origins.items()]
        _Present.planning.settings = given


def end_if_planned(spec: RunSpec) -> None:
    """End a planned script once it has made its driver. Raises `Planned` in planning."""
    if _Present.planning is not None:
        _Present.planning.spec = spec
        raise Planned


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CACHES = ("__pycache__", ".cache", "huggingface", "torchinductor")
"""Prefixes of cache folders that libraries may write to."""


def _refuse_to_write(event: str, arguments: tuple[Any, ...]) -> None:
    present = _Present.planning
    if present is None or event not in ("open", "os.mkdir", "os.rename", "subprocess.Popen"):
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITES):
        return
    what, does = arguments[0], "starts" if event == "subprocess.Popen" else "writes"
    is_path = isinstance(what, str | bytes | os.PathLike)
    if does == "writes":
        if not is_path:
            return  # a file descriptor of an open file
        path = Path(os.fsdecode(what)).absolute()
        if path.is_relative_to(present.scratch) or path.is_relative_to("/dev"):
            return
        is_cache = any(part.startswith(_CACHES) for part in path.parts)
        # Making a folder that exists changes nothing.
        if is_cache or (event == "os.mkdir" and path.is_dir()):
            return
    named = os.fsdecode(what) if is_path else what
    raise UserError(
        f"before it makes its driver, the script {does} {named}{_place()}, but weft plan must not start or write "
        "anything. Skip this step if it is done already, and run the script once; or use weft.prepared(...), which "
        "takes a sketch for planning"
    )


def _place() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_filename != "<string>":
            return f" ({frame.f_code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back
    return ""
