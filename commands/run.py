"""`weft run`: a script of one's own, with its settings."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass

from .command import Answer, ScriptCommand
from .script import run_script, script_file


@dataclass(frozen=True, kw_only=True)
class Run(ScriptCommand):
    """Run a script as `python SCRIPT ...` does. What stands behind SCRIPT is its own: its settings, or --config FILE; `weft run SCRIPT
    --help` lists them. The exit code is the script's. With --json what the script prints goes to standard error."""

    def answer(self) -> Answer:
        path = script_file(self.script)
        with redirect_stdout(sys.stderr if self.json else sys.stdout):
            code = run_script(path, self.arguments)
        return Answer({"script": self.script, "exit_code": code}, exit_code=code)
