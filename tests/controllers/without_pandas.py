"""Import this first to spare a test process the import of pandas.

On the first conversion of a process, Arrow imports pandas, if installed, to check for its objects.
That takes 0.7 s of CPU, and these tests use no pandas objects.
"""

import sys
from collections.abc import Sequence
from types import ModuleType

import pyarrow as pa


class _Hides:
    """Import hook that finds no pandas."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("hidden for Arrow's first conversion", name=name)


# the process of pytest also runs tests of data sets
if not {"pandas", "pytest"} & sys.modules.keys():
    sys.meta_path.insert(0, _Hides())  # pyright: ignore[reportArgumentType]
    pa.array([0])
    del sys.meta_path[0]
