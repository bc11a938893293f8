"""Tables as text for a terminal."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from ..readable import one_line
from ..redaction import beginning


def render_table(table: pa.Table, *, limit: int = 20, width: int = 32) -> str:
    """The first rows of a table for a terminal, long values cut.

    >>> print(render_table(pa.table({"level": ["prompts", "generate"], "tokens": [3, None], "done": [["generate"], []]})))
    level     tokens  done
    prompts        3  generate
    generate       -
    """
    table = table.rename_columns(list(map(one_line, table.column_names)))
    shown = [{name: _plain(value, width) for name, value in row.items()} for row in table.slice(0, limit).to_pylist()]
    widths = {name: max([len(name), *(len(row[name]) for row in shown)]) for name in table.column_names}
    right = {f.name for f in table.schema if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)}
    lines = [
        "  ".join(text.rjust(widths[name]) if name in right else text.ljust(widths[name]) for name, text in row.items())
        for row in [{name: name for name in table.column_names}, *shown]
    ]
    if len(table) > limit:
        lines.append(f"... {len(table) - limit} more")
    return "\n".join(line.rstrip() for line in lines)


def _plain(value: Any, width: int) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        text = ", ".join(
            one_line(str(v["writer"])) if isinstance(v, dict) and "writer" in v else _plain(v, width) for v in value
        )
    elif isinstance(value, float):
        text = f"{value:.6g}"
    else:
        text = one_line(str(value))
    return beginning(text, width)
