"""The interface of the engines that sample tokens for a rollout worker."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np

from ...algorithms.sampling import Sampling
from ...dataflow.errors import GenerationError
from ...dataflow.prompts.tokenizer import Tokenizer
from ..kept_sets import KeptSets
from .longest_first import HandOver, LongestFirst

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
    sampled: int = 0
    """Number of tokens at the end of `prompt_ids` that belong to the response. Another engine has
    sampled them. They count for stop strings and for random numbers."""
    policy: str = ""
    """The actor whose adapter samples, if the engine serves several."""


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
    """[L] int32: the version of the request's policy that sampled each token."""
    finish_reason: Literal["stop", "length", "unfinished"]
    """`step` returns no unfinished responses."""
    routes: np.ndarray | None = None
    """[P + L - 1, layers, k] uint16: the experts of each token; None if the engine does not record
    them."""
    kept_sets: KeptSets | None = None
    """The kept sets of the L tokens, if the engine records them and the sampling truncates."""


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

    @property
    def version(self) -> int:
        """Policy version of the next step's weights, the newest of several; 0 means the weights in
        the model's folder."""
        ...

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

    def update_weights(self, weights: Weights, policy: str = "") -> str:
        """Load these weights, and return the checksum of the loaded bytes. `policy` is the actor
        that published them; only engines that serve several adapters get it. Raises a
        WeightSyncError if the bytes differ from the published ones or do not fit the model. The
        engine then rejects requests to the policy until a complete version has arrived."""
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


@runtime_checkable
class GivesUpResponses(Protocol):
    """An engine whose running responses can move to another engine."""

    def take_unfinished(self, tickets: Collection[int]) -> list[Response]:
        """Drop these requests, and return their responses so far, in any order. Leaves out tickets
        that are unknown, or whose response `step` has returned or returns next."""
        ...


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

    def take_unfinished(self, tickets: Collection[int]) -> list[Response]:
        """Drop these of the caller's requests, and return their responses so far. Leaves out those
        that are finished; [] if the engine keeps its responses."""
        own, engine = self._tickets.intersection(tickets) - self._finished.keys(), self._engine
        taken = engine.take_unfinished(own) if own and isinstance(engine, GivesUpResponses) else []
        self._tickets.difference_update(response.ticket for response in taken)
        return taken

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


Responses = Generator[list[Response], Collection[int] | HandOver | None, None]
"""Yields responses as they finish. Send it the ids of requests to abort, or a `HandOver`: it then
yields the unfinished responses that it gives up, without a decoding step."""


def generate(
    engine: GenerationEngine,
    requests: Sequence[GenerationRequest],
    sampling: Sampling,
    *,
    order: LongestFirst[int] | None = None,
    slots: int | None = None,
    begun: Sequence[Response] = (),
) -> Responses:
    """Sample one response to each request. After each decoding step, yield the list of responses
    that finished in it, which may be empty.

    Submits all requests before the first step, or as many as `slots`, and then others as these
    finish. Several generators may be open at once. Closing one aborts its unfinished requests;
    sending it `request_id`s aborts those. Raises the errors of `submit` and `step`.

    Args:
        order: a queue of the indexes of all requests. By default, they start in order.
        slots: the largest number of unfinished requests, or None.
        begun: for each request, the response so far, which the engine continues; by default, it
            starts all of them.
    """
    queue = LongestFirst([range(len(requests))]) if order is None else order
    indexes: dict[int, int] = {}
    """Ticket -> index of an unfinished request."""
    with closing(Requests(engine)) as own:
        for step in itertools.count():
            while queue and (slots is None or own.num_unfinished < slots):
                index = queue.take(step)
                asked = requests[index], sampling
                if begun:
                    asked = continued(*asked, begun[index])
                indexes[own.submit(*asked)] = index
            if not own.num_unfinished:
                return
            finished = own.step()
            for k, response in enumerate(finished):
                index = indexes.pop(response.ticket)
                if begun:
                    finished[k] = joined(begun[index], response, response.request_id)
                queue.finish(index, len(finished[k].token_ids))
            said = yield finished
            while isinstance(said, HandOver):
                chosen = queue.to_give(step, said)
                # The model may sample the placeholder of images, so responses to images stay.
                movable = {index for index in chosen if not len(requests[index].images)}
                tickets = [ticket for ticket, index in indexes.items() if index in movable]
                taken = {indexes.pop(one.ticket): one for one in own.take_unfinished(tickets)}
                # Some of the running ones may just have finished.
                kept = set(indexes.values())
                given = [i for i in chosen if i in taken or i not in kept]
                queue.drop(set(given).__contains__)
                said = yield [
                    joined(begun[i] if begun else EMPTY, taken.get(i, EMPTY), requests[i].request_id)
                    for i in given
                ]
            if unwanted := set(said or ()):
                queue.drop(lambda index: requests[index].request_id in unwanted)
                tickets = [t for t, i in indexes.items() if requests[i].request_id in unwanted]
                own.abort(tickets)
                for ticket in tickets:
                    del indexes[ticket]


# Unfinished responses: an engine begins them, and a second engine continues them.

_INTS, _FLOATS = np.zeros(0, np.int32), np.zeros(0, np.float32)
EMPTY = Response(-1, -1, _INTS, _FLOATS, _INTS, "unfinished")
"""A response that no engine has begun."""


def continued(
    request: GenerationRequest, sampling: Sampling, begun: Response
) -> tuple[GenerationRequest, Sampling]:
    """Return a request for the tokens that follow the ones of `begun`, and its sampling."""
    number = len(begun.token_ids)
    if not number:
        return request, sampling
    prompt_ids = np.concatenate([request.prompt_ids, begun.token_ids])
    max_tokens, min_tokens = sampling.max_tokens - number, max(0, sampling.min_tokens - number)
    limits = {"max_tokens": max_tokens, "min_tokens": min_tokens}
    return replace(request, prompt_ids=prompt_ids, sampled=number), sampling.model_copy(update=limits)


def joined(begun: Response, rest: Response, request_id: int) -> Response:
    """Return the response with the tokens of both. The engine of `rest` knows the routes of all
    tokens."""
    kept = [one.kept_sets for one in (begun, rest) if one.kept_sets is not None]
    return replace(
        rest,
        request_id=request_id,
        token_ids=np.concatenate([begun.token_ids, rest.token_ids]),
        logprobs=np.concatenate([begun.logprobs, rest.logprobs]),
        versions=np.concatenate([begun.versions, rest.versions]),
        kept_sets=KeptSets.concat(kept) if kept else None,
    )


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
