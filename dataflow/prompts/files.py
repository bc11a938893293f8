"""Files of rows: Parquet and JSONL as Arrow tables, and where in which file each row came from."""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..errors import UserError, nearest


@dataclass(frozen=True)
class Origin:
    """Where each row of a table came from, for messages: runs of rows, each from one file."""

    runs: tuple[tuple[str, int], ...]  # (file, its first row), in order

    def __call__(self, row: int) -> str:
        """The place of a row: `train.jsonl, line 7`, or `train.parquet, row 7` (both count from 1)."""
        file, start = next(run for run in reversed(self.runs) if run[1] <= row)
        if Path(file).suffix == ".jsonl":
            for index, (line, _) in enumerate(lines(Path(file))):
                if index == row - start:
                    return f"{file}, line {line}"
        return f"{file}, row {row - start + 1}"

    @property
    def files(self) -> str:
        return ", ".join(file for file, _ in self.runs)


def read_files(paths: Sequence[Path], limit: int | None = None) -> tuple[pa.Table, Origin]:
    """The rows of all files, one file after the other; at most `limit` rows.

    Raises:
        UserError: a file is missing, empty, broken, of an unknown kind, or has other columns than the first.
    """
    if not paths:
        raise UserError("no prompt file was given: the list of paths is empty")
    if limit is not None and limit < 1:
        raise UserError(f"limit={limit}: at least one row must be read")
    for path in paths:
        _check_file(path)
    tables: list[pa.Table] = []
    runs: list[tuple[str, int]] = []
    rows = 0
    for path in paths:
        if limit is not None and rows >= limit:
            break
        tables.append(_read(path, None if limit is None else limit - rows))
        runs.append((str(path), rows))
        rows += tables[-1].num_rows
    return _concat(tables, [file for file, _ in runs]), Origin(tuple(runs))


def table_of(rows: Sequence[Mapping[str, Any]], name: str) -> pa.Table:
    """Python dictionaries as a table; a key that a row lacks is null there.

    Raises:
        UserError: there are no rows, a row is no dictionary, or a column holds values of several types.

    >>> table_of([{"a": 1}, {"a": 2, "b": "x"}], "rows").to_pylist()
    [{'a': 1, 'b': None}, {'a': 2, 'b': 'x'}]
    >>> table_of([{"a": 1}, {"a": "x"}], "rows")
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: rows, row 2: 'a' is text ("x"), but a number in row 1; one column, one type
    """
    if not rows:
        raise UserError(f"{name}: there are no rows")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise UserError(f"{name}, row {number}: a row is an object {{...}}, not {short(row)}")
    keys = list(dict.fromkeys(key for row in rows for key in row))
    try:
        return pa.table({key: pa.array([row.get(key) for row in rows]) for key in keys})
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        _explain_types(((f"{name}, row {i}", row) for i, row in enumerate(rows, start=1)), "row")
        raise UserError(f"{name}: {error}") from None


def _check_file(path: Path) -> None:
    """Refuses what is not a file of a known kind, before any of the files is read."""
    if not path.exists():
        folder = path.parent
        if not folder.is_dir():
            raise UserError(f"prompt file {str(path)!r} does not exist: there is no folder {str(folder)!r}")
        there = sorted(p.name for p in folder.iterdir() if p.suffix in _READERS)
        hint = nearest(path.name, there) or (f"; {str(folder)!r} has {', '.join(there[:5])}" if there else "")
        raise UserError(f"prompt file {str(path)!r} does not exist{hint}")
    if path.is_dir():
        there = sorted(str(p) for p in path.iterdir() if p.suffix in _READERS)
        hint = f": {', '.join(there[:5])}" if there else ", and it holds none"
        raise UserError(f"{str(path)!r} is a folder; give the prompt files in it{hint}")
    if path.suffix not in _READERS:
        hint = nearest(path.suffix.lower(), _READERS) or f"; these can be read: {', '.join(_READERS)}"
        raise UserError(f"{path}: unknown kind of file {path.suffix!r}{hint}")
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the file is empty")


def _read(path: Path, limit: int | None) -> pa.Table:
    table = _READERS[path.suffix](path, limit)
    if table.num_rows == 0:
        raise UserError(f"{path}: the file has no rows")
    # What other libraries noted about the columns (pandas' index, datasets' features) is not true of ours.
    return table.replace_schema_metadata(None)


def _read_parquet(path: Path, limit: int | None) -> pa.Table:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:  # not read_table, which takes columns from folder names
            if limit is None:
                return file.read()
            batches: list[pa.RecordBatch] = []
            for batch in file.iter_batches(batch_size=limit):
                batches.append(batch)
                if sum(map(len, batches)) >= limit:
                    break
            return pa.Table.from_batches(batches, file.schema_arrow).slice(0, limit)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: not a Parquet file that can be read ({error})") from None


def _read_json_lines(path: Path, limit: int | None) -> pa.Table:
    import pyarrow.json

    if limit is None:
        data, size = None, path.stat().st_size
    else:
        head = [line for _, line in itertools.islice(lines(path), limit)]
        data = b"".join(head)
        size = len(data)
    # A row must fit into a block: files of up to 256 MiB are one block, larger ones have rows of up to 64 MiB.
    options = pyarrow.json.ReadOptions(block_size=max(size, 1) if size < 2**28 else 2**26)

    def read(schema: pa.Schema | None) -> pa.Table:
        source = str(path) if data is None else pa.BufferReader(data)
        return pyarrow.json.read_json(source, options, pyarrow.json.ParseOptions(explicit_schema=schema))

    try:
        table = read(None)
        # pyarrow makes timestamps of strings that look like dates; an answer of "2024-01-01" is text.
        schema = pa.schema([f.with_type(_without_timestamps(f.type)) for f in table.schema])
        if not schema.equals(table.schema):
            table = read(schema)
        table.validate(full=True)  # UTF-8 is not checked by the parser
        return table
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        _explain_json(path)
        raise UserError(f"{path}: {error}") from None


def _read_json(path: Path, limit: int | None) -> pa.Table:
    """JSON lines, or one array of objects."""
    array = next((line.lstrip().startswith(b"[") for _, line in lines(path)), False)
    if not array:
        return _read_json_lines(path, limit)
    try:
        rows = json.loads(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    return table_of(rows[:limit], str(path))


_READERS: dict[str, Callable[[Path, int | None], pa.Table]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_json_lines,
    ".json": _read_json,
}


def _without_timestamps(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_without_timestamps(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(_without_timestamps(f.type)) for f in kind])
    return kind


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, each with its number, from 1."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield number, line


def _explain_json(path: Path) -> None:
    """Reads line by line what pyarrow could not read, to name the line; slow, but it ends in an error anyway."""

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
                near = text if len(text) <= 80 else text[:77] + "..."
                raise UserError(f"{place}: not JSON ({error}): {near}") from None
            if not isinstance(row, dict):
                raise UserError(f"{place}: a row is an object {{...}} on one line, not {short(row)}")
            yield place, row

    _explain_types(parsed(), "line")


def _explain_types(rows: Iterable[tuple[str, Mapping[str, Any]]], unit: str) -> None:
    """Raises for the first value whose type is not that of the same field in the rows before it."""
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


def short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _concat(tables: Sequence[pa.Table], files: Sequence[str]) -> pa.Table:
    """The rows of all tables; each must have the columns of the first, with the same types."""
    first = tables[0]
    for table, file in zip(tables[1:], files[1:], strict=True):
        for there, here, whose, other in ((first, table, file, files[0]), (table, first, files[0], file)):
            for column in there.column_names:
                if column not in here.column_names:
                    raise UserError(
                        f"{whose}: has no column {column!r}, which {other} has{nearest(column, here.column_names)}"
                    )
        for column in first.column_names:
            a, b = first.schema.field(column), table.schema.field(column)
            try:
                pa.unify_schemas([pa.schema([a]), pa.schema([b])], promote_options="permissive")
            except (pa.ArrowInvalid, pa.ArrowTypeError):
                raise UserError(f"{file}: column {column!r} is {b.type}, but {a.type} in {files[0]}") from None
    # Permissive: an all-null column of one file, or messages whose fields come in another order, still fit.
    return pa.concat_tables(tables, promote_options="permissive") if len(tables) > 1 else first
