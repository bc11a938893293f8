"""ReadSettings: how rows are read as prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from pydantic import Field, field_validator

from ..config import Config
from .files import lone_surrogate

TooLong = Literal["error", "drop"]
TrainOn = Literal["last", "all"]


class ReadSettings(Config):
    """How rows are read as prompts. `Prompts.read` and `Prompts.from_rows` take each of these by its name."""

    prompt: str | None = None
    """Column to take prompts from; `a.b` is a field of a struct. None: as the format of the rows has it. Set it where the rows have no
    known format."""
    answer: str | None = None
    """Column to take the ground truth from. None: as the format of the rows has it. Set it where the column has another name."""
    response: str | None = None
    """Column to take responses from, for supervised training. None: as the format of the rows has it. Set it where the column has another
    name."""
    train_on: TrainOn = "last"
    """Assistant turns of a conversation to train: the "last" one, or "all". Set it to "all" to learn from every assistant turn. Turns of
    users and tools are never trained."""
    extract_answer: bool = True
    r"""Take the final answer out of a worked one: what follows `####`, or what `\boxed{}` holds. Set it to False where a grader wants the
    whole."""
    chat: bool | None = None
    """Send a plain-text prompt as a user's message, through the chat template. None: where the tokenizer has a template, unless the texts
    hold special tokens of the tokenizer already. Messages always go through the template. Set it to False for a base model."""
    system: str | None = None
    """System prompt of every prompt whose messages do not begin with one. Set it to say what form an answer should have."""
    thinking: bool | None = None
    """Whether the template lets the model think before it answers; None: as the template does by itself. Set it to False for short
    responses."""
    chat_template_kwargs: Mapping[str, Any] = Field(default_factory=dict)
    """Further variables of the chat template. A row's own column of this name counts more. Set it for what a model's template asks for."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """[tokens] Longest prompt allowed, inclusive. None: what the context of the model leaves. Lower it where a few long prompts cost the
    memory of all."""
    too_long: TooLong = "error"
    """Handling of longer prompts: "error" refuses them, "drop" leaves them out. The same holds for rows that do not fit into the context
    of a model of the run: prompts without room for a response, and prompts with a response that is too long. The driver finds them
    before it starts any worker. Choose "drop" if there is enough data without them."""
    limit: int | None = Field(default=None, ge=1)
    """[rows] How many are read at most. None: all. Set it for a trial."""

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
