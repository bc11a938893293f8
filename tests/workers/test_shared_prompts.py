"""Rows of a prompt go to one training rank, because it computes the prompt once for all of them."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import weft
from weft.algorithms.grpo import grpo
from weft.controllers.group import Call
from weft.controllers.ranks.tasks import Task
from weft.controllers.simulation.costs import CostModel, Generation, LinearCost, LogNormal
from weft.workers.worker import remote

PROMPTS, SAMPLES, RANKS = 8, 4, 2


class Noted(weft.Simulated):
    """Notes the groups of the rows that each rank gets."""

    def __init__(self, costs: CostModel) -> None:
        super().__init__(costs)
        self.groups: dict[str, dict[int, list[int]]] = {}

    def _submit(self, rank: int, task: Task, call: Call) -> None:
        if call.node is not None:
            assert task.rows is not None
            ranks = self.groups.setdefault(call.node.name, {})
            ranks.setdefault(rank, []).extend(task.rows.group_ids.tolist())
        super()._submit(rank, task, call)


class Reward(weft.Worker):
    Config = weft.Config

    @remote(dispatch=weft.Dispatch.SPLIT_BY_DP, reads=("response_ids",), writes=("reward",))
    def score(self, samples: weft.Batch) -> weft.Batch:
        """Never called: the simulator invents the column."""
        return samples


def groups_of_ranks(tiny_model: Path, root: Path, **settings: Any) -> dict[str, dict[int, list[int]]]:
    """Return node -> rank -> the groups of its rows, in one step of GRPO."""
    model = str(tiny_model)
    rollout = weft.group(weft.RolloutWorker, model=model, engine="transformers")
    actor = weft.group(weft.ActorWorker, model=model, learning_rate=1e-6, **settings)
    rollout.follows(actor)
    reward = weft.group(Reward)
    prompts = weft.TableSource("prompts", pa.table({"prompt_ids": [[1] * 40] * PROMPTS}))
    graph = grpo(prompts, rollout=rollout, reward=reward, actor=actor, n=SAMPLES)
    lengths = LogNormal(mean=10, sigma=0.3, max_tokens=20)
    linear = LinearCost(fixed_s=1.0)
    names = ("reward.score", "actor.update", "actor.publish_weights", "rollout.receive_weights")
    costs = dict.fromkeys((*names, "group_advantages"), linear)
    generation = Generation(lengths=lengths, decode_step_s=1.0)
    backend = Noted(CostModel(nodes={"rollout.generate": generation, **costs}))
    pool = weft.ResourcePool("all", cpus=RANKS)
    with weft.Driver(
        graph,
        schedule=weft.Synchronous(steps=1, prompts_per_step=PROMPTS),
        placement={name: weft.Place(pool, RANKS) for name in ("rollout", "actor", "reward")},
        backend=backend,
        root=root,
        progress=False,
    ) as driver:
        driver.run()
    return backend.groups


def homes(ranks: dict[int, list[int]]) -> int:
    """Count pairs of a rank and a group that it has rows of."""
    return sum(len(set(groups)) for groups in ranks.values())


def test_an_update_gets_all_rows_of_a_prompt_on_one_rank(tiny_model: Path, tmp_path: Path):
    found = groups_of_ranks(tiny_model, tmp_path)
    assert homes(found["actor.update"]) == PROMPTS
    assert len(found["actor.update"][0]) == PROMPTS * SAMPLES // RANKS
    assert homes(found["reward.score"]) > PROMPTS, "a reward computes nothing for several rows"


def test_rows_that_share_no_computation_are_dealt_one_by_one(tiny_model: Path, tmp_path: Path):
    pool: Any = {"engine": _engine}
    assert homes(groups_of_ranks(tiny_model, tmp_path, **pool)["actor.update"]) > PROMPTS


def _engine(config: Any, context: Any, training: Any = None, *, head: str = "logprobs") -> Any:
    """Stand for an engine that says nothing about prompts. A simulation does not make it."""


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({}, True),
        ({"sequence_parallel": 2}, False),
        ({"tensor_parallel": 2}, True),
        ({"engine": _engine}, False),
    ],
)
def test_an_engine_says_whether_it_shares_prompts(
    tiny_model: Path, settings: dict[str, Any], shares: bool
):
    config = weft.ActorWorker.Config(model=str(tiny_model), learning_rate=1e-6, **settings)
    assert weft.ActorWorker.shares_prompts(config) is shares
    assert not weft.RolloutWorker.shares_prompts(config)
