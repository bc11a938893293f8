"""Roles: what the graphs ask of the handles that they are given.

The graphs stand below the workers and cannot name their classes. Any worker class with these methods will do;
`workers/actor.py`, `critic.py`, `reference.py`, `reward.py` and `rollout.py` have the usual ones.
"""

from __future__ import annotations

from typing import Any, Protocol

from .loss import Loss


class Rollout(Protocol):
    """Samples responses (`workers/rollout.py`)."""

    def generate(self, prompts: Any, *, n: int, sampling: Any) -> Any:
        """New rows: n responses to each prompt, of one group."""
        ...


class Reward(Protocol):
    """Scores responses (`workers/reward.py`)."""

    def score(self, samples: Any) -> Any:
        """Adds `reward`."""
        ...


class Scorer(Protocol):
    """Computes log-probabilities of responses (`workers/reference.py`, `workers/actor.py`)."""

    def logprobs(self, batch: Any, *, into: str, of: str = "response_ids") -> Any:
        """Adds the column `into`: one log-probability for each token of the responses in the column `of`."""
        ...


class Trainable(Protocol):
    """Takes optimizer steps (`workers/actor.py`)."""

    def update(self, batch: Any, *, loss: Loss, epochs: int = 1, minibatches: int = 1) -> Any:
        """One new version of the weights."""
        ...


class Critic(Trainable, Protocol):
    """Predicts the reward to come, and learns to (`workers/critic.py`)."""

    def values(self, batch: Any) -> Any:
        """Adds `values`: one for each token of the responses, of what comes from there."""
        ...
