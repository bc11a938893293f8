"""Command: what a person types after `weft`, and what comes back."""

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
"""An option that is off unless it is given."""
RunName: TypeAlias = Annotated[
    Positional[str], arg(metavar="RUN", help="A run's directory, or its name under runs/.")
]


@dataclass(frozen=True)
class Answer:
    """What a command found out."""

    found: Mapping[str, Any]
    """For programs: the object that `--json` prints."""
    text: str = ""
    """The same for people; empty when the command has shown it already."""
    notes: Sequence[str] = ()
    """Lines for standard error: what could not be read, say."""
    exit_code: int = 0
    """0; 1 when what was looked at is not sound."""

    @classmethod
    def partial(cls, found: Mapping[str, Any], text: str, notes: Sequence[str]) -> Answer:
        """An answer that may be incomplete; the notes name the missing parts. If the log of the run is damaged, the exit code is 1."""
        from ..dataflow.runs.log import DAMAGED

        damage = [note for note in notes if note.startswith(DAMAGED)]
        others = [f"note: {note}" for note in notes if note not in damage]
        return cls(found, text, [*(f"error: {note}" for note in damage), *others], int(bool(damage)))


@dataclass(frozen=True, kw_only=True)
class Command(ABC):
    """A command. Its fields are its arguments and options; tyro makes the help of their docstrings."""

    json: Switch = False
    """Print one JSON object on standard output, and nothing else there."""

    def check(self) -> None:
        """Refuse what no command takes.

        Raises:
            UserError: a number is negative, or larger than any table.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value < 0:
                raise UserError(f"--{field.name.replace('_', '-')} {value}: it is a number from 0 on")
            if isinstance(value, int) and value > MAX_NUMBER:
                raise UserError(f"--{field.name.replace('_', '-')} {value}: it is at most {MAX_NUMBER}")

    @classmethod
    def split(cls, words: Sequence[str]) -> list[str]:
        """The words of the command line as tyro is to read them; `--` stands before those that are no options."""
        return list(words)

    @classmethod
    def split_at_script(cls, words: Sequence[str]) -> list[str]:
        """The same for a command that takes a script: words behind the script are the script's, whatever they look like.

        Raises:
            UserError: an option before the script is none of this command.
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
        """Do what the command says.

        Raises:
            UserError: what the user can mend; exit code 2.
            WeftError: anything else that went wrong; exit code 1.
        """


@dataclass(frozen=True, kw_only=True)
class ScriptCommand(Command):
    """A command that takes a script. What stands behind the script is the script's own."""

    script: Annotated[Positional[str], arg(metavar="SCRIPT.py")]
    """A Python file."""
    arguments: Annotated[Positional[tuple[str, ...]], arg(metavar="ARGUMENTS")] = ()
    """Arguments of the script: whatever stands behind it."""

    @classmethod
    def split(cls, words: Sequence[str]) -> list[str]:
        return cls.split_at_script(words)


# Run folder
#
# Where a run lies, and the message where it does not.


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
        found = (
            f"has none of what a run leaves behind ({', '.join(LEFT)})" if _entries(path) else "is empty"
        )
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
