"""The canary stops a run before it samples if trainer and generator disagree on equal weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import weft
from weft.algorithms.grpo import grpo
from weft.dataflow.batch import Batch
from weft.dataflow.errors import WeftError, WeightSyncError
from weft.workers.actor import ActorConfig, ActorWorker, check_canary
from weft.workers.rollout import Canary, RolloutWorker
from weft.workers.rollout_config import RolloutConfig


def rollout_of(model: Path, **settings: Any) -> RolloutWorker:
    return RolloutWorker(RolloutConfig(model=str(model), engine="transformers", **settings))


@pytest.fixture
def other_positions(tiny_model: Path, tmp_path: Path) -> Path:
    """The same weights with another rotary base: all checksums agree, the outputs do not."""
    folder = tmp_path / "other"
    shutil.copytree(tiny_model, folder)
    settings = json.loads((folder / "config.json").read_text())
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 10.0}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_weights_pass(tiny_model: Path, dtype: Any):
    actor = ActorWorker(ActorConfig(model=str(tiny_model), dtype=dtype))
    canary = rollout_of(tiny_model, dtype=dtype).canary()
    assert len(canary.responses) == 4 and {len(tokens) for tokens in canary.responses} == {12}
    assert canary.exact == (dtype == "float32")
    actor.compare_canaries({"rollout[0]": canary}, version=0)


def test_a_generator_that_computes_something_else_is_named(tiny_model: Path, other_positions: Path):
    actor, rollout = ActorWorker(ActorConfig(model=str(tiny_model))), rollout_of(other_positions)
    taken = rollout.receive_weights(actor.publish_weights(5))
    assert actor.finish_publishing(5).checksum == taken, "the weights have arrived"
    with pytest.raises(
        WeightSyncError,
        match=r"version 5: the log-probabilities of rollout\[1\] for 48 tokens .* in the mean",
    ):
        actor.compare_canaries({"rollout[1]": rollout.canary()}, version=5)
    actor.close()


def test_the_bound_depends_on_the_precision_and_nan_is_refused():
    def check(gap: float, *, generator: bool, trainer: bool) -> None:
        canary = Canary(((1,),), ((2, 3),), ((-1.0, -2.0),), exact=generator)
        check_canary("rollout[0]", 1, canary, np.array([-1.0 + gap, -2.0]), exact=trainer)

    check(0.001, generator=True, trainer=True)
    check(0.3, generator=False, trainer=True)
    check(0.3, generator=True, trainer=False)
    for gap, exact in ((0.003, True), (0.5, False), (float("nan"), False)):
        with pytest.raises(WeightSyncError):
            check(gap, generator=exact, trainer=exact)


class EvenTokens:
    """A reward that needs no text: the share of even tokens."""

    def score(self, samples: Any) -> Any:
        return even_tokens(samples)


@weft.node(reads=("response_ids",), writes=("reward",))
def even_tokens(samples: Batch) -> Batch:
    return samples.with_columns(
        reward=[np.mean(np.array(ids) % 2 == 0) for ids in samples["response_ids"].to_pylist()]
    )


def test_a_run_stops_before_it_samples(tiny_model: Path, other_positions: Path, tmp_path: Path):
    prompts = weft.TableSource("prompts", pa.table({"prompt_ids": [[5, 6, 7], [8, 9]]}))
    actor: Any = weft.group(weft.ActorWorker, model=str(tiny_model))
    rollout: Any = weft.group(weft.RolloutWorker, model=str(other_positions), engine="transformers")
    rollout.follows(actor)
    graph = grpo(
        prompts,
        rollout=rollout,
        reward=EvenTokens(),
        actor=actor,
        n=2,
        sampling=weft.Sampling(max_tokens=4),
    )
    schedule = weft.Synchronous(steps=1, prompts_per_step=2)
    driver = weft.Driver(graph, schedule=schedule, root=tmp_path, name="canary", progress=False)
    with (
        pytest.raises(WeftError, match=r"weights version 0: the log-probabilities of rollout\[0\]"),
        driver,
    ):
        driver.run()
    assert not list((tmp_path / "canary").glob("samples/*"))
