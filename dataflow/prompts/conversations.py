"""Convert rows of messages to prompts and responses, with the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import pyarrow as pa

from ..errors import UserError, nearest
from .files import Origin, short
from .formats import find_column
from .images import refuse_places, with_places
from .tokenizer import Tokenizer

# Messages


Messages = list[dict[str, Any]]

SYSTEM_ROLES = ("system", "developer")
"""Roles that only the first message of a conversation should have."""

ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")

_SHAREGPT = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    **{role: role for role in SYSTEM_ROLES},
}

_OF_RENDERING = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_last",
    "continue_final_message",
}
"""Variables that the renderer sets."""


def read_messages(table: pa.Table, path: str, origin: Origin) -> list[Messages]:
    """Read a column of conversations, or of single messages, as lists of `{"role": ..., "content":
    ...}` without null fields.

    Raises:
        UserError: a row has no messages, or a message has no role or no content. The error names
            the row.
    """
    dialogues: list[Messages] = []
    for row, value in enumerate(find_column(table, path, origin, "column").to_pylist()):
        # A single message counts as a list of one.
        messages = [value] if isinstance(value, Mapping) else value
        if not messages:
            raise UserError(
                f"{origin(row)}: {path!r} is {short(messages)}; every row needs at least one message there"
            )
        try:
            dialogues.append([_message(message) for message in messages])
        except UserError as error:
            raise UserError(f"{origin(row)}: a message in {path!r} {error}") from None
    return dialogues


def _message(value: Any) -> dict[str, Any]:
    if value is None:
        raise UserError("is null")
    message = _without_nulls(value)
    if "role" not in message and "from" in message:
        said = message.pop("from")
        if said not in _SHAREGPT:
            raise UserError(
                f"is from {said!r}; ShareGPT's names are {', '.join(_SHAREGPT)}{nearest(said, _SHAREGPT)}"
            )
        message = {"role": _SHAREGPT[said], "content": message.pop("value", None), **message}
        # `value` may be missing, which leaves a null content.
        message = _without_nulls(message)
    if "role" not in message:
        raise UserError(f"has no role: {short(message)}")
    if not message.keys() - {"role", "name"}:
        raise UserError(f"has no content: {short(message)}")
    return message


def read_tools(table: pa.Table, origin: Origin) -> list[Any] | None:
    """Read the column `tools`, if there is one. Nulls in JSON text are kept.

    Raises:
        UserError: a row's value is not a list of functions. The error names the row.
    """
    found = _read_json(table, "tools", origin)
    for row, tools in enumerate(found or ()):
        if tools is not None and not (
            isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
        ):
            raise UserError(
                f"{origin(row)}: 'tools' is {short(tools)}; it must be a list of functions (objects)"
            )
    return found


def read_variables(table: pa.Table, origin: Origin) -> list[Any] | None:
    """Read the column `chat_template_kwargs`, if there is one.

    Raises:
        UserError: a row's value is not an object, or sets a variable of the renderer. The error
            names the row.
    """
    found = _read_json(table, "chat_template_kwargs", origin)
    for row, variables in enumerate(found or ()):
        if variables is not None and not isinstance(variables, dict):
            raise UserError(
                f"{origin(row)}: 'chat_template_kwargs' is {short(variables)}; it must be an object"
            )
        if taken := _OF_RENDERING.intersection(variables or ()):
            raise UserError(
                f"{origin(row)}: 'chat_template_kwargs' has {min(taken)!r}, which follows from the row itself; leave it out"
            )
    return found


def same_message(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two messages are equal except for white space."""
    rest = [{key: value for key, value in each.items() if key != "content"} for each in (one, other)]
    return rest[0] == rest[1] and same_text(one.get("content"), other.get("content"))


def same_text(one: Any, other: Any) -> bool:
    """Return whether the contents of two messages are equal except for white space."""
    return _words(one) == _words(other)


def _words(content: Any) -> Any:
    if isinstance(content, list) and all(
        isinstance(b, Mapping) and b.get("type") == "text" for b in content
    ):
        content = "".join(str(block.get("text", "")) for block in content)
    return content.split() if isinstance(content, str) else content


def _without_nulls(value: Any) -> Any:
    """Drop null fields. Arrow gives every struct of a column all fields, but templates test whether
    a field exists."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _read_json(table: pa.Table, name: str, origin: Origin) -> list[Any] | None:
    if name not in table.column_names:
        return None
    try:
        return [_from_json(value) for value in table.column(name).to_pylist()]
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin.files}: column {name!r} is text that is not JSON ({error})") from None


def _from_json(value: Any) -> Any:
    """Parse JSON text, or a list of such texts (TRL's form for tools of different shapes).

    Nulls in JSON text were written by the user and are kept. Nulls in structs may only fill up
    fields of other rows.
    """
    if isinstance(value, str):
        return json.loads(value) if value.strip() else None
    if isinstance(value, list):
        return [json.loads(inner) if isinstance(inner, str) else _without_nulls(inner) for inner in value]
    return _without_nulls(value)


# Conversations

Gap = tuple[int, int]
"""(start, end) characters of a response that are not trained: turns of users and tools, and headers
between turns."""


@dataclass(frozen=True)
class Texts:
    """Rows as the text to tokenise."""

    prompts: list[str]
    responses: dict[str, list[str]]
    chat: bool
    """Whether the chat template made the texts. It writes all special tokens."""
    has_bos: bool = False
    """Whether plain prompts already begin with the beginning-of-sequence token."""
    whole: bool = False
    """Whether each text is one sequence to model, without a prompt."""
    own_system: int = 0
    """Rows whose own system message takes precedence over the setting `system`."""
    gaps: Mapping[str, Sequence[Sequence[Gap]]] = field(default_factory=dict)
    """Untrained parts of each response, in order, by column and row. A column without gaps may be
    missing."""
    rows: Sequence[int] | None = None
    """Source row of each row; None if every source row makes one row."""
    turns: int = 0
    trained_turns: int = 0

    def keeping(self, kept: Sequence[int]) -> Texts:
        """Return a subset of the rows, by index."""
        return replace(
            self,
            prompts=[self.prompts[row] for row in kept],
            responses={name: [texts[row] for row in kept] for name, texts in self.responses.items()},
            gaps={name: [gaps[row] for row in kept] for name, gaps in self.gaps.items()},
            rows=[row if self.rows is None else self.rows[row] for row in kept],
        )


@dataclass(frozen=True)
class Exchange:
    """The messages of one row: a prompt, and its responses by column. A response begins with an
    assistant message.

    With `begun`, the prompt ends inside an assistant turn, and each response begins with that
    complete turn.
    """

    prompt: Messages
    responses: Mapping[str, Messages] = field(default_factory=dict)
    begun: bool = False

    @property
    def turns(self) -> int:
        """Number of assistant turns in the row. Turns of the prompt count once."""
        following = [message for response in self.responses.values() for message in response]
        return _assistant_turns(self.prompt) - self.begun + _assistant_turns(following)


@dataclass
class _Run:
    """Assistant turns in one row. Each turn's text extends the text before it."""

    prompt: str
    response: str
    gaps: list[Gap] = field(default_factory=list)
    turns: int = 1


@dataclass(frozen=True)
class Conversations:
    """Renders rows of messages with the chat template."""

    origin: Origin
    tokenizer: Tokenizer
    system: str | None = None
    """System prompt for rows without one."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Any] | None = None
    """Functions that the model may call, by row."""
    own_variables: Sequence[Any] | None = None
    """Further variables of the template, by row."""
    own_systems: Sequence[str | None] | None = None
    images: Sequence[int] | None = None
    """Number of images, by row; None if the source has no images."""

    def render(
        self, exchanges: Sequence[Exchange], columns: Mapping[str, str], *, split: bool = False
    ) -> Texts:
        """Render rows as text. Gaps exclude everything but assistant turns from training.

        Args:
            exchanges: the messages of each row. All have the same responses.
            columns: file column of each response.
            split: make several rows of a conversation if the template changes earlier turns when
                later ones follow, so that each turn is trained after the same text as in
                generation. Without `split`, this is an error.

        Raises:
            UserError: the template rejects the messages of a row, or its rendering cannot be split
                into prompt and response. The message names the row.
        """
        prompts: list[str] = []
        responses: dict[str, list[str]] = {name: [] for name in columns}
        gaps: dict[str, list[list[Gap]]] = {name: [] for name in columns}
        rows: list[int] = []
        own_system = trained = 0
        for row, exchange in enumerate(exchanges):
            messages, is_own = self._with_system(row, exchange.prompt)
            own_system += is_own
            messages = self._placed(row, messages, list(exchange.responses.values()))
            before = messages[:-1] if exchange.begun else messages
            first = {
                name: self._finished(row, [*before, tail[0]]) for name, tail in exchange.responses.items()
            }
            prompt = self._prompt(row, messages, list(first.values()), begun=exchange.begun)
            runs = {
                name: self._runs(row, prompt, first[name], before, tail)
                for name, tail in exchange.responses.items()
            }
            made = max(map(len, runs.values()), default=1)
            if made > 1 and not split:
                name = next(name for name, found in runs.items() if len(found) > 1)
                raise UserError(
                    f"{self.origin(row)}: the response in {columns[name]!r} has several assistant turns, and the chat template changes "
                    "the earlier ones when later ones follow; make the row end with its first assistant turn that is to be trained"
                )
            trained += sum(run.turns for found in runs.values() for run in found)
            rows += [row] * made
            for number in range(made):
                prompts.append(next((found[number].prompt for found in runs.values()), prompt))
                for name, found in runs.items():
                    responses[name].append(found[number].response)
                    gaps[name].append(found[number].gaps)
        return Texts(
            prompts,
            responses,
            chat=True,
            own_system=own_system,
            gaps=gaps,
            rows=rows if len(rows) > len(exchanges) else None,
            turns=sum(exchange.turns for exchange in exchanges),
            trained_turns=trained,
        )

    def _runs(
        self, row: int, prompt: str, first: str, before: Messages, response: Messages
    ) -> list[_Run]:
        """Collect the assistant turns of a response. A turn joins the previous run if its prompt
        extends the text of that run.

        Args:
            prompt: text of the prompt.
            first: text up to the end of the response's first turn.
            before: messages before the response.
        """
        runs = [_Run(prompt, first[len(prompt) :])]
        conversation, ended = [*before, *response], first
        for k in range(len(before) + 1, len(conversation)):
            if conversation[k]["role"] != "assistant":
                continue
            text = self._finished(row, conversation[: k + 1])
            opened = self._prompt(row, conversation[:k], [text])
            run = runs[-1]
            # The template kept the earlier turns, so this turn extends the row.
            if opened.startswith(ended):
                start = len(run.prompt)
                run.gaps.append((len(ended) - start, len(opened) - start))
                run.response = text[start:]
                run.turns += 1
            else:
                runs.append(_Run(opened, text[len(opened) :]))
            ended = text
        return runs

    def _prompt(
        self, row: int, messages: Messages, finished: Sequence[str], *, begun: bool = False
    ) -> str:
        """Render the prompt with the header for generation, and check that all finished turns begin
        with it.

        Some templates open a turn for generation with text that finished turns lack (`<think>`).
        The prompt then ends with the header of finished turns, and never elsewhere, such as inside
        a tag that starts like another.
        """
        # With `begun`, the last message is an unfinished assistant turn.
        prompt = self._text(row, messages, add_generation_prompt=not begun, continue_last=begun)
        if all(text.startswith(prompt) for text in finished):
            return prompt
        if not begun:
            header = self._header(row, messages)
            if prompt.startswith(header) and all(text.startswith(header) for text in finished):
                return header
        text = next(text for text in finished if not text.startswith(prompt))
        raise UserError(
            f"{self.origin(row)}: the chat template writes {_end(text, prompt)} for the assistant's turn, but {_end(prompt, text)} "
            "where it is to be generated, so no place divides the prompt from the response; change the template, or the settings "
            "thinking and chat_template_kwargs"
        )

    def _header(self, row: int, messages: Messages) -> str:
        # Unlikely to occur in messages.
        mark = "WEFT_ANSWERS_HERE"
        text = self._text(row, [*messages, {"role": "assistant", "content": mark}])
        return text[: text.rfind(mark)] if mark in text else text

    def _finished(self, row: int, messages: Messages) -> str:
        """Render messages up to the token that ends the last turn, where generation stops.
        Templates often add a newline."""
        text = self._text(row, messages)
        stripped = text.rstrip("\n")
        return stripped if stripped.endswith(self.tokenizer.special_texts) else text

    def _text(self, row: int, messages: Messages, **how: bool) -> str:
        own = (self.own_variables[row] if self.own_variables else None) or {}
        tools = self.tools[row] if self.tools else None
        chat = self.tokenizer.chat
        try:
            text = chat.render(messages, tools=tools, **how, **{**self.variables, **own})
        except UserError as error:
            raise UserError(f"{self.origin(row)}: {error}") from None
        for message in messages:
            role = message["role"]
            # Templates silently skip roles that they do not know.
            if role not in ROLES and not any(role in source for source in chat.sources.values()):
                raise UserError(
                    f"{self.origin(row)}: a message has the role {role!r}, which the chat template does not know; roles are "
                    f"{', '.join(ROLES)}"
                )
        return text

    def _with_system(self, row: int, messages: Messages) -> tuple[Messages, bool]:
        """Add the system prompt. Also return whether the row's own one takes precedence over the
        setting `system`."""
        has_own = messages[0]["role"] in SYSTEM_ROLES
        column = self.own_systems[row] if self.own_systems else None
        if column is not None and column.strip():
            if has_own and not same_text(messages[0].get("content"), column):
                raise UserError(
                    f"{self.origin(row)}: the system prompt of the column and the first message of the row differ; remove one of them"
                )
            return (messages if has_own else [_system(column), *messages]), self.system is not None
        if self.system is None or has_own:
            return messages, has_own and self.system is not None
        return [_system(self.system), *messages], False

    def _placed(self, row: int, prompt: Messages, responses: Sequence[Messages]) -> Messages:
        try:
            for response in responses:
                refuse_places(response)
            if self.images is not None:
                return with_places(prompt, self.images[row])
            refuse_places(prompt)
            return prompt
        except UserError as error:
            raise UserError(f"{self.origin(row)}: {error}") from None


@dataclass(frozen=True)
class Divider:
    """Splits rows of messages into prompts and responses."""

    origin: Origin

    def with_prompts(
        self,
        prompts: Sequence[Messages],
        responses: Mapping[str, Sequence[Messages]],
        columns: Mapping[str, str],
    ) -> list[Exchange]:
        """Pair prompts with their responses.

        A response is either the assistant's turn, or a whole conversation that repeats the prompt,
        which is then used once. If a prompt ends with an assistant turn, the response continues it
        (TRL's rule).

        Args:
            responses: messages by token column.
            columns: file column by token column.

        Raises:
            UserError: a response has neither form. The message names the row.
        """
        made: list[Exchange] = []
        for row, prompt in enumerate(prompts):
            own = {name: column[row] for name, column in responses.items()}
            begun = prompt[-1]["role"] == "assistant"
            if not own:
                made.append(Exchange(prompt, begun=begun))
                continue
            if begun:
                continued = {name: _continued(prompt, response) for name, response in own.items()}
                if all(continued.values()):
                    self._check_ends(row, continued, columns)
                    made.append(Exchange(prompt, continued, begun=True))
                    continue
            wholes: dict[str, Messages] = {}
            start = 0
            for name, response in own.items():
                wholes[name], end = self._whole(row, prompt, response, columns[name])
                start = max(start, end)
            made.append(self._divided(row, wholes, columns, start))
        return made

    def pairs(
        self, chosen: Sequence[Messages], rejected: Sequence[Messages], columns: Mapping[str, str]
    ) -> list[Exchange]:
        """Split pairs of whole conversations after the messages that both begin with.

        Raises:
            UserError: the conversations of a row have no common prompt, or do not end with the
                assistant's turn.
        """
        return [
            self._divided(row, {"chosen_ids": list(pair[0]), "rejected_ids": list(pair[1])}, columns, 1)
            for row, pair in enumerate(zip(chosen, rejected, strict=True))
        ]

    def last_turns(self, dialogues: Sequence[Messages], column: str, answered: bool) -> list[Exchange]:
        """Split conversations before their last message if it is the assistant's. Otherwise they
        are prompts.

        Args:
            answered: whether the first row ends with the assistant's turn.

        Raises:
            UserError: another row ends differently, or has only a response.
        """
        for row, messages in enumerate(dialogues):
            if (messages[-1]["role"] == "assistant") != answered:
                said = "without it (a prompt)", "with the assistant's turn (a response)"
                raise UserError(
                    f"{self.origin(row)}: {column!r} ends {said[not answered]}, but the rows before end {said[answered]}; "
                    "keep the two in different files, or train on every assistant turn (train_on='all')"
                )
            if answered and len(messages) == 1:
                raise UserError(
                    f"{self.origin(row)}: {column!r} holds only a response, with no message before it"
                )
        if not answered:
            return [Exchange(messages) for messages in dialogues]
        return [Exchange(messages[:-1], {"response_ids": messages[-1:]}) for messages in dialogues]

    def all_turns(self, dialogues: Sequence[Messages], column: str) -> list[Exchange]:
        """Split conversations before their first assistant turn. Messages after the last assistant
        turn are dropped.

        Raises:
            UserError: a conversation has no assistant turn, or begins with one.
        """
        made: list[Exchange] = []
        for row, messages in enumerate(dialogues):
            turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
            if not turns or turns[0] == 0:
                what = (
                    "begins with the assistant's turn, with no message before it"
                    if turns
                    else "has no assistant turn"
                )
                raise UserError(f"{self.origin(row)}: {column!r} {what} (train_on='all')")
            made.append(
                Exchange(messages[: turns[0]], {"response_ids": messages[turns[0] : turns[-1] + 1]})
            )
        return made

    def _whole(self, row: int, prompt: Messages, response: Messages, column: str) -> tuple[Messages, int]:
        """Return the whole conversation of a response, and the index of the first message after its
        prompt."""
        systems = sum(message["role"] in SYSTEM_ROLES for message in prompt[:1])
        # The response may repeat the prompt with or without its system message.
        for asked, added in ((prompt, []), (prompt[systems:], prompt[:systems])):
            at = _find(response, asked)
            if at is not None and (at == 0 or not added):
                return [*added, *response], len(added) + at + len(asked)
        if response[0]["role"] == "assistant":
            return [*prompt, *response], len(prompt)
        raise UserError(
            f"{self.origin(row)}: {column!r} begins with a message of role {response[0]['role']!r}, and the row's prompt is not in it; "
            "a response is the assistant's turn, or a whole conversation that repeats the prompt"
        )

    def _divided(
        self, row: int, wholes: dict[str, Messages], columns: Mapping[str, str], start: int
    ) -> Exchange:
        """Split conversations before an assistant turn, after the longest shared beginning.

        Args:
            start: smallest index for the split.
        """
        self._check_ends(row, wholes, columns)
        first, *others = wholes.values()
        names = " and ".join(repr(columns[name]) for name in wholes)
        most = min(map(len, wholes.values())) - 1  # at least one message is the response
        if others:
            shared = next(
                (k for k in range(most) if not all(same_message(first[k], o[k]) for o in others)), most
            )
        else:
            shared = start
        if shared < start:
            self._no_prompt(row, names, len(wholes))
        # Go back to a place where all responses begin with an assistant turn.
        for end in range(min(shared, most), start - 1, -1):
            if all(whole[end]["role"] == "assistant" for whole in wholes.values()):
                return Exchange(first[:end], {name: whole[end:] for name, whole in wholes.items()})
        raise UserError(
            f"{self.origin(row)}: in {names} no assistant turn follows the prompt, so the response is missing"
        )

    def _no_prompt(self, row: int, names: str, number: int) -> NoReturn:
        if number > 1:
            raise UserError(
                f"{self.origin(row)}: {names} begin with different messages: no common prompt"
            )
        raise UserError(f"{self.origin(row)}: {names} has no message before the response")

    def _check_ends(self, row: int, wholes: Mapping[str, Messages], columns: Mapping[str, str]) -> None:
        for name, messages in wholes.items():
            if messages[-1]["role"] != "assistant":
                raise UserError(
                    f"{self.origin(row)}: {columns[name]!r} ends with a message of role {messages[-1]['role']!r}; a response ends with "
                    "the assistant's turn"
                )


def _continued(prompt: Messages, response: Messages) -> Messages:
    """Complete the assistant turn that ends the prompt with the response. Return no messages if the
    response does not continue it."""
    *before, last = prompt
    repeats = len(response) > len(before) and all(map(same_message, response, before))
    turn, *rest = response[len(before) :] if repeats else response
    begun, text = last.get("content"), turn.get("content")
    if (
        turn["role"] != "assistant"
        or not isinstance(begun, str)
        or not isinstance(text, str)
        or turn == last
    ):
        return []
    if text.startswith(begun):
        return [turn, *rest]
    return [] if repeats and before else [{**turn, "content": begun + text}, *rest]


def _find(conversation: Messages, part: Messages) -> int | None:
    places = range(len(conversation) - len(part) + 1) if part else ()
    return next((k for k in places if all(map(same_message, conversation[k:], part))), None)


def _assistant_turns(messages: Messages) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def _system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def _end(text: str, other: str, characters: int = 30) -> str:
    """Return an excerpt of a text around its first difference from another text, for error
    messages."""
    same = next(
        (k for k, (a, b) in enumerate(zip(text, other, strict=False)) if a != b),
        min(len(text), len(other)),
    )
    return repr(text[max(0, same - 15) : same + characters])
