"""Convert messages to prompts and responses with the chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import UserError, nearest
from .files import Rows, short
from .tokenizer import Tokenizer

# Messages


Messages = list[dict[str, Any]]

_SYSTEM_ROLES = ("system", "developer")
"""Roles of system messages, which should come first in a conversation."""

_ROLES = (*_SYSTEM_ROLES, "user", "assistant", "tool")

_SHAREGPT = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    **{role: role for role in _SYSTEM_ROLES},
}

_OF_RENDERING = frozenset(
    (
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_last",
        "continue_final_message",
    )
)
"""Template variables that only the renderer may set."""


def read_messages(rows: Rows, path: str) -> list[Messages]:
    """Read a column of conversations or single messages. Return each row as a list of messages
    `{"role": ..., "content": ...}` without null fields. Raises a `UserError` that names the row if
    there are no messages or a message has no content."""
    dialogues: list[Messages] = []
    for row, value in enumerate(rows.column(path).to_pylist()):
        # A single message counts as a list of one.
        messages = [value] if isinstance(value, Mapping) else value
        if not messages:
            raise rows.error(
                f"{path!r} is {short(messages)}; every row needs at least one message there", row
            )
        try:
            dialogues.append([_message(message) for message in messages])
        except UserError as error:
            raise rows.error(f"a message in {path!r} {error}", row) from None
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
        # Without `value`, the content is null.
        message = _without_nulls(message)
    if "role" not in message:
        raise UserError(f"has no role: {short(message)}")
    if not message.keys() - {"role", "name"}:
        raise UserError(f"has no content: {short(message)}")
    return message


def _without_nulls(value: Any) -> Any:
    # Templates test for fields, but Arrow gives all structs of a column the same fields.
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _read_tools(rows: Rows) -> list[Any] | None:
    found = _read_json(rows, "tools")
    for row, tools in enumerate(found or ()):
        are_objects = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
        if tools is not None and not are_objects:
            raise rows.error(f"'tools' is {short(tools)}; it must be a list of functions (objects)", row)
    return found


def _read_variables(rows: Rows) -> list[Any] | None:
    found = _read_json(rows, "chat_template_kwargs")
    for row, variables in enumerate(found or ()):
        if variables is not None and not isinstance(variables, dict):
            raise rows.error(f"'chat_template_kwargs' is {short(variables)}; it must be an object", row)
        if taken := _OF_RENDERING.intersection(variables or ()):
            raise rows.error(
                f"'chat_template_kwargs' has {min(taken)!r}, which follows from the row itself; leave it out",
                row,
            )
    return found


def _read_json(rows: Rows, name: str) -> list[Any] | None:
    if name not in rows.table.column_names:
        return None
    try:
        return [_from_json(value) for value in rows.table.column(name).to_pylist()]
    except (ValueError, RecursionError) as error:
        raise rows.error(f"column {name!r} is text that is not JSON ({error})") from None


def _from_json(value: Any) -> Any:
    """Parse JSON text, or a list of JSON texts (TRL's tools with different fields)."""
    if isinstance(value, str):
        return json.loads(value) if value.strip() else None
    if isinstance(value, list):
        return [
            # Nulls in JSON text stay. Nulls in structs may come from Arrow, for other rows' fields.
            json.loads(inner) if isinstance(inner, str) else _without_nulls(inner)
            for inner in value
        ]
    return _without_nulls(value)


def _same_message(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    # Ignore white space.
    rest = [{key: value for key, value in each.items() if key != "content"} for each in (one, other)]
    return rest[0] == rest[1] and _words(one.get("content")) == _words(other.get("content"))


def _words(content: Any) -> Any:
    if isinstance(content, list) and all(
        isinstance(b, Mapping) and b.get("type") == "text" for b in content
    ):
        content = "".join(str(block.get("text", "")) for block in content)
    return content.split() if isinstance(content, str) else content


# Images in messages


_MARK = re.compile(r"(<image>)")
"""Place of an image in a text, as in verl."""


def with_places(messages: Sequence[dict[str, Any]], images: int) -> list[dict[str, Any]]:
    """Return messages with a content block of type `image` for each image, for the chat template.

    Existing blocks stay. Without blocks, each mark `<image>` in the texts becomes one, as in verl.
    Without marks, all blocks go before the text of the first user message, as in TRL. Raises a
    `UserError` if the number of blocks or marks differs from `images`.

    >>> with_places([{"role": "user", "content": "What is it?"}], 1)
    [{'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': 'What is it?'}]}]
    """
    counted = f"{images} image" if images == 1 else f"{images} images"
    placed = [dict(message) for message in messages]
    places, what = sum(map(_count_places, placed)), "a content block of type 'image'"
    if not places:
        for message in placed:
            if any(_MARK.search(str(block.get("text", ""))) for block in _blocks(message)):
                message["content"] = [part for block in _blocks(message) for part in _parts(block)]
        places, what = sum(map(_count_places, placed)), "a mark <image>"
    if not places and images:
        first = next((message for message in placed if message.get("role") == "user"), None)
        if first is None:
            raise UserError(f"the row has {counted}, and no message of the user to put them into")
        first["content"] = [{"type": "image"}] * images + _blocks(first)
    elif places != images:
        raise UserError(
            f"the row has {counted}, and its messages have places for {places} ({what} each)"
        )
    return placed


def _refuse_places(messages: Sequence[dict[str, Any]]) -> None:
    for message in messages:
        if _count_places(message):
            raise UserError(
                f"a message of role {message.get('role')!r} has a content block of type 'image', but no image belongs to it: images "
                "must be in the prompt, and in the column 'images'"
            )


def _count_places(message: Mapping[str, Any]) -> int:
    return sum(block.get("type") == "image" for block in _blocks(message))


def _blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def _parts(block: dict[str, Any]) -> list[dict[str, Any]]:
    text = block.get("text")
    if not isinstance(text, str):  # not a text block
        return [block]
    parts = filter(None, _MARK.split(text))
    return [
        {"type": "image"} if _MARK.fullmatch(part) else {"type": "text", "text": part} for part in parts
    ]


# Conversations

Gap = tuple[int, int]
"""(start, end) of characters of a response that are not trained: headers and others' turns."""


@dataclass(frozen=True)
class Texts:
    """Texts of rows, ready to tokenise."""

    prompts: list[str]
    responses: dict[str, list[str]]
    chat: bool = False
    """Whether the chat template rendered the texts, with all special tokens."""
    has_bos: bool = False
    """Whether plain prompts begin with the beginning-of-sequence token."""
    whole: bool = False
    """Whether to train on whole texts, without a prompt."""
    own_system: int = 0
    """Number of rows whose own system message overrides the setting `system`."""
    gaps: Mapping[str, Sequence[Sequence[Gap]]] = field(default_factory=dict)
    """Maps token columns to each row's gaps. Columns without gaps may be missing."""
    rows: Sequence[int] | None = None
    """Source row of each row; None if each source row becomes exactly one row."""
    turns: int = 0
    trained_turns: int = 0

    def keeping(self, kept: Sequence[int]) -> Texts:
        """Return the rows with these indices."""
        return replace(
            self,
            prompts=[self.prompts[row] for row in kept],
            responses={name: [texts[row] for row in kept] for name, texts in self.responses.items()},
            gaps={name: [gaps[row] for row in kept] for name, gaps in self.gaps.items()},
            rows=[self.source_row(row) for row in kept],
        )

    def source_row(self, row: int) -> int:
        return row if self.rows is None else self.rows[row]


@dataclass(frozen=True)
class _Dialogue:
    """A row's prompt, and a mapping from token columns to responses that the assistant begins.

    If `begun`, the prompt ends inside an assistant turn, and each response begins with the complete
    turn.
    """

    prompt: Messages
    responses: Mapping[str, Messages] = field(default_factory=dict)
    begun: bool = False

    @property
    def turns(self) -> int:
        """Number of assistant turns in the prompt and all responses."""
        messages = [*self.prompt, *(m for response in self.responses.values() for m in response)]
        return sum(message["role"] == "assistant" for message in messages) - self.begun


@dataclass
class _Run:
    """Assistant turns that share a row, because each turn's text extends the text before it."""

    prompt: str
    response: str
    gaps: list[Gap] = field(default_factory=list)
    turns: int = 1


class TemplateRenderer:
    """Renders rows of messages with the chat template.

    Args:
        system: system prompt for rows without their own.
        variables: template variables for all rows.
        own_systems: system prompt of each row, from a column.
        images: number of images in each row; None without images.
    """

    def __init__(
        self,
        rows: Rows,
        tokenizer: Tokenizer,
        system: str | None,
        variables: Mapping[str, Any],
        own_systems: Sequence[str | None] | None,
        images: Sequence[int] | None,
    ) -> None:
        self._rows = rows
        self._tokenizer = tokenizer
        self._system = system
        self._variables = variables
        self._tools = _read_tools(rows)
        self._own_variables = _read_variables(rows)
        self._own_systems = own_systems
        self._images = images

    def render(
        self, divide: Callable[[int], _Dialogue], columns: Mapping[str, str], *, split: bool = False
    ) -> Texts:
        """Render all rows as text. Everything except assistant turns becomes a gap.

        Args:
            divide: maps a row's index to its messages. Rows must have the same response columns.
            columns: maps token columns to the file's columns of responses.
            split: whether to split a conversation into several rows if the template changes earlier
                turns once later ones follow, so that each turn is trained after the same text as in
                generation. Without `split`, such a template is an error.

        Raises:
            UserError: a row cannot be split into prompt and response.
        """
        prompts: list[str] = []
        responses: dict[str, list[str]] = {name: [] for name in columns}
        gaps: dict[str, list[list[Gap]]] = {name: [] for name in columns}
        sources: list[int] = []
        own_system = turns = trained = 0
        for row in range(len(self._rows.table)):
            try:
                dialogue = divide(row)
                is_own, prompt, runs = self._render_row(row, dialogue)
                made = max(map(len, runs.values()), default=1)
                if made > 1 and not split:
                    name = next(name for name, found in runs.items() if len(found) > 1)
                    raise UserError(
                        f"the response in {columns[name]!r} has several assistant turns, and the chat template changes "
                        "the earlier ones when later ones follow; make the row end with its first assistant turn that is to be trained"
                    )
            except UserError as error:
                raise self._rows.error(str(error), row) from None
            turns += dialogue.turns
            own_system += is_own
            trained += sum(run.turns for found in runs.values() for run in found)
            sources += [row] * made
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
            rows=sources if len(sources) > len(self._rows.table) else None,
            turns=turns,
            trained_turns=trained,
        )

    def _render_row(self, row: int, dialogue: _Dialogue) -> tuple[bool, str, dict[str, list[_Run]]]:
        """Return (whether the row's own system prompt overrides the setting, prompt, responses)."""
        messages, is_own = self._with_system(row, dialogue.prompt)
        for response in dialogue.responses.values():
            _refuse_places(response)
        if self._images is not None:
            messages = with_places(messages, self._images[row])
        else:
            _refuse_places(messages)
        before = messages[:-1] if dialogue.begun else messages
        first = {
            name: self._finished(row, [*before, tail[0]]) for name, tail in dialogue.responses.items()
        }
        prompt = self._prompt(row, messages, list(first.values()), begun=dialogue.begun)
        runs = {
            name: self._runs(row, prompt, first[name], before, tail)
            for name, tail in dialogue.responses.items()
        }
        return is_own, prompt, runs

    def _runs(
        self, row: int, prompt: str, first: str, before: Messages, response: Messages
    ) -> list[_Run]:
        """Collect a response's assistant turns. `first` is the text up to the first turn's end."""
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
        """Render the prompt with the header of the assistant's turn. All `finished` texts must
        begin with it. For generation, some templates open a turn with text that finished turns lack
        (`<think>`). Then, the prompt ends with the header of finished turns."""
        # If `begun`, the last message is an unfinished assistant turn.
        prompt = self._text(row, messages, add_generation_prompt=not begun, continue_last=begun)
        if all(text.startswith(prompt) for text in finished):
            return prompt
        if not begun:
            mark = "WEFT_ANSWERS_HERE"  # unlikely to occur in messages
            header = self._text(row, [*messages, {"role": "assistant", "content": mark}])
            header = header[: header.rfind(mark)] if mark in header else header
            if prompt.startswith(header) and all(text.startswith(header) for text in finished):
                return header
        text = next(text for text in finished if not text.startswith(prompt))
        raise UserError(
            f"the chat template writes {_end(text, prompt)} for the assistant's turn, but {_end(prompt, text)} "
            "where it is to be generated, so no place divides the prompt from the response; change the template, or "
            "chat_template_kwargs"
        )

    def _finished(self, row: int, messages: Messages) -> str:
        """Render messages up to the token that ends the last turn, where generation stops."""
        text = self._text(row, messages)
        stripped = text.rstrip("\n")  # templates often add a newline after this token
        return stripped if stripped.endswith(self._tokenizer.special_texts) else text

    def _text(self, row: int, messages: Messages, **how: bool) -> str:
        own = (self._own_variables[row] if self._own_variables else None) or {}
        tools = self._tools[row] if self._tools else None
        chat = self._tokenizer.chat
        text = chat.render(messages, tools=tools, **how, **{**self._variables, **own})
        for role in (message["role"] for message in messages):
            # Templates silently skip unknown roles, so check the role.
            if role not in _ROLES and not any(role in source for source in chat.sources.values()):
                raise UserError(
                    f"a message has the role {role!r}, which the chat template does not know; roles are {', '.join(_ROLES)}"
                )
        return text

    def _with_system(self, row: int, messages: Messages) -> tuple[Messages, bool]:
        """Add the system prompt to messages. Also return whether the row's own system prompt
        overrides the setting."""
        has_own = messages[0]["role"] in _SYSTEM_ROLES
        column = self._own_systems[row] if self._own_systems else None
        is_column = column is not None and bool(column.strip())
        if is_column and has_own and _words(messages[0].get("content")) != _words(column):
            raise UserError(
                "the system prompt of the column and the first message of the row differ; remove one of them"
            )
        takes_precedence = (is_column or has_own) and self._system is not None
        system = column if is_column else self._system
        if has_own or system is None:
            return messages, takes_precedence
        return [{"role": "system", "content": system}, *messages], takes_precedence


def _end(text: str, other: str, characters: int = 30) -> str:
    pairs = enumerate(zip(text, other, strict=False))
    same = next((k for k, (a, b) in pairs if a != b), min(len(text), len(other)))
    return repr(text[max(0, same - 15) : same + characters])


# Dividing messages into a prompt and responses


def divide_after_prompt(
    prompt: Messages, responses: Mapping[str, Messages], columns: Mapping[str, str]
) -> _Dialogue:
    """Combine a prompt with its responses. `responses` maps token columns to messages, and
    `columns` maps them to the file's columns.

    A response is the assistant's turn, or a conversation that repeats the prompt, which is dropped.
    If the prompt ends with an assistant turn, the response continues that turn (TRL's rule). Raises
    a `UserError` for other responses.
    """
    begun = prompt[-1]["role"] == "assistant"
    if not responses:
        return _Dialogue(prompt, begun=begun)
    if begun:
        continued = {name: _continued(prompt, response) for name, response in responses.items()}
        if all(continued.values()):
            _check_ends(continued, columns)
            return _Dialogue(prompt, continued, begun=True)
    wholes = {name: _whole(prompt, each, columns[name]) for name, each in responses.items()}
    start = max(end for _, end in wholes.values())
    return divide_wholes({name: whole for name, (whole, _) in wholes.items()}, columns, start)


def divide_last_turn(messages: Messages, column: str, answered: bool) -> _Dialogue:
    """Split a conversation into a prompt and its last message, the response. If not `answered`, the
    whole conversation is the prompt. Raises a `UserError` if the last message does not fit
    `answered`, which the first row determines."""
    if (messages[-1]["role"] == "assistant") != answered:
        said = "without it (a prompt)", "with the assistant's turn (a response)"
        raise UserError(
            f"{column!r} ends {said[not answered]}, but the rows before end {said[answered]}; "
            "keep the two in different files, or train on every assistant turn (train_on='all')"
        )
    if not answered:
        return _Dialogue(messages)
    if len(messages) == 1:
        raise UserError(f"{column!r} holds only a response, with no message before it")
    return _Dialogue(messages[:-1], {"response_ids": messages[-1:]})


def divide_all_turns(messages: Messages, column: str) -> _Dialogue:
    """Split a conversation before its first assistant turn, and drop messages after the last one.
    Raises a `UserError` if there is no assistant turn or the conversation begins with one."""
    turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns or turns[0] == 0:
        begins = "begins with the assistant's turn, with no message before it"
        raise UserError(f"{column!r} {begins if turns else 'has no assistant turn'} (train_on='all')")
    return _Dialogue(messages[: turns[0]], {"response_ids": messages[turns[0] : turns[-1] + 1]})


def _whole(prompt: Messages, response: Messages, column: str) -> tuple[Messages, int]:
    """Return a prompt and response as one conversation, and the prompt's number of messages."""
    systems = sum(message["role"] in _SYSTEM_ROLES for message in prompt[:1])
    # The response may repeat the prompt with or without its system message.
    for asked, added in ((prompt, []), (prompt[systems:], prompt[:systems])):
        at = _find(response, asked)
        if at is not None and (at == 0 or not added):
            return [*added, *response], len(added) + at + len(asked)
    if response[0]["role"] == "assistant":
        return [*prompt, *response], len(prompt)
    raise UserError(
        f"{column!r} begins with a message of role {response[0]['role']!r}, and the row's prompt is not in it; "
        "a response is the assistant's turn, or a whole conversation that repeats the prompt"
    )


def divide_wholes(
    wholes: Mapping[str, Messages], columns: Mapping[str, str], start: int = 1
) -> _Dialogue:
    """Split conversations into their shared prompt and the responses. The prompt is the longest
    shared beginning of at least `start` messages before an assistant turn. Raises a `UserError` if
    there is no such beginning."""
    _check_ends(wholes, columns)
    first, *others = wholes.values()
    names = " and ".join(repr(columns[name]) for name in wholes)
    most = min(map(len, wholes.values())) - 1  # at least one message is the response
    if others:
        differ = (k for k in range(most) if not all(_same_message(first[k], o[k]) for o in others))
        shared = next(differ, most)
        if shared < start:
            raise UserError(f"{names} begin with different messages: no common prompt")
    else:
        shared = start
    # Go back until all responses begin with an assistant turn.
    for end in range(min(shared, most), start - 1, -1):
        if all(whole[end]["role"] == "assistant" for whole in wholes.values()):
            return _Dialogue(first[:end], {name: whole[end:] for name, whole in wholes.items()})
    raise UserError(f"in {names} no assistant turn follows the prompt, so the response is missing")


def _check_ends(wholes: Mapping[str, Messages], columns: Mapping[str, str]) -> None:
    for name, messages in wholes.items():
        if messages[-1]["role"] != "assistant":
            raise UserError(
                f"{columns[name]!r} ends with a message of role {messages[-1]['role']!r}; a response ends with the assistant's turn"
            )


def _continued(prompt: Messages, response: Messages) -> Messages:
    """Return the response with the complete assistant turn that the prompt begins; empty if the
    response does not continue that turn."""
    *before, last = prompt
    repeats = len(response) > len(before) and all(map(_same_message, response, before))
    turn, *rest = response[len(before) :] if repeats else response
    begun, text = last.get("content"), turn.get("content")
    if not isinstance(begun, str) or not isinstance(text, str):
        return []
    if turn["role"] != "assistant" or turn == last:
        return []
    if text.startswith(begun):
        return [turn, *rest]
    return [] if repeats and before else [{**turn, "content": begun + text}, *rest]


def _find(conversation: Messages, part: Messages) -> int | None:
    places = range(len(conversation) - len(part) + 1) if part else ()
    return next((k for k in places if all(map(_same_message, conversation[k:], part))), None)
