"""pass@k, avg@k and their intervals against brute force, tables and simulated coverage."""

import math
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from weft.algorithms.evaluation import (
    evaluate,
    interval,
    majority_at_k,
    pass_at_k,
    score_prompts,
    student_t,
)
from weft.algorithms.graders.math import Math
from weft.algorithms.graders.text import F1, RegularExpression, TagFormat
from weft.controllers.graph_run import values_of
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.dataflow.graph import group
from weft.dataflow.metrics import Estimate, merge
from weft.dataflow.source import TableSource
from weft.workers.reward import RewardWorker
from weft.workers.rewards.function import Reward
from weft.workers.rollout import RolloutWorker


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_all_draws_of_k_that_hold_a_solution(n: int):
    for c in range(n + 1):
        solved = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            draws = list(combinations(solved, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("n", "k"), [(4, 1), (10, 3), (16, 8), (200, 100)])
def test_pass_at_k_is_unbiased(n: int, k: int):
    for p in (0.0, 0.01, 0.3, 1.0):
        chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
        expected = sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances))
        assert expected == pytest.approx(1 - (1 - p) ** k)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 0), (4, 1, 5), (4, 5, 1), (0, 0, 1)])
def test_pass_at_k_of_fewer_samples_is_refused(n: int, c: int, k: int):
    with pytest.raises(ValueError, match=f"pass@{k} of {n} samples"):
        pass_at_k(n, c, k)


def drawn(seed: int, prompts: int, n: int) -> Batch:
    draw = np.random.default_rng(seed)
    rewards = draw.choice([0.0, 0.5, 1.0], size=prompts * n).astype(np.float32)
    return Batch.of(group_id=np.repeat(np.arange(prompts), n).tolist(), reward=rewards.tolist())


@pytest.mark.parametrize("seed", range(3))
def test_the_metrics_of_prompts_are_those_of_brute_force_however_they_are_split(seed: int):
    n, ks, batch = 4, (1, 2, 4), drawn(seed, 9, 4)
    rewards = np.array(batch["reward"].to_pylist()).reshape(9, n)
    parts = [batch.take(np.arange(first * n, last * n)) for first, last in ((0, 2), (2, 3), (3, 9))]
    found = merge(score_prompts(part, n=n, k=ks, solved=1.0) for part in parts)
    estimate = found["avg@4"]
    assert isinstance(estimate, Estimate) and estimate.value == pytest.approx(rewards.mean())
    assert estimate.number == 9 and estimate.std == pytest.approx(rewards.mean(1).std())
    for k in ks:
        each = [np.mean([max(draw) >= 1.0 for draw in combinations(row, k)]) for row in rewards]
        assert found[f"pass@{k}"].value == pytest.approx(np.mean(each))
    assert found["prompts"].value == 9


def test_a_prompt_that_has_lost_samples_counts_with_those_that_are_left():
    batch = Batch.of(group_id=[0, 0, 1], reward=[1.0, 0.0, 1.0])
    found = {name: metric.value for name, metric in score_prompts(batch, n=2, k=(1, 2)).items()}
    assert found == {"avg@2": 0.75, "pass@1": 0.75, "pass@2": 1.0, "prompts": 2.0}
    none = score_prompts(batch.take(np.array([], np.int64)), n=2, k=(1,))
    assert math.isnan(none["avg@2"].value) and none["prompts"].value == 0


def test_a_threshold_defines_a_solved_prompt():
    batch = Batch.of(group_id=[0, 0], reward=[0.5, 0.1])
    assert score_prompts(batch, n=2, k=(1,), solved=0.5)["pass@1"].value == 0.5


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [
        (1, 12.7062),
        (2, 4.3027),
        (3, 3.1824),
        (4, 2.7764),
        (5, 2.5706),
        (9, 2.2622),
        (29, 2.0452),
        (120, 1.9799),
    ],
)
def test_the_quantiles_of_students_t_are_those_of_the_tables(freedom: int, quantile: float):
    assert student_t(freedom) == pytest.approx(quantile, rel=2e-3)


@pytest.mark.parametrize(("number", "p"), [(20, 0.1), (50, 0.5), (200, 0.97)])
def test_wilsons_interval_holds_the_shares_that_are_not_too_unlikely(number: int, p: float):
    low, high = interval(p, math.sqrt(p * (1 - p)), number) or (0, 0)
    for share in (low, high):  # at its ends, the observed share is 1.96 standard errors away
        assert abs(p - share) == pytest.approx(
            1.959964 * math.sqrt(share * (1 - share) / number), rel=1e-6
        )


def test_an_interval_over_prompts_covers_and_one_over_samples_does_not():
    draw, prompts, n, covered, naive = np.random.default_rng(0), 40, 8, 0, 0
    chances = draw.beta(0.6, 0.6, size=(1500, prompts))  # some prompts are easy, others hard
    solved = draw.random((1500, prompts, n)) < chances[..., None]
    for run in solved:
        means = run.mean(1)
        low, high = interval(means.mean(), means.std(), prompts) or (0, 0)
        covered += low <= 0.5 <= high
        low, high = interval(run.mean(), run.std(), prompts * n) or (0, 0)
        naive += low <= 0.5 <= high
    assert 0.935 <= covered / 1500 <= 0.965 and naive / 1500 < 0.75


def test_a_k_that_needs_more_responses_is_refused():
    source: Any = TableSource(
        "held_out", pa.table({"prompt_ids": pa.array([[1]], pa.list_(pa.int32()))})
    )
    with pytest.raises(UserError, match=r"evaluate\(n=4, k=\(1, 8\)\): pass@8 needs n of at least 8"):
        evaluate(source, rollout=None, reward=None, n=4, k=(1, 8))  # pyright: ignore[reportArgumentType]


def form(response: str) -> float:
    return float("boxed" in response)


def right(response: str, answer: str) -> float:
    return float(response == answer)


SOURCE: Any = TableSource(
    "held_out",
    pa.table({"prompt_ids": pa.array([[1]], pa.list_(pa.int32())), "answer": pa.array(["4"])}),
)


def measured(functions: Any, **settings: Any) -> dict[str, Any]:
    """Return the arguments of the evaluation's scoring node for these reward functions."""
    rollout = group(RolloutWorker, model="model", engine="transformers")
    reward = group(RewardWorker, function=functions, tokenizer="model")
    graph = evaluate(SOURCE, rollout=rollout, reward=reward, **settings)
    return dict(graph.nodes[-1].arguments)


@pytest.mark.parametrize(
    ("functions", "settings", "k", "verdict"),
    [
        (Math(), {}, (1,), "reward"),
        (
            (Reward(function=Math(), name="right"), Reward(function=form, weight=0.1)),
            {},
            (1,),
            "reward/right",
        ),
        (
            (Reward(function=Math(), weight=0.5, name="right"), TagFormat()),
            {"n": 4},
            (1, 4),
            "reward/right",
        ),
        ((right, form), {"verdict": "right"}, (1,), "reward/right"),
        ((right, form), {}, (), "reward"),
        (right, {}, (), "reward"),
        (right, {"n": 2}, (1, 2), "reward"),
        (right, {"solved": 0.5}, (1,), "reward"),
        (F1(), {}, (), "reward"),
    ],
)
def test_pass_at_k_uses_the_reward_function_with_a_verdict(
    functions: Any, settings: dict[str, Any], k: tuple[int, ...], verdict: str
):
    arguments = measured(functions, **settings)
    assert arguments["k"] == k and arguments.get("verdict", "reward") == verdict


@pytest.mark.parametrize("seed", range(20))
def test_a_majority_of_k_is_that_of_all_draws_of_k(seed: int):
    draw = np.random.default_rng(seed)
    n = 5
    answers = [[None, "1", "2", "3"][k] for k in draw.integers(4, size=n)]
    solved = [answer == "3" for answer in answers]
    for k in range(1, n + 1):
        expected: list[float] = []
        for chosen in combinations(range(n), k):
            votes = [answers[i] for i in chosen if answers[i] is not None]
            winners = [one for one in set(votes) if votes.count(one) == max(map(votes.count, votes))]
            expected.append(winners.count("3") / len(winners) if winners else 0.0)
        orders = [
            majority_at_k([answers[i] for i in order], [solved[i] for i in order], k)
            for order in permutations(range(n))
        ]
        assert np.mean(orders) == pytest.approx(np.mean(expected))


def test_correct_responses_vote_together_however_they_write_the_answer():
    assert majority_at_k(["1/2", r"\\frac12", "3", None], [True, True, False, False], 4) == 1.0
    assert majority_at_k([None, None], [False, False], 2) == 0.0
    assert majority_at_k([None, "7"], [True, False], 2) == 0.5
    with pytest.raises(ValueError, match="maj@3 of 2 samples"):
        majority_at_k(["1", "2"], [True, False], 3)


def test_majorities_are_measured_over_prompts():
    batch = Batch.of(
        group_id=[0, 0, 0, 1, 1, 1, 2],
        reward=[1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0],
        final_answer=["7", "7", "5", "5", "7", "5", "7"],
    )
    found = {name: metric.value for name, metric in score_prompts(batch, n=3, k=(1, 3)).items()}
    assert found["maj@3"] == 0.5 and "maj@1" not in found
    assert {"maj@3", "maj@3_low"} <= {*values_of(score_prompts(batch, n=3, k=(3,)))}


@pytest.mark.parametrize(
    ("functions", "settings", "counted"),
    [
        (Math(), {"n": 4}, True),
        ((Reward(function=Math(), name="right"), Reward(function=form)), {"n": 2}, True),
        (Math(), {}, False),
        (F1(), {"n": 4}, False),
        (RegularExpression(pattern="a"), {"n": 4}, False),
    ],
)
def test_votes_are_counted_with_a_grader_that_finds_answers(
    functions: Any, settings: dict[str, Any], counted: bool
):
    rollout = group(RolloutWorker, model="model", engine="transformers")
    reward = group(RewardWorker, function=functions, tokenizer="model")
    nodes = [node.name for node in evaluate(SOURCE, rollout=rollout, reward=reward, **settings).nodes]
    assert ("reward.final_answers" in nodes) == counted


def test_a_bonus_for_the_form_makes_no_response_right():
    samples = Batch.of(group_id=[1, 2], reward=[1.1, 1.0], right=[1.0, 0.0])
    found = score_prompts(samples, n=1, k=(1,), verdict="right")
    assert found["pass@1"].value == 0.5 and found["avg@1"].value == pytest.approx(1.05)
