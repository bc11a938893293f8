"""The engines, their model and its tokenizer. Tests share one vLLM engine, because it starts
slowly."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for imports of `engine_model` and `backend_ranks`

from engine_model import VOCABULARY, published, save_model
from tokenizers import Tokenizer, decoders, models

from weft.resharding.publisher import WeightPublisher
from weft.workers.generation.engine import GenerationEngine
from weft.workers.generation.transformers_engine import TransformersEngine
from weft.workers.generation.vllm_engine import VllmEngine
from weft.workers.rollout import RolloutWorker
from weft.workers.rollout_config import RolloutConfig


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def vllm_worker(folder: Path, inspects_models_here: None) -> Iterator[RolloutWorker]:
    """The engine of the session.

    Closing another vLLM engine of this process destroys the process groups of both. Hence the
    modules that use this one sort before those with their own engines.
    """
    worker = RolloutWorker(
        RolloutConfig(model=folder, engine="vllm", max_num_seqs=64, kv_cache_gib=0.05, kept_sets=True)
    )
    yield worker
    worker.close()


@pytest.fixture
def model(folder: Path) -> Any:
    """The model, for plain forward passes."""
    return TransformersEngine(str(folder)).model


@pytest.fixture
def publisher() -> Iterator[WeightPublisher]:
    publisher = WeightPublisher()
    yield publisher
    publisher.close()


@pytest.fixture
def vllm(vllm_worker: RolloutWorker, folder: Path, publisher: WeightPublisher) -> Iterator[VllmEngine]:
    """The shared vLLM engine. Afterwards it gets its initial weights and version back."""
    engine = vllm_worker.engine
    assert isinstance(engine, VllmEngine)
    yield engine
    if engine.version:
        model = TransformersEngine(str(folder)).model
        engine.update_weights(published(model, publisher, version=0, scale=1.0))


@pytest.fixture(params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request: pytest.FixtureRequest, folder: Path) -> GenerationEngine:
    if request.param == "vllm":
        return request.getfixturevalue("vllm")
    return TransformersEngine(str(folder), kept_sets=True)


@pytest.fixture
def with_tokenizer(folder: Path) -> Path:
    """Add a tokenizer to the model's folder: two letters per token in the upper half, one in the
    lower."""
    if not (folder / "tokenizer.json").exists():
        texts = ["<pad>", "<stop>", "<bos>", *"defgh", *(a + b for a in "abcdef" for b in "abde")]
        tokenizer = Tokenizer(
            models.WordLevel({text: i for i, text in enumerate(texts[:VOCABULARY])}, "<pad>")
        )
        tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
