"""Sampling: logprobs that a trainer can compare with, and errors where there are none."""

from typing import Any

import pyarrow as pa
import pytest

from weft.algorithms.grpo import grpo
from weft.algorithms.policy_loss import PolicyLoss
from weft.algorithms.ppo import ppo
from weft.algorithms.sampling import Sampling
from weft.dataflow.errors import UserError
from weft.dataflow.graph import group
from weft.dataflow.source import TableSource
from weft.workers.actor import ActorWorker
from weft.workers.adaptive_kl import AdaptiveKlWorker
from weft.workers.critic import CriticWorker
from weft.workers.reference import ReferenceWorker
from weft.workers.reward import RewardWorker
from weft.workers.rollout import RolloutWorker

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
    ("sampling", "cut_by"),
    [
        (Sampling(), ""),
        (Sampling(temperature=0.6), ""),
        (Sampling(top_p=0.9), "top_p=0.9"),
        (Sampling(top_k=20, top_p=0.9), "top_p=0.9, top_k=20"),
        (Sampling(min_tokens=4), "min_tokens=4"),
        (Sampling(min_tokens=4, stop=None), ""),
        (Sampling(temperature=0), ""),
        (Sampling(temperature=0, top_p=0.9, top_k=20), ""),
        (Sampling(temperature=0, min_tokens=4), "min_tokens=4"),
    ],
    ids=str,
)
def test_samples_of_a_truncated_distribution_have_no_logprobs(sampling: Sampling, cut_by: str):
    assert sampling.writes == (() if cut_by else ("response_logprobs",))
    assert not cut_by or sampling.leaves_out["response_logprobs"].startswith(
        f"with {cut_by} tokens are drawn"
    )


def test_a_loss_that_needs_missing_logprobs_is_refused_with_reason_and_advice():
    with pytest.raises(UserError) as refused:
        grpo(PROMPTS, **handles(), sampling=CUT)
    assert str(refused.value) == (
        "node 'actor.update' reads column 'response_logprobs', which node 'rollout.generate' leaves out: with top_p=0.9, top_k=20 "
        "tokens are drawn from a part of the distribution, and the trainer knows only the whole; sample without, or compare with "
        "the trainer's own: PolicyLoss(old='old_logprobs')"
    )


def test_with_the_trainers_own_everything_is_recorded():
    own = PolicyLoss(old="old_logprobs")
    graph = grpo(PROMPTS, **handles(), sampling=CUT, loss=own)
    assert graph["actor.logprobs"].writes == ("old_logprobs",)
    assert "response_logprobs" not in graph["actor.update"].reads
    models = {"critic": group(CriticWorker, model="m"), "reference": group(ReferenceWorker, model="m")}
    fixed = ppo(PROMPTS, **handles(), **models, kl=0.1, sampling=CUT, loss=own)
    assert "old_logprobs" in fixed["token_rewards"].reads
    steered = ppo(PROMPTS, **handles(), **models, kl=group(AdaptiveKlWorker), sampling=CUT, loss=own)
    assert all("old_logprobs" in steered[f"kl.{node}"].reads for node in ("token_rewards", "update"))
    with pytest.raises(
        UserError, match="node 'token_rewards' reads column 'response_logprobs', which node 'rollout"
    ):
        ppo(PROMPTS, **handles(), **models, kl=0.1, sampling=CUT)


def test_a_temperature_at_which_no_engine_draws_is_refused():
    with pytest.raises(
        UserError, match=r"temperature must be 0 \(greedy\) or at least 0\.01, not 0\.001"
    ):
        Sampling(temperature=0.001)
