"""Source: where the rows of a graph come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa


class Source(Protocol):
    """A name, the columns that each row has, and the rows themselves."""

    @property
    def name(self) -> str: ...
    @property
    def columns(self) -> tuple[str, ...]: ...
    @property
    def table(self) -> pa.Table: ...


@dataclass(frozen=True)
class TableSource:
    """Rows of any Arrow table; see `dataflow/prompts/prompts.py` for prompts from files.

    >>> TableSource("pairs", pa.table({"prompt_ids": [[1, 2]]})).columns
    ('prompt_ids',)
    """

    name: str
    table: pa.Table

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.table.column_names)
