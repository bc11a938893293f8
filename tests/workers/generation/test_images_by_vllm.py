"""vLLM as the engine of a vision model. Skipped without torchvision, which its model classes
need."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seeing_model

from weft.algorithms.policy_loss import NegativeLogLikelihood
from weft.algorithms.sampling import Sampling
from weft.dataflow.batch import Batch
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.rollout import RolloutWorker
from weft.workers.rollout_config import RolloutConfig

pytestmark = pytest.mark.vllm
pytest.importorskip("torchvision")

PROMPTS = (
    seeing_model.make_rows()
    .select(["sample_id", "prompt_ids", "images"])
    .with_columns(group_id=np.arange(5))
)
SAMPLING = Sampling(max_tokens=12, temperature=2, stop=None)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_model.save_model(tmp_path_factory.mktemp("models") / "seeing")


@pytest.fixture(scope="module")
def rollout(seeing: Path, inspects_models_here: None) -> Iterator[RolloutWorker]:
    worker = RolloutWorker(
        RolloutConfig(
            model=seeing, engine="vllm", max_num_seqs=16, kv_cache_gib=0.05, double_buffer=False
        )
    )
    yield worker
    worker.close()


def samples_of(rollout: RolloutWorker, after: Any = lambda steps: None) -> Batch:
    """Return two responses per prompt, with its columns; call `after(steps)` after each step."""
    parts: list[Batch] = []
    for steps, found in enumerate(rollout.generate(PROMPTS, n=2, sampling=SAMPLING)):
        if found is not None:
            rows = found[0].rows
            prompts = PROMPTS.take(rows.numpy("parent_id")).select(["prompt_ids", "images"])
            parts.append(rows.with_columns(prompt_ids=prompts["prompt_ids"], images=prompts["images"]))
        after(steps)
    whole = Batch.concat(parts)
    return whole.with_columns(sample_id=np.arange(len(whole)))


def largest_gap(trainer: ActorWorker, samples: Batch) -> float:
    said = trainer.logprobs(samples, into="said").ragged_numpy("said")[0]
    return float(np.abs(said - samples.ragged_numpy("response_logprobs")[0]).max())


def test_responses_have_the_trainers_logprobs_despite_caches_of_older_weights(
    seeing: Path, rollout: RolloutWorker
):
    trainer = ActorWorker(ActorConfig(model=seeing, learning_rate=1e-2))

    def update(version: int) -> None:
        # this trains the vision tower as well
        trainer.update(seeing_model.make_rows(), loss=NegativeLogLikelihood())
        rollout.receive_weights(trainer.publish_weights(version, ("rollout[0]",)))
        trainer.finish_publishing(version)

    for version in range(1, 3):
        assert largest_gap(trainer, samples_of(rollout)) < 5e-4
        update(version)
    under_way = samples_of(rollout, lambda steps: update(3) if steps == 4 else None)
    assert set(under_way.ragged_numpy("response_versions")[0].tolist()) == {2, 3}
    assert largest_gap(trainer, samples_of(rollout)) < 5e-4
