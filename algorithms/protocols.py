"""Interfaces of the worker handles that graphs use. Any worker class with these methods works."""

from __future__ import annotations

from typing import Any, Protocol

from .loss import Loss
from .sampling import Sampling


class Rollout(Protocol):
    """Samples responses (`workers/rollout.py`)."""

    def generate(self, prompts: Any, *, n: int, sampling: Sampling) -> Any:
        """Return n new rows for each prompt, which form one group."""
        ...


class Rewarder(Protocol):
    """Scores responses (`workers/reward.py`, `workers/reward_model.py`)."""

    def score(self, samples: Any, *, into: str = "reward") -> Any:
        """Add the column `into`."""
        ...


class Scorer(Protocol):
    """Computes log-probabilities of responses (`workers/reference.py`, `workers/actor.py`)."""

    def logprobs(self, batch: Any, *, into: str, of: str = "response_ids") -> Any:
        """Add the column `into`: one log-probability per token of the column `of`."""
        ...


class Trainable(Protocol):
    """Takes optimizer steps (`workers/actor.py`, `workers/critic.py`)."""

    def update(self, batch: Any, *, loss: Loss, epochs: int = 1, minibatches: int = 1) -> Any:
        """Create one new version of the weights."""
        ...


class Policy(Trainable, Scorer, Protocol):
    """A trainable model that also computes log-probabilities (`workers/actor.py`)."""

    def logprobs(
        self, batch: Any, *, into: str, of: str = "response_ids", entropies: bool = False
    ) -> Any:
        """Add the column `into` and, if `entropies` is set, the entropy of each token's
        distribution."""
        ...
