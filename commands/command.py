"""Command: the base of all commands, and their answers."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from tyro.conf import Positional, arg

from ..dataflow.errors import UserError, nearest
from ..dataflow.runs.files import LEFT, is_run

MAX_NUMBER = 2**63 - 1
Switch: TypeAlias = Annotated[bool, arg(help_behavior_hint="")]
"""An option that is off by default."""
RunName: TypeAlias = Annotated[
    Positional[str], arg(metavar="RUN", help="A run's directory, or its name under runs/.")
]


@dataclass(frozen=True)
class Answer:
    """The result of a command."""

    found: Mapping[str, Any]
    """The object that `--json` prints, for programs."""
    text: str = ""
    """The same as text, or empty if the command has shown it already."""
    notes: Sequence[str] = ()
    """Lines for standard error, for example about unreadable files."""
    exit_code: int = 0
    """0, or 1 if the examined files are damaged or a check failed."""

    @classmethod
    def partial(cls, found: Mapping[str, Any], text: str, notes: Sequence[str]) -> Answer:
        """Make an answer that may be incomplete; the notes name the missing parts.

        The exit code is 1 if the log of the run is damaged.
        """
        from ..dataflow.runs.log import DAMAGED

        damage = [note for note in notes if note.startswith(DAMAGED)]
        others = [f"note: {note}" for note in notes if note not in damage]
        return cls(found, text, [*(f"error: {note}" for note in damage), *others], int(bool(damage)))


@dataclass(frozen=True, kw_only=True)
class Command(ABC):
    """A command. Its fields are its arguments and options; tyro makes their help from docstrings."""

    json: Switch = False
    """Print one JSON object, and nothing else, on standard output."""

    def check(self) -> None:
        """Check the values that no command accepts.

        Raises:
            UserError: a number is negative or too large.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value < 0:
                raise UserError(f"--{field.name.replace('_', '-')} {value}: it must be 0 or more")
            if isinstance(value, int) and value > MAX_NUMBER:
                raise UserError(
                    f"--{field.name.replace('_', '-')} {value}: it must be at most {MAX_NUMBER}"
                )

    @classmethod
    def split(cls, words: Sequence[str]) -> list[str]:
        """Prepare the words of the command line for tyro; `--` goes before words that are not options."""
        return list(words)

    @classmethod
    def split_at_script(cls, words: Sequence[str]) -> list[str]:
        """Prepare the words for a command that takes a script, whose words come after it.

        Raises:
            UserError: an option before the script does not belong to this command.
        """
        at = next((number for number, word in enumerate(words) if word.endswith(".py")), None)
        if at is None:
            return list(words)
        options = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(cls)}
        options = {"--help", *options} - {"--script", "--arguments"}
        for word in words[:at]:
            option = word.partition("=")[0]
            if option.startswith("--") and option.replace("_", "-") not in options:
                hint = (
                    nearest(option, options)
                    or f"; options before the script are {', '.join(sorted(options))}"
                )
                raise UserError(f"there is no option {option}{hint}")
        return [*words[:at], "--", *words[at:]]

    @abstractmethod
    def answer(self) -> Answer:
        """Run the command.

        Raises:
            UserError: an error that the user can fix; exit code 2.
            WeftError: any other error; exit code 1.
        """


@dataclass(frozen=True, kw_only=True)
class ScriptCommand(Command):
    """A command that takes a script. Words after the script are the script's arguments."""

    script: Annotated[Positional[str], arg(metavar="SCRIPT.py")]
    """A Python file."""
    arguments: Annotated[Positional[tuple[str, ...]], arg(metavar="ARGUMENTS")] = ()
    """Arguments of the script: all words after it."""

    @classmethod
    def split(cls, words: Sequence[str]) -> list[str]:
        return cls.split_at_script(words)


# The directory of a run.


RUNS = Path("runs")
"""Default folder of runs, to look up names."""


def run_path(name: str) -> Path:
    """Return the directory of a run, which need not exist, from a path or a name under `runs/`.

    >>> run_path("first"), run_path("elsewhere/first")
    (PosixPath('runs/first'), PosixPath('elsewhere/first'))
    """
    return Path(name) if Path(name).is_dir() or len(Path(name).parts) > 1 else RUNS / name


def find_run(name: str) -> Path:
    """Return the directory of a run.

    Raises:
        UserError: it does not exist, or is not a run; suggests the nearest name.
    """
    path = run_path(name)
    if not path.is_dir():
        raise UserError(f"there is no run {path}{nearest(path.name, run_names(path.parent))}")
    if not is_run(path):
        runs = [name for name in run_names(path) if is_run(path / name)]
        if runs:
            raise UserError(f"{path} is a folder of runs: name one of them, such as {path / runs[0]}")
        found = f"has none of the files of a run ({', '.join(LEFT)})" if _entries(path) else "is empty"
        raise UserError(f"{path} holds no run: it {found}")
    return path


def run_names(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, or nothing if it cannot be read."""
    return sorted(inside.name for inside in _entries(folder) if inside.is_dir())


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
