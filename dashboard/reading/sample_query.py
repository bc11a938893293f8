"""Filters, searches and orders over the samples of a run."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ...dataflow.errors import UserError, nearest

PIECE = 8192
"""Rows that one thread searches at once."""
compute: Any = pyarrow.compute  # its functions are made when it is imported
OPERATORS = {
    "<=": compute.less_equal,
    ">=": compute.greater_equal,
    "!=": compute.not_equal,
    "=": compute.equal,
    "<": compute.less,
    ">": compute.greater,
}


def chosen(table: pa.Table, filters: str, search: str) -> np.ndarray:
    """Places of the rows that pass. No text is copied.

    Args:
        table: of the index.
        filters: conditions with `and` between them, each `COLUMN OPERATOR VALUE` with one of <=, >=, !=, =, <, >, or ~ for text that
            contains another.
        search: text that the prompt or the response contains, whatever its case.

    Raises:
        UserError: a filter is none, or names no column.
    """
    passes = np.ones(len(table), bool)
    for one in re.split(r"\s+and\s+", filters.strip(), flags=re.IGNORECASE) if filters.strip() else ():
        passes &= _condition(table, one).to_numpy()
    if search and "_text" in table.column_names:
        passes &= _contains(table["_text"], search.lower())
    return np.flatnonzero(passes)


_POOL = ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="search")


def _contains(column: pa.ChunkedArray, text: str) -> np.ndarray:
    """[rows] bool, whether a text is in each, on all cores."""
    pieces = [chunk.slice(at, PIECE) for chunk in column.chunks for at in range(0, len(chunk), PIECE)]
    found = _POOL.map(lambda piece: compute.fill_null(compute.match_substring(piece, text), False), pieces)
    return np.concatenate([each.to_numpy(zero_copy_only=False) for each in found] or [np.empty(0, bool)])


def _condition(table: pa.Table, text: str) -> Any:
    operator = min(
        (op for op in (*OPERATORS, "~") if op in text), key=lambda op: (text.index(op), -len(op)), default=None
    )
    if operator is None:
        raise UserError(
            f"filter {text!r} is none: write COLUMN OPERATOR VALUE, such as reward>=0.5, step=12 or response~sorry"
        )
    name, _, value = (part.strip() for part in text.partition(operator))
    column = table[require_column(table, name)]
    if operator == "~":
        return compute.fill_null(compute.match_substring(column.cast(pa.string()), value, ignore_case=True), False)
    try:
        wanted = pa.scalar(value, pa.string()).cast(column.type)
    except pa.ArrowException:
        raise UserError(f"filter {text!r}: {value!r} is no {column.type}, as column {name!r} has") from None
    return compute.fill_null(OPERATORS[operator](column, wanted), False)


NAMES = {"id": "sample_id", "group": "group_id", "kind": "graph"}
"""Names that pages have for columns."""


def require_column(table: pa.Table, name: str) -> str:
    """The name of a column in the index.

    Raises:
        UserError: there is none of that name.
    """
    name = NAMES.get(name, name)
    if name.startswith("_") or name not in table.column_names:
        columns = [column for column in table.column_names if not column.startswith("_")]
        hint = nearest(name, columns) or f"; they have {', '.join(columns)}"
        raise UserError(f"samples have no column {name!r}{hint}")
    return name


def ordered(table: pa.Table, places: np.ndarray, sort: str) -> np.ndarray:
    """These places in the order of a column.

    Args:
        table: of the index.
        places: of rows.
        sort: name of a column, with a minus before it for the largest first.
    """
    name = require_column(table, sort.removeprefix("-"))
    order = "descending" if sort.startswith("-") else "ascending"
    keys = [(name, order), *([("sample_id", "ascending")] if name != "sample_id" else [])]
    values = table.select([key for key, _ in keys])
    values = values if len(places) == len(table) else values.take(pa.array(places))
    return places[compute.sort_indices(values, sort_keys=keys).to_numpy()]


def rows_at(table: pa.Table, places: np.ndarray) -> list[dict[str, Any]]:
    """A few rows; `take` would go through all of the table."""
    return [table.slice(place, 1).to_pylist()[0] for place in places.tolist()]
