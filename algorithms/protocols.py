"""Roles: what the graphs ask of the handles that they are given.

The graphs stand below the workers and cannot name their classes. Any worker class with these methods will do;
`workers/actor.py`, `critic.py`, `reference.py`, `reward.py`, `reward_model.py`, `rollout.py` and `adaptive_kl.py` have the usual ones.
"""

from __future__ import annotations

from typing import Any, Protocol

from .loss import Loss
from .sampling import Sampling


class Rollout(Protocol):
    """Samples responses (`workers/rollout.py`)."""

    def generate(self, prompts: Any, *, n: int, sampling: Sampling) -> Any:
        """New rows: n responses to each prompt, of one group."""
        ...


class Rewarder(Protocol):
    """Scores responses (`workers/reward.py`, `workers/reward_model.py`)."""

    def score(self, samples: Any, *, into: str = "reward") -> Any:
        """Adds the column `into`."""
        ...


class Scorer(Protocol):
    """Computes log-probabilities of responses (`workers/reference.py`, `workers/actor.py`)."""

    def logprobs(self, batch: Any, *, into: str, of: str = "response_ids") -> Any:
        """Adds the column `into`: one log-probability for each token of the responses in the column `of`."""
        ...


class Trainable(Protocol):
    """Takes optimizer steps (`workers/actor.py`, `workers/critic.py`)."""

    def update(self, batch: Any, *, loss: Loss, epochs: int = 1, minibatches: int = 1) -> Any:
        """One new version of the weights."""
        ...


class Policy(Trainable, Scorer, Protocol):
    """Is trained, and says what it thinks of tokens before it is (`workers/actor.py`)."""

    def logprobs(
        self, batch: Any, *, into: str, of: str = "response_ids", entropies: bool = False
    ) -> Any:
        """Adds the column `into`, and with `entropies` the entropy of each token's distribution."""
        ...


class Critic(Trainable, Protocol):
    """Predicts the reward to come, and learns to (`workers/critic.py`)."""

    def values(self, batch: Any) -> Any:
        """Adds `values`: one for each token of the responses, of what comes from there."""
        ...


class Penalty(Protocol):
    """Takes the divergence from the reference off the reward, with a coefficient of its own (`workers/adaptive_kl.py`)."""

    def token_rewards(self, samples: Any, *, old: str) -> Any:
        """Adds `token_rewards`; the column `old` has the log-probabilities of the policy that sampled."""
        ...

    def update(self, samples: Any, *, old: str) -> Any:
        """One new coefficient, from the divergence of these samples."""
        ...
