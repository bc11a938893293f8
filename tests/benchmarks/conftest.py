"""Imports of benchmarks/, which is not a package: each program can import its own folder and the ones
above."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Import `folder/module`, or a module of benchmarks/ itself."""

    def module(name: str) -> ModuleType:
        room, _, stem = name.rpartition("/")
        for folder in (BENCHMARKS, BENCHMARKS / room):
            if str(folder) not in sys.path:
                monkeypatch.syspath_prepend(str(folder))
        return importlib.import_module(stem)

    return module
