"""ReadSettings: how rows are read as prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from pydantic import Field

from ..config import Config

TooLong = Literal["error", "drop"]


class ReadSettings(Config):
    """How rows are read as prompts. `Prompts.read` and `Prompts.from_rows` take each of these by its name."""

    prompt: str | None = None
    """Column to take prompts from, where the rows have no known format; `a.b` is a field of a struct."""
    answer: str | None = None
    """Column to take the ground truth from."""
    response: str | None = None
    """Column to take responses from, for supervised training."""
    extract_answer: bool = True
    r"""Take the final answer out of a worked one: what follows `####`, or what `\boxed{}` holds."""
    chat: bool | None = None
    """Send a plain-text prompt as a user's message, through the chat template. Default: where the tokenizer has a template, unless
    the texts hold special tokens of the tokenizer already. Messages always go through the template."""
    system: str | None = None
    """System prompt of every prompt whose messages do not begin with one."""
    thinking: bool | None = None
    """Whether the template lets the model think before it answers; None: as the template does by itself."""
    chat_template_kwargs: Mapping[str, Any] = Field(default_factory=dict)
    """Further variables of the chat template. A row's own column of this name counts more."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longest prompt allowed, in tokens, inclusive."""
    too_long: TooLong = "error"
    """What a longer prompt is: an `error`, or a row to `drop`. It holds as well for prompts that leave no room for a response in the
    context of the model that is to answer them; the driver finds these before it starts anything."""
    limit: int | None = Field(default=None, ge=1)
    """Read no more than this many rows."""


class ReadArguments(TypedDict, total=False):
    """The fields of `ReadSettings` as keyword arguments, for type checkers and editors."""

    prompt: str | None
    answer: str | None
    response: str | None
    extract_answer: bool
    chat: bool | None
    system: str | None
    thinking: bool | None
    chat_template_kwargs: Mapping[str, Any]
    max_prompt_tokens: int | None
    too_long: TooLong
    limit: int | None
