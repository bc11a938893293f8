"""Rows of a source, whatever it is: files, a folder, or a data set by its Hugging Face id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ..errors import UserError
from .files import ACCEPTED_ROWS, described, read_files
from .folders import find_part
from .hub import is_hub_id, read_hub
from .origin import Origin


@dataclass(frozen=True)
class Rows:
    """Rows as they were read."""

    name: str
    """A short name of the source."""
    table: pa.Table
    origin: Origin
    choices: tuple[str, ...] = ()
    """Defaults that were taken: a subset, a split."""


def check_paths(source: object) -> None:
    """Refuse anything but a list of paths.

    Raises:
        UserError: rows of a program, say, which `Prompts.from_rows` takes.
    """
    paths = source if isinstance(source, Sequence) else None
    if paths is None or not all(isinstance(path, str | Path) for path in paths):
        raise UserError(
            f"prompts are read from a path, a list of paths, or the id of a data set, not from {described(source)}; "
            f"Prompts.from_rows takes {ACCEPTED_ROWS}"
        )


def read_rows(
    source: str | Path | Sequence[str | Path], subset: str | None, split: str | None, limit: int | None
) -> Rows:
    """Read a source.

    Args:
        source: a file, files (their rows one after the other), a folder, or a Hugging Face id.
        subset: of a folder or data set.
        split: of a folder or data set.
        limit: read no more than this many rows.

    Raises:
        UserError: with the file or id, the rule, the value and the nearest right name.
    """
    alone = isinstance(source, (str, Path))
    if not alone:
        check_paths(source)
    paths = [Path(p).expanduser() for p in ([source] if alone else source)]
    if alone and paths[0].is_dir():
        part = find_part(paths[0], subset, split)
        table, origin = read_files(part.files, limit)
        name = paths[0].resolve().name
        return Rows(f"{name}_{part.split}" if part.split else name, table, origin, part.choices)
    if isinstance(source, str) and is_hub_id(source):
        found = read_hub(source, subset, split)
        table = found.table if limit is None else found.table.slice(0, limit)
        if not len(table):
            raise UserError(f"{found.name}: there are no rows")
        name = f"{source.partition('/')[2]}_{found.split}"
        return Rows(name, table.replace_schema_metadata(None), Origin(((found.name, 0),)), found.choices)
    for setting, value in (("subset", subset), ("split", split)):
        if value is not None:
            raise UserError(f"{setting}={value!r} is for folders and Hugging Face ids, and {str(source)!r} is files")
    table, origin = read_files(paths, limit)
    names = list(dict.fromkeys(Path(path.name).stem.split(".")[0] for path in paths))
    return Rows("+".join(names) if len(names) <= 3 else f"{names[0]}+{len(names) - 1}", table, origin)
