"""The tests beside this file look at runs of the toy workers of the controllers' tests."""

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
    """A folder with the runs one and two, which are done; the second had another seed and made checkpoints."""
    root = tmp_path_factory.mktemp("dashboard") / "runs"
    recorded_runs.run(root, "one")
    recorded_runs.run(root, "two", seed=1, every=2)
    return root


@pytest.fixture(autouse=True)
def pages_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page waits until all samples are read, also on a busy machine."""
    for module in (sample_index, comparison):
        monkeypatch.setattr(module, "READ_S", 60.0)


@pytest.fixture
def client(runs: Path) -> TestClient:
    return client_of(runs)
