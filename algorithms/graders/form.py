"""Rewards for the form of a response: its tags, and its length."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pydantic

from .grader import Grader


class TagFormat(Grader):
    """1 when the response consists of tagged parts in their order, each once and not empty, otherwise 0.

    >>> TagFormat()("<think>6 * 7</think> 42"), TagFormat()("42"), TagFormat()("<think>6 * 7</think>")
    (1.0, 0.0, 0.0)
    >>> TagFormat(tags=("think", "answer"), rest=False)("<think>6 * 7</think>\\n<answer>42</answer>")
    1.0
    """

    tags: tuple[str, ...] = pydantic.Field(default=("think",), min_length=1)
    """Names of the tags, in their order. Nothing but spaces stands before the first and between two. Give those that the system prompt
    asks for."""
    rest: bool = True
    """Whether text must follow the last tag; False: none may. Set it to False where the answer stands in a tag of its own."""
    opened: bool = False
    """Whether the chat template has opened the first tag already, so that the response begins inside it. Set it for templates that do."""

    def __call__(self, response: str) -> float:
        """Check a response."""
        text = f"<{self.tags[0]}>{response}" if self.opened else response
        parts = r"\s*".join(rf"<{tag}>\s*\S(?:(?!</?{tag}>).)*</{tag}>" for tag in map(re.escape, self.tags))
        after = r"\s*\S.*" if self.rest else r"\s*"
        found = re.fullmatch(rf"\s*{parts}{after}", text, re.DOTALL)
        once = all(text.count(f"<{tag}>") == 1 and text.count(f"</{tag}>") == 1 for tag in self.tags)
        return float(found is not None and once)


class LengthReward(Grader):
    """1 for a response of at most `full_tokens`, falling linearly to 0 at `no_tokens`.

    >>> [LengthReward(full_tokens=2, no_tokens=6)([7] * tokens) for tokens in (2, 4, 9)]
    [1.0, 0.5, 0.0]
    """

    full_tokens: int = pydantic.Field(ge=0)
    """[tokens] Longest response that has the full reward. Give it; there is no default."""
    no_tokens: int
    """[tokens] Shortest response that has none. Give it; there is no default."""

    @pydantic.model_validator(mode="after")
    def _falls(self) -> LengthReward:
        if self.no_tokens <= self.full_tokens:
            raise ValueError(f"no_tokens must be more than full_tokens={self.full_tokens}, not {self.no_tokens}")
        return self

    def __call__(self, response_ids: Sequence[int]) -> float:
        """The reward for the length of a response, in tokens."""
        share = (self.no_tokens - len(response_ids)) / (self.no_tokens - self.full_tokens)
        return min(max(share, 0.0), 1.0)
