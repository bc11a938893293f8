"""Formats: which columns of a file hold prompts, responses and ground truths, in TRL, verl and OpenRLHF."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import UserError, nearest
from .files import Origin

_ANSWERS = ("reward_model.ground_truth", "answer", "solution", "ground_truth", "label")
"""Where a ground truth is looked for: verl's place, the names of TRL's examples, OpenRLHF's label."""


@dataclass(frozen=True)
class Format:
    """Which columns of a file mean what.

    `dialogue` is a column of whole conversations: one that ends with the assistant's turn is a prompt and its response.
    A name with a dot reaches into a struct column.
    """

    name: str
    prompt: str | None = None
    response: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    dialogue: str | None = None
    text: str | None = None
    marks: tuple[str, ...] = ()
    """Further columns that the format is known by."""

    @property
    def columns(self) -> tuple[str, ...]:
        named = (self.prompt, self.dialogue, self.text, self.response, self.chosen, self.rejected)
        return tuple(column for column in named if column) + self.marks

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.columns)})"


FORMATS = (
    Format("TRL unpaired preference", prompt="prompt", response="completion", marks=("label",)),
    Format("TRL or OpenRLHF preference", prompt="prompt", chosen="chosen", rejected="rejected"),
    Format("TRL or OpenRLHF preference, implicit prompt", chosen="chosen", rejected="rejected"),
    Format("TRL prompt-completion", prompt="prompt", response="completion"),
    Format("verl supervised", prompt="prompt", response="response"),
    Format("OpenRLHF supervised", prompt="input", response="output"),
    Format("verl prompts", prompt="prompt", marks=("reward_model",)),
    Format("OpenRLHF prompts with labels", prompt="input", marks=("label",)),
    Format("TRL prompt-only", prompt="prompt"),
    Format("TRL or verl conversations", dialogue="messages"),
    Format("OpenRLHF prompts", dialogue="input"),
    Format("OpenRLHF prompt-collection", dialogue="context_messages"),
    Format("GSM8K", prompt="question", marks=("answer",)),
    Format("TRL language modeling", text="text"),
)
"""Known formats, the most specific first: a file has the first one whose columns it all has."""


def find_format(table: pa.Table, origin: Origin, columns: Mapping[str, str | None]) -> Format:
    """The format that the arguments describe, or else the first known one whose columns the file has."""
    names = table.column_names
    for role, column in columns.items():
        if column is not None:
            find_column(table, column, origin, role)
    prompt, response = columns["prompt"], columns["response"]
    if prompt is not None:
        if response is None and {"chosen", "rejected"} <= set(names):
            return Format(f"preference, prompt={prompt!r}", prompt=prompt, chosen="chosen", rejected="rejected")
        said = f"prompt={prompt!r}" + (f", response={response!r}" if response else "")
        whole = response is None and not is_text(find_column(table, prompt, origin, "prompt").type)
        if whole and prompt != "prompt":  # OpenRLHF's `--input_key`; only TRL's own `prompt` may hold half a response
            return Format(said, dialogue=prompt)
        return Format(said, prompt=prompt, response=response)
    if {"instruction", "input"} <= set(names):
        raise UserError(
            f"{origin.files}: columns 'instruction' and 'input' (Alpaca's format) make one prompt together; "
            "write them into one column 'prompt', or say prompt='instruction'"
        )
    for format in FORMATS:
        if set(format.columns) <= set(names):
            if format.dialogue == "input" and is_text(table.schema.field("input").type):
                format = dataclasses.replace(format, prompt="input", dialogue=None)
            if response is not None:
                if not format.prompt:
                    break
                format = Format(f"{format.name}, response={response!r}", prompt=format.prompt, response=response)
            return format

    best = max(FORMATS, key=lambda format: sum(_likest(column, names)[0] - 0.7 for column in format.columns))
    found = ", ".join(f"{f.name!r} ({type_name(f.type)})" for f in table.schema)
    hint = ""
    for column in best.columns:
        if column not in names:
            likeness, likest = _likest(column, names)
            hint += f"; it needs {column!r}" + (f", did you mean {likest!r}?" if likeness >= 0.7 else "")
    raise UserError(
        f"{origin.files}: no known format has these columns: found {found}; the nearest format is {best}{hint}; "
        "rename the column, or say which holds the prompt (prompt='...'); docs/data.md shows all formats"
    )


def _likest(wanted: str, found: Sequence[str]) -> tuple[float, str]:
    """How like the wanted name the likest of the found ones is (0 to 1), and that one."""

    def likeness(name: str) -> float:
        part = 0.9 if wanted in name.split("_") else 0.0  # `chosen_response` is like `chosen`
        return max(part, difflib.SequenceMatcher(None, wanted, name).ratio())

    return max((likeness(name), name) for name in found)


def find_column(table: pa.Table, path: str, origin: Origin, role: str) -> pa.ChunkedArray:
    """A column, or with dots in the path a field of a struct column."""
    if path in table.column_names:
        return table.column(path)
    name, *fields = path.split(".")
    if name not in table.column_names:
        hint = nearest(name, table.column_names) or f"; it has {', '.join(table.column_names)}"
        raise UserError(f"{origin.files}: there is no column {path!r} ({role}={path!r}){hint}")
    column = table.column(name)
    for inner in fields:
        inside = [f.name for f in column.type] if pa.types.is_struct(column.type) else []
        if inner not in inside:
            hint = nearest(inner, inside) or (f"; it has {', '.join(inside)}" if inside else f"; it is {column.type}")
            raise UserError(f"{origin.files}: column {name!r} has no field {inner!r} ({role}={path!r}){hint}")
        column = pc.call_function("struct_field", [column], pc.StructFieldOptions([inside.index(inner)]))
    return column


def find_answers(
    table: pa.Table, format: Format, origin: Origin, answer: str | None
) -> pa.ChunkedArray | pa.Array | None:
    """The ground truth of each row as text, or None where the file has none."""
    if answer is None:
        used = {format.prompt, format.response, format.dialogue, format.text}
        for path in _ANSWERS:
            name, _, inner = path.partition(".")
            if name not in table.column_names or path in used:
                continue
            kind = table.schema.field(name).type
            if inner and not (pa.types.is_struct(kind) and kind.get_field_index(inner) >= 0):
                continue
            if pa.types.is_boolean(kind):  # a label of unpaired preferences: liked or not
                continue
            answer = path
            break
        else:
            return None
    column = find_column(table, answer, origin, "answer")
    if is_text(column.type):
        return as_text(column)
    if pa.types.is_primitive(column.type) or pa.types.is_null(column.type):
        return column.cast(pa.string())
    texts = [
        None if value is None else json.dumps(value, ensure_ascii=False, default=str) for value in column.to_pylist()
    ]
    return pa.array(texts, pa.string())


def column_kind(kind: pa.DataType, column: str, origin: Origin) -> Literal["text", "messages"]:
    """Whether a column is text or messages; refuses what is neither."""
    if is_text(kind):
        return "text"
    item = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else None
    if item is not None and pa.types.is_struct(item):
        fields = [f.name for f in item]
        if "role" in fields and ("content" in fields or "tool_calls" in fields):
            return "messages"
        hint = " (rename 'from' to 'role' and 'value' to 'content')" if {"from", "value"} <= set(fields) else ""
        raise UserError(
            f"{origin.files}: column {column!r} holds objects with {', '.join(fields)}; "
            f"messages have 'role' and 'content'{hint}"
        )
    if pa.types.is_null(kind):
        raise UserError(f"{origin.files}: column {column!r} is empty (null) in every row")
    raise UserError(
        f"{origin.files}: column {column!r} is {type_name(kind)}; it must be text, or messages: "
        'a list of {"role": ..., "content": ...}'
    )


def is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of text as plain strings; large ones stay large, they may not fit."""
    return column if pa.types.is_large_string(column.type) else column.cast(pa.string())


def type_name(kind: pa.DataType) -> str:
    if is_text(kind):
        return "text"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if pa.types.is_struct(kind.value_type):
            return f"list of {{{', '.join(f.name for f in kind.value_type)}}}"
        return f"list of {type_name(kind.value_type)}"
    return f"object with {', '.join(f.name for f in kind)}" if pa.types.is_struct(kind) else str(kind)
