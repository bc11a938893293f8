"""Preference pairs in the driver: complete, best against worst; groups without a best are replaced."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from toy import ToyActor, ToyReward, ToyRollout, prompts

from weft.algorithms.preference import best_and_worst, dpo
from weft.controllers.driver import Driver
from weft.controllers.schedule import Pipelined, Synchronous
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.check import check_log
from weft.dataflow.graph import group
from weft.dataflow.metrics import Max, Metrics, Sum
from weft.dataflow.operation import Shape, TrainingBatch, node
from weft.dataflow.source import TableSource
from weft.dataflow.tracing import graph
from weft.workers.dispatch import Dispatch
from weft.workers.worker import remote


class GivenPairs(ToyActor):
    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=("response_ids", "preferred"),
        takes=lambda epochs: TrainingBatch(accumulates=epochs == 1),
    )
    def update(self, samples: Batch, *, loss: Any = None, epochs: int = 1, last: bool = True) -> Metrics:
        return {"pairs": Sum(len(samples) / 2)}


def test_a_response_of_a_given_pair_has_the_tokens_of_its_prompt_and_its_own(tmp_path: Path):
    given = TableSource(
        "pairs", pa.table({"prompt_ids": [[1, 2, 3]], "chosen_ids": [[4, 5]], "rejected_ids": [[6]]})
    )
    with Driver(
        dpo(given, actor=group(GivenPairs)),
        schedule=Synchronous(steps=2, prompts_per_step=1),
        root=tmp_path,
        name="run",
        progress=False,
    ) as driver:
        metrics = driver.run()
        updates = [call for call in driver.directory.timeline if call["node"] == "actor.update"]
    assert [call["tokens"] for call in updates] == [3 + 2 + 3 + 1] * 2
    assert [round(row["tokens_per_s"] * row["step_s"]) for row in metrics[1:]] == [9, 9]


@node(shape=Shape.EXPAND, reads=("sum",), writes=("prompt_ids", "response_ids", "preferred"))
def asked(sums: Batch) -> Batch:
    """Make prompts from the source, which has none."""
    ids = sums["sum"].to_pylist()
    number = len(ids)
    parents = [id for id in sums["sample_id"].to_pylist() for _ in range(2)]
    return Batch.of(
        parent_id=parents,
        prompt_ids=[[id] for id in ids for _ in range(2)],
        response_ids=[[1], [2, 3]] * number,
        preferred=[1, 0] * number,
    )


@graph
def asking(sums: Any, *, actor: Any) -> Any:
    return actor.update(asked(sums), loss=None)


def test_a_source_need_not_have_prompts(tmp_path: Path):
    given = TableSource("sums", pa.table({"sum": [7, 8]}))
    with Driver(
        asking(given, actor=group(GivenPairs)),
        schedule=Synchronous(steps=1, prompts_per_step=2),
        root=tmp_path,
        name="run",
        progress=False,
    ) as driver:
        driver.run()
        updates = [call for call in driver.directory.timeline if call["node"] == "actor.update"]
    assert [call["tokens"] for call in updates] == [2 * (1 + 1 + 1 + 2)]


class PairActor(ToyActor):
    """Checks that it gets pairs, and counts them."""

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=("response_ids", "preferred", "reward"),
        takes=lambda epochs: TrainingBatch(accumulates=epochs == 1),
    )
    def update(self, samples: Batch, *, loss: Any = None, epochs: int = 1, last: bool = True) -> Metrics:
        groups, index = samples.groups()
        by_group = [samples.take((index == k).nonzero()[0]).to_rows() for k in range(len(groups))]
        for pair in by_group:
            worst, best = sorted(pair, key=lambda row: row["preferred"])
            assert (worst["preferred"], best["preferred"]) == (0, 1) and best["reward"] > worst["reward"]
        return {"pairs": Sum(float(len(groups))), "rows": Max(float(max(map(len, by_group))))}


@graph
def toy_online(prompts: Any, *, rollout: Any, reward: Any, actor: Any) -> Any:
    return actor.update(best_and_worst(reward.score(rollout.generate(prompts, n=3))), loss=None)


@pytest.mark.parametrize(
    "schedule", [Synchronous(steps=3, prompts_per_step=4), Pipelined(steps=3, prompts_per_step=4)]
)
def test_each_step_has_its_number_of_pairs(tmp_path: Path, schedule: Any):
    made = {"rollout": group(ToyRollout), "reward": group(ToyReward), "actor": group(PairActor)}
    made["rollout"].follows(made["actor"])
    with Driver(
        toy_online(prompts(12), **made), schedule=schedule, root=tmp_path, name="run", progress=False
    ) as driver:
        metrics = driver.run()
        assert driver.buffer is not None
        dropped = driver.buffer.ledgers["train"].live.dropped["best_and_worst"]
    assert [row["actor/pairs"] for row in metrics[1:]] == [4, 4, 4] and all(
        row["actor/rows"] == 2 for row in metrics[1:]
    )
    ties = sum(row["tied_groups"] for row in metrics[1:])
    assert dropped == 3 * ties + 12, (
        "all rows of a group without a best one, and the middle one of each other"
    )
    assert not check_log(tmp_path / "run" / "buffer").violations
