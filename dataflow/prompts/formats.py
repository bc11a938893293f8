"""Formats: the columns for prompts and responses in common data sets, and in data for TRL, verl,
OpenRLHF and slime."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import UserError, nearest
from ..json_values import as_json, exact_array, is_json, json_array
from .files import Origin, start_of


@dataclass(frozen=True)
class Format:
    """The roles of a file's columns.

    `dialogue` is a column of whole conversations. If one ends with the assistant's turn, it becomes
    a prompt and its response. A name with a dot selects a field of a struct column.
    """

    name: str
    prompt: str | None = None
    response: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    dialogue: str | None = None
    text: str | None = None
    context: str | None = None
    """Text to append to the prompt after a blank line."""
    system: str | None = None
    marks: tuple[str, ...] = ()
    """Further columns that identify the format."""

    @property
    def columns(self) -> tuple[str, ...]:
        named = (
            *(self.system, self.prompt, self.context, self.dialogue, self.text),
            *(self.response, self.chosen, self.rejected),
        )
        return tuple(column for column in named if column) + self.marks

    @property
    def responses(self) -> dict[str, str]:
        """Token column -> column of the file, for responses."""
        if self.chosen and self.rejected:
            return {"chosen_ids": self.chosen, "rejected_ids": self.rejected}
        return {"response_ids": self.response} if self.response else {}

    @property
    def texts(self) -> tuple[str, ...]:
        return self.columns[: len(self.columns) - len(self.marks)]

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.columns)})"


FORMATS = (
    Format("TRL unpaired preference", prompt="prompt", response="completion", marks=("label",)),
    Format("Orca pairs", system="system", prompt="question", chosen="chosen", rejected="rejected"),
    Format("TRL or OpenRLHF preference", prompt="prompt", chosen="chosen", rejected="rejected"),
    Format("ShareGPT preference", prompt="conversations", chosen="chosen", rejected="rejected"),
    Format("preference of questions", prompt="question", chosen="chosen", rejected="rejected"),
    Format("preference of inputs", prompt="input", chosen="chosen", rejected="rejected"),
    Format("preference of instructions", prompt="instruction", chosen="chosen", rejected="rejected"),
    Format("TRL or OpenRLHF preference, implicit prompt", chosen="chosen", rejected="rejected"),
    Format("TRL prompt-completion", prompt="prompt", response="completion"),
    Format("verl supervised", prompt="prompt", response="response"),
    Format("Alpaca", prompt="instruction", context="input", response="output"),
    Format("Alpaca without inputs", prompt="instruction", response="output"),
    Format("Dolly", prompt="instruction", context="context", response="response"),
    Format("OpenRLHF supervised", prompt="input", response="output"),
    Format("verl prompts", prompt="prompt", marks=("reward_model",)),
    Format("slime prompts", prompt="prompt", marks=("label",)),
    Format("OpenRLHF prompts with labels", prompt="input", marks=("label",)),
    Format("TRL prompt-only", prompt="prompt"),
    Format("slime conversations", dialogue="messages", marks=("label",)),
    Format("TRL or verl conversations", dialogue="messages"),
    Format("ShareGPT conversations", dialogue="conversations"),
    Format("OpenRLHF prompts", dialogue="input"),
    Format("OpenRLHF prompt-collection", dialogue="context_messages"),
    Format("GSM8K questions", prompt="question", marks=("answer",)),
    Format("MATH problems", prompt="problem", marks=("solution",)),
    Format("MATH problems with answers", prompt="problem", marks=("answer",)),
    Format("questions", prompt="question"),
    Format("problems", prompt="problem"),
    Format("TRL language modeling", text="text"),
)
"""Known formats, the most specific first. A file has the first format whose columns it has."""

SYSTEM_COLUMNS = ("system", "system_prompt")


def find_format(table: pa.Table, origin: Origin, columns: Mapping[str, str | None]) -> Format:
    """Return the format of a file, with its column of system prompts if there is one (see
    `_find_format`)."""
    format = _find_format(table, origin, columns)
    used = {*format.columns, columns["answer"]} - {format.system}
    found = [name for name in SYSTEM_COLUMNS if name in table.column_names and name not in used]
    system = next((name for name in found if is_text(table.schema.field(name).type)), None)
    return dataclasses.replace(format, system=system)


def _find_format(table: pa.Table, origin: Origin, columns: Mapping[str, str | None]) -> Format:
    """Return the format that the arguments describe, or the first known format whose columns the
    file has.

    Args:
        columns: the columns that the user named, by role: `prompt`, `answer`, `response`.
            `find_answers` checks the answer column.

    Raises:
        UserError: there is no such column, or no known format has these columns; the message names
            the nearest.
    """
    names = table.column_names
    prompt, response = columns["prompt"], columns["response"]
    for role, column in (("prompt", prompt), ("response", response)):
        if column is not None:
            find_column(table, column, origin, role)
    if prompt is not None:
        if response is None and {"chosen", "rejected"} <= set(names):
            return Format(
                f"preference, prompt={prompt!r}", prompt=prompt, chosen="chosen", rejected="rejected"
            )
        said = f"prompt={prompt!r}" + (f", response={response!r}" if response else "")
        whole = response is None and not is_text(find_column(table, prompt, origin, "prompt").type)
        # As OpenRLHF's `--input_key`. Only TRL's `prompt` may have half a response.
        if whole and prompt != "prompt":
            return Format(said, dialogue=prompt)
        return Format(said, prompt=prompt, response=response)
    for format in FORMATS:
        if not set(format.columns) <= set(names):
            continue
        if format.text and "role" in names:
            raise UserError(
                f"{origin.files}: columns 'role' and 'text' make each row one message (OpenAssistant's trees); a row must be a whole "
                "conversation, in a column 'messages'. To train on the texts alone, leave out 'role'"
            )
        # OpenRLHF's `input` may be text or messages.
        if format.dialogue == "input" and is_text(table.schema.field("input").type):
            format = dataclasses.replace(format, prompt="input", dialogue=None)
        if format.columns == ("prompt",) and response is None and (whole := _conversations(table)):
            format = Format("UltraChat conversations", dialogue=whole)
        if format.columns == ("chosen", "rejected") and all(
            _has_turns(table.column(name)) for name in format.columns
        ):
            format = dataclasses.replace(format, name="HH-RLHF")
        if response is not None:
            if not format.prompt:
                break
            name = f"{format.name}, response={response!r}"
            format = dataclasses.replace(format, name=name, response=response, chosen=None, rejected=None)
        return format

    raise _unknown(table, origin)


def _conversations(table: pa.Table) -> str | None:
    found = [name for name in ("messages", "conversations") if name in table.column_names]
    return next((name for name in found if pa.types.is_nested(table.schema.field(name).type)), None)


def refuse_quoted_messages(table: pa.Table, format: Format, origin: Origin) -> None:
    """Refuse columns of prompts or responses whose texts are all lists of messages, in JSON or
    Python syntax.

    Raises:
        UserError: naming the column.
    """
    for name in filter(None, (format.prompt, *format.responses.values())):
        column = table.column(name) if name in table.column_names else None
        if column is None or not is_text(column.type) or not len(column):
            continue
        if count_matches(
            as_text(column), r"""^\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:"""
        ) == len(column):
            raise UserError(
                f"{origin.files}: the texts of column {name!r} are lists of messages, such as {start_of(column[0].as_py())}; parse them "
                f"(json.loads) and pass the rows to Prompts.from_rows, or set prompt={format.prompt!r} to use the text unchanged"
            )


def _has_turns(column: pa.ChunkedArray) -> bool:
    return is_text(column.type) and count_matches(as_text(column), r"^\n\nHuman:") == len(column)


def _unknown(table: pa.Table, origin: Origin) -> UserError:
    """Return the error for unknown columns: the columns found, and the columns missing for the nearest format."""
    names = table.column_names
    best = max(
        FORMATS, key=lambda format: sum(_likest(column, names)[0] - 0.7 for column in format.columns)
    )
    found = ", ".join(f"{f.name!r} ({type_name(f.type)})" for f in table.schema)
    hint = ""
    for column in best.columns:
        if column not in names:
            # Only suggest names that are similar enough to be typing errors.
            likeness, likest = _likest(column, names)
            hint += f"; it needs {column!r}" + (f", did you mean {likest!r}?" if likeness >= 0.7 else "")
    return UserError(
        f"{origin.files}: no known format has these columns: found {found}; the nearest format is {best}{hint}; "
        "rename the column, or name the prompt column (prompt='...'); docs/data.md shows all formats"
    )


def _likest(wanted: str, found: Sequence[str]) -> tuple[float, str]:
    """Return the similarity (0 to 1) of the most similar name to the wanted one, and that name."""

    def likeness(name: str) -> float:
        part = 0.9 if wanted in name.split("_") else 0.0  # `chosen_response` is similar to `chosen`
        alike = min(0.9, difflib.SequenceMatcher(None, wanted, name).ratio())
        return 1.0 if name == wanted else max(part, alike)

    return max((likeness(name), name) for name in found)


def find_column(table: pa.Table, path: str, origin: Origin, role: str) -> pa.ChunkedArray:
    """Return a column, or a field of a struct column if the path has dots."""
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
            hint = nearest(inner, inside) or (
                f"; it has {', '.join(inside)}" if inside else f"; it is {column.type}"
            )
            raise UserError(
                f"{origin.files}: column {name!r} has no field {inner!r} ({role}={path!r}){hint}"
            )
        column = pc.call_function("struct_field", [column], pc.StructFieldOptions([inside.index(inner)]))
    return column


def column_kind(kind: pa.DataType, column: str, origin: Origin) -> Literal["text", "messages"]:
    """Return whether a type is text or messages (one or a list). Refuse all other types."""
    if is_text(kind):
        return "text"
    item = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind
    if pa.types.is_struct(item):
        fields = {f.name for f in item}
        if ("role" in fields and fields & {"content", "tool_calls"}) or fields >= {"from", "value"}:
            return "messages"
        raise UserError(
            f"{origin.files}: column {column!r} holds objects with {', '.join(f.name for f in item)}; "
            "messages have 'role' and 'content' (or ShareGPT's 'from' and 'value')"
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
    """Return a column of text as plain strings. Large strings stay large, because they may not fit."""
    return column if pa.types.is_large_string(column.type) else column.cast(pa.string())


def count_matches(column: pa.ChunkedArray, pattern: str) -> int:
    """Count the texts that match a regular expression (RE2). Arrow does it without a Python string
    per row."""
    found = pc.call_function("match_substring_regex", [column], pc.MatchSubstringOptions(pattern))
    return pc.call_function("sum", [found]).as_py() or 0


def type_name(kind: pa.DataType) -> str:
    if is_text(kind):
        return "text"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if pa.types.is_struct(kind.value_type):
            return f"list of {{{', '.join(f.name for f in kind.value_type)}}}"
        return f"list of {type_name(kind.value_type)}"
    return f"object with {', '.join(f.name for f in kind)}" if pa.types.is_struct(kind) else str(kind)


# Answer marks
#
# Both functions scan a text once, so that long texts stay cheap.


_BOX = re.compile(
    r"\\(?:boxed|fbox|beginboxed)\s*(?=\{)|\\(?:boxed|fbox)(?:\s+\$?|\$|(?=[\d-]))(?P<bare>[^\s${}\\]+)"
)


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""Return start, end and content of each `\boxed{...}` or `\fbox{...}`, in text order.

    Unclosed boxes are skipped. Of nested boxes, only the innermost counts.

    >>> boxes(r"first \boxed{\frac{1}{2}}, then \boxed 7 and \boxed{")
    [(6, 25, '\\frac{1}{2}'), (32, 40, '7')]
    """
    closing = _closing_braces(text)
    places: list[tuple[int, int, int, int]] = []
    for match in _BOX.finditer(text):
        inside = match.span("bare")
        if match["bare"] is None and match.end() in closing:
            inside = (match.end() + 1, closing[match.end()])
        if inside[0] >= 0:
            places.append((match.start(), inside[1] + (match["bare"] is None), *inside))
    innermost = [
        one for one, following in pairwise([*places, (len(text),) * 4]) if one[1] <= following[0]
    ]
    return [(start, end, text[inside:outside].rstrip(".,;")) for start, end, inside, outside in innermost]


def after_hashes(text: str, *, at_end: bool = False) -> str | None:
    """Return the rest of the line after the last `####`, where GSM8K has its answers.

    Args:
        text: a worked solution or a response.
        at_end: only accept the last line, so that a section heading does not count.

    Returns:
        The answer, or None if the text marks none.

    >>> after_hashes("6 * 7 = 42\\n#### 42")
    '42'
    """
    _, found, rest = text.rstrip().removesuffix("####").rpartition("####")
    answer, _, below = rest.strip().partition("\n")
    if not found or (at_end and below):
        return None
    return answer.strip() or None


def _closing_braces(text: str) -> dict[int, int]:
    """Return offset of each opening brace -> offset of its closing brace."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for match in re.finditer(r"\\[{}]|[{}]", text):
        if match.group() == "{":
            opened.append(match.start())
        elif match.group() == "}" and opened:
            closing[opened.pop()] = match.start()
    return closing


# Answers


_COLUMNS = ("reward_model.ground_truth", "answer", "solution", "ground_truth", "label")
"""Columns to search for ground truths: of verl, of data for TRL and verifiers, and the labels of
OpenRLHF and slime."""

_CHUNK = 8192

_THOUSANDS = re.compile(r"[-+$]{0,2}\d{1,3}(,\d{3})+(\.\d+)?")


@dataclass(frozen=True)
class Answers:
    """The ground truths of all rows."""

    column: str
    values: pa.ChunkedArray
    """Text, or the values of the file as `JsonType`, or values without a JSON form (such as dates)
    in their own type."""
    after_hashes: int = 0
    """Rows whose answer comes after `####`."""
    boxed: int = 0
    r"""Rows whose answer is the content of the last `\boxed{}`."""
    first_whole: int | None = None
    """The first row that was not shortened although others were, or None."""

    @property
    def shortened(self) -> int:
        return self.after_hashes + self.boxed

    @property
    def missing(self) -> list[int]:
        """Rows without an answer."""
        return np.flatnonzero(self.values.is_null().to_numpy()).tolist()


def find_answers(
    table: pa.Table, format: Format, origin: Origin, answer: str | None, extract: bool
) -> Answers | None:
    """Return the ground truth of each row as in the file, or None if the rows have none.

    Args:
        table: the rows, with the values of the file.
        answer: the column; None uses the first known one in the rows.
        extract: extract the final answer of worked solutions (`final_answer`).

    Raises:
        UserError: there is no such column.
    """
    name = answer or _usual_column(table, format)
    if name is None:
        return None
    column = _values(table, name, origin)
    if not extract or not (is_text(column.type) or is_json(column.type)) or not _may_be_worked(column):
        return Answers(name, column)
    chunks: list[pa.Array] = []
    hashes = boxed = 0
    whole: int | None = None
    for start in range(0, len(column), _CHUNK):
        values: list[Any] = column.slice(start, _CHUNK).to_pylist()
        for row, text in enumerate(values):
            worked = isinstance(text, str) and not _is_json_text(text)
            after_hashes = _after_hashes(text) if worked else None
            in_box = _last_boxed(text) if worked and after_hashes is None else None
            if after_hashes is None and in_box is None:
                whole = start + row if whole is None and text is not None else whole
                continue
            # GSM8K's mark takes precedence over boxes.
            values[row] = after_hashes or in_box
            hashes, boxed = hashes + (after_hashes is not None), boxed + (in_box is not None)
        chunks.append(json_array(values) if is_json(column.type) else pa.array(values, column.type))
    return Answers(name, pa.chunked_array(chunks, column.type), hashes, boxed, whole)


def final_answer(text: str) -> str | None:
    r"""Return the final answer of a worked solution: after `####` in its last line, or in its last
    `\boxed{}`.

    Commas between thousands after `####` are removed, as in GSM8K's own rule.

    Returns:
        The answer, or None if the text marks none.

    >>> final_answer("5 * 200 = 1000, and 2 more.\n#### 1,002")
    '1002'
    >>> final_answer(r"So $x = \boxed{\frac{1}{2}}$.")
    '\\frac{1}{2}'
    >>> final_answer("It is 4.") is None
    True
    """
    return _after_hashes(text) or _last_boxed(text)


def _after_hashes(text: str) -> str | None:
    """Return the answer after `####` at the end of a solution, without commas between thousands."""
    answer = after_hashes(text, at_end=True)
    return answer.replace(",", "") if answer and _THOUSANDS.fullmatch(answer) else answer


def _last_boxed(text: str) -> str | None:
    found = boxes(text)
    return found[-1][2].strip() or None if found else None


def _is_json_text(text: str) -> bool:
    """Return whether a text is a JSON object or list, which is data for a grader and not a worked
    solution."""
    if not text.lstrip().startswith(("{", "[")):
        return False
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False


def _may_be_worked(column: pa.ChunkedArray) -> bool:
    texts = column.cast(pa.string()) if is_json(column.type) else column
    return count_matches(texts, r"####|\\boxed|\\fbox") > 0


def _usual_column(table: pa.Table, format: Format) -> str | None:
    used = {format.prompt, format.response, format.dialogue, format.text}
    for path in _COLUMNS:
        name, _, inner = path.partition(".")
        if name not in table.column_names or path in used:
            continue
        kind = table.schema.field(name).type
        if inner and not _has_field(table.column(name), inner):
            continue
        if pa.types.is_boolean(kind):  # a label of unpaired preferences
            continue
        return path
    return None


def _has_field(column: pa.ChunkedArray, name: str) -> bool:
    if is_json(column.type):
        return any(isinstance(value, dict) and name in value for value in column.to_pylist())
    return pa.types.is_struct(column.type) and column.type.get_field_index(name) >= 0


def _values(table: pa.Table, path: str, origin: Origin) -> pa.ChunkedArray:
    """Return a column or a nested field (with dots in the path): text as plain strings, other
    values as JSON if possible."""
    name, *fields = path.split(".")
    if (
        path not in table.column_names
        and name in table.column_names
        and is_json(table.schema.field(name).type)
    ):
        values = table.column(name).to_pylist()
        for field in fields:
            if not any(isinstance(value, dict) and field in value for value in values):
                there = dict.fromkeys(key for value in values if isinstance(value, dict) for key in value)
                hint = nearest(field, there) or (f"; it has {', '.join(there)}" if there else "")
                raise UserError(
                    f"{origin.files}: column {name!r} has no field {field!r} (answer={path!r}){hint}"
                )
            values = [value.get(field) if isinstance(value, dict) else None for value in values]
        column = pa.chunked_array([exact_array(values)])
    else:
        column = find_column(table, path, origin, "answer")
    if is_text(column.type):
        return as_text(column)
    if pa.types.is_null(column.type):
        return column.cast(pa.string())
    try:
        return as_json(column)
    except (TypeError, ValueError):
        return column
