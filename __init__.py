"""Weft: an RLHF and post-training orchestrator. One graph, any placement, any schedule.

The names below are what a program needs; each is imported from its module when it is first used, so that
`import weft` loads neither torch nor Ray nor vLLM and a bad configuration is reported at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and checkers; tests/test_packaging.py keeps it equal to the table
    pass

_MODULES: dict[str, str] = {}
"""Public name -> the module that defines it."""

_FOLDERS = ("algorithms", "controllers", "dataflow", "resharding", "workers")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    elif name in _FOLDERS:
        value = import_module(f".{name}", __name__)
    elif name == "__version__":
        value = import_module("importlib.metadata").version("weft")
    else:
        raise AttributeError(_no_such_name(name))
    globals()[name] = value
    return value


def _no_such_name(name: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, __dir__(), n=1)
    return f"module 'weft' has no attribute {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def __dir__() -> list[str]:
    return sorted({"__version__", *_MODULES, *_FOLDERS, *globals()})
