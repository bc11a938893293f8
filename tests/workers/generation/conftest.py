"""The vLLM engine that tests in this folder share, because it starts slowly."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for imports of `engine_model` and `backend_ranks`

from weft.workers.rollout import RolloutConfig, RolloutWorker


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from engine_model import save_model

    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def vllm_worker(folder: Path, inspects_models_here: None) -> Iterator[RolloutWorker]:
    """The engine of the session.

    Closing another vLLM engine of this process destroys the process groups of both. Hence the
    modules that use this one sort before those with their own engines.
    """
    worker = RolloutWorker(
        RolloutConfig(model=folder, engine="vllm", max_num_seqs=64, kv_cache_gib=0.05)
    )
    yield worker
    worker.close()
