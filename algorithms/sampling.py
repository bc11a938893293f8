"""Sampling: how the tokens of a response are drawn."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, field_validator

from ..dataflow.column import OLD_LOGPROBS, RESPONSE_LOGPROBS
from ..dataflow.config import Config
from ..dataflow.prompts.files import lone_surrogate

LOWEST_TEMPERATURE = 0.01
"""vLLM draws at this temperature whatever is asked for between 0 and it."""


class Sampling(Config):
    """How tokens are drawn, which decides the distribution that their log-probabilities belong to.

    A trainer knows the whole distribution at a temperature. What draws from another one (`top_p`, `top_k`, `min_tokens`) leaves
    the column `response_logprobs` out: a ratio of the trainer's probabilities to them would compare two distributions and not
    two policies.

    >>> Sampling(temperature=0.7).writes, Sampling(top_p=0.9).writes
    (('response_logprobs',), ())
    """

    max_tokens: int = Field(default=64, ge=1, le=100_000_000)
    """[tokens] Longest response, the stop token included. Raise it where `truncation_rate` is high."""
    temperature: float = Field(default=1.0, ge=0)
    """[factor] It divides the logits; 0 is greedy. Lower it for evaluations, raise it where the responses of a group are all alike."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """[share] Smallest set of tokens whose probability reaches this; 1 keeps all. Lower it for evaluations alone: the trainer knows only
    the whole distribution."""
    top_k: int = Field(default=0, ge=0, le=100_000_000)
    """[tokens] Sample only from this many of the most likely tokens; 0 keeps all. Set it only for evaluations, like `top_p`."""
    min_tokens: int = Field(default=0, ge=0, le=100_000_000)
    """[tokens] Shortest response: stop tokens are masked before it. Raise it if responses must have a minimum length. Like `top_p`, it
    changes the distribution that is sampled."""
    stop: tuple[str, ...] = ()
    """Stop strings, such as ("</answer>",), in addition to the model's stop tokens. The response keeps the tokens that complete the
    string, with their log-probabilities, and rewards read the text of all its tokens. Set it if answers end with a fixed text."""
    ignore_stop: bool = False
    """Go on to `max_tokens` whatever is sampled. Set it in benchmarks, to know the number of tokens."""

    @field_validator("stop", mode="before")
    @classmethod
    def _are_texts(cls, stop: object) -> object:
        texts = (stop,) if isinstance(stop, str) else stop
        if isinstance(texts, list | tuple) and "" in texts:
            raise ValueError(f"stop has an empty text, which would end every response at once: {stop!r}")
        if (half := lone_surrogate(texts)) is not None:
            raise ValueError(
                f"stop has the lone surrogate {half!a}, which is half of a character and in no response: {stop!r}"
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
        """The most likely token each time, and otherwise the same.

        >>> Sampling(max_tokens=8, top_p=0.9).greedy
        Sampling(max_tokens=8, temperature=0.0, top_p=0.9, top_k=0, min_tokens=0, stop=(), ignore_stop=False)
        """
        return self.model_copy(update={"temperature": 0.0})

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that only some samplings write."""
        return tuple(c for c in (str(RESPONSE_LOGPROBS),) if c not in self.leaves_out)

    @property
    def leaves_out(self) -> Mapping[str, str]:
        """Columns that this sampling does not write, and why. The graph tells a node that reads one."""
        cut = []
        if self.temperature:  # a greedy token is the likeliest of any set that is kept
            cut += [f"top_p={self.top_p}"] * (self.top_p < 1) + [f"top_k={self.top_k}"] * (self.top_k > 0)
        cut += [f"min_tokens={self.min_tokens}"] * (self.min_tokens > 0 and not self.ignore_stop)
        if not cut:
            return {}
        return {
            str(
                RESPONSE_LOGPROBS
            ): f"with {', '.join(cut)} tokens are drawn from a part of the distribution, and the trainer knows "
            f"only the whole; sample without, or compare with the trainer's own: PolicyLoss(old={str(OLD_LOGPROBS)!r})"
        }
