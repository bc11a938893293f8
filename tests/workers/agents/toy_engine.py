"""An engine that answers prompts with given texts, one token in each step."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from weft.algorithms.sampling import Sampling
from weft.workers.generation.engine import GenerationRequest, Response
from weft.workers.kept_sets import KeptSets

from .words import WordRenderer


class ToyEngine:
    """Samples `answer(prompt)`, then the stop token, unless a word is a stop string. Token k has the
    log-probability -k - 1. Truncated sampling keeps the sampled token and the next one."""

    def __init__(self, renderer: WordRenderer, answer: Callable[[str], str]) -> None:
        self.renderer, self.answer = renderer, answer
        self.version = 0
        self.requests: list[tuple[GenerationRequest, Sampling]] = []
        self.aborted: list[int] = []
        self._left: dict[int, tuple[list[int], list[int], int, bool]] = {}
        """Ticket -> (answer, versions so far, maximum length, whether the sampling truncates)."""

    @property
    def num_unfinished(self) -> int:
        return len(self._left)

    def submit(self, request: GenerationRequest, sampling: Sampling) -> int:
        self.requests.append((request, sampling))
        text = self.answer(self.renderer.decode(request.prompt_ids.tolist()))
        stops = [k for k, word in enumerate(text.split()) if word in (sampling.stop or ())]
        ids = [*self.renderer.ids(text), 0]
        ids = ids[: stops[0] + 1] if stops else ids
        most = min(len(ids), sampling.max_tokens)
        self._left[len(self.requests)] = ids, [], most, sampling.truncates
        return len(self.requests)

    def step(self) -> list[Response]:
        finished: list[Response] = []
        for ticket, (ids, versions, most, truncates) in list(self._left.items()):
            versions.append(self.version)
            if len(versions) == most:
                del self._left[ticket]
                logprobs = -np.arange(1, most + 1, dtype=np.float32)
                reason = "stop" if most == len(ids) else "length"
                kept = np.array([[id, id + 1] for id in ids[:most]], np.int32).ravel()
                kept_sets = KeptSets(np.full(most, 2, np.int32), kept) if truncates else None
                finished.append(
                    Response(
                        ticket,
                        0,
                        np.array(ids[:most], np.int32),
                        logprobs,
                        np.array(versions, np.int32),
                        reason,
                        kept_sets=kept_sets,
                    )
                )
        return finished

    def abort(self, tickets: Collection[int]) -> None:
        for ticket in tickets:
            if self._left.pop(ticket, None) is not None:
                self.aborted.append(ticket)
