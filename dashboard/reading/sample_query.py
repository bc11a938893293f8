"""Filters, searches and orders over the samples of a run."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ...dataflow.errors import UserError, nearest
from .sample_index import TEXTS

compute: Any = pyarrow.compute  # its functions are made when it is imported
OPERATORS = {
    "<=": compute.less_equal,
    ">=": compute.greater_equal,
    "!=": compute.not_equal,
    "=": compute.equal,
    "<": compute.less,
    ">": compute.greater,
}


def chosen(table: pa.Table, filters: str, search: str) -> pa.Table:
    """The rows that pass.

    Args:
        table: of the index.
        filters: conditions with `and` between them, each `COLUMN OPERATOR VALUE` with one of <=, >=, !=, =, <, >, or ~ for text that
            contains another.
        search: text that the prompt or the response contains, whatever its case.

    Raises:
        UserError: a filter is none, or names no column.
    """
    for one in re.split(r"\s+and\s+", filters.strip(), flags=re.IGNORECASE) if filters.strip() else ():
        table = table.filter(_condition(table, one))
    if search:
        found = [
            compute.match_substring(table[name], search, ignore_case=True)
            for name in TEXTS
            if name in table.column_names
        ]
        if found:
            mask = found[0]
            for other in found[1:]:
                mask = compute.or_kleene(mask, other)
            table = table.filter(compute.fill_null(mask, False))
    return table


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


def ordered(table: pa.Table, sort: str) -> np.ndarray:
    """Places of the rows in an order.

    Args:
        table: of the index.
        sort: name of a column, with a minus before it for the largest first.
    """
    name = require_column(table, sort.removeprefix("-"))
    order = "descending" if sort.startswith("-") else "ascending"
    keys = [(name, order), *([("sample_id", "ascending")] if name != "sample_id" else [])]
    return compute.sort_indices(table, sort_keys=keys).to_numpy()
