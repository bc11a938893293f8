"""VllmDrafts: switches the drafts of a vLLM engine on and off, and counts them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...dataflow.metrics import Mean, Metrics
from .speculation import DraftCounts, Payoff, Speculation


class VllmDrafts:
    """Drafts of an engine that runs in this process.

    Between two steps it sets the length of the next drafts: for vLLM's own methods, in the table from
    batch size to length (`num_speculative_tokens_per_batch_size`), and for Weft's drafters, in that
    of each rank.
    """

    def __init__(self, engine: Any, speculation: Speculation) -> None:
        self._engine = engine
        self._scheduler: Any = engine.engine_core.engine_core.scheduler
        self._speculation = speculation
        self._payoff = Payoff(speculation.off_above)
        self._length: int | None = None
        self._accepted = 0
        self._reset()
        engine.collective_rpc("weft_correct_drafts")
        # vLLM calls it for each checked draft, even without its own statistics.
        self._scheduler.make_spec_decoding_stats = self._note

    @contextmanager
    def step(self) -> Iterator[None]:
        """Wrap a step of the engine."""
        responses = min(len(self._scheduler.requests), self._scheduler.max_num_running_reqs)
        drafts = self._payoff.decide(responses)
        self._set_length(self._speculation.tokens if drafts else 0)
        self._steps += 1
        self._drafting_steps += drafts
        accepted, began = self._accepted, time.perf_counter()
        yield
        self._payoff.note(time.perf_counter() - began, responses + self._accepted - accepted)

    def take_metrics(self) -> Metrics:
        """Return the metrics of the steps since the last call."""
        found = self._counts.metrics()
        if self._steps:
            found = {**found, "speculating": Mean(float(self._drafting_steps), float(self._steps))}
        self._reset()
        return found

    def _reset(self) -> None:
        self._counts = DraftCounts()
        self._steps = self._drafting_steps = 0

    def _note(self, *_: Any, num_draft_tokens: int, num_accepted_tokens: int, **__: Any) -> None:
        self._counts.note(num_draft_tokens, num_accepted_tokens)
        self._accepted += num_accepted_tokens

    def _set_length(self, length: int) -> None:
        if length == self._length:
            return
        self._length = length
        table: list[int] | None = self._scheduler.dynamic_sd_lookup
        if table is None:
            self._engine.collective_rpc("weft_draft", args=(length,))
        else:
            table[:] = [length] * len(table)
