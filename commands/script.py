"""Runs a script in this process, as `python SCRIPT ...` does."""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from ..dataflow.errors import UserError, WeftError, nearest


def script_file(name: str) -> Path:
    """The file of a script.

    Raises:
        UserError: there is no such file.
    """
    path = Path(name)
    if path.suffix != ".py":
        raise UserError(f"SCRIPT is a Python file, such as train.py, not {name!r}")
    if not path.is_file():
        others = [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UserError(f"there is no script {path}{nearest(path.name, others)}")
    return path


def run_script(path: Path, arguments: Sequence[str]) -> int:
    """Run a script; returns its exit code. What it imports and what its workers import is found as if Python had been started with it.

    Args:
        path: of the script.
        arguments: that it finds in `sys.argv`.

    Raises:
        WeftError: the script did not catch it.
    """
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=str(path), __builtins__=builtins)
    sys.modules["__main__"] = main
    sys.argv = [str(path), *arguments]
    sys.path[0] = str(path.parent.resolve())
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), main.__dict__)
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)
        return 1
    except (WeftError, KeyboardInterrupt):
        raise
    except Exception:
        sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]
        return 1
    return 0
