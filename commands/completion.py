"""`weft completion`: what a shell needs to complete commands and options."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from .command import Answer, Command


@dataclass(frozen=True, kw_only=True)
class Completion(Command):
    """Print what a shell needs to complete commands and options, to be sourced by it."""

    shell: Annotated[Positional[Literal["bash", "zsh", "fish"]], arg(metavar="{bash,zsh,fish}")]
    """The shell that completes."""

    def answer(self) -> Answer:
        from .command_line import PRINT_COMPLETION, parse

        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            parse([PRINT_COMPLETION, self.shell])
        return Answer({"shell": self.shell, "script": printed.getvalue()}, printed.getvalue().rstrip("\n"))
