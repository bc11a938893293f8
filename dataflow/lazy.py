"""Lazy import of torch, so that tracing and checking a graph takes milliseconds.

Modules import it with:

    from ..dataflow.lazy import torch
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class _LazyModule:
    """Stand-in that imports a module when one of its attributes is first used.

    >>> _LazyModule("math").sqrt(9.0)
    3.0
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)

    def __reduce__(self) -> tuple[type[_LazyModule], tuple[str]]:
        # cloudpickle pickles a user's function together with the globals that it uses.
        return _LazyModule, (self._name,)


if TYPE_CHECKING:
    import torch as torch
else:
    torch = _LazyModule("torch")
