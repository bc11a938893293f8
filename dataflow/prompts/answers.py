"""Finds the column of ground truths, and takes the final answer out of a worked solution."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import pyarrow as pa

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
    texts: pa.ChunkedArray
    after_hashes: int = 0
    """Rows whose answer is what follows `####`."""
    boxed: int = 0
    r"""Rows whose answer is what the last `\boxed{}` holds."""
    first_whole: int | None = None
    """The first row that is taken as written, though others were shortened; None: there is none."""

    @property
    def shortened(self) -> int:
        return self.after_hashes + self.boxed


def find_answers(table: pa.Table, format: Format, origin: Origin, answer: str | None, extract: bool) -> Answers | None:
    """The ground truth of each row as text, or None where the rows have none.

    Args:
        answer: the column; None: the first known one that the rows have.
        extract: take the final answer out of a worked solution (`final_answer`).

    Raises:
        UserError: there is no such column.
    """
    name = answer or _usual_column(table, format)
    if name is None:
        return None
    found = find_column(table, name, origin, "answer")
    column = _column_as_text(found)
    if not extract or not is_text(found.type) or not count_matches(column, r"####|\\boxed|\\fbox"):
        return Answers(name, column)
    chunks: list[pa.Array] = []
    hashes = boxed = 0
    whole: int | None = None
    for start in range(0, len(column), _CHUNK):
        texts: list[str | None] = column.slice(start, _CHUNK).to_pylist()
        for row, text in enumerate(texts):
            after_hashes = None if text is None else _after_hashes(text)
            in_box = _last_boxed(text) if text is not None and after_hashes is None else None
            if after_hashes is None and in_box is None:
                whole = start + row if whole is None else whole
                continue
            texts[row] = after_hashes or in_box
            hashes, boxed = hashes + (after_hashes is not None), boxed + (in_box is not None)
        chunks.append(pa.array(texts, column.type))
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


def _usual_column(table: pa.Table, format: Format) -> str | None:
    used = {format.prompt, format.response, format.dialogue, format.text}
    for path in _COLUMNS:
        name, _, inner = path.partition(".")
        if name not in table.column_names or path in used:
            continue
        kind = table.schema.field(name).type
        if inner and not (pa.types.is_struct(kind) and kind.get_field_index(inner) >= 0):
            continue
        if pa.types.is_boolean(kind):  # a label of unpaired preferences: liked or not
            continue
        return path
    return None


def _column_as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Numbers as text; lists and objects as JSON."""
    if is_text(column.type):
        return as_text(column)
    if pa.types.is_primitive(column.type) or pa.types.is_null(column.type):
        return column.cast(pa.string())
    chunks = [
        pa.array([None if v is None else json.dumps(v, ensure_ascii=False, default=str) for v in chunk.to_pylist()])
        for chunk in (column.slice(start, _CHUNK) for start in range(0, max(len(column), 1), _CHUNK))
    ]
    return pa.chunked_array([chunk.cast(pa.string()) for chunk in chunks], pa.string())
