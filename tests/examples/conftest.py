"""Tests in this folder share `small`, which runs an example as a program, and a warm-started
model."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder where the first example leaves data and a warm-started model for the others."""
    return tmp_path_factory.mktemp("runs")
