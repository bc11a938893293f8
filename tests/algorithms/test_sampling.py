"""Sampling: which samples have kept sets, and which nodes of a graph read them."""

from typing import Any

import pyarrow as pa
import pytest

from weft.algorithms.distillation import distillation
from weft.algorithms.evaluation import evaluate
from weft.algorithms.grpo import grpo
from weft.algorithms.policy_loss import PolicyLoss
from weft.algorithms.ppo import ppo
from weft.algorithms.sampling import Sampling
from weft.dataflow.errors import UserError
from weft.dataflow.graph import group
from weft.dataflow.source import TableSource
from weft.workers.actor import ActorWorker, _check_kept_sets
from weft.workers.critic import CriticWorker
from weft.workers.reference import ReferenceWorker
from weft.workers.reward import RewardWorker
from weft.workers.rollout import RolloutWorker
from weft.workers.rollout_config import record_kept_sets

PROMPTS = TableSource("prompts", pa.table({"prompt_ids": [[1]]}))
CUT = Sampling(top_p=0.9, top_k=20)


def always_one(response: str) -> float:
    return 1.0


def handles() -> dict[str, Any]:
    return {
        "rollout": group(RolloutWorker, model="m"),
        "reward": group(RewardWorker, function=always_one, tokenizer="m"),
        "actor": group(ActorWorker, model="m"),
    }


@pytest.mark.parametrize(
    ("sampling", "truncates"),
    [
        (Sampling(), False),
        (Sampling(temperature=0.6), False),
        (Sampling(top_p=0.9), True),
        (Sampling(top_k=20), True),
        (Sampling(min_p=0.05), True),
        (Sampling(min_tokens=4), True),
        (Sampling(min_tokens=4, stop=None), False),
        (Sampling(temperature=0), False),
        (Sampling(temperature=0, top_p=0.9, top_k=20, min_p=0.1), False),
        (Sampling(temperature=0, min_tokens=4), True),
    ],
    ids=str,
)
def test_samples_of_a_part_of_the_vocabulary_have_kept_sets(sampling: Sampling, truncates: bool):
    assert sampling.truncates == truncates
    kept = ("kept_counts", "kept_ids") if truncates else ()
    assert sampling.writes == ("response_logprobs", *kept)


def test_trainers_and_references_read_kept_sets():
    models = {"critic": group(CriticWorker, model="m"), "reference": group(ReferenceWorker, model="m")}
    graph = ppo(
        PROMPTS, **handles(), **models, kl=0.1, sampling=CUT, loss=PolicyLoss(old="old_logprobs")
    )
    readers = {node.name for node in graph.nodes if "kept_ids" in node.reads}
    assert readers == {"actor.logprobs", "reference.logprobs", "actor.update"}
    assert {"kept_counts", "kept_ids"} <= {*graph["rollout.generate"].writes}


def test_kept_sets_that_nobody_reads_are_not_written():
    assert "kept_ids" in grpo(PROMPTS, **handles(), sampling=CUT)["rollout.generate"].writes
    whole = grpo(PROMPTS, **handles())
    assert not [node.name for node in whole.nodes if "kept_ids" in (*node.reads, *node.writes)]
    given = handles()
    del given["actor"]
    evaluation = evaluate(PROMPTS, **given, sampling=CUT)
    assert not [node.name for node in evaluation.nodes if "kept_ids" in (*node.reads, *node.writes)]


def test_a_run_records_kept_sets_only_in_groups_whose_samples_are_trained_on():
    found: list[bool] = []
    for sampling, of_evaluation in ((CUT, Sampling(temperature=0)), (Sampling(), CUT)):
        given = handles()
        training = grpo(PROMPTS, **given, sampling=sampling)
        del given["actor"]
        record_kept_sets([training, evaluate(PROMPTS, **given, sampling=of_evaluation)])
        found.append(given["rollout"].config.kept_sets)
    assert found == [True, False]


def test_a_divergence_over_the_vocabulary_and_a_policy_loss_over_kept_sets_are_refused():
    given = handles() | {"teacher": group(ReferenceWorker, model="m")}
    mixed = distillation(PROMPTS, **given, sampling=CUT)
    with pytest.raises(
        UserError, match=r"'actor\.update': the divergence from a teacher is over the whole"
    ):
        _check_kept_sets(mixed["actor.update"])
    del given["reward"]
    alone = distillation(PROMPTS, **given, sampling=CUT)
    _check_kept_sets(alone["actor.update"])
    sampled = distillation(PROMPTS, **given, sampling=CUT, top=0)
    _check_kept_sets(sampled["actor.update"])
    assert "kept_ids" in sampled["teacher.logprobs"].reads


def test_a_temperature_at_which_no_engine_draws_is_refused():
    with pytest.raises(
        UserError, match=r"temperature must be 0 \(greedy\) or at least 0\.01, not 0\.001"
    ):
        Sampling(temperature=0.001)
