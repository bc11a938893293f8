"""Solve rates count the outcome of each episode, and see every group before filters drop it."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from weft.algorithms.advantages import group_advantages
from weft.algorithms.graders.math import Math
from weft.algorithms.grpo import drop_zero_variance, first_of_group, grpo
from weft.algorithms.solve_rates import solve_rates, with_solve_rates
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.rows import Wiring
from weft.dataflow.errors import UserError
from weft.dataflow.graph import Graph, group
from weft.dataflow.metrics import GroupCounts, merge
from weft.dataflow.prompts.curriculum import Curriculum
from weft.dataflow.prompts.prompts import Prompts
from weft.dataflow.source import TableSource
from weft.dataflow.tracing import graph
from weft.workers.actor import ActorWorker
from weft.workers.reward import RewardWorker
from weft.workers.rewards.function import Reward
from weft.workers.rollout import RolloutWorker

TABLE = pa.table({"prompt_ids": [[1], [2]], "answer": ["1", "2"], "data": ["a", "b"]})


def short(response: str) -> float:
    return -len(response)


def tidy(response: str) -> float:
    return 1.0


def counts(samples: Batch, **settings: Any) -> dict[int, tuple[int, int]]:
    return solve_rates(samples, **settings)[1]["outcomes"].counts  # type: ignore[union-attr]


# The node


def test_each_group_has_its_share_of_solved_responses():
    samples = Batch.of(group_id=[9, 7, 9, 7, 9], right=[1.0, 0.0, 0.0, 0.0, 1.0])
    rated, metrics = solve_rates(samples, outcome="right")
    assert np.allclose(rated["solve_rate"].to_pylist(), [2 / 3, 0, 2 / 3, 0, 2 / 3])
    assert metrics["outcomes"] == GroupCounts({7: (0, 2), 9: (2, 3)})


def test_partial_credit_counts_from_the_given_outcome_on():
    samples = Batch.of(group_id=[1, 1, 1], reward=[0.4, 0.5, 2.0])
    assert counts(samples) == {1: (1, 3)} and counts(samples, solved=0.5) == {1: (2, 3)}


def test_an_episode_counts_once_and_masked_or_ungraded_ones_have_no_vote():
    samples = Batch.of(
        group_id=[1, 1, 1, 1, 2, 2],
        episode_id=[10, 10, 11, 12, 20, 21],
        reward=[1.0, 1.0, 0.0, 0.0, float("nan"), 1.0],
        response_mask=[[1], [0], [0], [1], [1], [0]],
    )
    rated, metrics = solve_rates(samples)
    assert metrics["outcomes"].counts == {1: (1, 2), 2: (0, 0)}  # type: ignore[union-attr]
    assert np.allclose(rated.numpy("solve_rate"), [0.5] * 4 + [np.nan] * 2, equal_nan=True)


def test_counts_of_several_ranks_are_united():
    parts = [{"outcomes": GroupCounts({1: (1, 2)})}, {"outcomes": GroupCounts({2: (0, 2)})}]
    assert merge(parts) == {"outcomes": GroupCounts({1: (1, 2), 2: (0, 2)})}


# The graph


def groups(*functions: Any) -> dict[str, Any]:
    made = {
        "rollout": group(RolloutWorker, model="m", engine="transformers"),
        "reward": group(RewardWorker, function=functions or (Math(),), tokenizer="m"),
        "actor": group(ActorWorker, model="m"),
    }
    made["rollout"].follows(made["actor"])
    return made


def source(**settings: Any) -> Prompts:
    return Prompts("sums", TABLE).with_curriculum(Curriculum(**settings))


@graph
def dapo(prompts, *, rollout, reward, actor):
    samples: Any = first_of_group(rollout.generate(prompts, n=4), 2, by="response_ids")
    samples = drop_zero_variance(reward.score(samples))
    return actor.update(group_advantages(samples))


@graph
def over_issued(prompts, *, rollout, reward, actor):
    samples = reward.score(rollout.generate(prompts, n=4))
    samples: Any = drop_zero_variance(first_of_group(samples, 2))
    return actor.update(group_advantages(samples))


def test_the_node_sees_groups_before_filters_and_no_rows_that_a_quorum_left_out():
    made = with_solve_rates(dapo(source(), **groups()))
    names = [node.name for node in made.nodes]
    assert names.index("solve_rates") == names.index("reward.score") + 1
    node = made["solve_rates"]
    assert "drop_zero_variance" not in node.after
    assert {"reward.score", "first_of_group"} <= set(node.after)
    made.validate()


def test_the_node_does_not_wait_for_rows_that_a_later_quorum_cancels():
    made = with_solve_rates(over_issued(source(), **groups()))
    assert "first_of_group" in made["solve_rates"].after
    assert "drop_zero_variance" not in made["solve_rates"].after
    wiring = Wiring(made)
    quorum = wiring.index["first_of_group"]
    assert wiring.upstream_only[quorum] == [wiring.index["reward.score"]], "they are not even scored"


def test_a_graph_without_a_curriculum_stays_as_it_is():
    plain = grpo(TableSource("sums", TABLE), **groups())
    assert with_solve_rates(plain) is plain


@pytest.mark.parametrize(
    ("functions", "settings", "outcome"),
    [
        ((Math(),), {}, "reward"),
        ((Math(), short), {}, "reward/Math"),
        ((short,), {}, "reward"),
        ((tidy, short), {"outcome": "reward/tidy"}, "reward/tidy"),
    ],
)
def test_the_outcome_is_the_grader_and_not_the_sum_with_shaping_terms(
    functions: Any, settings: dict[str, Any], outcome: str
):
    node = with_solve_rates(grpo(source(**settings), **groups(*functions)))["solve_rates"]
    assert node.reads == (outcome,) and node.arguments["outcome"] == outcome


@pytest.mark.parametrize(
    ("functions", "settings", "said"),
    [
        ((tidy, short), {}, r"adds up tidy, short, .* such as Curriculum\(outcome='reward/tidy'\)"),
        ((tidy, Reward(function=short, weight=0.1)), {}, "needs the outcome alone"),
        ((Math(),), {"outcome": "reward/Maths"}, "no node of graph 'grpo' writes this column"),
        ((Math(),), {"outcome": "rewards"}, "did you mean 'reward'?"),
        ((Math(),), {"sources": "dat"}, "sums: .* no such column; did you mean 'data'?"),
    ],
)
def test_an_unclear_outcome_is_refused(functions: Any, settings: dict[str, Any], said: str):
    made: Graph = grpo(source(**settings), **groups(*functions))
    with pytest.raises(UserError, match=said.removesuffix("?")):
        with_solve_rates(made)
