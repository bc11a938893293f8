"""Graphs: columns that they read and write, and errors for missing ones."""

import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest

from weft.algorithms.advantages import greedy_baseline, leave_one_out
from weft.algorithms.corrections import TruncatedImportance
from weft.algorithms.covariance import KlCov
from weft.algorithms.distillation import Distillation, distillation
from weft.algorithms.grpo import grpo
from weft.algorithms.kl import KlPenalty
from weft.algorithms.methods import supervised
from weft.algorithms.policy_loss import PolicyLoss
from weft.algorithms.ppo import ppo
from weft.algorithms.sampling import Sampling
from weft.algorithms.surrogates import sequence_product, sequence_ratio
from weft.dataflow.errors import UserError
from weft.dataflow.graph import group
from weft.dataflow.source import TableSource
from weft.workers.actor import ActorWorker
from weft.workers.critic import CriticWorker
from weft.workers.reference import ReferenceWorker

PAIRS = TableSource("pairs", pa.table({"prompt_ids": [[1, 2]], "response_ids": [[3]]}))


def test_supervised_is_one_node():
    graph = supervised(PAIRS, actor=group(ActorWorker, model="m"))
    (node,) = graph.nodes
    assert node.name == "actor.update" and node.reads == ("prompt_ids", "response_ids")


def test_a_loss_that_reads_an_unwritten_column_is_refused():
    with pytest.raises(UserError, match="reads column 'advantages', which no node writes"):
        supervised(PAIRS, actor=group(ActorWorker, model="m"), loss=PolicyLoss())


def rollout_and_reward() -> tuple:
    pytest.importorskip("weft.workers.rollout")
    from weft.workers.reward import RewardWorker
    from weft.workers.rollout import RolloutWorker

    return group(RolloutWorker, model="m"), group(RewardWorker, function=always_one, tokenizer="m")


def always_one(response: str) -> float:
    return 1.0


def test_grpo_records_the_graph_of_the_paper():
    rollout, reward = rollout_and_reward()
    actor, reference = group(ActorWorker, model="m"), group(ReferenceWorker, model="m")
    loss = PolicyLoss(kl=KlPenalty(coefficient=0.04))
    prompts = TableSource(
        "prompts", pa.table({"prompt": ["1+1="], "prompt_ids": [[1]], "answer": ["2"]})
    )
    graph = grpo(
        prompts,
        rollout=rollout,
        reward=reward,
        actor=actor,
        reference=reference,
        loss=loss,
        advantages=leave_one_out,
    )
    assert [n.name for n in graph.nodes] == [
        "rollout.generate",
        "reward.score",
        "reference.logprobs",
        "group_advantages",
        "actor.update",
    ]
    assert graph["group_advantages"].arguments["estimator"] is leave_one_out
    assert {"advantages", "response_logprobs", "reference_logprobs"} <= set(graph["actor.update"].reads)
    with pytest.raises(UserError) as refused:
        grpo(prompts, rollout=rollout, reward=reward, actor=actor, loss=loss)
    assert str(refused.value) == (
        "node 'actor.update' reads column 'reference_logprobs', which no node writes; a reference makes it: give the graph "
        "reference=weft.group(weft.ReferenceWorker, model=...), or, for an actor with LoRA, reference=weft.adapter_off(actor); "
        "in a graph of your own, samples = reference.logprobs(samples)"
    )


@pytest.mark.parametrize(
    ("loss", "steps", "scored"),
    [
        (PolicyLoss(), {"epochs": 2, "minibatches": 2}, False),
        (PolicyLoss(ratio=sequence_ratio), {}, False),
        (PolicyLoss(ratio=sequence_ratio), {"minibatches": 2}, True),
        (PolicyLoss(ratio=sequence_product), {"epochs": 2}, True),
        (PolicyLoss(correction=TruncatedImportance()), {"epochs": 2}, True),
        (PolicyLoss(old="old_logprobs"), {}, True),
    ],
    ids=["tokens", "one step", "minibatches", "epochs", "correction", "decoupled"],
)
def test_the_old_policy_is_asked_where_the_loss_needs_it(
    loss: PolicyLoss, steps: dict[str, int], scored: bool
):
    rollout, reward = rollout_and_reward()
    actor, critic = group(ActorWorker, model="m"), group(CriticWorker, model="m")
    prompts = TableSource("prompts", pa.table({"prompt_ids": [[1]]}))
    for graph in (
        grpo(prompts, rollout=rollout, reward=reward, actor=actor, loss=loss, **steps),
        ppo(prompts, rollout=rollout, reward=reward, actor=actor, critic=critic, loss=loss, **steps),
    ):
        assert ("actor.logprobs" in [n.name for n in graph.nodes]) == scored
        assert ("old_logprobs" in graph["actor.update"].reads) == scored
        assert graph["actor.update"].arguments["epochs"] == steps.get("epochs", 1)
        assert graph["actor.update"].arguments["minibatches"] == steps.get("minibatches", 1)


def test_entropies_are_written_with_the_old_logprobs():
    rollout, reward = rollout_and_reward()
    actor = group(ActorWorker, model="m")
    prompts = TableSource("prompts", pa.table({"prompt_ids": [[1]]}))
    graph = grpo(prompts, rollout=rollout, reward=reward, actor=actor, entropies=True)
    assert graph["actor.logprobs"].writes == ("old_logprobs", "entropies")


def test_remax_samples_a_greedy_response_to_each_prompt_first():
    rollout, reward = rollout_and_reward()
    prompts = TableSource("prompts", pa.table({"prompt_ids": [[1]]}))
    sampling = Sampling(max_tokens=8, temperature=0.7)
    actor = group(ActorWorker, model="m")
    graph = grpo(
        prompts,
        rollout=rollout,
        reward=reward,
        actor=actor,
        sampling=sampling,
        advantages=greedy_baseline,
    )
    greedy, sampled = graph["rollout.generate"], graph["rollout.generate_2"]
    assert greedy.arguments["n"] == 1 and greedy.arguments["sampling"] == Sampling(
        max_tokens=8, temperature=0
    )
    assert graph["reward.score"].writes == ("baseline_reward",) and graph["reward.score_2"].writes == (
        "reward",
    )
    assert sampled.level == greedy.makes_level and "baseline_reward" in graph["group_advantages"].reads


def test_algorithms_and_training_workers_are_imported_without_torch():
    code = (
        "import sys, weft.algorithms.grpo, weft.algorithms.methods, weft.workers.actor, weft.workers.reference; "
        "print(*{'torch', 'transformers', 'ray', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("covariance", [None, KlCov()], ids=["without", "with"])
def test_graphs_mark_covariances_if_the_loss_has_a_rule(covariance: KlCov | None):
    rollout, reward = rollout_and_reward()
    actor, critic = group(ActorWorker, model="m"), group(CriticWorker, model="m")
    teacher = group(ReferenceWorker, model="m")
    prompts = TableSource("prompts", pa.table({"prompt_ids": [[1]]}))
    loss = PolicyLoss(covariance=covariance)
    sampled: dict[str, Any] = {"rollout": rollout, "reward": reward, "actor": actor}
    for graph in (
        grpo(prompts, **sampled, loss=loss),
        ppo(prompts, **sampled, critic=critic, loss=loss),
        distillation(prompts, **sampled, teacher=teacher, loss=Distillation(policy=loss)),
        distillation(prompts, **sampled, teacher=teacher, top=0, loss=loss),
    ):
        names = [node.name for node in graph.nodes]
        assert ("high_covariance" in names) == bool(covariance)
        assert ("high_covariance" in graph["actor.update"].reads) == bool(covariance)
