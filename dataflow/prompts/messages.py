"""Messages: conversations, tools and template variables of rows as Python values, in one form for all formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from ..errors import UserError, nearest
from .damage import short
from .formats import find_column
from .origin import Origin

Messages = list[dict[str, Any]]

SYSTEM_ROLES = ("system", "developer")
"""Roles of a message that a conversation may begin with. No second one should follow it."""

ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")

_SHAREGPT = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    **{role: role for role in SYSTEM_ROLES},
}
"""ShareGPT's `from` -> role."""

_OF_RENDERING = {"messages", "tools", "documents", "add_generation_prompt", "continue_last", "continue_final_message"}
"""Variables that the renderer sets."""


def read_messages(table: pa.Table, path: str, origin: Origin) -> list[Messages]:
    """Read a column of conversations, or of single messages, as lists of `{"role": ..., "content": ...}` without null fields.

    Raises:
        UserError: a row has no messages, or a message has no role or no content. The error names the row.
    """
    dialogues: list[Messages] = []
    for row, value in enumerate(find_column(table, path, origin, "column").to_pylist()):
        messages = [value] if isinstance(value, Mapping) else value
        if not messages:
            raise UserError(f"{origin(row)}: {path!r} is {short(messages)}; every row needs at least one message there")
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
            raise UserError(f"is from {said!r}; ShareGPT's names are {', '.join(_SHAREGPT)}{nearest(said, _SHAREGPT)}")
        message = {"role": _SHAREGPT[said], "content": message.pop("value", None), **message}
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
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise UserError(f"{origin(row)}: 'tools' is {short(tools)}; it must be a list of functions (objects)")
    return found


def read_variables(table: pa.Table, origin: Origin) -> list[Any] | None:
    """Read the column `chat_template_kwargs`, if there is one.

    Raises:
        UserError: a row's value is not an object, or sets a variable of the renderer. The error names the row.
    """
    found = _read_json(table, "chat_template_kwargs", origin)
    for row, variables in enumerate(found or ()):
        if variables is not None and not isinstance(variables, dict):
            raise UserError(f"{origin(row)}: 'chat_template_kwargs' is {short(variables)}; it must be an object")
        if taken := _OF_RENDERING.intersection(variables or ()):
            raise UserError(
                f"{origin(row)}: 'chat_template_kwargs' has {min(taken)!r}, which follows from the row itself; leave it out"
            )
    return found


def same_message(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two messages are equal but for white space."""
    rest = [{key: value for key, value in each.items() if key != "content"} for each in (one, other)]
    return rest[0] == rest[1] and same_text(one.get("content"), other.get("content"))


def same_text(one: Any, other: Any) -> bool:
    """Whether two contents of messages are equal but for white space."""
    return _words(one) == _words(other)


def _words(content: Any) -> Any:
    if isinstance(content, list) and all(isinstance(b, Mapping) and b.get("type") == "text" for b in content):
        content = "".join(str(block.get("text", "")) for block in content)
    return content.split() if isinstance(content, str) else content


def _without_nulls(value: Any) -> Any:
    """Drop null fields. Arrow gives every struct of a column all fields, but templates test whether a field exists."""
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

    The user wrote the nulls in JSON text, but a null in a struct may come from a field of another row.
    """
    if isinstance(value, str):
        return json.loads(value) if value.strip() else None
    if isinstance(value, list):
        return [json.loads(inner) if isinstance(inner, str) else _without_nulls(inner) for inner in value]
    return _without_nulls(value)
