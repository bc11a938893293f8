"""Generation: what a rollout worker asks of the engine that samples tokens. Two engines answer: `VllmEngine`
(`vllm_engine.py`) and `TransformersEngine` (`transformers_engine.py`); a user can bring another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from ...algorithms.sampling import Sampling

if TYPE_CHECKING:
    from ...resharding.weights import Weights


@dataclass(frozen=True)
class Request:
    """One response wanted."""

    request_id: int
    prompt_ids: np.ndarray
    """[P] int32."""
    seed: int | None = None
    """The same seed, weights and prompt give the same tokens; None draws from the engine's own stream."""


@dataclass(frozen=True)
class Response:
    """One response, finished."""

    request_id: int
    token_ids: np.ndarray
    """[L] int32, the stop token included."""
    logprobs: np.ndarray
    """[L] float32 nats, of the sampled tokens under the distribution that they were drawn from, cut or whole (greedy: under
    the model's own, at temperature 1)."""
    versions: np.ndarray
    """[L] int32 policy version that sampled each token."""
    finish_reason: Literal["stop", "length"]


class GenerationEngine(Protocol):
    """Samples responses, and takes over new weights between two steps."""

    version: int
    """Policy version of the weights that the next step samples from; 0 for those of the model's folder."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[list[Response]]:
        """Responses as they finish, those of one step together; an empty list where nothing finished, after each step. All
        requests are admitted before the first step.

        Closing the iterator early gives up the requests that are not finished. `update_weights` may be called
        between two items: requests go on under the new version.
        """
        ...

    def update_weights(self, weights: Weights) -> str:
        """Take over these weights; returns the checksum of the bytes that were loaded."""
        ...

    def sleep(self) -> None:
        """Give device memory up."""
        ...

    def wake_up(self) -> None:
        """Take device memory back."""
        ...

    def close(self) -> None: ...
