"""Rows of a file as the text that is tokenised: the chat template applied, responses parted from their prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from ..errors import UserError
from .files import Origin, short
from .formats import Format, as_text, column_kind, find_column
from .tokenizer import Tokenizer

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Texts:
    prompts: list[str]
    responses: dict[str, list[str]]  # by the column that their tokens go to
    chat: bool  # the texts went through the chat template, which writes all special tokens
    whole: bool = False  # there are no prompts: each text is one sequence to model


def texts_of(table: pa.Table, format: Format, origin: Origin, tokenizer: Tokenizer, chat: bool) -> Texts:
    """Prompts and responses as the text that is tokenised."""
    if format.text:
        return Texts(_strings(table, format.text, origin), {}, chat=False, whole=True)
    parts: dict[str, str] = {}
    if format.chosen and format.rejected:
        parts = {"chosen_ids": format.chosen, "rejected_ids": format.rejected}
    elif format.response:
        parts = {"response_ids": format.response}
    columns = [path for path in (format.prompt, format.dialogue, *parts.values()) if path]
    kinds = {path: column_kind(find_column(table, path, origin, "column").type, path, origin) for path in columns}
    if format.dialogue and kinds[format.dialogue] == "text":
        raise UserError(
            f"{origin.files}: column {format.dialogue!r} is text, in the format {format} it is messages; "
            f"say prompt={format.dialogue!r} to use the text as a prompt"
        )
    if not chat and set(kinds.values()) == {"text"}:
        responses = {name: _strings(table, path, origin) for name, path in parts.items()}
        if format.prompt:
            return Texts(_strings(table, format.prompt, origin, empty="refuse"), responses, chat=False)
        return _split_texts(responses, origin)
    # From here on, everything is messages; text beside messages, or with chat=True, is the content of one.
    if format.prompt and kinds[format.prompt] == "text" and not chat:
        other = next(path for path, kind in kinds.items() if kind == "messages")
        raise UserError(
            f"{origin.files}: column {format.prompt!r} is text, but {other!r} is messages; make both the same, "
            "or say chat=True to send the prompt as a user's message"
        )
    role = {format.prompt: "user"}
    dialogues = {path: _dialogues(table, path, origin, kinds[path], role.get(path, "assistant")) for path in columns}
    context = _Context.of(table, origin, tokenizer)
    if format.prompt:
        prompts = dialogues[format.prompt]
        return context.render(prompts, {name: dialogues[path] for name, path in parts.items()})
    if format.dialogue:
        return _split_dialogues(dialogues[format.dialogue], format.dialogue, context)
    chosen, rejected = (dialogues[path] for path in parts.values())
    return _split_preferences(chosen, rejected, context)


def _strings(table: pa.Table, path: str, origin: Origin, empty: Literal["refuse", "allow"] = "allow") -> list[str]:
    """A text column as Python strings; null is refused, and blank text where it says so."""
    texts = as_text(find_column(table, path, origin, "column")).to_pylist()
    for row, text in enumerate(texts):
        if text is None or (empty == "refuse" and not text.strip()):
            raise UserError(f"{origin(row)}: {path!r} is {short(text)}; every row needs text there")
    return texts


def _dialogues(table: pa.Table, path: str, origin: Origin, kind: str, role: str) -> list[Messages]:
    """A column as messages; text is the content of one message of `role`."""
    if kind == "text":
        empty = "refuse" if role == "user" else "allow"
        return [[{"role": role, "content": text}] for text in _strings(table, path, origin, empty)]
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


@dataclass(frozen=True)
class _Context:
    """What rendering a row needs beside its messages."""

    origin: Origin
    tokenizer: Tokenizer
    tools: Sequence[Any] | None
    variables: Sequence[Any] | None

    @classmethod
    def of(cls, table: pa.Table, origin: Origin, tokenizer: Tokenizer) -> _Context:
        """With the columns `tools` (functions that the model may call) and `chat_template_kwargs`, if there are any."""

        def values(name: str) -> list[Any] | None:
            if name not in table.column_names:
                return None
            try:
                return [_without_nulls(_from_json(value)) for value in table.column(name).to_pylist()]
            except ValueError as error:
                raise UserError(f"{origin.files}: column {name!r} is text that is not JSON ({error})") from None

        return cls(origin, tokenizer, values("tools"), values("chat_template_kwargs"))

    def text(self, row: int, messages: Messages, **how: bool) -> str:
        variables = (self.variables[row] if self.variables else None) or {}
        tools = self.tools[row] if self.tools else None
        try:
            return self.tokenizer.render(messages, tools=tools, **how, **variables)
        except UserError as error:
            raise UserError(f"{self.origin(row)}: {error}") from None

    def render(self, prompts: Sequence[Messages], responses: Mapping[str, Sequence[Messages]]) -> Texts:
        """Prompts and, by column, what the template adds when the response's messages follow."""
        texts: list[str] = []
        tails: dict[str, list[str]] = {name: [] for name in responses}
        for row, messages in enumerate(prompts):
            # A prompt that ends with the assistant's turn is a response already begun (TRL's rule).
            begun = messages[-1]["role"] == "assistant"
            prompt = self.text(row, messages, add_generation_prompt=not begun, continue_last=begun)
            wholes = {name: self.text(row, messages + column[row]) for name, column in responses.items()}
            # Some templates open the assistant's turn with text (`<think>`) that finished turns do not have.
            if not all(whole.startswith(prompt) for whole in wholes.values()):
                prompt = _common_start([prompt, *wholes.values()])
            texts.append(prompt)
            for name, whole in wholes.items():
                tails[name].append(self._until_stop(whole[len(prompt) :]))
        return Texts(texts, tails, chat=True)

    def _until_stop(self, response: str) -> str:
        """Without the newline that templates write after the token that ends a turn: generation stops before it."""
        stripped = response.rstrip("\n")
        return stripped if stripped.endswith(self.tokenizer.special_texts) else response


def _split_dialogues(dialogues: Sequence[Messages], column: str, context: _Context) -> Texts:
    """Conversations: prompts, or prompts with responses where they end with the assistant's turn."""
    answered = [messages[-1]["role"] == "assistant" for messages in dialogues]
    if not any(answered):
        return context.render(dialogues, {})
    if not all(answered):
        row = answered.index(not answered[0])
        said = "with the assistant's turn (a response)", "without it (a prompt)"
        raise UserError(
            f"{context.origin(row)}: {column!r} ends {said[answered[0]]}, but the rows before end "
            f"{said[not answered[0]]}; keep the two in different files"
        )
    for row, messages in enumerate(dialogues):
        if len(messages) == 1:
            raise UserError(f"{context.origin(row)}: {column!r} holds only a response, with no message before it")
    return context.render([m[:-1] for m in dialogues], {"response_ids": [m[-1:] for m in dialogues]})


def _split_preferences(chosen: Sequence[Messages], rejected: Sequence[Messages], context: _Context) -> Texts:
    """Pairs without a prompt of their own: the prompt is the messages that both begin with."""
    prompts: list[Messages] = []
    for row, pair in enumerate(zip(chosen, rejected, strict=True)):
        most = min(map(len, pair)) - 1  # at least one message is the response
        same = next((i for i in range(most) if pair[0][i] != pair[1][i]), most)
        if same == 0:
            raise UserError(
                f"{context.origin(row)}: 'chosen' and 'rejected' begin with different messages: no common prompt"
            )
        prompts.append(pair[0][:same])
    counts = [len(prompt) for prompt in prompts]
    return context.render(
        prompts,
        {
            "chosen_ids": [messages[n:] for messages, n in zip(chosen, counts, strict=True)],
            "rejected_ids": [messages[n:] for messages, n in zip(rejected, counts, strict=True)],
        },
    )


def _common_start(texts: Sequence[str]) -> str:
    """The longest string that all texts begin with."""
    low, high = min(texts), max(texts)  # what these two share, everything between them shares
    end = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return low[:end]


def _split_texts(pairs: Mapping[str, list[str]], origin: Origin) -> Texts:
    """Pairs of texts without a prompt of their own: the prompt is the whole words that both begin with."""
    chosen, rejected = pairs["chosen_ids"], pairs["rejected_ids"]
    prompts: list[str] = []
    for row, pair in enumerate(zip(chosen, rejected, strict=True)):
        # Cut before the last white space of the common beginning: no word is split, and tokens begin with their space.
        words = re.match(r"(.*\S)\s", _common_start(pair), re.DOTALL)
        if words is None:
            raise UserError(
                f"{origin(row)}: 'chosen' and 'rejected' do not begin with the same words: no common prompt"
            )
        prompts.append(words.group(1))
    tails = {name: [t[len(p) :] for t, p in zip(column, prompts, strict=True)] for name, column in pairs.items()}
    return Texts(prompts, tails, chat=False)
