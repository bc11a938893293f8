"""The interface of the engines that sample tokens for a rollout worker."""

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
    request_id: int
    prompt_ids: np.ndarray
    """[P] int32 token ids, with one placeholder for each image."""
    seed: int | None = None
    """Equal seeds, weights and prompts give equal tokens. If None, the engine chooses a seed."""
    images: Sequence[Any] = ()
    """Encoded images, as bytes or buffers. Only engines with an image processor accept them."""


@dataclass(frozen=True)
class Response:
    request_id: int
    token_ids: np.ndarray
    """[L] int32 token ids, including the stop token."""
    logprobs: np.ndarray
    """[L] float32 nats under the sampling distribution, which `Sampling` may truncate. Greedy
    responses use the model's own distribution at temperature 1."""
    versions: np.ndarray
    """[L] int32: the policy version that sampled each token."""
    finish_reason: Literal["stop", "length"]
    routes: np.ndarray | None = None
    """[P + L - 1, layers, k] uint16: the experts of each token; None if the engine does not record
    them."""


NOT_WHOLE = (
    "no complete version of the weights has arrived, or a later update failed: nothing is generated"
)
"""Error of an engine that must not generate, because its weights are not one complete version."""

Responses = Generator[list[Response], Collection[int] | None, None]
"""Yields responses as they finish. Send it the ids of requests to abort."""


class GenerationEngine(Protocol):
    """Samples responses, and loads new weights between decoding steps."""

    version: int
    """Policy version of the next step's weights; 0 means the weights in the model's folder."""

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Responses:
        """Sample one response to each request. After each decoding step, yield the list of
        responses that finished in it, which may be empty.

        The engine admits all requests before the first step. The caller may call `update_weights`
        between two items; requests then continue under the new version. Closing the generator
        aborts all unfinished requests; sending it request ids aborts those. Raises a
        GenerationError if the engine rejects a request or fails."""
        ...

    def weight_bytes(self) -> int:
        """Return the size of the model's weights in bytes, over all ranks of the engine."""
        ...

    def stage_weights(self, weights: Weights) -> Iterator[None]:
        """Receive a version into separate memory while requests continue; `update_weights` then
        switches to it. Yields until the version has arrived, or nothing if the engine cannot stage
        weights. Raises a WeightSyncError if the received bytes differ from the published ones."""
        ...

    def update_weights(self, weights: Weights) -> str:
        """Load these weights, and return the checksum of the loaded bytes. Raises a WeightSyncError
        if the bytes differ from the published ones or do not fit the model. The engine then rejects
        requests until a complete version has arrived."""
        ...

    def recompute(self) -> None:
        """Rebuild the KV cache of unfinished requests with the current weights."""
        ...

    def sleep(self, *, discard_weights: bool = False) -> None:
        """Free device memory. With `discard_weights`, the engine need not keep the weights, because
        a new version will arrive after `wake_up`."""
        ...

    def wake_up(self) -> None:
        """Reclaim the memory that `sleep` freed."""
        ...

    def close(self) -> None: ...


# Stop strings. All engines share this code, so they all end a response at the same token.


MARGIN = 16
"""Extra tokens to decode before a stop string, because the first one may lose its space."""


StopCheck = Callable[[Sequence[int] | np.ndarray], bool]
"""Returns whether the last token completes a stop string."""


def stop_check(stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> StopCheck:
    """Return a check for these stop strings. `decode` turns token ids into text.

    >>> ends = stop_check(("ab",), lambda ids: "".join("abc"[i] for i in ids))
    >>> [ends([0, 1][:length]) for length in (1, 2)], ends([0, 1, 2]), ends([2, 0, 1, 0, 1])
    ([False, True], False, True)
    """
    # Every token of text has at least one byte.
    window = max(len(text.encode()) for text in stop) + MARGIN

    def completes(token_ids: Sequence[int] | np.ndarray) -> bool:
        tail = [int(token) for token in token_ids[-window:]]
        text = decode(tail)
        if not any(each in text for each in stop):
            return False
        # An earlier occurrence also counts without the last token.
        before = decode(tail[:-1])
        return any(text.count(each) > before.count(each) for each in stop)

    return completes


def stop_check_of(sampling: Sampling, model: str) -> StopCheck | None:
    """Return the stop check of these settings, using the model's tokenizer; None without stop
    strings."""
    if not sampling.stop:
        return None
    decode = tokenizer_of(model).decode
    return stop_check(sampling.stop, lambda ids: decode([list(ids)])[0])


@cache
def tokenizer_of(model: str) -> Tokenizer:
    """Return the tokenizer in a model's folder, which reward functions use too."""
    return Tokenizer.load(model)
