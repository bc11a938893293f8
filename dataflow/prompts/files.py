"""Read files of rows as Arrow tables: Parquet, JSONL, JSON, CSV, TSV, and data sets saved by
`datasets`."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from ..errors import UserError, nearest
from ..json_values import exact_array, joined
from ..untrusted_text import beginning

# Origin


COMPRESSED = ".gz"


@dataclass(frozen=True)
class Origin:
    """The file and the line or row that each row of a table came from, for messages."""

    runs: tuple[tuple[str, int], ...]
    """(file, number of its first row), in order."""
    start: int = 0
    """Number of the first row, if the table is a part of the rows."""
    rows: Sequence[int] | None = None
    """Original row of each row, counted from `start`; None if they are the same."""

    def __call__(self, row: int) -> str:
        """Return the place of a row: `train.jsonl, line 7`, or `train.parquet, row 7` (both count
        from 1)."""
        row = self.start + (row if self.rows is None else self.rows[row])
        file, first = next(run for run in reversed(self.runs) if run[1] <= row)
        if file_kind(Path(file)) == ".jsonl":
            for index, (line, _) in enumerate(lines(Path(file))):
                if index == row - first:
                    return f"{file}, line {line}"
        return f"{file}, row {row - first + 1}"

    def at(self, start: int) -> Origin:
        return replace(self, start=self.start + start)

    def of(self, rows: Sequence[int] | None) -> Origin:
        return replace(self, rows=rows)

    @property
    def files(self) -> str:
        return ", ".join(file for file, _ in self.runs)


def file_kind(path: Path) -> str:
    """Return the suffix that determines the format: `.jsonl` for `train.jsonl` and
    `train.jsonl.gz`."""
    return Path(path.stem).suffix if path.suffix == COMPRESSED else path.suffix


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the non-blank lines of a file with their numbers, from 1."""
    with gzip.open(path) if path.suffix == COMPRESSED else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield number, line


# Damaged files


MAX_NESTING = 100
"""Most levels of nested objects and lists in a row. Parsers are recursive and would crash the
process at some ten thousand levels."""
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]', re.DOTALL)
_CLOSING_QUOTE = re.compile(rb'[^"]*(?:""[^"]*)*"(?!")')
_SURROGATE = re.compile("[\ud800-\udfff]")


def refuse_deep(place: str, text: bytes) -> None:
    """Refuse deeply nested JSON before it is parsed.

    Raises:
        UserError: it has more than MAX_NESTING levels.
    """
    # A fast check that almost all rows pass.
    if text.count(b"[") + text.count(b"{") <= MAX_NESTING:
        return
    level = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        mark = found[0][:1]
        level += (mark in b"[{") - (mark in b"]}")
        if level > MAX_NESTING:
            raise UserError(f"{place}: objects and lists are nested more than {MAX_NESTING} deep")


def refuse_surrogates(key: str, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Refuse lone surrogates (halves of characters), which neither files nor tokenizers can
    represent.

    Args:
        key: the column.
        rows: the place of each row, and the row.

    Raises:
        UserError: a text of this column has one; the message names the row.
    """
    for place, row in rows:
        half = lone_surrogate(row.get(key))
        if half is not None:
            raise UserError(
                f"{place}: {key!r} holds the lone surrogate {half!a}, which is half of a character: the text was cut or decoded "
                "wrongly; repair it, or remove it with text.encode(errors='ignore').decode()"
            )


def lone_surrogate(value: object) -> str | None:
    """Return the first lone surrogate in a text, or in the texts of a list or an object.

    >>> lone_surrogate(["a" + chr(0xD83D)]), lone_surrogate("a\U0001f600") is None
    ('\\ud83d', True)
    """
    if isinstance(value, str):
        found = _SURROGATE.search(value)
        return found[0] if found else None
    inner = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    if not isinstance(inner, list | tuple):
        return None
    return next((half for each in inner if (half := lone_surrogate(each)) is not None), None)


def refuse_foreign(key: str, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Refuse values of a column that JSON cannot represent.

    Raises:
        UserError: names the first such value.
    """
    for place, row in rows:
        value = row.get(key)
        kind = _json_type(value)
        if kind.startswith("a ") and kind not in ("a boolean", "a number", "a list"):
            raise UserError(
                f"{place}: {key!r} is {kind}; a value is text, a number, a boolean, a list, an object or null"
            )


def explain_csv(path: Path, data: bytes, delimiter: str) -> None:
    """Parse a CSV file that pyarrow cannot read, to name the bad row and its line.

    Args:
        data: the bytes of the file.

    Raises:
        UserError: for the first row that is not UTF-8, or has more or fewer fields than the header.
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


def refuse_open_quote(path: Path, data: bytes, delimiter: str) -> None:
    """Refuse CSV that ends inside quotes, because the file was cut off or has an extra quote.

    Args:
        data: the bytes of the file.

    Raises:
        UserError: naming the line with the opening quote.
    """
    opens = re.compile(rb'(?:\A|[\r\n]|%s)"' % re.escape(delimiter.encode()))
    text, at = data.removeprefix(codecs.BOM_UTF8), 0
    while (found := opens.search(text, at)) is not None:
        closed = _CLOSING_QUOTE.match(text, found.end())
        if closed is None:
            line = text.count(b"\n", 0, found.end()) + 1
            began = short(text[found.end() : found.end() + 60].decode(errors="replace"))
            raise UserError(
                f"{path}, line {line}: the file ends inside the quotes that open here ({began}); it was cut off"
            )
        at = closed.end()


def refuse_mixed(name: str, values: Iterable[Any], origin: Callable[[int], str]) -> None:
    """Refuse a column whose values have different types.

    Args:
        name: the column.
        values: one value per row.
        origin: row -> its place, for messages.

    Raises:
        UserError: naming the first value whose type differs from the same field in earlier rows.
    """
    seen: dict[str, tuple[str, int]] = {}

    def visit(name: str, value: Any, row: int) -> None:
        kind = _json_type(value)
        if kind == "null":
            return
        was, first = seen.setdefault(name, (kind, row))
        if was != kind:
            where = origin(first).rpartition(", ")[2]
            raise UserError(
                f"{origin(row)}: {name!r} is {kind} ({short(value)}), but {was} in {where}; one column, one type"
            )
        if isinstance(value, Mapping):
            for key, inner in value.items():
                visit(f"{name}.{key}", inner, row)
        elif isinstance(value, list):
            for inner in value:
                visit(f"{name}[]", inner, row)

    for row, value in enumerate(values):
        visit(name, value, row)


def short(value: Any) -> str:
    """Return a value as JSON, in at most 60 characters."""
    text = _SURROGATE.sub(
        lambda half: ascii(half[0])[1:-1], json.dumps(value, ensure_ascii=False, default=str)
    )
    return beginning(text, 60)


def start_of(text: str) -> str:
    """Return the beginning of a text, in at most 80 characters."""
    return beginning(text, 80)


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


# Files

_ONE_BLOCK = 2**28
"""[bytes] Parse files up to this size as one block. Larger files use blocks of `_BLOCK` bytes, and
each row must fit in a block."""
_BLOCK = 2**26
_ROWS = 8192
"""Rows of JSON to hold as Python objects at a time."""


ACCEPTED_ROWS = "a list of dictionaries, a datasets.Dataset, a pandas DataFrame, or an Arrow table"
"""Types of rows in memory that can be read."""


@runtime_checkable
class HasArrow(Protocol):
    """A `datasets.Dataset`. In this format, slices of it are Arrow tables."""

    def with_format(self, type: str) -> Any: ...


def read_files(paths: Sequence[Path], limit: int | None = None) -> tuple[pa.Table, Origin]:
    """Read all files, one after the other, up to `limit` rows.

    Raises:
        UserError: a file is missing, empty, broken or of an unknown kind, or has other columns than
            the first.
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


def table_of(rows: Any, name: str, limit: int | None = None) -> pa.Table:
    """Convert rows in memory to a table without changing values. Missing keys become null.

    Args:
        rows: dictionaries, a `datasets.Dataset`, a pandas data frame, or an Arrow table.
        name: name of the rows in messages.
        limit: most rows to read.

    Raises:
        UserError: the rows have another type, or none exist, or a value has neither an Arrow nor a
            JSON type.

    >>> table_of([{"a": 1}, {"a": 2, "b": "x"}], "rows").to_pylist()
    [{'a': 1, 'b': None}, {'a': 2, 'b': 'x'}]
    >>> table_of([{"a": {1, 2}}, {"a": object()}], "rows")
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: rows, row 1: 'a' is a set; a value is text, a number, a boolean, a list, an object or null
    """
    if isinstance(rows, pa.Table | pa.RecordBatch):
        table = pa.table(rows).slice(0, limit)
    elif isinstance(rows, HasArrow):
        table = rows.with_format("arrow")[:limit]
    elif is_frame(rows):
        table = _table_of_frame(rows.head(limit) if limit is not None else rows, name)
    elif isinstance(rows, Sequence) and not isinstance(rows, str | bytes):
        table = _table(
            ((f"{name}, row {number}", row) for number, row in enumerate(rows[:limit], start=1)), name
        )
    else:
        raise UserError(f"{name}: rows are {ACCEPTED_ROWS}, not {described(rows)}")
    if not table.num_rows:
        raise UserError(f"{name}: there are no rows")
    return table.replace_schema_metadata(None)


def is_rows(value: object) -> bool:
    """Return whether a value is rows in memory, not a path or a list of paths."""
    if isinstance(value, str | Path):
        return False
    listed = isinstance(value, Sequence) and any(isinstance(row, Mapping) for row in value)
    return listed or isinstance(value, pa.Table | pa.RecordBatch | HasArrow) or is_frame(value)


def is_frame(value: object) -> bool:
    kind = type(value)
    return kind.__name__ == "DataFrame" and kind.__module__.partition(".")[0] == "pandas"


def _table_of_frame(frame: Any, name: str) -> pa.Table:
    """Convert a pandas data frame to a table without its index; missing values become null."""
    columns: dict[str, pa.Array] = {}
    for place, key in enumerate(frame.columns):
        if not isinstance(key, str):
            raise UserError(
                f"{name}: the name of a column is text, not {key!r}; rename it with frame.rename(columns=...)"
            )
        if key in columns:
            raise UserError(f"{name}: there are two columns {key!r}; rename one of them")
        series = frame.iloc[:, place]
        if series.dtype == object:
            values = [None if _is_missing(value) else value for value in series.tolist()]
            columns[key] = _column(
                key, [(f"{name}, row {row}", {key: v}) for row, v in enumerate(values, start=1)]
            )
            continue
        try:
            columns[key] = pa.Array.from_pandas(series)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise UserError(
                f"{name}: column {key!r} of type {series.dtype} cannot be read ({error})"
            ) from None
    return pa.table(columns)


def _is_missing(value: object) -> bool:
    """Return whether pandas counts a value as missing: None, nan, `pandas.NA` or `pandas.NaT`."""
    return (
        value is None
        or (isinstance(value, float) and value != value)
        or type(value).__name__ in ("NAType", "NaTType")
    )


def described(value: object) -> str:
    """Return the type of a value in words.

    >>> described(3), described(pa.array([1]))
    ('an int', 'a pyarrow.Int64Array')
    """
    kind = type(value)
    if kind.__name__ == "DatasetDict" and isinstance(value, Mapping):
        return f"a DatasetDict: give one of its splits ({', '.join(map(repr, value))})"
    name = (
        kind.__name__
        if kind.__module__ == "builtins"
        else f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
    )
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def is_readable(path: Path) -> bool:
    """Return whether a file's name has a known format."""
    return file_kind(path) in _READERS


def _check_file(path: Path) -> None:
    """Refuse missing or unknown files before any file is read."""
    if not path.exists():
        folder = path.parent
        if not folder.is_dir():
            raise UserError(
                f"prompt file {str(path)!r} does not exist: there is no folder {str(folder)!r}"
            )
        there = sorted(p.name for p in folder.iterdir() if is_readable(p))
        hint = nearest(path.name, there) or (
            f"; {str(folder)!r} has {', '.join(there[:5])}" if there else ""
        )
        if path.parent == Path() and not path.suffix:
            hint += "; the id of a data set is OWNER/NAME"
        raise UserError(f"prompt file {str(path)!r} does not exist{hint}")
    if path.is_dir():
        raise UserError(f"{str(path)!r} is a folder; list the files in it, or pass the folder alone")
    if not is_readable(path):
        kind = file_kind(path)
        hint = (
            nearest(kind.lower(), _READERS)
            or f"; these can be read: {', '.join(_READERS)}, and with {COMPRESSED}"
        )
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
    # Drop metadata of other libraries (pandas' index, datasets' features), which does not apply
    # here.
    return table.replace_schema_metadata(None)


def _read_parquet(path: Path, limit: int | None) -> pa.Table:
    import pyarrow.parquet

    try:
        # `read_table` would add columns from folder names.
        with pyarrow.parquet.ParquetFile(path) as file:
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
    """Memory-map an Arrow stream, as `datasets` saves it, or an Arrow file."""
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
    def rows() -> Iterator[tuple[str, Any]]:
        for number, line in itertools.islice(lines(path), limit):
            place = f"{path}, line {number}"
            yield place, _parsed(place, line)

    return _table(rows(), str(path), " on one line")


def _parsed(place: str, line: bytes) -> Any:
    """Parse a line of JSON. pyarrow's own reader changes values, and crashes on some files."""
    refuse_deep(place, line)
    try:
        return json.loads(line.decode().strip())
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 ({error})") from None
    except ValueError as error:
        raise UserError(f"{place}: not JSON ({error}): {start_of(line.decode().strip())}") from None


def _table(rows: Iterable[tuple[str, Any]], source: str, where: str = "") -> pa.Table:
    """Convert rows to a table without changing values.

    Args:
        rows: the place of each row, and the row.
        where: where to expect an object, for messages.
    """
    parts: list[pa.Table] = []
    rows = iter(rows)
    while part := list(itertools.islice(rows, _ROWS)):
        for place, row in part:
            if not isinstance(row, Mapping):
                raise UserError(f"{place}: a row is an object {{...}}{where}, not {short(row)}")
        keys = dict.fromkeys(key for _, row in part for key in row)
        parts.append(
            pa.table({key: _column(key, part) for key in keys}) if keys else _no_columns(len(part))
        )
    if not parts:
        raise UserError(f"{source}: {'the file has' if where else 'there are'} no rows")
    names = list(dict.fromkeys(name for part in parts for name in part.column_names))
    if not names:
        raise UserError(f"{source}: the rows have no columns: each is an empty object {{}}")
    return pa.table(
        {
            name: joined(
                [
                    part.column(name)
                    if name in part.column_names
                    else pa.chunked_array([pa.nulls(len(part))])
                    for part in parts
                ]
            )
            for name in names
        }
    )


def _no_columns(rows: int) -> pa.Table:
    return pa.table({"": pa.nulls(rows)}).select([])


def _column(key: Any, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> pa.Array:
    if not isinstance(key, str) or lone_surrogate(key):
        place = next(place for place, row in rows if key in row)
        raise UserError(f"{place}: the name of a column is text, not {key!a}")
    try:
        return exact_array([row.get(key) for _, row in rows])
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        refuse_surrogates(key, rows)
        refuse_foreign(key, rows)
        raise UserError(f"{rows[0][0]}: column {key!r} cannot be read ({error})") from None


def _read_json(path: Path, limit: int | None) -> pa.Table:
    """Read a JSON array of objects, or concatenated objects."""
    data = _bytes(path)
    refuse_deep(str(path), data)
    try:
        # Accepts a byte order mark.
        text = data.decode("utf-8-sig")
        array = text.lstrip().startswith("[")
        rows = itertools.islice((_elements if array else _objects)(text), limit)
        return _table(
            ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1)), str(path)
        )
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None


_BLANK = re.compile(r"\s*")
_decode = json.JSONDecoder().raw_decode


def _after_blank(text: str, at: int) -> int:
    return _BLANK.match(text, at).end()  # type: ignore[union-attr]  # it always matches


def _objects(text: str) -> Iterator[Any]:
    at = _after_blank(text, 0)
    while at < len(text):
        value, end = _decode(text, at)
        yield value
        at = _after_blank(text, end)


def _elements(text: str) -> Iterator[Any]:
    at = _after_blank(text, _after_blank(text, 0) + 1)
    while not text.startswith("]", at):
        element, end = _decode(text, at)
        yield element
        at = _after_blank(text, end)
        if text.startswith(",", at):
            at = _after_blank(text, at + 1)
        elif not text.startswith("]", at):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
    if (end := _after_blank(text, at + 1)) < len(text):
        raise json.JSONDecodeError("Text after the array", text, end)


def _read_csv(path: Path, limit: int | None, delimiter: str = ",") -> pa.Table:
    """Read CSV with a header. CSV has no types, so every column is text."""
    import pyarrow.csv

    data = _bytes(path)
    head = data[: 2**20].decode("utf-8-sig", errors="replace")
    header = next(csv.reader(io.StringIO(head, newline=""), delimiter=delimiter), [])
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{path}: the header has {twice!r} twice ({', '.join(header)})")
    if len(header) == 1 and ";" in header[0]:
        raise UserError(
            f"{path}: the header is {header[0]!r}; fields are separated by {delimiter!r}, not by ';'"
        )
    # pyarrow could read all rows after an open quote as one field.
    refuse_open_quote(path, data, delimiter)
    try:
        table = pyarrow.csv.read_csv(
            pa.BufferReader(data.removeprefix(codecs.BOM_UTF8)),
            pyarrow.csv.ReadOptions(block_size=max(len(data), 1) if len(data) < _ONE_BLOCK else _BLOCK),
            pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=False
            ),
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
    first = tables[0]
    for table, file in zip(tables[1:], files[1:], strict=True):
        for there, here, whose, other in ((first, table, file, files[0]), (table, first, files[0], file)):
            for column in there.column_names:
                if column not in here.column_names:
                    raise UserError(
                        f"{whose}: has no column {column!r}, which {other} has{nearest(column, here.column_names)}"
                    )
    if len(tables) == 1:
        return first
    columns: dict[str, pa.ChunkedArray] = {}
    for column in first.column_names:
        try:
            columns[column] = joined([table.column(column) for table in tables])
        except (pa.ArrowException, TypeError, ValueError):
            kinds = {
                file: table.schema.field(column).type for file, table in zip(files, tables, strict=True)
            }
            other = next(file for file in files if kinds[file] != kinds[files[0]])
            raise UserError(
                f"{other}: column {column!r} is {kinds[other]}, but {kinds[files[0]]} in {files[0]}"
            ) from None
    return pa.table(columns)
