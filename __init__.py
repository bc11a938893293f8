"""Weft: an RLHF and post-training orchestrator. One graph, any placement, any schedule.

The names below are what a program needs; each is imported from its module when it is first used, so that
`import weft` loads neither torch nor Ray nor vLLM and a bad configuration is reported at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_MODULES: dict[str, str] = {}
"""Public name -> the module that defines it."""

_FOLDERS = ("algorithms", "controllers", "dataflow", "resharding", "workers")

if TYPE_CHECKING:  # the same names for editors and checkers; tests/test_packaging.py keeps the two equal
    from . import algorithms as algorithms
    from . import controllers as controllers
    from . import dataflow as dataflow
    from . import resharding as resharding
    from . import workers as workers

    __version__: str

else:

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name in _MODULES:
            value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
        elif name in _FOLDERS:
            value = import_module(f".{name}", __name__)
        elif name == "__version__":
            value = import_module("importlib.metadata").version("weft")
        else:
            from .dataflow.errors import nearest

            raise AttributeError(f"module 'weft' has no attribute {name!r}{nearest(name, __dir__())}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({"__version__", *_MODULES, *_FOLDERS, *globals()})
