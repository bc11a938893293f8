"""ReadSettings: how to read rows as prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from pydantic import Field, field_validator

from ..config import Config
from .files import lone_surrogate

TooLong = Literal["error", "drop"]
TrainOn = Literal["last", "all"]


class ReadSettings(Config):
    """How to read rows as prompts. `Prompts.read` and `Prompts.from_rows` take these as keyword
    arguments."""

    prompt: str | None = None
    """Column of the prompts; `a.b` is a field of a struct. None uses the column of the detected
    format. Set it if the rows have no known format."""
    answer: str | None = None
    """Column of the ground truth. None uses the column of the detected format. Set it if the column
    has another name."""
    response: str | None = None
    """Column of the responses, for supervised training. None uses the column of the detected
    format. Set it if the column has another name."""
    train_on: TrainOn = "last"
    """Assistant turns of a conversation to train: the "last" one, or "all". Set it to "all" to
    learn from every assistant turn. Turns of users and tools are never trained."""
    extract_answer: bool = True
    r"""Extract the final answer of worked solutions: the text after `####`, or the content of
    `\boxed{}`. Set it to False if a grader needs the whole solution."""
    chat: bool | None = None
    """Send a plain-text prompt as a user's message, through the chat template. None does so if the
    tokenizer has a template, unless the texts already have special tokens. Messages always go
    through the template. Set it to False for a base model."""
    system: str | None = None
    """System prompt for prompts whose messages do not begin with one. Set it to specify the form of
    answers."""
    thinking: bool | None = None
    """Whether the template lets the model think before it answers. None uses the template's
    default. Set it to False for short responses."""
    chat_template_kwargs: Mapping[str, Any] = Field(default_factory=dict)
    """Further variables of the chat template. A row's own column of this name takes precedence. Set
    it for variables that a model's template needs."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """[tokens] Longest allowed prompt, inclusive. None allows what the model's context leaves.
    Lower it if a few long prompts determine the memory use."""
    too_long: TooLong = "error"
    """How to handle longer prompts: "error" refuses them, "drop" leaves them out. It also applies
    to rows that exceed the context of a model of the run: prompts without room for a response, and
    prompts with a response that is too long. The driver finds them before it starts any worker.
    Choose "drop" if there is enough data without them."""
    limit: int | None = Field(default=None, ge=1)
    """[rows] Most rows to read. None reads all. Set it for a trial."""

    @field_validator("system", "chat_template_kwargs")
    @classmethod
    def _is_whole(cls, value: Any) -> Any:
        half = lone_surrogate(value)
        if half is not None:
            raise ValueError(
                f"holds the lone surrogate {half!a}, which is half of a character: the text was cut or decoded wrongly"
            )
        return value


class ReadArguments(TypedDict, total=False):
    """The fields of `ReadSettings` as keyword arguments, for type checkers and editors."""

    prompt: str | None
    answer: str | None
    response: str | None
    train_on: TrainOn
    extract_answer: bool
    chat: bool | None
    system: str | None
    thinking: bool | None
    chat_template_kwargs: Mapping[str, Any]
    max_prompt_tokens: int | None
    too_long: TooLong
    limit: int | None
