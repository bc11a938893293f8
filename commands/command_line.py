"""The tree of commands: their arguments, answers and exit codes.

Each command is a function that returns an `Answer`. tyro derives its options from the function's
arguments, and their help from the docstring. Every command also has the option `--json`.

Exit codes:
- 0: success
- 1: the examined files are damaged or unreadable, or a check failed
- 2: an error that the user can fix
- 130: Ctrl-C

With `--json`, standard output is one JSON object, even after an error: {"error": ..., "exit_code":
...}. All other messages go to standard error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import math
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, Union, get_type_hints

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg, subcommand

from ..dataflow.errors import UserError, WeftError, nearest
from ..dataflow.runs.files import LEFT, is_run
from ..dataflow.untrusted_text import redacted, show, show_json

TREE: Mapping[str, Any] = {
    "run": "run:run",
    "plan": "plan:plan",
    "runs": "runs:runs",
    "watch": "runs:watch",
    "stop": "runs:stop",
    "samples": "samples:samples",
    "diff": "runs:diff",
    "eval": "eval:evaluate",
    "export": "export:export",
    "merge": "merge:merge",
    "select": "select:select",
    "timeline": "timeline:timeline",
    "explain": "explain:explain",
    "buffer": {
        "check": "buffer:check",
        "why": "buffer:explain",
        "table": "buffer:table",
        "sql": "buffer:sql",
        "archive": "buffer:write_archive",
    },
    "submit": "jobs:submit",
    "jobs": {"list": "jobs:list_jobs", "follow": "jobs:follow", "stop": "jobs:stop_job"},
    "doctor": "doctor:doctor",
    "dashboard": "dashboard:dashboard",
    "completion": "command_line:completion",
}
"""Maps each command name to its `module:function`, or to the tree of its subcommands."""
MAX_NUMBER = 2**63 - 1
MOST_SAID = 300
"""Maximum characters to show of an unexpected error's message."""
PRINT_COMPLETION = "--tyro-print-completion"
DESCRIPTION = "Start, watch and inspect runs of Weft, also while they are running, and check a machine. --version prints the version."

# Argument types. `help_behavior_hint=""` hides an option's default in its help.

Switch: TypeAlias = Annotated[bool, arg(help_behavior_hint="")]
Name: TypeAlias = Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")]
StepNumber: TypeAlias = Annotated[int | None, arg(metavar="STEP", help_behavior_hint="")]
RunName: TypeAlias = Annotated[
    Positional[str], arg(metavar="RUN", help="A run's directory, or its name under runs/.")
]
Script: TypeAlias = Annotated[Positional[str], arg(metavar="SCRIPT.py")]
ScriptArguments: TypeAlias = Annotated[Positional[tuple[str, ...]], arg(metavar="ARGUMENTS")]
Json: TypeAlias = Annotated[
    bool,
    arg(help="Print one JSON object, and nothing else, on standard output.", help_behavior_hint=""),
]


@dataclass(frozen=True)
class Answer:
    found: Mapping[str, Any]
    """Object that `--json` prints."""
    text: str = ""
    """The same answer for people; empty if the command has already printed it."""
    notes: Sequence[str] = ()
    """Lines for standard error, such as notes on unreadable files."""
    exit_code: int = 0
    """0, or 1 if the examined files are damaged or a check failed."""

    @classmethod
    def partial(cls, found: Mapping[str, Any], text: str, notes: Sequence[str]) -> Answer:
        """Return an answer about a run whose data may be incomplete; `notes` name the missing
        parts. The exit code is 1 if a note reports a damaged log."""
        from ..dataflow.runs.log import DAMAGED

        damage = [note for note in notes if note.startswith(DAMAGED)]
        others = [f"note: {note}" for note in notes if note not in damage]
        return cls(found, text, [*(f"error: {note}" for note in damage), *others], int(bool(damage)))

    @classmethod
    def of_table(cls, table: Any, limit: int, notes: Sequence[str]) -> Answer:
        """Return an answer with the first `limit` rows of a table, and notes as in `partial`."""
        from ..dataflow.runs.tables import render_table

        found = {"rows": table.slice(0, limit).to_pylist(), "number": len(table)}
        return cls.partial(found, render_table(table, limit=limit), notes)


class _ParsedCommand(NamedTuple):
    command: Callable[..., Answer]
    arguments: Mapping[str, Any]
    as_json: bool

    def answer(self) -> Answer:
        for name, value in self.arguments.items():
            option = f"--{name.replace('_', '-')} {value}"
            if isinstance(value, int | float) and not value >= 0:  # also refuses NaN
                raise UserError(f"{option}: it must be 0 or more")
            if isinstance(value, int) and value > MAX_NUMBER:
                raise UserError(f"{option}: it must be at most {MAX_NUMBER}")
        return self.command(**self.arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in the words after `weft`, and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--version"]:
        show(f"weft {version('weft')}", sys.stdout)
        return 0
    # `parse` may fail before it knows whether --json was given.
    as_json = False
    try:
        parsed = parse(words)
        as_json = parsed.as_json
        answer = parsed.answer()
    except UserError as error:
        return _failed(f"error: {error}", 2, str(error), as_json)
    except WeftError as error:
        return _failed(f"{type(error).__name__}: {error.text}", 1, error.text, as_json)
    except KeyboardInterrupt:
        return _failed("interrupted", 130, "interrupted", as_json)
    except BrokenPipeError:
        return _reader_is_gone()
    except Exception as error:  # reading damaged files can raise anything
        if sys.flags.dev_mode:
            raise
        return _failed(f"unexpected error: {_where(error)}", 1, _where(error), as_json)
    return _show(answer, as_json)


def parse(words: Sequence[str]) -> _ParsedCommand:
    """Parse the words of a command line into a command.

    Raises:
        UserError: There is no such command.
        SystemExit: Help or a completion was printed (exit code 0), or an argument is wrong (2).
    """
    if words and words[0] == PRINT_COMPLETION:
        # Completion needs the whole tree.
        return tyro.cli(_union(TREE), prog="weft", args=words, config=(FlagCreatePairsOff,))
    tree: Any = TREE
    name, rest = "weft", list(words)
    while isinstance(tree, Mapping):
        if not rest or rest[0].startswith("-"):
            stubs = _union(tree, stubs=True)
            return tyro.cli(stubs, prog=name, description=_about(name), args=rest or ["--help"])
        if rest[0] not in tree:
            hint = nearest(rest[0], tree) or f"; it has {', '.join(tree)}"
            raise UserError(f"{name} has no command {rest[0]!r}{hint}")
        tree, name = tree[rest[0]], f"{name} {rest.pop(0)}"
    command = _command(tree)
    if "script" in inspect.signature(command).parameters:
        rest = _split_at_script(command, rest)
    return tyro.cli(_collecting(command), prog=name, args=rest, config=(FlagCreatePairsOff,))


def _collecting(command: Callable[..., Answer]) -> Callable[..., _ParsedCommand]:
    """Return a function for tyro that takes a command's arguments and `--json`."""
    own = inspect.signature(command).parameters

    def collect(*, json: bool, **arguments: Any) -> _ParsedCommand:
        # Only commands that print while they run take `json` themselves.
        if "json" in own:
            arguments["json"] = json
        return _ParsedCommand(command, arguments, json)

    hints = {"json": Json, **get_type_hints(command, include_extras=True)}
    flag = inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False)
    parameters = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, each in {"json": flag, **own}.items()
    ]
    setattr(collect, "__signature__", inspect.Signature(parameters))  # noqa: B010
    collect.__annotations__ = hints
    # Join continuation lines: tyro would keep the line breaks in an argument's help.
    collect.__doc__ = re.sub(r"\n {5,}", " ", inspect.getdoc(command) or "")
    return collect


def _split_at_script(command: Callable[..., Answer], words: Sequence[str]) -> list[str]:
    """Insert `--` before the script, so that all later words are the script's. Raises UserError for
    an unknown option before the script."""
    at = next((number for number, word in enumerate(words) if word.endswith(".py")), None)
    if at is None:
        return list(words)
    names = {"help", "json", *inspect.signature(command).parameters} - {"script", "arguments"}
    options = {f"--{name.replace('_', '-')}" for name in names}
    for word in words[:at]:
        option = word.partition("=")[0]
        if option.startswith("--") and option.replace("_", "-") not in options:
            hint = (
                nearest(option, options)
                or f"; options before the script are {', '.join(sorted(options))}"
            )
            raise UserError(f"there is no option {option}{hint}")
    return [*words[:at], "--", *words[at:]]


def _about(name: str) -> str:
    if name == "weft":
        return DESCRIPTION
    said = (import_module(f".{name.split()[-1]}", __package__).__doc__ or "").partition(": ")[2]
    return f"{said[:1].upper()}{said[1:]}"


def _command(place: str) -> Callable[..., Answer]:
    module, _, name = place.partition(":")
    return getattr(import_module(f".{module}", __package__), name)


def _union(tree: Mapping[str, Any], *, stubs: bool = False) -> Any:
    """Return a tree of commands as a union type for tyro; with `stubs`, without arguments, which is
    faster."""
    return Union[tuple(_branch(name, below, stubs) for name, below in tree.items())]  # noqa: UP007


def _branch(name: str, below: Any, stubs: bool) -> Any:
    is_tree = not isinstance(below, str)
    about = _about(name) if is_tree else " ".join((_command(below).__doc__ or "").split())
    about = about.partition(". ")[0].rstrip(".") + "."
    if stubs:
        return Annotated[Any, subcommand(name, constructor=lambda: None, description=about)]
    if is_tree:
        return Annotated[_union(below), subcommand(name, description=about)]
    constructor = _collecting(_command(below))
    return Annotated[Any, subcommand(name, constructor=constructor, description=about)]


def _show(answer: Answer, as_json: bool) -> int:
    try:
        if as_json:
            show_json(_plain(answer.found))
        elif answer.text:
            show(answer.text, sys.stdout)
        for note in answer.notes:
            show(note)
    except BrokenPipeError:
        return _reader_is_gone()
    return answer.exit_code


def _failed(said: str, code: int, why: str, as_json: bool) -> int:
    show(said)
    if as_json:
        show_json({"error": redacted(why), "exit_code": code})
    return code


def _where(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    said = " ".join(str(error).split())[:MOST_SAID]
    return (
        f"{type(error).__name__}: {said} ({place.filename}:{place.lineno}); one of the files read may be damaged. "
        "Set PYTHONDEVMODE=1 to see the traceback"
    )


def _reader_is_gone() -> int:
    """End quietly after the reader has closed the pipe, as in `weft buffer table RUN | head`."""
    # Otherwise Python reports the broken pipe at exit.
    sys.stderr.close()
    return 0


def _plain(value: Any) -> Any:
    """Convert a value to JSON types. NaN and infinities become null.

    >>> _plain({"loss": float("nan"), "steps": (1, 2)})
    {'loss': None, 'steps': [1, 2]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    return value


# `weft completion`


def completion(
    shell: Annotated[Positional[Literal["bash", "zsh", "fish"]], arg(metavar="{bash,zsh,fish}")],
) -> Answer:
    """Print a script that completes commands and options; source it in your shell.

    Args:
        shell: The name of your shell.
    """
    printed = io.StringIO()
    # tyro prints the completion and then exits.
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        parse([PRINT_COMPLETION, shell])
    return Answer({"shell": shell, "script": printed.getvalue()}, printed.getvalue().rstrip("\n"))


# The directory of a run.


RUNS = Path("runs")
"""Default folder of runs."""


def run_path(name: str) -> Path:
    """Return the directory of a run, given its path or its name under `runs/`. It need not exist.

    >>> run_path("first"), run_path("elsewhere/first")
    (PosixPath('runs/first'), PosixPath('elsewhere/first'))
    """
    return Path(name) if Path(name).is_dir() or len(Path(name).parts) > 1 else RUNS / name


def find_run(name: str) -> Path:
    """Return the directory of a run, given its path or its name under `runs/`.

    Raises:
        UserError: The directory does not exist, or is not a run.
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
    """Return the sorted names of a folder's subfolders; none if the folder cannot be read."""
    return sorted(inside.name for inside in _entries(folder) if inside.is_dir())


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
