"""Sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field, field_validator

from ..dataflow.column import KEPT_COUNTS, KEPT_IDS, RESPONSE_LOGPROBS
from ..dataflow.config import Config
from ..dataflow.prompts.files import lone_surrogate

LOWEST_TEMPERATURE = 0.01
"""Lowest positive temperature; vLLM raises lower ones to this value."""


class Sampling(Config):
    """Sampling parameters of responses.

    With `top_p`, `top_k`, `min_p` or `min_tokens`, a rollout samples each token from a part of the
    vocabulary, its *kept set*. If a trainer reads the rows, they have the kept sets, and the trainer
    computes probabilities over the same tokens.

    >>> Sampling(temperature=0.7).writes, Sampling(top_p=0.9).writes
    (('response_logprobs',), ('response_logprobs', 'kept_counts', 'kept_ids'))
    """

    max_tokens: int = Field(default=64, ge=1, le=100_000_000)
    """[tokens] Maximum length of a response, including the stop token. Raise it if
    `truncation_rate` is high."""
    temperature: float = Field(default=1.0, ge=0)
    """[factor] Divisor of the logits; 0 is greedy decoding. Lower it for evaluations; raise it if
    the responses of a group are all alike."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """[share] Sample from the smallest set of tokens whose total probability reaches this share; 1
    keeps all tokens. Lower it if unlikely tokens spoil responses; rows then need 4 bytes for each
    token in the set."""
    top_k: int = Field(default=0, ge=0, le=100_000_000)
    """[tokens] Sample only from this many of the most likely tokens; 0 keeps all tokens. Set it, like
    `top_p`, if unlikely tokens spoil responses."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """[share] Sample only from tokens with at least this share of the most likely token's probability;
    0 keeps all tokens. Set it, like `top_p`, if unlikely tokens spoil responses, for example at a
    high temperature."""
    min_tokens: int = Field(default=0, ge=0, le=100_000_000)
    """[tokens] Minimum length of a response; stop tokens are masked until then. Raise it if responses
    end too early."""
    stop: tuple[str, ...] | None = ()
    """Stop strings, such as ("</answer>",), in addition to the model's stop tokens. The response
    keeps the tokens that complete a stop string, with their log-probabilities, and rewards see
    their text. None ignores stop tokens too and always generates `max_tokens`. Set it if answers
    end with a fixed text, or to None in benchmarks."""

    retired: ClassVar[Mapping[str, str]] = {"ignore_stop": "set stop=None"}

    @field_validator("stop", mode="before")
    @classmethod
    def _are_texts(cls, stop: object) -> object:
        texts = (stop,) if isinstance(stop, str) else stop
        if isinstance(texts, list | tuple) and "" in texts:
            raise ValueError(f"stop has an empty text, which would end every response at once: {stop!r}")
        if (half := lone_surrogate(texts)) is not None:
            raise ValueError(
                f"stop has the lone surrogate {half!a}, which is half of a character and cannot occur in a response: {stop!r}"
            )
        return texts

    @field_validator("temperature")
    @classmethod
    def _is_drawn_at(cls, temperature: float) -> float:
        if 0 < temperature < LOWEST_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {LOWEST_TEMPERATURE}, not {temperature}"
            )
        return temperature

    @property
    def greedy(self) -> Sampling:
        """The same settings, but with greedy decoding."""
        return self.model_copy(update={"temperature": 0.0})

    @property
    def narrows(self) -> bool:
        """Whether only the most likely tokens can be sampled. Greedy decoding takes the most likely one
        in any case, so it counts as the whole distribution."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be sampled. With `stop=None`, `min_tokens` masks nothing."""
        return self.narrows or (self.min_tokens > 0 and self.stop is not None)

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that depend on the sampling."""
        kept = (KEPT_COUNTS, KEPT_IDS) if self.truncates else ()
        return tuple(map(str, (RESPONSE_LOGPROBS, *kept)))
