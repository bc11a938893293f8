"""`weft run`: run a script with its settings."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import TracebackType

from ..dataflow.errors import UserError, WeftError, nearest
from ..dataflow.untrusted_text import show
from .command_line import Answer, Json, Script, ScriptArguments


def run(script: Script, arguments: ScriptArguments = (), *, json: Json = False) -> Answer:
    """Run a script as `python SCRIPT ...` does. The words after SCRIPT set its settings, or name a
    file with them (--config FILE); `weft run SCRIPT --help` lists the settings. The exit code is
    the script's. With --json, the script's output goes to standard error.

    Args:
        script: A Python file.
        arguments: The script's arguments: all words after SCRIPT.
    """
    path = script_file(script)
    with redirect_stdout(sys.stderr if json else sys.stdout):
        code = run_script(path, arguments)
    return Answer({"script": script, "exit_code": code}, exit_code=code)


def script_file(name: str) -> Path:
    """Return the script's path. Raises UserError if it is not an existing Python file."""
    path = Path(name)
    if path.suffix != ".py":
        raise UserError(f"SCRIPT must be a Python file, such as train.py, not {name!r}")
    if not path.is_file():
        others = [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UserError(f"there is no script {path}{nearest(path.name, others)}")
    return path


def run_script(path: Path, arguments: Sequence[str]) -> int:
    """Run a script and return its exit code; its imports work as with `python SCRIPT`. Raises a
    WeftError that the script does not catch."""
    sys.argv = [str(path), *arguments]
    # Python also puts the script's folder first on the path.
    sys.path[0] = str(path.parent.resolve())
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        show(str(left.code))
        return 1
    except (WeftError, KeyboardInterrupt):
        raise
    except Exception as error:
        shown = error.with_traceback(_of_script(error.__traceback__, str(path)))
        show("".join(traceback.format_exception(shown)), end="")
        return 1
    return 0


def _of_script(trace: TracebackType | None, file: str) -> TracebackType | None:
    """Return the part of a traceback that starts in the script, if any."""
    while trace is not None and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    return trace
