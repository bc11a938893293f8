"""Tests in this folder look at runs of the controllers' toy workers."""

import sys
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from weft.dashboard.reading import comparison, sample_index

sys.path.insert(0, str(Path(__file__).parents[1] / "commands"))
sys.path.insert(0, str(Path(__file__).parents[1] / "controllers"))
sys.path.insert(0, str(Path(__file__).parent))
import recorded_runs  # pyright: ignore[reportMissingImports]
from served import client_of  # pyright: ignore[reportMissingImports]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with finished runs one and two; the second has another seed and checkpoints."""
    root = tmp_path_factory.mktemp("dashboard") / "runs"
    recorded_runs.run(root, "one")
    recorded_runs.run(root, "two", seed=1, every=2)
    return root


@pytest.fixture(autouse=True)
def pages_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pages wait until all samples are read, even on a busy machine."""
    for module in (sample_index, comparison):
        monkeypatch.setattr(module, "READ_S", 60.0)


@pytest.fixture
def client(runs: Path) -> TestClient:
    return client_of(runs)
