"""Imported first by processes of tests, it spares them pandas.

Arrow imports pandas, where that is installed, on the first conversion of a process, to see whether it is given any of its objects. That
takes 0.7 s of a CPU, and nobody here gives it any.
"""

import sys
from collections.abc import Sequence
from types import ModuleType

import pyarrow as pa


class _Hides:
    """Finds no pandas."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("hidden for Arrow's first conversion", name=name)


if not {"pandas", "pytest"} & sys.modules.keys():  # the process of pytest has tests of data sets, too
    sys.meta_path.insert(0, _Hides())  # pyright: ignore[reportArgumentType]
    pa.array([0])
    del sys.meta_path[0]
