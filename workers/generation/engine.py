"""GenerationEngine: what a rollout worker asks of the engine that samples tokens. Two engines implement it, `VllmEngine`
(`vllm_engine.py`) and `TransformersEngine` (`transformers_engine.py`); a user can bring another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from ...algorithms.sampling import Sampling
from ...dataflow.prompts.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ...resharding.weights import Weights


@dataclass(frozen=True)
class GenerationRequest:
    """A response to be sampled."""

    request_id: int
    prompt_ids: np.ndarray
    """[P] int32, with one placeholder for each image."""
    seed: int | None = None
    """Equal seeds, weights and prompts give equal tokens; None draws from the engine's own stream."""
    images: Sequence[Any] = ()
    """Those of the prompt, encoded: bytes, or what has their buffer. Only an engine that was given the processor of a model takes any."""


@dataclass(frozen=True)
class Response:
    """A finished response."""

    request_id: int
    token_ids: np.ndarray
    """[L] int32, the stop token included."""
    logprobs: np.ndarray
    """[L] float32 nats, under the distribution that the tokens were drawn from, whether cut or not (greedy: under the model's
    own, at temperature 1)."""
    versions: np.ndarray
    """[L] int32: the policy version that sampled each token."""
    finish_reason: Literal["stop", "length"]
    routes: np.ndarray | None = None
    """[P + L - 1, layers, k] uint16: the experts that each token was sent to, where the engine records them."""


NOT_WHOLE = (
    "no complete version of the weights has arrived, or a later update failed: nothing is generated"
)
"""What an engine says that is asked to generate before it has weights of one version."""

Responses = Generator[list[Response], Collection[int] | None, None]
"""Responses as they finish. The engine may be sent the ids of requests that are no longer wanted."""


class GenerationEngine(Protocol):
    """Samples responses, and loads new weights between two steps."""

    version: int
    """Policy version of the weights that the next step samples from; 0: those of the model's folder."""

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Responses:
        """Sample one response to each request. `stop_strings(sampling, model)` of `stop_strings.py` tells which token completes a stop
        string; the response ends with it, and `finish_reason` is "stop".

        All requests are admitted before the first step. Closing the generator early aborts the requests that are not finished;
        sending it ids of requests aborts these.
        `update_weights` may be called between two items: requests go on under the new version.

        Returns:
            After each step the responses that finished in it; an empty list where none did.

        Raises:
            GenerationError: the engine refuses a request, or fails.
        """
        ...

    def weight_bytes(self) -> int:
        """Of its model's weights, on all ranks of the engine."""
        ...

    def stage_weights(self, weights: Weights) -> Iterator[None]:
        """Take a version into memory beside the model while requests go on, so that `update_weights` has only to exchange it. Yields until
        it has come; an engine that cannot do so yields nothing.

        Raises:
            WeightSyncError: the bytes are not those that were published.
        """
        ...

    def update_weights(self, weights: Weights) -> str:
        """Load these weights; returns the checksum of the bytes that were loaded.

        Raises:
            WeightSyncError: the bytes are not those that were published, or do not fit the model.
        """
        ...

    def recompute(self) -> None:
        """Compute keys and values of unfinished requests again with the current weights. Called after `update_weights`."""
        ...

    def sleep(self) -> None:
        """Free device memory."""
        ...

    def wake_up(self) -> None:
        """Claim device memory again."""
        ...

    def close(self) -> None: ...


# Stop strings
#
# StopStrings: which sampled token completes a stop string. All engines use it, so they end
# responses at the same token.


MARGIN = 16
"""Extra tokens that are decoded before the ones that can hold the stop string: the first decoded token may lose a space."""


class StopStrings:
    """The stop strings of a sampling, and the decoder of a model's tokens.

    A token ends a response when the text has one more occurrence of a stop string with it than without it.

    >>> letters = StopStrings(("ab",), lambda ids: "".join("abc"[i] for i in ids))
    >>> [letters.end([0, 1][:length]) for length in (1, 2)], letters.end([0, 1, 2]), letters.end([2, 0, 1, 0, 1])
    ([False, True], False, True)

    Args:
        stop: texts that end a response.
        decode: token ids -> their text.
    """

    def __init__(self, stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stop = tuple(stop)
        self._decode = decode
        self._window = (
            max(len(text.encode()) for text in stop) + MARGIN
        )  # a token of text has at least one byte

    def end(self, token_ids: Sequence[int] | np.ndarray) -> bool:
        """Whether the last of these tokens completes a stop string."""
        tail = [int(token) for token in token_ids[-self._window :]]
        text = self._decode(tail)
        if not any(stop in text for stop in self._stop):
            return False
        before = self._decode(tail[:-1])
        return any(text.count(stop) > before.count(stop) for stop in self._stop)


def stop_strings(sampling: Sampling, model: str) -> StopStrings | None:
    """The stop strings of a sampling, with the tokenizer of a model's folder, or None if it has none or ignores them.

    Raises:
        UserError: the folder has no tokenizer.
    """
    if not sampling.stop or sampling.ignore_stop:
        return None
    decode = tokenizer_of(model).decode
    return StopStrings(sampling.stop, lambda ids: decode([list(ids)])[0])


@cache
def tokenizer_of(model: str) -> Tokenizer:
    """The tokenizer of a model's folder. Reward functions get text from the same one.

    Raises:
        UserError: the folder has no tokenizer.
    """
    return Tokenizer.load(model)
