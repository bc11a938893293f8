"""Interfaces of the worker handles that graphs use. Any worker class with these methods works."""

from __future__ import annotations

from typing import Any, Protocol

from ..dataflow.errors import UserError
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


class Teacher(Scorer, Protocol):
    """Computes its likeliest tokens (`workers/reference.py`, `workers/teacher.py`)."""

    def top_logprobs(
        self,
        batch: Any,
        *,
        top: int,
        of: str = "response_ids",
        prompts: str = "prompt_ids",
        where: tuple[str, Any] | None = None,
        into: str = "teacher",
    ) -> Any:
        """Add `into`_ids and `into`_logprobs: the `top` likeliest tokens at each position of the column
        `of`. `where` names a column and the value of the rows that this teacher scores; other rows get
        empty lists."""
        ...


class Trainable(Protocol):
    """Takes optimizer steps (`workers/actor.py`, `workers/critic.py`)."""

    def update(self, batch: Any, *, loss: Loss, epochs: int = 1, minibatches: int = 1) -> Any:
        """Create one new version of the weights."""
        ...


class Policy(Trainable, Scorer, Protocol):
    """A trainable model that also computes log-probabilities (`workers/actor.py`)."""

    def logprobs(
        self,
        batch: Any,
        *,
        into: str,
        of: str = "response_ids",
        entropies: bool = False,
        collisions: bool = False,
    ) -> Any:
        """Add the column `into` and, if they are set, the entropy and `log_collisions` of each token's
        distribution."""
        ...


def scored(
    prompts: Any,
    *,
    rollout: Any,
    reward: Rewarder | None,
    harness: Any,
    env: Any,
    n: int,
    sampling: Sampling,
) -> Any:
    """Return n scored rows for each prompt, in a graph: by a harness, in environments, or by `generate`
    and `score`.

    Raises:
        UserError: there is not exactly one of a harness, environments and a reward.
    """
    ways = {"reward": reward, "harness": harness, "env": env}
    given = [f"{name}=..." for name, value in ways.items() if value is not None]
    if len(given) != 1:
        raise UserError(
            "give one of reward=..., which scores responses, harness=..., whose result is the reward, and env=..., "
            f"whose rewards are added up; there are {', '.join(given) or 'none'}"
        )
    if env is not None:
        return rollout.interact(prompts, env=env, n=n, sampling=sampling)
    if harness is not None:
        return rollout.run(prompts, harness=harness, n=n, sampling=sampling)
    assert reward is not None
    return reward.score(rollout.generate(prompts, n=n, sampling=sampling))
