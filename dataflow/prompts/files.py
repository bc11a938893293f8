"""Files of rows as Arrow tables: Parquet, JSONL, JSON, CSV, and data sets that `datasets` saved to disk."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..errors import UserError, nearest
from .damage import explain_csv, explain_json, explain_types, refuse_deep, refuse_large_integers, short
from .origin import COMPRESSED, Origin, file_kind, lines

_ONE_BLOCK = 2**28
"""Bytes up to which a file is parsed as one block. A row must fit into a block: in larger files, one of `_BLOCK` bytes."""
_BLOCK = 2**26


def read_files(paths: Sequence[Path], limit: int | None = None) -> tuple[pa.Table, Origin]:
    """The rows of all files, one file after the other; at most `limit` rows.

    Raises:
        UserError: a file is missing, empty, broken, of an unknown kind, or has other columns than the first.
    """
    if not paths:
        raise UserError("no prompt file was given: the list of paths is empty")
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
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        explain_types(((f"{name}, row {i}", row) for i, row in enumerate(rows, start=1)), "row")
        raise UserError(f"{name}: {error}") from None


def is_readable(path: Path) -> bool:
    """Whether a file is of a kind that can be read, by its name."""
    return file_kind(path) in _READERS


def _check_file(path: Path) -> None:
    """Refuse what is not a file of a known kind, before any of the files is read."""
    if not path.exists():
        folder = path.parent
        if not folder.is_dir():
            raise UserError(f"prompt file {str(path)!r} does not exist: there is no folder {str(folder)!r}")
        there = sorted(p.name for p in folder.iterdir() if is_readable(p))
        hint = nearest(path.name, there) or (f"; {str(folder)!r} has {', '.join(there[:5])}" if there else "")
        if path.parent == Path() and not path.suffix:
            hint += "; the id of a data set is OWNER/NAME"
        raise UserError(f"prompt file {str(path)!r} does not exist{hint}")
    if path.is_dir():
        raise UserError(f"{str(path)!r} is a folder; a list of paths names the files in it, a folder is given alone")
    if not is_readable(path):
        kind = file_kind(path)
        hint = nearest(kind.lower(), _READERS) or f"; these can be read: {', '.join(_READERS)}, and with {COMPRESSED}"
        raise UserError(f"{path}: unknown kind of file {kind!r}{hint}")
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the file is empty")


def _read(path: Path, limit: int | None) -> pa.Table:
    try:
        table = _READERS[file_kind(path)](path, limit)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: not a gzip file that can be read ({error})") from None
    except OSError as error:  # no permission, a broken disk
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
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


def _read_arrow(path: Path, limit: int | None) -> pa.Table:
    """An Arrow stream, as `datasets` saves it, or an Arrow file; mapped into memory, not read."""
    source = pa.memory_map(str(path))
    try:
        try:
            table = pa.ipc.open_stream(source).read_all()
        except pa.ArrowInvalid:
            table = pa.ipc.open_file(source).read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: not an Arrow file that can be read ({error})") from None
    return table if limit is None else table.slice(0, limit)


def _read_json_lines(path: Path, limit: int | None) -> pa.Table:
    for number, line in itertools.islice(lines(path), limit):
        refuse_deep(f"{path}, line {number}", line)
    try:
        if limit is not None:
            table = _parse_json(b"".join(line for _, line in itertools.islice(lines(path), limit)))
        elif path.suffix == COMPRESSED:
            table = _parse_json(gzip.decompress(path.read_bytes()))
        else:
            table = _parse_json(path)
        if any(_has_floats(column.type) for column in table.schema):
            for number, line in itertools.islice(lines(path), limit):
                refuse_large_integers(f"{path}, line {number}", line.decode())
        return table
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        explain_json(path)
        raise UserError(f"{path}: {error}") from None


def _parse_json(source: Path | bytes) -> pa.Table:
    import pyarrow.json

    size = len(source) if isinstance(source, bytes) else source.stat().st_size
    options = pyarrow.json.ReadOptions(block_size=max(size, 1) if size < _ONE_BLOCK else _BLOCK)

    def read(schema: pa.Schema | None) -> pa.Table:
        data = pa.BufferReader(source) if isinstance(source, bytes) else str(source)
        return pyarrow.json.read_json(data, options, pyarrow.json.ParseOptions(explicit_schema=schema))

    table = read(None)
    # pyarrow makes timestamps of strings that look like dates; an answer of "2024-01-01" is text.
    schema = pa.schema([f.with_type(_without_timestamps(f.type)) for f in table.schema])
    if not schema.equals(table.schema):
        table = read(schema)
    table.validate(full=True)  # UTF-8 is not checked by the parser
    return table


def _has_floats(kind: pa.DataType) -> bool:
    """Whether a type has a part that is a floating-point number, which is what pyarrow makes of an integer beyond 64 bits."""
    return pa.types.is_floating(kind) or any(_has_floats(kind.field(i).type) for i in range(kind.num_fields))


def _without_timestamps(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_without_timestamps(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(_without_timestamps(f.type)) for f in kind])
    return kind


def _read_json(path: Path, limit: int | None) -> pa.Table:
    """JSON lines, or one array of objects."""
    array = next((line.lstrip().startswith(b"[") for _, line in lines(path)), False)
    if not array:
        return _read_json_lines(path, limit)
    try:
        data = _bytes(path)
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    refuse_deep(str(path), data)
    try:
        rows = list(itertools.islice(_objects(text), limit))
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    for number, row in enumerate(rows, start=1):
        if not row.startswith("{"):
            raise UserError(f"{path}, row {number}: a row is an object {{...}}, not {short(json.loads(row))}")
    if not rows:
        raise UserError(f"{path}: there are no rows")
    try:
        table = _parse_json("\n".join(rows).encode())
        if any(_has_floats(column.type) for column in table.schema):
            for number, row in enumerate(rows, start=1):
                refuse_large_integers(f"{path}, row {number}", row)
        return table
    except pa.ArrowInvalid as error:
        explain_types(((f"{path}, row {i}", json.loads(row)) for i, row in enumerate(rows, start=1)), "row")
        raise UserError(f"{path}: {error}") from None


def _objects(text: str) -> Iterator[str]:
    """The elements of a JSON array, each on one line: none of them stays a Python object."""
    decode, blank = json.JSONDecoder(parse_int=str).raw_decode, re.compile(r"\s*")

    def after_blank(at: int) -> int:
        return blank.match(text, at).end()  # type: ignore[union-attr]  # it matches no characters, too

    at = after_blank(after_blank(0) + 1)
    while not text.startswith("]", at):
        _, end = decode(text, at)
        yield text[at:end].replace("\n", " ").replace("\r", " ")
        at = after_blank(end)
        if text.startswith(",", at):
            at = after_blank(at + 1)
        elif not text.startswith("]", at):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
    if (end := after_blank(at + 1)) < len(text):
        raise json.JSONDecodeError("Text after the array", text, end)


def _read_csv(path: Path, limit: int | None, delimiter: str = ",") -> pa.Table:
    """CSV with a header. It has no types: every column is text."""
    import pyarrow.csv

    data = _bytes(path)
    head = data[: 2**20].decode("utf-8-sig", errors="replace")
    header = next(csv.reader(io.StringIO(head, newline=""), delimiter=delimiter), [])
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{path}: the header has {twice!r} twice ({', '.join(header)})")
    if len(header) == 1 and ";" in header[0]:
        raise UserError(f"{path}: the header is {header[0]!r}; fields are parted by {delimiter!r}, not by ';'")
    try:
        table = pyarrow.csv.read_csv(
            pa.BufferReader(data.removeprefix(codecs.BOM_UTF8)),
            pyarrow.csv.ReadOptions(block_size=max(len(data), 1) if len(data) < _ONE_BLOCK else _BLOCK),
            pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=False),
        )
    except pa.ArrowInvalid as error:
        explain_csv(path, data, delimiter)
        raise UserError(f"{path}: {error}") from None
    return table if limit is None else table.slice(0, limit)


def _read_tsv(path: Path, limit: int | None) -> pa.Table:
    return _read_csv(path, limit, "\t")


def _bytes(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == COMPRESSED else data


_READERS: dict[str, Callable[[Path, int | None], pa.Table]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".arrow": _read_arrow,
}


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
