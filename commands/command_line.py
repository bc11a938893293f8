"""The tree of commands, and what each ends with.

Exit codes: 0; 1 when what was looked at is not sound, or cannot be read; 2 when the user can mend it; 130 after Ctrl-C. With `--json`,
standard output is one JSON object and nothing else, also where a command ends with an error: {"error": ..., "exit_code": ...}.
Everything else that is said goes to standard error.
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
    "timeline": "timeline:Timeline",
    "buffer": {
        "check": "buffer:Check",
        "why": "buffer:Why",
        "table": "buffer:Table",
        "sql": "buffer:Sql",
        "archive": "buffer:Archive",
    },
    "submit": "submit:Submit",
    "jobs": {"list": "jobs:List", "follow": "jobs:Follow", "stop": "jobs:Stop"},
    "doctor": "doctor:Doctor",
    "dashboard": "dashboard:Dashboard",
    "completion": "completion:Completion",
}
"""Name -> module and class of a command, or the commands below it."""
MOST_SAID = 300
"""Characters of an error that no command expects."""
PRINT_COMPLETION = "--tyro-print-completion"
DESCRIPTION = "Start, watch and inspect runs of Weft, also while they are running, and check a machine. --version prints the version."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: words after `weft`; None: those of this process.

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
    except Exception as error:  # a run may be damaged in ways that nobody thought of
        if sys.flags.dev_mode:
            raise
        return _failed(f"unexpected error: {_where(error)}", 1, _where(error), as_json)
    return _show(answer, as_json)


def parse(words: Sequence[str]) -> Command:
    """The command that these words call.

    Raises:
        UserError: there is no such command.
        SystemExit: help or a completion was printed (0), or an argument is wrong and was told (2).
    """
    if words and words[0] == PRINT_COMPLETION:
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
    """The commands as a type that tyro takes.

    Args:
        tree: names of commands.
        stubs: leave out their arguments, which take time.
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
    """A command without arguments."""


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
    """An error that no command expects, in one line."""
    if isinstance(error, OSError) and error.filename is not None:
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    said = " ".join(str(error).split())[:MOST_SAID]
    return (
        f"{type(error).__name__}: {said} ({place.filename}:{place.lineno}); a file that was read may be damaged. "
        "PYTHONDEVMODE=1 shows the traceback"
    )


def _reader_is_gone() -> int:
    """The reader has seen enough: `weft buffer table RUN | head`."""
    sys.stderr.close()
    return 0


def _plain(value: Any) -> Any:
    """A value as JSON has it: a number that is not finite becomes null.

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


# Completion
#
# `weft completion`: what a shell needs to complete commands and options.


@dataclass(frozen=True, kw_only=True)
class Completion(Command):
    """Print what a shell needs to complete commands and options, to be sourced by it."""

    shell: Annotated[Positional[Literal["bash", "zsh", "fish"]], arg(metavar="{bash,zsh,fish}")]
    """The shell that completes."""

    def answer(self) -> Answer:

        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            parse([PRINT_COMPLETION, self.shell])
        return Answer(
            {"shell": self.shell, "script": printed.getvalue()}, printed.getvalue().rstrip("\n")
        )
