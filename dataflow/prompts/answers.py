"""Finds the column of ground truths with the values of the file, and takes the final answer out of a worked solution."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import UserError, nearest
from ..json_values import as_json, exact_array, is_json, json_array
from .answer_marks import after_hashes, boxes
from .formats import Format, as_text, count_matches, find_column, is_text
from .origin import Origin

_COLUMNS = ("reward_model.ground_truth", "answer", "solution", "ground_truth", "label")
"""Where a ground truth is looked for: verl's place, the names of TRL's and verifiers' data, the label of OpenRLHF and slime."""

_CHUNK = 8192

_THOUSANDS = re.compile(r"[-+$]{0,2}\d{1,3}(,\d{3})+(\.\d+)?")


@dataclass(frozen=True)
class Answers:
    """The ground truths of all rows."""

    column: str
    """The column, or `a.b` for a field, that they were taken from."""
    values: pa.ChunkedArray
    """Text, or the values of the file as `JsonType`, or what JSON cannot hold (dates, say) in its own type."""
    after_hashes: int = 0
    """Rows whose answer is what follows `####`."""
    boxed: int = 0
    r"""Rows whose answer is what the last `\boxed{}` holds."""
    first_whole: int | None = None
    """The first row that is taken as written, though others were shortened; None: there is none."""

    @property
    def shortened(self) -> int:
        return self.after_hashes + self.boxed

    @property
    def missing(self) -> list[int]:
        """Rows without an answer."""
        return np.flatnonzero(self.values.is_null().to_numpy()).tolist()


def find_answers(table: pa.Table, format: Format, origin: Origin, answer: str | None, extract: bool) -> Answers | None:
    """The ground truth of each row as it is in the file, or None where the rows have none.

    Args:
        table: the rows, with the values of the file.
        answer: the column; None: the first known one that the rows have.
        extract: take the final answer out of a worked solution (`final_answer`).

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
            values[row] = after_hashes or in_box
            hashes, boxed = hashes + (after_hashes is not None), boxed + (in_box is not None)
        chunks.append(json_array(values) if is_json(column.type) else pa.array(values, column.type))
    return Answers(name, pa.chunked_array(chunks, column.type), hashes, boxed, whole)


def final_answer(text: str) -> str | None:
    r"""The final answer of a worked solution: what follows `####` in its last line, else what its last `\boxed{}` holds.

    Commas between thousands after `####` are left out, as GSM8K's own rule has it.

    Returns:
        The answer, or None where the text marks none.

    >>> final_answer("5 * 200 = 1000, and 2 more.\n#### 1,002")
    '1002'
    >>> final_answer(r"So $x = \boxed{\frac{1}{2}}$.")
    '\\frac{1}{2}'
    >>> final_answer("It is 4.") is None
    True
    """
    return _after_hashes(text) or _last_boxed(text)


def _after_hashes(text: str) -> str | None:
    """The answer after `####` at the end of a solution, without commas between thousands."""
    answer = after_hashes(text, at_end=True)
    return answer.replace(",", "") if answer and _THOUSANDS.fullmatch(answer) else answer


def _last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{}` that is closed."""
    found = boxes(text)
    return found[-1][2].strip() or None if found else None


def _is_json_text(text: str) -> bool:
    """Whether a text is an object or a list in JSON: data for a grader, not a solution to take an answer from."""
    if not text.lstrip().startswith(("{", "[")):
        return False
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False


def _may_be_worked(column: pa.ChunkedArray) -> bool:
    """Whether any text of a column marks a final answer."""
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
        if pa.types.is_boolean(kind):  # a label of unpaired preferences: liked or not
            continue
        return path
    return None


def _has_field(column: pa.ChunkedArray, name: str) -> bool:
    if is_json(column.type):
        return any(isinstance(value, dict) and name in value for value in column.to_pylist())
    return pa.types.is_struct(column.type) and column.type.get_field_index(name) >= 0


def _values(table: pa.Table, path: str, origin: Origin) -> pa.ChunkedArray:
    """A column, or with dots in the path a field of a column of objects: text as plain strings, other values as JSON where it has them."""
    name, *fields = path.split(".")
    if path not in table.column_names and name in table.column_names and is_json(table.schema.field(name).type):
        values = table.column(name).to_pylist()
        for field in fields:
            if not any(isinstance(value, dict) and field in value for value in values):
                there = dict.fromkeys(key for value in values if isinstance(value, dict) for key in value)
                hint = nearest(field, there) or (f"; it has {', '.join(there)}" if there else "")
                raise UserError(f"{origin.files}: column {name!r} has no field {field!r} (answer={path!r}){hint}")
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
