"""Conversations: rows of messages as prompts and responses, through the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from ..errors import UserError
from .damage import short
from .formats import find_column
from .images import refuse_places, with_places
from .origin import Origin
from .tokenizer import Tokenizer

Messages = list[dict[str, Any]]

_SYSTEM = ("system", "developer")
"""Roles of a message that a conversation may begin with, and that no second one should follow."""


@dataclass(frozen=True)
class Texts:
    """Rows as the text that is tokenised."""

    prompts: list[str]
    responses: dict[str, list[str]]
    """By the column that their tokens go to."""
    chat: bool
    """Whether the texts went through the chat template, which writes all special tokens."""
    has_bos: bool = False
    """Whether plain prompts begin with the token that begins a sequence already."""
    whole: bool = False
    """Whether there are no prompts: each text is one sequence to model."""
    own_system: int = 0
    """Rows that begin with a system message of their own, where another was to be added."""


@dataclass(frozen=True)
class Conversations:
    """What rendering rows of messages needs beside the messages."""

    origin: Origin
    tokenizer: Tokenizer
    system: str | None = None
    """System prompt of rows that have none of their own."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Of the chat template, for all rows."""
    tools: Sequence[Any] | None = None
    """By row: functions that the model may call."""
    own_variables: Sequence[Any] | None = None
    """By row: further variables of the template."""
    images: Sequence[int] | None = None
    """By row: how many images it has; None: no row of the source has any."""

    @classmethod
    def of(
        cls,
        table: pa.Table,
        origin: Origin,
        tokenizer: Tokenizer,
        system: str | None,
        variables: Mapping[str, Any],
        images: Sequence[int] | None = None,
    ) -> Conversations:
        """With the columns `tools` and `chat_template_kwargs` of the rows, if there are any.

        Raises:
            UserError: one of these columns is text that is not JSON.
        """

        def values(name: str) -> list[Any] | None:
            if name not in table.column_names:
                return None
            try:
                return [_without_nulls(_from_json(value)) for value in table.column(name).to_pylist()]
            except (ValueError, RecursionError) as error:
                raise UserError(f"{origin.files}: column {name!r} is text that is not JSON ({error})") from None

        return cls(origin, tokenizer, system, variables, values("tools"), values("chat_template_kwargs"), images)

    def render(self, prompts: Sequence[Messages], responses: Mapping[str, Sequence[Messages]]) -> Texts:
        """Prompts and, by column, what the template adds when the response's messages follow.

        Raises:
            UserError: the template refuses the messages of a row; the message names it.
        """
        texts: list[str] = []
        tails: dict[str, list[str]] = {name: [] for name in responses}
        own_system = 0
        for row, messages in enumerate(prompts):
            if self.system is not None:
                if messages[0].get("role") in _SYSTEM:
                    own_system += 1
                else:
                    messages = [{"role": "system", "content": self.system}, *messages]
            messages = self._placed(row, messages, [each[row] for each in responses.values()])
            # A prompt that ends with the assistant's turn is a response already begun (TRL's rule).
            begun = messages[-1]["role"] == "assistant"
            prompt = self._text(row, messages, add_generation_prompt=not begun, continue_last=begun)
            wholes = {name: self._text(row, messages + column[row]) for name, column in responses.items()}
            # Some templates open the assistant's turn with text (`<think>`) that finished turns do not have.
            if not all(whole.startswith(prompt) for whole in wholes.values()):
                prompt = common_start([prompt, *wholes.values()])
            texts.append(prompt)
            for name, whole in wholes.items():
                tails[name].append(self._until_stop(whole[len(prompt) :]))
        return Texts(texts, tails, chat=True, own_system=own_system)

    def _placed(self, row: int, prompt: Messages, responses: Sequence[Messages]) -> Messages:
        """The prompt with the places of the row's images."""
        try:
            for response in responses:
                refuse_places(response)
            if self.images is not None:
                return with_places(prompt, self.images[row])
            refuse_places(prompt)
            return prompt
        except UserError as error:
            raise UserError(f"{self.origin(row)}: {error}") from None

    def _text(self, row: int, messages: Messages, **how: bool) -> str:
        own = (self.own_variables[row] if self.own_variables else None) or {}
        tools = self.tools[row] if self.tools else None
        try:
            return self.tokenizer.chat.render(messages, tools=tools, **how, **{**self.variables, **own})
        except UserError as error:
            raise UserError(f"{self.origin(row)}: {error}") from None

    def _until_stop(self, response: str) -> str:
        """Without the newline that templates write after the token that ends a turn: generation stops before it."""
        stripped = response.rstrip("\n")
        return stripped if stripped.endswith(self.tokenizer.special_texts) else response

    def split_dialogues(self, dialogues: Sequence[Messages], column: str, answered: bool) -> Texts:
        """Conversations: prompts, or prompts with responses where they end with the assistant's turn.

        Args:
            answered: whether the first of all rows ends with the assistant's turn.

        Raises:
            UserError: another row ends otherwise, or holds only a response.
        """
        for row, messages in enumerate(dialogues):
            if (messages[-1]["role"] == "assistant") != answered:
                said = "without it (a prompt)", "with the assistant's turn (a response)"
                raise UserError(
                    f"{self.origin(row)}: {column!r} ends {said[not answered]}, but the rows before end {said[answered]}; "
                    "keep the two in different files"
                )
            if answered and len(messages) == 1:
                raise UserError(f"{self.origin(row)}: {column!r} holds only a response, with no message before it")
        if not answered:
            return self.render(dialogues, {})
        return self.render([m[:-1] for m in dialogues], {"response_ids": [m[-1:] for m in dialogues]})

    def split_preferences(self, chosen: Sequence[Messages], rejected: Sequence[Messages]) -> Texts:
        """Pairs without a prompt of their own: the prompt is the messages that both begin with.

        Raises:
            UserError: both responses of a row begin with different messages.
        """
        prompts: list[Messages] = []
        for row, pair in enumerate(zip(chosen, rejected, strict=True)):
            most = min(map(len, pair)) - 1  # at least one message is the response
            same = next((i for i in range(most) if pair[0][i] != pair[1][i]), most)
            if same == 0:
                raise UserError(
                    f"{self.origin(row)}: 'chosen' and 'rejected' begin with different messages: no common prompt"
                )
            prompts.append(pair[0][:same])
        counts = [len(prompt) for prompt in prompts]
        return self.render(
            prompts,
            {
                "chosen_ids": [messages[n:] for messages, n in zip(chosen, counts, strict=True)],
                "rejected_ids": [messages[n:] for messages, n in zip(rejected, counts, strict=True)],
            },
        )


def read_messages(table: pa.Table, path: str, origin: Origin) -> list[Messages]:
    """A column of messages, without the fields that are null.

    Raises:
        UserError: a row has no messages, or a message no role.
    """
    dialogues: list[Messages] = []
    for row, messages in enumerate(find_column(table, path, origin, "column").to_pylist()):
        if not messages:
            raise UserError(f"{origin(row)}: {path!r} is {short(messages)}; every row needs at least one message there")
        clean = [_without_nulls(message) for message in messages]
        for message in clean:
            if "role" not in message:
                raise UserError(f"{origin(row)}: a message in {path!r} has no role: {short(message)}")
        dialogues.append(clean)
    return dialogues


def common_start(texts: Sequence[str]) -> str:
    """The longest string that all texts begin with.

    >>> common_start(["the sky", "the sea"])
    'the s'
    """
    low, high = min(texts), max(texts)  # what these two share, everything between them shares
    end = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return low[:end]


def _without_nulls(value: Any) -> Any:
    """Without the fields that are null: Arrow gives every struct of a column the fields of all, and templates ask
    whether a field is there."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _from_json(value: Any) -> Any:
    """TRL keeps tools of different shapes as JSON text, in whole or one by one: Arrow has one type per column."""
    if isinstance(value, str):
        return json.loads(value)
    return (
        [_from_json(inner) if isinstance(inner, str) else inner for inner in value]
        if isinstance(value, list)
        else value
    )
