"""torch, imported when it is first used. Without it, a graph is traced and checked in milliseconds.

from ..dataflow.lazy import torch
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class LazyModule:
    """A module that is imported when one of its attributes is used.

    >>> LazyModule("math").sqrt(9.0)
    3.0
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)

    def __reduce__(self) -> tuple[type[LazyModule], tuple[str]]:
        return LazyModule, (
            self._name,
        )  # cloudpickle carries users' functions together with their globals


if TYPE_CHECKING:
    import torch as torch
else:
    torch = LazyModule("torch")
