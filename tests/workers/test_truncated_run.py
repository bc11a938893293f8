"""A run that trains on samples of a part of the vocabulary, ended in the middle and resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import weft
from weft.algorithms.grpo import grpo
from weft.algorithms.kl import KlPenalty
from weft.algorithms.policy_loss import PolicyLoss
from weft.controllers.recovery.checkpoints import CheckpointConfig
from weft.controllers.schedule import Training
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.check import check_log
from weft.dataflow.metrics import Metrics
from weft.dataflow.operation import TrainingBatch
from weft.workers.dispatch import Dispatch
from weft.workers.rollout_config import record_kept_sets
from weft.workers.worker import remote

PROMPTS = [[5, 6, 7], [8, 9], [10, 11], [12, 13, 14], [15], [16, 17]]
CUT = weft.Sampling(max_tokens=8, top_p=0.9, top_k=20, min_p=0.05, min_tokens=2)
SCHEDULES = [
    weft.Synchronous(steps=4, prompts_per_step=2),
    weft.Asynchronous(steps=4, prompts_per_step=2, max_staleness=2),
]


class EndedError(Exception):
    """Ends a run in the middle."""


@weft.node(reads=("response_ids",), writes=("reward",))
def parity(batch: Batch) -> Batch:
    return batch.with_columns(reward=[float(sum(ids) % 2) for ids in batch["response_ids"].to_pylist()])


class Parity:
    """Stands in for a group of reward workers."""

    score = staticmethod(parity)


def run(
    model: Path, root: Path, schedule: Training, *, ends_after: int | None = None, resume: str = "none"
) -> list[dict[str, float]]:
    actor = weft.group(weft.ActorWorker, model=str(model), learning_rate=1e-10)
    rollout = weft.group(weft.RolloutWorker, model=str(model), engine="transformers")
    rollout.follows(actor)
    graph = grpo(
        weft.TableSource("prompts", pa.table({"prompt_ids": PROMPTS})),
        rollout=rollout,
        reward=Parity(),
        actor=actor,
        reference=weft.group(weft.ReferenceWorker, model=str(model)),
        n=4,
        sampling=CUT,
        loss=PolicyLoss(kl=KlPenalty(coefficient=0.1)),
    )

    def stop(row: Mapping[str, float]) -> bool:
        if row["step"] == ends_after:
            raise EndedError
        return False

    settings: dict[str, Any] = {"root": root, "name": "run", "progress": False, "stop": stop}
    settings |= {"checkpoint": CheckpointConfig(every=1), "resume": resume}
    with weft.Driver(graph, schedule=schedule, **settings) as driver:
        return driver.run()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: type(each).__name__)
def test_kept_sets_of_rows_in_flight_survive_a_resume(
    tiny_model: Path, tmp_path: Path, schedule: Training
):
    """The weights hardly change, so generator, trainer and reference agree at every token."""
    with pytest.raises(EndedError):
        run(tiny_model, tmp_path, schedule, ends_after=2)
    metrics = run(tiny_model, tmp_path, schedule, resume="latest")
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4]
    for row in metrics[1:]:
        assert row["actor/max_logprob_gap"] < 5e-4 and row["actor/mean_logprob_gap"] < 1e-5
        assert abs(row["actor/kl"]) < 1e-5
    assert not check_log(tmp_path / "run" / "buffer").violations


class Own(weft.Worker):
    """Trains with log-probabilities and not with kept sets."""

    Config = weft.Config

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=("response_ids", "response_logprobs"),
        takes=TrainingBatch(),
    )
    def update(self, batch: Batch) -> Metrics:
        raise AssertionError("no run has started")


def test_an_update_that_reads_the_probabilities_without_the_kept_sets_is_refused(
    tmp_path: Path, tiny_model: Path
):
    @weft.graph
    def trains(prompts: Any, *, rollout: Any, actor: Any) -> Any:
        return actor.update(rollout.generate(prompts, n=2, sampling=CUT))

    rollout = weft.group(weft.RolloutWorker, model=str(tiny_model), engine="transformers")
    graph = trains(
        weft.TableSource("prompts", pa.table({"prompt_ids": PROMPTS})),
        rollout=rollout,
        actor=weft.group(Own, name="actor"),
    )
    with pytest.raises(
        weft.UserError, match=r"'actor.update' trains with .* add 'kept_counts' and 'kept_ids'"
    ):
        weft.Driver(graph, schedule=SCHEDULES[0], root=tmp_path, progress=False)


def test_probabilities_of_a_file_need_no_kept_sets():
    @weft.graph
    def trains(rows: Any, *, actor: Any) -> Any:
        return actor.update(rows)

    columns = {"response_ids": [[5], [6]], "response_logprobs": [[-1.0], [-2.0]]}
    graph = trains(weft.TableSource("rows", pa.table(columns)), actor=weft.group(Own, name="actor"))
    assert "response_logprobs" in graph.nodes[0].reads
    record_kept_sets([graph])
