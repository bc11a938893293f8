"""The interface of the engines that sample tokens for a rollout worker."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from ...algorithms.sampling import Sampling
from ...dataflow.errors import GenerationError
from ...dataflow.prompts.tokenizer import Tokenizer
from ..kept_sets import KeptSets
from .longest_first import LongestFirst

if TYPE_CHECKING:
    from ...resharding.weights import Weights


@dataclass(frozen=True)
class Structure:
    """The form that the text of a response must have. Only vLLM can enforce it.

    The engine masks all other tokens, and reports log-probabilities of the masked distribution.
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    value: Any
    """A JSON schema (as a mapping or text), a regular expression, a list of texts, or an EBNF
    grammar."""


@dataclass(frozen=True)
class GenerationRequest:
    request_id: int
    """The caller's number, which errors and the response repeat."""
    prompt_ids: np.ndarray
    """[P] int32 token ids, with one placeholder for each image."""
    seed: int | None = None
    """Equal seeds, weights and prompts give equal tokens. If None, the engine chooses a seed."""
    images: Sequence[Any] = ()
    """Encoded images, as bytes or buffers. Only engines with an image processor accept them."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop tokens in addition to the model's. `Sampling(stop=None)` ignores both."""
    structure: Structure | None = None


@dataclass(frozen=True)
class Response:
    ticket: int
    """Number that `GenerationEngine.submit` gave the request."""
    request_id: int
    token_ids: np.ndarray
    """[L] int32 token ids, including the stop token."""
    logprobs: np.ndarray
    """[L] float32 nats under the sampling distribution, which `Sampling` may truncate. Greedy
    responses use the model's own distribution at temperature 1, without masked stop tokens."""
    versions: np.ndarray
    """[L] int32: the policy version that sampled each token."""
    finish_reason: Literal["stop", "length"]
    routes: np.ndarray | None = None
    """[P + L - 1, layers, k] uint16: the experts of each token; None if the engine does not record
    them."""
    kept_sets: KeptSets | None = None
    """The kept sets of the L tokens, if the engine records them and the sampling truncates."""


NOT_WHOLE = (
    "no complete version of the weights has arrived, or a later update failed: nothing is generated"
)
"""Error of an engine that must not generate, because its weights are not one complete version."""


class GenerationEngine(Protocol):
    """Samples responses, and loads new weights between decoding steps.

    Requests of all callers decode together, whenever they were submitted and whatever their
    settings. An engine without other callers is used like this:

        ticket = engine.submit(GenerationRequest(0, prompt_ids), Sampling(max_tokens=8))
        while engine.num_unfinished:
            for response in engine.step():
                print(response.ticket, response.token_ids)

    Callers that share an engine use `generate` or `Requests` instead.
    """

    version: int
    """Policy version of the next step's weights; 0 means the weights in the model's folder."""

    @property
    def num_unfinished(self) -> int:
        """Number of submitted requests that `step` has not returned."""
        ...

    def submit(self, request: GenerationRequest, sampling: Sampling) -> int:
        """Queue a request. Return its ticket, which no other request to the engine has. Raises a
        GenerationError if the engine rejects the request."""
        ...

    def step(self) -> list[Response]:
        """Admit waiting requests, decode a token of each admitted one, and return the responses that
        finished; [] if there is nothing to decode. The caller may call `update_weights` between two
        steps; requests then continue under the new version. Raises a GenerationError if the engine
        fails."""
        ...

    def abort(self, tickets: Collection[int]) -> None:
        """Drop these requests. Ignores tickets that `step` has returned or that are unknown."""
        ...

    def weight_bytes(self) -> int:
        """Return the size of the model's weights in bytes, over all ranks of the engine. Quantised
        weights count with the unquantised ones that they are made from."""
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


# Requests of several callers in one engine


class Requests:
    """One caller's requests to an engine that others use too. Each caller receives the responses to
    its own requests, even if another caller's `step` finished them.

        with closing(Requests(engine)) as own:
            own.submit(request, sampling)
            while own.num_unfinished:
                for response in own.step():
                    print(response.token_ids)
    """

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._tickets: set[int] = set()
        self._finished = _finished.setdefault(engine, {})

    @property
    def num_unfinished(self) -> int:
        """Number of the caller's requests that `step` has not returned."""
        return len(self._tickets)

    def submit(self, request: GenerationRequest, sampling: Sampling) -> int:
        """See `GenerationEngine.submit`."""
        ticket = self._engine.submit(request, sampling)
        self._tickets.add(ticket)
        return ticket

    def step(self) -> list[Response]:
        """Return the caller's finished responses, in order of their tickets. Decodes a step first,
        unless other callers' steps have finished some."""
        if self._tickets and self._tickets.isdisjoint(self._finished):
            if not self._engine.num_unfinished:
                raise GenerationError(
                    f"the engine dropped {len(self._tickets)} requests, because an earlier step failed"
                )
            for response in self._engine.step():
                self._finished[response.ticket] = response
        done = sorted(self._tickets & self._finished.keys())
        self._tickets.difference_update(done)
        return [self._finished.pop(ticket) for ticket in done]

    def abort(self, tickets: Collection[int]) -> None:
        """Drop these of the caller's requests."""
        own = self._tickets.intersection(tickets)
        self._engine.abort(own)
        self._tickets -= own
        for ticket in own:
            self._finished.pop(ticket, None)

    def close(self) -> None:
        """Drop all of the caller's requests."""
        self.abort(self._tickets)


_finished: WeakKeyDictionary[GenerationEngine, dict[int, Response]] = WeakKeyDictionary()
"""Responses of each engine, by ticket, that their callers have not taken."""

Responses = Generator[list[Response], Collection[int] | None, None]
"""Yields responses as they finish. Send it the ids of requests to abort."""


def generate(
    engine: GenerationEngine,
    requests: Sequence[GenerationRequest],
    sampling: Sampling,
    *,
    order: LongestFirst[int] | None = None,
    slots: int | None = None,
) -> Responses:
    """Sample one response to each request. After each decoding step, yield the list of responses
    that finished in it, which may be empty.

    Submits all requests before the first step, or as many as `slots`, and then others as these
    finish. Several generators may be open at once. Closing one aborts its unfinished requests;
    sending it `request_id`s aborts those. Raises the errors of `submit` and `step`.

    Args:
        order: a queue of the indexes of all requests. By default, they start in order.
        slots: the largest number of unfinished requests, or None.
    """
    queue = LongestFirst([range(len(requests))]) if order is None else order
    indexes: dict[int, int] = {}
    """Ticket -> index of an unfinished request."""
    with closing(Requests(engine)) as own:
        for step in itertools.count():
            while queue and (slots is None or own.num_unfinished < slots):
                index = queue.take(step)
                indexes[own.submit(requests[index], sampling)] = index
            if not own.num_unfinished:
                return
            finished = own.step()
            for response in finished:
                queue.finish(indexes.pop(response.ticket), len(response.token_ids))
            if unwanted := set((yield finished) or ()):
                queue.drop(lambda index: requests[index].request_id in unwanted)
                tickets = [t for t, i in indexes.items() if requests[i].request_id in unwanted]
                own.abort(tickets)
                for ticket in tickets:
                    del indexes[ticket]


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


def stable_hash(*numbers: int, content: bytes = b"") -> int:
    """Return a 63-bit hash that does not depend on the process or run."""
    digest = hashlib.blake2b(content, digest_size=8)
    digest.update(repr(numbers).encode())
    return int.from_bytes(digest.digest(), "little") >> 1
