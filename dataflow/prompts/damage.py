"""What is wrong with a file that cannot be read: the first line or row that breaks a rule."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from .origin import lines

MAX_NESTING = 100
"""Levels of objects and lists in a row; the parsers, which call themselves for each, end the process at some tens of thousands."""
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]', re.DOTALL)
_LONG_INTEGER = re.compile(r"-?\d{19,}(?![\d.eE])")


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


def refuse_large_integers(place: str, text: str) -> None:
    """Refuse an integer that would become a floating-point number, and lose its last digits.

    Args:
        text: a row as JSON.

    Raises:
        UserError: an integer needs more than 64 bits.
    """

    def checked(digits: str) -> int:
        number = int(digits) if len(digits) < 100 else 2**64
        if not -(2**63) <= number < 2**63:
            short_digits = digits if len(digits) <= 40 else f"{digits[:37]}..."
            raise UserError(f"{place}: the integer {short_digits} has more than 64 bits; write it as text, in quotes")
        return number

    if _LONG_INTEGER.search(text):
        json.loads(text, parse_int=checked)


def explain_json(path: Path) -> None:
    """Read line by line what pyarrow could not read, to name the line; slow, but it ends in an error anyway.

    Raises:
        UserError: for the first line that is not an object in UTF-8, or has a value of another type than the lines before.
    """

    def parsed() -> Iterator[tuple[str, dict[str, Any]]]:
        for number, line in lines(path):
            place = f"{path}, line {number}"
            text = line.decode(errors="replace").strip()
            try:
                line.decode()
                row = json.loads(text)
            except UnicodeDecodeError as error:
                raise UserError(f"{place}: not UTF-8 ({error})") from None
            except ValueError as error:
                raise UserError(f"{place}: not JSON ({error}): {_start(text)}") from None
            if not isinstance(row, dict):
                raise UserError(f"{place}: a row is an object {{...}} on one line, not {short(row)}")
            yield place, row

    explain_types(parsed(), "line")


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


def explain_types(rows: Iterable[tuple[str, Mapping[str, Any]]], unit: str) -> None:
    """Name the first value whose type is not that of the same field in the rows before it.

    Args:
        rows: the place of each row, and the row.
        unit: what a place counts: `line` or `row`.

    Raises:
        UserError: for that value; none is raised where all types agree.
    """
    seen: dict[str, tuple[str, str]] = {}  # field -> (type, where it was first seen)

    def visit(name: str, value: Any, place: str) -> None:
        kind = _json_type(value)
        if kind == "null":
            return
        was, where = seen.setdefault(name, (kind, place))
        if was != kind:
            where = where.rpartition(f"{unit} ")[2]
            raise UserError(
                f"{place}: {name!r} is {kind} ({short(value)}), but {was} in {unit} {where}; one column, one type"
            )
        if isinstance(value, Mapping):
            for key, inner in value.items():
                visit(f"{name}.{key}", inner, place)
        elif isinstance(value, list):
            for inner in value:
                visit(f"{name}[]", inner, place)

    for place, row in rows:
        for key, value in row.items():
            visit(key, value, place)


def short(value: Any) -> str:
    """A value as JSON, in at most 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _start(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


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
