"""The tree of commands, and their exit codes.

Exit codes: 0 for success; 1 if the examined files are damaged or unreadable, or a check failed; 2
for an error that the user can fix; 130 after Ctrl-C. With `--json`, standard output is one JSON
object, even if a command ends with an error: {"error": ..., "exit_code": ...}. All other messages
go to standard error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any, Literal, Union

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg, subcommand

from ..dataflow.errors import UserError, WeftError, nearest
from ..dataflow.untrusted_text import redacted, show, show_json
from .command import Answer, Command

TREE: Mapping[str, Any] = {
    "run": "run:Run",
    "plan": "plan:PlanRun",
    "runs": "runs:Runs",
    "watch": "watch:Watch",
    "stop": "stop:Stop",
    "samples": "samples:Samples",
    "diff": "diff:Diff",
    "export": "export:Export",
    "timeline": "timeline:TimelineCommand",
    "buffer": {
        "check": "buffer:Check",
        "why": "buffer:Why",
        "table": "buffer:Table",
        "sql": "buffer:Sql",
        "archive": "buffer:Archive",
    },
    "submit": "jobs:Submit",
    "jobs": {"list": "jobs:List", "follow": "jobs:Follow", "stop": "jobs:Stop"},
    "doctor": "doctor:Doctor",
    "dashboard": "dashboard:Dashboard",
    "completion": "command_line:Completion",
}
"""Name -> module and class of a command, or a tree of its subcommands."""
MOST_SAID = 300
"""Most characters of an unexpected error to show."""
PRINT_COMPLETION = "--tyro-print-completion"
DESCRIPTION = "Start, watch and inspect runs of Weft, also while they are running, and check a machine. --version prints the version."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: words after `weft`; by default, from this process.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--version"]:
        print(f"weft {version('weft')}")
        return 0
    as_json = False
    try:
        command = parse(words)
        as_json = command.json
        command.check()
        answer = command.answer()
    except UserError as error:
        return _failed(f"error: {error}", 2, str(error), as_json)
    except WeftError as error:
        return _failed(f"{type(error).__name__}: {error.text}", 1, error.text, as_json)
    except KeyboardInterrupt:
        return _failed("interrupted", 130, "interrupted", as_json)
    except BrokenPipeError:
        return _reader_is_gone()
    except Exception as error:  # damaged files can raise anything
        if sys.flags.dev_mode:
            raise
        return _failed(f"unexpected error: {_where(error)}", 1, _where(error), as_json)
    return _show(answer, as_json)


def parse(words: Sequence[str]) -> Command:
    """Parse the words of a command line into a command.

    Raises:
        UserError: there is no such command.
        SystemExit: help or a completion was printed (0), or an argument is wrong (2).
    """
    if words and words[0] == PRINT_COMPLETION:
        # Completion needs the whole tree.
        return tyro.cli(_union(TREE), prog="weft", args=words, config=(FlagCreatePairsOff,))
    tree: Any = TREE
    name, rest = "weft", list(words)
    while isinstance(tree, Mapping):
        if not rest or rest[0].startswith("-"):
            return tyro.cli(
                _union(tree, stubs=True), prog=name, description=_about(name), args=rest or ["--help"]
            )
        if rest[0] not in tree:
            hint = nearest(rest[0], tree) or f"; it has {', '.join(tree)}"
            raise UserError(f"{name} has no command {rest[0]!r}{hint}")
        tree, name = tree[rest[0]], f"{name} {rest.pop(0)}"
    command = _command(tree)
    return tyro.cli(command, prog=name, args=command.split(rest), config=(FlagCreatePairsOff,))


def _about(name: str) -> str:
    if name == "weft":
        return DESCRIPTION
    said = (import_module(f".{name.split()[-1]}", __package__).__doc__ or "").partition(": ")[2]
    return f"{said[:1].upper()}{said[1:]}"


def _command(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f".{module}", __package__), name)


def _union(tree: Mapping[str, Any], *, stubs: bool = False) -> Any:
    """Return the commands as a type for tyro.

    Args:
        stubs: leave out their arguments, which take time to import.
    """
    return Union[tuple(_branch(name, below, stubs) for name, below in tree.items())]  # noqa: UP007


def _branch(name: str, below: Any, stubs: bool) -> Any:
    if isinstance(below, Mapping):
        about = _about(name)
    else:
        about = " ".join((_command(below).__doc__ or "").split())
    about = about.partition(". ")[0].rstrip(".") + "."
    if stubs:
        return Annotated[Any, subcommand(name, constructor=_nothing, description=about)]
    below = _union(below) if isinstance(below, Mapping) else _command(below)
    return Annotated[below, subcommand(name, description=about)]


def _nothing() -> None:
    """Stub for a command without its arguments."""


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
    """Describe an unexpected error in one line."""
    if isinstance(error, OSError) and error.filename is not None:
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    said = " ".join(str(error).split())[:MOST_SAID]
    return (
        f"{type(error).__name__}: {said} ({place.filename}:{place.lineno}); one of the files read may be damaged. "
        "Set PYTHONDEVMODE=1 to see the traceback"
    )


def _reader_is_gone() -> int:
    """Exit quietly: the reader of the pipe has closed it, as in `weft buffer table RUN | head`."""
    # Otherwise Python reports the broken pipe at exit.
    sys.stderr.close()
    return 0


def _plain(value: Any) -> Any:
    """Convert a value to JSON types. Numbers that are not finite become null.

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


# `weft completion`: shell completion of commands and options.


@dataclass(frozen=True, kw_only=True)
class Completion(Command):
    """Print a script for your shell to source, which completes commands and options."""

    shell: Annotated[Positional[Literal["bash", "zsh", "fish"]], arg(metavar="{bash,zsh,fish}")]
    """The shell."""

    def answer(self) -> Answer:

        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            parse([PRINT_COMPLETION, self.shell])
        return Answer(
            {"shell": self.shell, "script": printed.getvalue()}, printed.getvalue().rstrip("\n")
        )
