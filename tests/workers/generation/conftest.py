"""The engine of vLLM that the tests of this folder share: it takes long to start."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # what tests here import: `engine_model`, `backend_ranks`

from weft.workers.rollout import RolloutConfig, RolloutWorker


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from engine_model import save_model

    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def vllm_worker(folder: Path, inspects_models_here: None) -> Iterator[RolloutWorker]:
    """The engine of the session. Another engine of this process that closes ends vLLM's process groups for both, so the modules that
    use this one sort before those that start their own."""
    worker = RolloutWorker(RolloutConfig(model=folder, engine="vllm", max_num_seqs=64, kv_cache_gib=0.05))
    yield worker
    worker.close()
