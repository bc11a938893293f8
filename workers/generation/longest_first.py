"""LongestFirst: a queue of requests that starts the longest expected responses first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class HandOver:
    """A request to give up unfinished responses, for other replicas to continue."""

    parts: int = 2
    """Number of replicas, including this one, that share the unfinished responses."""
    min_tokens: int = 0
    """[tokens] A running response is given up only if at least this many are expected to follow."""


class LongestFirst(Generic[T]):
    """Requests that wait for a free slot of the engine. The longest expected responses start first,
    because a long response that starts last leaves the other slots idle.

        queue = LongestFirst([["a0", "a1"], ["b0", "b1"]], np.array([nan, 300.0]))
        request = queue.take(step)         # "a0", because nothing is known about its length
        queue.finish(request, tokens=900)
        queue.take(step)                   # "a1", because 900 tokens are more than 300

    - Prompts without a forecast first start one response each, in order, to learn their lengths.
    - Next comes the prompt with the longest expected response: the mean of its forecast and of its
      own responses in this call. A running response counts with twice its tokens so far, if that is
      more than expected.
    - The order depends on the engine's steps and not on time, so equal calls have equal batches.

    Args:
        requests: the requests of each prompt, which start in this order.
        expected: [prompts] tokens; NaN without a forecast. By default, no prompt has one.
        begun: request -> tokens that its response already has, if any.
    """

    def __init__(
        self,
        requests: Sequence[Sequence[T]],
        expected: np.ndarray | None = None,
        begun: Mapping[T, int] = MappingProxyType({}),
    ) -> None:
        self._begun = begun
        forecast = np.full(len(requests), np.nan) if expected is None else np.asarray(expected, float)
        self._requests = [deque(own) for own in requests]
        self._waiting = np.array([len(own) for own in requests], np.int64)
        self._number = int(self._waiting.sum())
        self._known = (~np.isnan(forecast)).astype(float)
        """[prompts] Number of known lengths: of the forecast, and of finished responses."""
        self._tokens = np.nan_to_num(forecast)
        """[prompts] Sum of the known lengths."""
        self._running = np.zeros(len(requests))
        self._began = np.zeros(len(requests))
        """[prompts] Sum of the first steps of running responses."""
        self._starts: dict[T, tuple[int, int]] = {}
        """Running request -> its prompt and first step."""

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return self._number

    def take(self, step: int) -> T:
        """Return the next request, which starts in this step. The queue must not be empty."""
        prompt = self._next(step) if len(self._requests) > 1 else 0
        request = self._requests[prompt].popleft()
        began = step - self._begun.get(request, 0)
        self._waiting[prompt] -= 1
        self._number -= 1
        self._running[prompt] += 1
        self._began[prompt] += began
        self._starts[request] = prompt, began
        return request

    def to_give(self, step: int, wanted: HandOver) -> list[T]:
        """Return the requests to give up, but do not drop them: the next ones to start and, if these
        are too few, every other running one, from the longest on."""
        parts = wanted.parts
        number = (self._number + len(self._starts)) * (parts - 1) // parts
        order = np.argsort(-self._expected(step), kind="stable") if number else ()
        waiting = [request for prompt in order for request in self._requests[prompt]][:number]
        mean = self._tokens / np.maximum(self._known, 1)
        left: dict[T, float] = {}
        for request, (prompt, began) in self._starts.items():
            left[request] = max(mean[prompt], 2 * (step - began)) - (step - began)
        long = [request for request in left if left[request] >= wanted.min_tokens]
        running = sorted(long, key=lambda request: -left[request])
        others = [request for k, request in enumerate(running) if k % parts]
        return [*waiting, *others[: number - len(waiting)]]

    def finish(self, request: T, tokens: int) -> None:
        """Note the length of a response that has finished."""
        prompt = self._stop(request)
        self._tokens[prompt] += tokens
        self._known[prompt] += 1

    def drop(self, unwanted: Callable[[T], bool]) -> None:
        """Forget requests, whether they wait or run."""
        for prompt, own in enumerate(self._requests):
            kept = [request for request in own if not unwanted(request)]
            self._number -= len(own) - len(kept)
            self._waiting[prompt] = len(kept)
            self._requests[prompt] = deque(kept)
        for request in [request for request in self._starts if unwanted(request)]:
            self._stop(request)

    def _stop(self, request: T) -> int:
        prompt, step = self._starts.pop(request)
        self._running[prompt] -= 1
        self._began[prompt] -= step
        return prompt

    def _next(self, step: int) -> int:
        waiting = self._waiting > 0
        unknown = waiting & (self._known + self._running == 0)
        if unknown.any():
            return int(unknown.argmax())
        return int(np.where(waiting, self._expected(step), -1).argmax())

    def _expected(self, step: int) -> np.ndarray:
        """Return the expected length of a response to each prompt, [prompts] float64; 0 if nothing is known."""
        mean = self._tokens / np.maximum(self._known, 1)
        so_far = self._running * step - self._began
        tokens = self._tokens + np.maximum(self._running * mean, 2 * so_far)
        return tokens / np.maximum(self._known + self._running, 1)
