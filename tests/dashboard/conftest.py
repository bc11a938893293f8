"""The tests beside this file look at runs of the toy workers of the controllers' tests."""

import sys
from pathlib import Path

import pytest
from starlette.testclient import TestClient

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


@pytest.fixture
def client(runs: Path) -> TestClient:
    return client_of(runs)
