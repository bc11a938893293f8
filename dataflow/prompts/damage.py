"""What is wrong with a file that cannot be read: the first line or row that breaks a rule."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..redaction import beginning

MAX_NESTING = 100
"""Levels of objects and lists in a row; the parsers, which call themselves for each, end the process at some tens of thousands."""
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]', re.DOTALL)
_CLOSING_QUOTE = re.compile(rb'[^"]*(?:""[^"]*)*"(?!")')
_SURROGATE = re.compile("[\ud800-\udfff]")


def refuse_deep(place: str, text: bytes) -> None:
    """Refuse JSON that is nested too deeply, before it is parsed.

    Raises:
        UserError: it has more than MAX_NESTING levels.
    """
    if text.count(b"[") + text.count(b"{") <= MAX_NESTING:
        return
    level = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        mark = found[0][:1]
        level += (mark in b"[{") - (mark in b"]}")
        if level > MAX_NESTING:
            raise UserError(f"{place}: objects and lists are nested more than {MAX_NESTING} deep")


def refuse_surrogates(key: str, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Refuse halves of characters, which no file and no tokenizer can hold.

    Args:
        key: the column.
        rows: the place of each row, and the row.

    Raises:
        UserError: a text of this column has one; the message names the row.
    """
    for place, row in rows:
        half = lone_surrogate(row.get(key))
        if half is not None:
            raise UserError(
                f"{place}: {key!r} holds the lone surrogate {half!a}, which is half of a character: the text was cut or decoded "
                "wrongly; repair it, or take it out with text.encode(errors='ignore').decode()"
            )


def lone_surrogate(value: object) -> str | None:
    """The first half of a character in a text, or in the texts of a list or an object, if there is one.

    >>> lone_surrogate(["a" + chr(0xD83D)]), lone_surrogate("a\U0001f600") is None
    ('\\ud83d', True)
    """
    if isinstance(value, str):
        found = _SURROGATE.search(value)
        return found[0] if found else None
    inner = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    if not isinstance(inner, list | tuple):
        return None
    return next((half for each in inner if (half := lone_surrogate(each)) is not None), None)


def refuse_foreign(key: str, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Refuse values of a column that no data file can hold.

    Raises:
        UserError: names the first such value.
    """
    for place, row in rows:
        value = row.get(key)
        kind = _json_type(value)
        if kind.startswith("a ") and kind not in ("a boolean", "a number", "a list"):
            raise UserError(
                f"{place}: {key!r} is {kind}; a value is text, a number, a boolean, a list, an object or null"
            )


def explain_csv(path: Path, data: bytes, delimiter: str) -> None:
    """Read row by row what pyarrow could not read, to name the row and its line.

    Args:
        data: the bytes of the file.

    Raises:
        UserError: for the first row that is not UTF-8, or has another number of fields than the header.
    """
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).splitlines(), start=1):
        try:
            line.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{path}, line {number}: not UTF-8 ({error})") from None
    rows = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), delimiter=delimiter)
    try:
        header = next(rows)
        for number, row in enumerate((row for row in rows if row), start=1):
            if len(row) != len(header):
                raise UserError(
                    f"{path}, row {number} (it ends on line {rows.line_num}): {len(row)} fields, "
                    f"but the header has {len(header)} ({', '.join(header)}); quote a field that holds a comma: {short(row)}"
                )
    except csv.Error as error:
        raise UserError(f"{path}, line {rows.line_num}: not CSV ({error})") from None


def refuse_open_quote(path: Path, data: bytes, delimiter: str) -> None:
    """Refuse CSV that ends inside quotes: the file was cut off, or a quote too many takes the rows behind it for one field.

    Args:
        data: the bytes of the file.

    Raises:
        UserError: naming the line with the opening quote.
    """
    opens = re.compile(rb'(?:\A|[\r\n]|%s)"' % re.escape(delimiter.encode()))
    text, at = data.removeprefix(codecs.BOM_UTF8), 0
    while (found := opens.search(text, at)) is not None:
        closed = _CLOSING_QUOTE.match(text, found.end())
        if closed is None:
            line = text.count(b"\n", 0, found.end()) + 1
            began = short(text[found.end() : found.end() + 60].decode(errors="replace"))
            raise UserError(
                f"{path}, line {line}: the file ends inside the quotes that open here ({began}); it was cut off"
            )
        at = closed.end()


def refuse_mixed(name: str, values: Iterable[Any], origin: Callable[[int], str]) -> None:
    """Name the first value whose type is not that of the same field in the rows before it.

    Args:
        name: the column.
        values: one for each row.
        origin: row -> its place, for messages.

    Raises:
        UserError: for that value; none is raised where all types agree.
    """
    seen: dict[str, tuple[str, int]] = {}
    """Field -> its type, and the row where it was first seen."""

    def visit(name: str, value: Any, row: int) -> None:
        kind = _json_type(value)
        if kind == "null":
            return
        was, first = seen.setdefault(name, (kind, row))
        if was != kind:
            where = origin(first).rpartition(", ")[2]
            raise UserError(
                f"{origin(row)}: {name!r} is {kind} ({short(value)}), but {was} in {where}; one column, one type"
            )
        if isinstance(value, Mapping):
            for key, inner in value.items():
                visit(f"{name}.{key}", inner, row)
        elif isinstance(value, list):
            for inner in value:
                visit(f"{name}[]", inner, row)

    for row, value in enumerate(values):
        visit(name, value, row)


def short(value: Any) -> str:
    """A value as JSON, in at most 60 characters."""
    text = _SURROGATE.sub(lambda half: ascii(half[0])[1:-1], json.dumps(value, ensure_ascii=False, default=str))
    return beginning(text, 60)


def start_of(text: str) -> str:
    """The beginning of a text, in at most 80 characters."""
    return beginning(text, 80)


def _json_type(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list() | tuple():
            return "a list"
        case Mapping():
            return "an object"
        case _:
            return f"a {type(value).__name__}"
