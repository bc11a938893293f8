"""PPO with a critic in the driver, in one process: four models, several optimizer steps per
update."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import weft
from weft.algorithms.kl import KlPenalty
from weft.algorithms.policy_loss import PolicyLoss
from weft.algorithms.ppo import ppo
from weft.algorithms.reward_model import (
    process_reward_model,
    reward_accuracy,
    reward_model,
    step_rewards,
)
from weft.algorithms.sampling import Sampling
from weft.algorithms.surrogates import Clipped
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.dataflow.graph import Graph, group
from weft.dataflow.source import TableSource
from weft.workers.actor import ActorWorker
from weft.workers.adaptive_kl import AdaptiveKlWorker
from weft.workers.critic import CriticWorker
from weft.workers.reference import ReferenceWorker
from weft.workers.reward import RewardWorker
from weft.workers.reward_model import RewardModelConfig, RewardModelWorker
from weft.workers.rollout import RolloutWorker


def small_share(response_ids: list[int]) -> float:
    """Return the share of tokens in the lower half of the vocabulary."""
    return float(np.mean(np.array(response_ids) < 48))


def prompts(number: int = 64) -> TableSource:
    rng = np.random.default_rng(0)
    return TableSource(
        "prompts", pa.table({"prompt_ids": [rng.integers(3, 97, 4).tolist() for _ in range(number)]})
    )


def recorded(model: Path, **settings) -> Graph:
    name = str(model)
    actor = group(ActorWorker, model=name, learning_rate=2e-3)
    critic = group(CriticWorker, model=name, learning_rate=2e-3)
    rollout = group(RolloutWorker, model=name, engine="transformers")
    rollout.follows(actor)
    reward = settings.pop("reward", None) or group(RewardWorker, function=small_share, tokenizer=name)
    reference = group(ReferenceWorker, model=name)
    sampling = Sampling(max_tokens=4)
    return ppo(
        prompts(),
        rollout=rollout,
        reward=reward,
        actor=actor,
        critic=critic,
        reference=reference,
        sampling=sampling,
        **settings,
    )


def run(graph: Graph, root: Path, steps: int, **settings) -> list[dict[str, float]]:
    schedule = settings.pop("schedule", weft.Synchronous)(steps=steps, prompts_per_step=32)
    with weft.Driver(
        graph, schedule=schedule, root=root, name="run", progress=False, record_every=0, **settings
    ) as driver:
        return driver.run()


def test_the_graph_is_that_of_four_models(words_model: Path):
    graph = recorded(words_model, kl=0.05, epochs=2, minibatches=4)
    assert [node.name for node in graph.nodes] == [
        "rollout.generate",
        "reward.score",
        "reference.logprobs",
        "token_rewards",
        "critic.values",
        "critic_advantages",
        "critic.update",
        "actor.update",
    ]
    assert {"values", "returns"} <= set(graph["critic.update"].reads)
    assert {"advantages", "response_logprobs"} <= set(graph["actor.update"].reads)
    assert (
        graph["critic.update"].arguments["epochs"] == 2
        and graph["actor.update"].arguments["minibatches"] == 4
    )
    assert "outcome_rewards" in [node.name for node in recorded(words_model).nodes]


def test_it_learns_with_several_epochs_and_minibatches(words_model: Path, tmp_path: Path):
    loss = PolicyLoss(surrogate=Clipped(dual=3.0))
    metrics = run(recorded(words_model, kl=0.01, loss=loss, epochs=2, minibatches=2), tmp_path, 12)
    first, last = metrics[1], metrics[-1]
    assert last["reward/mean"] > first["reward/mean"] + 0.15
    assert last["critic/loss"] < first["critic/loss"]
    assert last["critic/value"] == pytest.approx(last["critic/return"], abs=0.2)
    assert first["actor/tokens"] == first["critic/tokens"] == 2 * 32 * 4  # two epochs


@pytest.mark.parametrize("schedule", [weft.Pipelined, weft.Asynchronous])
def test_it_runs_under_other_schedules_with_the_divergence_in_the_loss(
    words_model: Path, tmp_path: Path, schedule: type
):
    graph = recorded(words_model, loss=PolicyLoss(kl=KlPenalty(coefficient=0.05)))
    metrics = run(graph, tmp_path, 3, schedule=schedule)
    assert len(metrics) == 4 and metrics[1]["actor/kl"] == pytest.approx(0, abs=1e-4)
    assert metrics[-1]["actor/kl"] > 0 and metrics[-1]["critic/loss"] >= 0


@pytest.mark.thorough
def test_a_run_resumes_actor_critic_and_coefficient(words_model: Path, tmp_path: Path):
    def graph() -> Graph:
        steered = group(AdaptiveKlWorker, value=0.1, target=0.05, horizon=100)
        return recorded(words_model, epochs=2, kl=steered)

    whole = run(graph(), tmp_path / "whole", 4)
    assert whole[1]["kl/kl_coefficient"] == 0.1 and whole[1]["kl/kl"] == pytest.approx(0, abs=1e-4)
    assert whole[2]["kl/kl_coefficient"] == pytest.approx(0.1 * (1 - 0.2 * 32 / 100)), (
        "it is below its target at first"
    )
    assert whole[3]["kl/kl"] > 0
    checkpoint = weft.CheckpointConfig(every=2)
    run(graph(), tmp_path / "cut", 2, checkpoint=checkpoint)
    resumed = run(graph(), tmp_path / "cut", 4, checkpoint=checkpoint, resume="latest")
    for name in (
        "reward/mean",
        "critic/loss",
        "actor/loss",
        "critic/value",
        "kl/kl_coefficient",
        "kl/kl",
    ):
        assert resumed[-1][name] == pytest.approx(whole[-1][name], rel=1e-5, abs=1e-7), name


@pytest.mark.thorough
def test_a_trained_reward_model_is_the_reward_of_ppo(words_model: Path, tmp_path: Path):
    rng = np.random.default_rng(1)
    columns = {
        "prompt_ids": [rng.integers(3, 97, 4).tolist() for _ in range(256)],
        "chosen_ids": [rng.integers(0, 48, 4).tolist() for _ in range(256)],
        "rejected_ids": [rng.integers(48, 97, 4).tolist() for _ in range(256)],
    }
    table = pa.table(columns)
    learner = group(
        CriticWorker, name="model", model=str(words_model), head="rewards", learning_rate=2e-3
    )
    held_out = weft.Evaluation(
        reward_accuracy(TableSource("held_out", table.slice(192)), model=learner), every=15
    )
    with weft.Driver(
        reward_model(TableSource("train", table.slice(0, 192)), model=learner),
        schedule=weft.Synchronous(steps=15, prompts_per_step=32),
        evaluations=[held_out],
        root=tmp_path,
        name="reward_model",
        progress=False,
    ) as driver:
        metrics = driver.run()
        driver.call(learner, "save", path=tmp_path / "reward")
    assert metrics[1]["model/loss"] == pytest.approx(np.log(2), abs=0.05)
    assert metrics[-1]["eval/preference_accuracy"] > 0.9
    reward = group(RewardModelWorker, model=str(tmp_path / "reward"))
    metrics = run(recorded(words_model, reward=reward, kl=0.01), tmp_path, 8)
    assert metrics[-1]["reward/mean"] > metrics[1]["reward/mean"] + 0.3


def test_a_process_reward_model_learns_which_steps_are_right(words_model: Path, tmp_path: Path):
    """A step is a token and the separator 7. It is correct if the token is in the lower half."""
    rng = np.random.default_rng(2)
    rows: dict[str, list] = {"prompt_ids": [], "response_ids": [], "labels": []}
    for _ in range(256):
        tokens = rng.integers(8, 97, 3)
        rows["prompt_ids"].append(rng.integers(8, 97, 3).tolist())
        rows["response_ids"].append([each for token in tokens for each in (int(token), 7)])
        rows["labels"].append((tokens < 48).astype(float).tolist())
    learner = group(
        CriticWorker, name="model", model=str(words_model), head="rewards", learning_rate=3e-3
    )
    metrics = run(
        process_reward_model(TableSource("steps", pa.table(rows)), model=learner, separator=7),
        tmp_path,
        30,
    )
    assert metrics[1]["model/loss"] == pytest.approx(np.log(2), abs=0.05)
    assert metrics[-1]["model/step_accuracy"] > 0.9 and metrics[-1]["model/tokens"] == 32 * 6


def test_process_rewards_go_into_advantages(words_model: Path):
    worker = RewardModelWorker(RewardModelConfig(model=str(words_model)))
    samples = Batch.of(prompt_ids=[[1], [2]], response_ids=[[3, 7, 4], [5, 7]])
    scored = step_rewards(worker.token_scores(samples), separator=7)
    logits = scored.ragged_numpy("token_scores")[0]
    expected = 1 / (1 + np.exp(-logits)) * np.array([0, 1, 1, 0, 1])
    assert scored.ragged_numpy("token_rewards")[0] == pytest.approx(expected, abs=1e-6)


def test_a_model_with_the_wrong_head_is_refused(words_model: Path, tmp_path: Path):
    critic = group(CriticWorker, model=str(words_model))
    wrong = reward_accuracy(
        TableSource(
            "pairs", pa.table({"prompt_ids": [[1]], "chosen_ids": [[2]], "rejected_ids": [[3]]})
        ),
        model=critic,
    )
    with pytest.raises(
        UserError, match="calls 'model', which has head='values'; score needs head='rewards'"
    ):
        weft.Driver(wrong, schedule=weft.Synchronous(steps=1), root=tmp_path, progress=False)


def test_a_model_without_a_head_has_no_rewards(words_model: Path, tmp_path: Path):
    graph = recorded(words_model, reward=group(RewardModelWorker, model=str(words_model)))
    with pytest.raises(
        UserError, match=r"has no scalar head \(a tensor 'score.weight' in its safetensors files\)"
    ):
        weft.Driver(graph, schedule=weft.Synchronous(steps=1), root=tmp_path, progress=False)
