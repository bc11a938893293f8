"""Whole runs in one process: corrections over a step, an adaptive entropy bonus, Muon, the optimal
token baseline, proposers with solvers, and VAPO's two lambdas."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import weft
from weft.algorithms.advantages import group_advantages, group_centred
from weft.algorithms.corrections import DivergenceRejection
from weft.algorithms.grpo import grpo
from weft.algorithms.policy_loss import PolicyLoss, old_logprobs
from weft.algorithms.ppo import ppo
from weft.algorithms.rewards import outcome_rewards, penalize_repetition, penalize_truncated
from weft.algorithms.sampling import Sampling
from weft.algorithms.step_corrections import SecondMoment, TopEntropy
from weft.algorithms.surrogates import Unclipped
from weft.algorithms.token_baseline import optimal_token_advantages
from weft.algorithms.values import LengthAdaptive
from weft.dataflow.graph import Graph, group
from weft.dataflow.source import TableSource
from weft.workers.actor import ActorWorker
from weft.workers.adaptive_entropy import AdaptiveEntropyWorker
from weft.workers.critic import CriticWorker
from weft.workers.reward import RewardWorker
from weft.workers.rollout import RolloutWorker

SAMPLING = Sampling(max_tokens=4)


def small_share(response_ids: list[int]) -> float:
    """Return the share of tokens in the lower half of the vocabulary."""
    return float(np.mean(np.array(response_ids) < 48))


def groups(model: Path, **settings: Any) -> dict[str, Any]:
    actor = group(ActorWorker, model=str(model), learning_rate=2e-3, **settings)
    rollout = group(RolloutWorker, model=str(model), engine="transformers")
    rollout.follows(actor)
    reward = group(RewardWorker, function=small_share, tokenizer=str(model))
    return {"rollout": rollout, "reward": reward, "actor": actor}


def prompts() -> TableSource:
    ids = np.random.default_rng(0).integers(3, 97, (16, 4)).tolist()
    return TableSource("prompts", pa.table({"prompt_ids": ids}))


def run(graph: Graph, folder: Path, steps: int, **settings: Any) -> list[dict[str, float]]:
    schedule = weft.Synchronous(steps=steps, prompts_per_step=4)
    with weft.Driver(
        graph, schedule=schedule, root=folder, name="run", progress=False, record_every=0, **settings
    ) as d:
        return d.run()


def test_top_entropy_tokens_with_an_adaptive_bonus_and_muon(words_model: Path, tmp_path: Path):
    def graph() -> Graph:
        entropy = group(AdaptiveEntropyWorker, name="bonus", value=0.01, target=9.0, change=0.02)
        loss = PolicyLoss(
            correction=(DivergenceRejection(limit=0.5), TopEntropy(share=0.25)),
            entropy_coefficient="entropy_coefficient",
        )
        own = groups(words_model, optimizer="muon")
        return grpo(prompts(), **own, n=2, sampling=SAMPLING, loss=loss, entropy=entropy)

    whole = run(graph(), tmp_path / "whole", 4)
    assert [m["bonus/entropy_coefficient"] for m in whole[1:]] == pytest.approx([0.01, 0.03, 0.05, 0.07])
    tokens = [m["actor/tokens"] for m in whole[1:]]
    assert [m["actor/masked_tokens"] for m in whole[1:]] == [t - max(1, int(0.25 * t)) for t in tokens]
    checkpoint = weft.CheckpointConfig(every=2)
    run(graph(), tmp_path / "cut", 2, checkpoint=checkpoint)
    resumed = run(graph(), tmp_path / "cut", 4, checkpoint=checkpoint, resume="latest")
    for name in ("reward/mean", "actor/loss", "bonus/entropy_coefficient"):
        assert resumed[-1][name] == pytest.approx(whole[-1][name], rel=1e-5, abs=1e-7), name


@weft.graph
def proposers(prompts: Any, *, rollout: Any, reward: Any, actor: Any) -> Any:
    """Three continuations of each prompt, with two solutions each, compared with each other."""
    proposals = rollout.generate(prompts, n=3, sampling=SAMPLING)
    samples = reward.score(rollout.generate(proposals, n=2, sampling=SAMPLING))
    samples = penalize_truncated(samples, keep=0.5, into="stopped_reward")
    samples = penalize_repetition(samples, reward="stopped_reward")
    samples = group_advantages(
        samples, estimator=group_centred, reward="shaped_reward", within="parent_id"
    )
    return actor.update(samples)


@weft.graph
def optimal_baseline(prompts: Any, *, rollout: Any, reward: Any, actor: Any) -> Any:
    samples = reward.score(rollout.generate(prompts, n=4, sampling=SAMPLING))
    samples = old_logprobs(samples, actor=actor, collisions=True)
    samples = optimal_token_advantages(outcome_rewards(samples))
    return actor.update(samples, loss=PolicyLoss(old="old_logprobs"))


@pytest.mark.parametrize("made", [proposers, optimal_baseline])
def test_graphs_with_these_advantages_train(words_model: Path, tmp_path: Path, made: Any):
    metrics = run(made(prompts(), **groups(words_model)), tmp_path, 2)
    assert len(metrics) == 3 and metrics[-1]["actor/grad_norm"] > 0


def test_vapo_with_m2po_trains(words_model: Path, tmp_path: Path):
    critic = group(CriticWorker, model=str(words_model), learning_rate=2e-3)
    graph = ppo(
        prompts(),
        **groups(words_model),
        critic=critic,
        sampling=SAMPLING,
        lam=LengthAdaptive(alpha=0.5),
        value_lam=1.0,
        loss=PolicyLoss(surrogate=Unclipped(), correction=SecondMoment()),
        minibatches=2,
    )
    metrics = run(graph, tmp_path, 2)
    assert metrics[-1]["critic/loss"] > 0 and "actor/masked_tokens" in metrics[-1]
