"""Read rows from files, folders, Hugging Face data sets or memory into Arrow tables.

Files may be Parquet, JSONL, JSON, CSV or TSV files, or data sets saved by `datasets`.
"""

from __future__ import annotations

import codecs
import csv
import functools
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import UserError, nearest
from ..json_values import CANNOT_HOLD, exact_array, joined
from ..untrusted_text import beginning

# Rows


_COMPRESSED = ".gz"


@dataclass(frozen=True)
class Rows:
    """Rows of a source, with the file and line of each for error messages."""

    name: str
    table: pa.Table
    runs: tuple[tuple[str, int], ...]
    """(file, index of its first row) of each file, in order."""
    choices: tuple[str, ...] = ()
    """Defaults that were used, such as `subset 'main' of main, socratic`."""
    start: int = 0
    """Index of the table's first row among all rows."""

    def place(self, row: int) -> str:
        """Return the place of a row, such as `train.jsonl, line 7`, counted from 1."""
        row += self.start
        file, first = next(run for run in reversed(self.runs) if run[1] <= row)
        if _kind(Path(file)) == ".jsonl":
            # Count lines, because blank lines are not rows.
            for line, _ in itertools.islice(_lines(Path(file)), row - first, None):
                return f"{file}, line {line}"
        return f"{file}, row {row - first + 1}"

    @property
    def files(self) -> str:
        return ", ".join(file for file, _ in self.runs)

    def error(self, problem: str, row: int | None = None) -> UserError:
        """Return an error that names the row or, by default, the files."""
        return UserError(f"{self.files if row is None else self.place(row)}: {problem}")

    def part(self, start: int, length: int) -> Rows:
        return replace(self, table=self.table.slice(start, length), start=self.start + start)

    def column(self, path: str, role: str = "column") -> pa.ChunkedArray:
        """Return a column or, for a path with dots, a field of a struct column."""
        table = self.table
        if path in table.column_names:
            return table.column(path)
        name, *fields = path.split(".")
        if name not in table.column_names:
            hint = nearest(name, table.column_names) or f"; it has {', '.join(table.column_names)}"
            raise self.error(f"there is no column {path!r} ({role}={path!r}){hint}")
        column = table.column(name)
        for inner in fields:
            inside = [f.name for f in column.type] if pa.types.is_struct(column.type) else []
            if inner not in inside:
                has = f"it has {', '.join(inside)}" if inside else f"it is {column.type}"
                hint = nearest(inner, inside) or f"; {has}"
                raise self.error(f"column {name!r} has no field {inner!r} ({role}={path!r}){hint}")
            options = pc.StructFieldOptions([inside.index(inner)])
            column = pc.call_function("struct_field", [column], options)
        return column


def _kind(path: Path) -> str:
    """Return the suffix of the format: `.jsonl` for `train.jsonl` and `train.jsonl.gz`."""
    return Path(path.stem).suffix if path.suffix == _COMPRESSED else path.suffix


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) for each line that is not blank. Numbers count from 1."""
    with gzip.open(path) if path.suffix == _COMPRESSED else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield number, line


def read_rows(
    source: str | Path | Sequence[str | Path], subset: str | None, split: str | None, limit: int | None
) -> Rows:
    """Read up to `limit` rows. `source` is a file, a list of files, a folder, or a data set's
    Hugging Face id. Folders and data sets may have subsets and splits."""
    alone = isinstance(source, (str, Path))
    paths: Any = [source] if alone else source
    if not isinstance(paths, Sequence) or not all(isinstance(path, str | Path) for path in paths):
        raise UserError(
            f"prompts are read from a path, a list of paths, or the id of a data set, not from {_described(source)}; "
            f"Prompts.from_rows takes {_ACCEPTED_ROWS}"
        )
    paths = [Path(path).expanduser() for path in paths]
    if alone and paths[0].is_dir():
        files, found, choices = _find_files(paths[0], subset, split)
        name = paths[0].resolve().name
        rows = _read_files(f"{name}_{found}" if found else name, files, limit)
        return replace(rows, choices=choices)
    if isinstance(source, str) and is_hub_id(source):
        return _read_hub(source, subset, split, limit)
    for setting, value in (("subset", subset), ("split", split)):
        if value is not None:
            raise UserError(
                f"{setting}={value!r} is for folders and Hugging Face ids, and {str(source)!r} is files"
            )
    names = list(dict.fromkeys(Path(path.name).stem.split(".")[0] for path in paths))
    name = "+".join(names) if len(names) <= 3 else f"{names[0]}+{len(names) - 1}"
    return _read_files(name, paths, limit)


# Rows in memory


_ACCEPTED_ROWS = "a list of dictionaries, a datasets.Dataset, a pandas DataFrame, or an Arrow table"


def rows_in_memory(rows: Any, name: str, limit: int | None = None) -> Rows:
    """Convert rows in memory to a table without changing values. Missing keys become null.

    Raises:
        UserError: the rows are not `_ACCEPTED_ROWS`, there are none, or a value has no type.

    >>> rows_in_memory([{"a": 1}, {"a": 2, "b": "x"}], "rows").table.to_pylist()
    [{'a': 1, 'b': None}, {'a': 2, 'b': 'x'}]
    >>> rows_in_memory([{"a": {1, 2}}, {"a": object()}], "rows")
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: rows, row 1: 'a' is a set; a value is text, a number, a boolean, a list, an object or null
    """
    if isinstance(rows, pa.Table | pa.RecordBatch):
        table = pa.table(rows).slice(0, limit)
    # A `datasets.Dataset`. The library may not be installed, so check the method.
    elif hasattr(rows, "with_format"):
        table = rows.with_format("arrow")[:limit]
    elif _is_frame(rows):
        table = _table_of_frame(rows.head(limit) if limit is not None else rows, name)
    elif isinstance(rows, Sequence) and not isinstance(rows, str | bytes):
        table = _table(_numbered(rows[:limit], name), name)
    else:
        raise UserError(f"{name}: rows are {_ACCEPTED_ROWS}, not {_described(rows)}")
    if not table.num_rows:
        raise UserError(f"{name}: there are no rows")
    return Rows(name, table.replace_schema_metadata(None), ((name, 0),))


def is_rows(value: object) -> bool:
    """Return whether a value contains rows. If not, it is a path or a list of paths."""
    if isinstance(value, str | Path):
        return False
    listed = isinstance(value, Sequence) and any(isinstance(row, Mapping) for row in value)
    is_table = isinstance(value, pa.Table | pa.RecordBatch) or hasattr(value, "with_format")
    return listed or is_table or _is_frame(value)


def _is_frame(value: object) -> bool:
    kind = type(value)
    # Compare names, because pandas may not be installed.
    return kind.__name__ == "DataFrame" and kind.__module__.partition(".")[0] == "pandas"


def _table_of_frame(frame: Any, name: str) -> pa.Table:
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
            columns[key] = _column(key, list(_numbered([{key: value} for value in values], name)))
            continue
        try:
            columns[key] = pa.Array.from_pandas(series)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise UserError(
                f"{name}: column {key!r} of type {series.dtype} cannot be read ({error})"
            ) from None
    return pa.table(columns)


def _is_missing(value: object) -> bool:
    is_nan = isinstance(value, float) and value != value
    return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType")


def _described(value: object) -> str:
    """Return the type of a value in words.

    >>> _described(3), _described(pa.array([1]))
    ('an int', 'a pyarrow.Int64Array')
    """
    kind = type(value)
    if kind.__name__ == "DatasetDict" and isinstance(value, Mapping):
        return f"a DatasetDict: give one of its splits ({', '.join(map(repr, value))})"
    package = "" if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}."
    name = f"{package}{kind.__name__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


# Folders


_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Maps each split to the words that mark it in names of files and folders."""

_OTHER = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


def _find_files(
    folder: Path, subset: str | None, split: str | None
) -> tuple[list[Path], str | None, tuple[str, ...]]:
    """Find the files of one split in a folder, sorted by name.

    Words in the names of files (`train-00000-of-00002.parquet`) or folders (`test/`) identify
    splits. Other folders with files are subsets. With several splits, the default is `train`.

    Returns:
        (files, split, defaults that were used). The split is None if no file names one.
    """
    subsets = _subsets(folder)
    choices: list[str] = []
    if subsets:
        subset, choice = choose("subset", list(subsets), subset, str(folder), ("default", "main"))
        choices += choice
        files = subsets[subset]
    elif subset is not None:
        raise UserError(f"{folder}: has no subsets (subset={subset!r})")
    else:
        files = _files(folder)
    splits: dict[str | None, list[Path]] = {}
    for file in files:
        splits.setdefault(_split_of(file.relative_to(folder)), []).append(file)
    named = [name for name in splits if name is not None]
    if split is not None or len(splits) > 1:
        if not named:
            raise UserError(
                f"{folder}: no file is named after a split (split={split!r}); it has {_names(files)}"
            )
        split, choice = choose("split", named, split, str(folder), ("train",))
        choices += choice
        if None in splits:
            choices.append(f"files without a split in their name are not read: {_names(splits[None])}")
        files = splits[split]
    if len(set(map(_kind, files))) > 1:
        raise UserError(
            f"{folder}: holds files of several kinds ({_names(files)}); pass a list of files instead of the folder"
        )
    return files, split or next(iter(splits)), tuple(choices)


def choose(
    what: str, known: Sequence[str], wanted: str | None, where: str, usual: Sequence[str]
) -> tuple[str, list[str]]:
    """Choose the subset or split to read: `wanted`, else the only one, else a `usual` one.

    Also return a list with the description of the default, if it was used.

    >>> choose("split", ["train", "test"], None, "sums", ["train"])
    ('train', ["split 'train' of train, test"])
    >>> choose("split", ["train", "test"], "tset", "sums", ["train"])
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: sums: there is no split 'tset'; did you mean 'test'?
    """
    if wanted is not None:
        if wanted not in known:
            hint = nearest(wanted, known) or f"; it has {', '.join(known)}"
            raise UserError(f"{where}: there is no {what} {wanted!r}{hint}")
        return wanted, []
    if len(known) == 1:
        return known[0], []
    for name in usual:
        if name in known:
            return name, [f"{what} {name!r} of {', '.join(known)}"]
    raise UserError(
        f"{where}: has the {what}s {', '.join(known)}; choose one, such as {what}={known[0]!r}"
    )


def _is_data(path: Path) -> bool:
    return path.is_file() and _kind(path) in _READERS and path.name not in _OTHER


def _files(folder: Path, above: tuple[Path, ...] = ()) -> list[Path]:
    """Return the readable files in a folder, and in subfolders named `data` or after a split."""
    above = (*above, folder.resolve())
    found = [path for path in folder.iterdir() if _is_data(path)]
    for inner in (p for p in folder.iterdir() if p.is_dir() and p.resolve() not in above):
        if inner.name == "data" or _split_of(Path(inner.name)):
            found += _files(inner, above)
    if not found:
        raise UserError(f"{str(folder)!r} is a folder without readable prompt files")
    return sorted(found)


def _subsets(folder: Path) -> Mapping[str, list[Path]]:
    """Map each subset to its files. A folder without readable files has subfolders as subsets."""
    inner = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    are_splits = any(p.name == "data" or _split_of(Path(p.name)) for p in inner)
    if are_splits or any(map(_is_data, folder.iterdir())):
        return {}
    return {path.name: _files(path) for path in inner if any(map(_is_data, path.rglob("*")))}


def _split_of(path: Path) -> str | None:
    """Return the split that a path names, or None. The file's name takes precedence over folders.

    >>> _split_of(Path("data/train-00000-of-00002.parquet")), _split_of(Path("dev/a.jsonl")), _split_of(Path("a.jsonl"))
    ('train', 'validation', None)
    """
    for part in reversed(path.parts):
        # Match whole words, because `latest.jsonl` is not a test split.
        words = re.split(r"[^a-z]+", part.lower())
        for split, names in _SPLITS.items():
            if any(name in words for name in names):
                return split
    return None


def _names(files: Sequence[Path]) -> str:
    return ", ".join(file.name for file in files[:5]) + (", ..." if len(files) > 5 else "")


# Hugging Face hub


_TIMEOUT_S = 10.0
"""[s] Time limit for a request to the hub about a data set."""


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form of a data set's id: OWNER/NAME.

    >>> is_hub_id("openai/gsm8k"), is_hub_id("data/train.jsonl"), is_hub_id("train.parquet")
    (True, False, False)
    """
    # If a local folder OWNER exists, the name is a path.
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is None or Path(name).parent.is_dir():
        return False
    return re.search(r"\.(parquet|jsonl?|csv|tsv|arrow|gz)$", name) is None


def _read_hub(name: str, subset: str | None, split: str | None, limit: int | None) -> Rows:
    try:
        import datasets
        import datasets.config
    except ModuleNotFoundError:
        raise UserError(
            f"{name!r} is not a file or folder; to read it from the Hugging Face hub, install the library datasets: "
            "pip install 'weft[datasets]'"
        ) from None
    source = _cached(name)
    if source is None:
        _check_reachable(name, Path(datasets.config.HF_DATASETS_CACHE))
        source = name

    def ask(call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        try:
            return call(source, *arguments, **more)
        except (OSError, ValueError, RuntimeError) as error:  # no network, or unreadable files
            raise UserError(f"data set {name!r}: {_first_line(error)}") from None

    subsets = ask(datasets.get_dataset_config_names)
    subset, chosen = choose("subset", subsets, subset, name, ("default", "main"))
    splits = ask(datasets.get_dataset_split_names, subset)
    split, also = choose("split", splits, split, name, ("train",))
    table = ask(datasets.load_dataset, subset, split=split).with_format("arrow")[:].slice(0, limit)
    shown = f"{name} ({subset}, {split})"
    if not len(table):
        raise UserError(f"{shown}: there are no rows")
    table = table.replace_schema_metadata(None)
    return Rows(f"{name.partition('/')[2]}_{split}", table, ((shown, 0),), (*chosen, *also))


def _cached(name: str) -> str | None:
    """Return a data set's folder in the local Hugging Face cache; None if its data is not
    cached."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = huggingface_hub.snapshot_download(name, repo_type="dataset", local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    files = (path.name for path in Path(folder).rglob("*") if path.is_file())
    is_whole = any(file not in ("README.md", "LICENSE") and not file.startswith(".") for file in files)
    return folder if is_whole else None


def _check_reachable(name: str, cache: Path) -> None:
    """Make one request to the hub, to find a missing network without the library's retries."""
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=_TIMEOUT_S)
    except GatedRepoError as error:
        raise UserError(
            f"data set {name!r} is gated; accept its terms on its page, then run `hf auth login`: {_first_line(error)}"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{name!r} is not a file or folder, and not a data set on the Hugging Face hub"
        ) from None
    except Exception as error:  # such as no network, offline mode or a timeout; classes vary
        # `datasets` can read its own cache without the network.
        if (cache / name.replace("/", "___")).is_dir():
            return
        raise UserError(
            f"{name!r} is not a file or folder, and not a data set in the local Hugging Face cache; the hub cannot be "
            f"reached ({_first_line(error)}); on a machine with network access, run `hf download --repo-type dataset {name}`"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


# Files

_ONE_BLOCK = 2**28
"""[bytes] Parse files up to this size as one block. In larger files, parsed in blocks of `_BLOCK`
bytes, each row must fit in a block."""
_BLOCK = 2**26
_ROWS = 8192
"""Number of JSON rows to hold as Python objects at the same time."""


def _read_files(name: str, paths: Sequence[Path], limit: int | None) -> Rows:
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
    return Rows(name, _concat(tables, [file for file, _ in runs]), tuple(runs))


def _check_file(path: Path) -> None:
    if not path.exists():
        folder = path.parent
        if not folder.is_dir():
            raise UserError(
                f"prompt file {str(path)!r} does not exist: there is no folder {str(folder)!r}"
            )
        there = sorted(p.name for p in folder.iterdir() if _kind(p) in _READERS)
        others = f"; {str(folder)!r} has {', '.join(there[:5])}" if there else ""
        hint = nearest(path.name, there) or others
        if path.parent == Path() and not path.suffix:
            hint += "; the id of a data set is OWNER/NAME"
        raise UserError(f"prompt file {str(path)!r} does not exist{hint}")
    if path.is_dir():
        raise UserError(f"{str(path)!r} is a folder; list the files in it, or pass the folder alone")
    kind = _kind(path)
    if kind not in _READERS:
        known = f"; these can be read: {', '.join(_READERS)}, and with {_COMPRESSED}"
        raise UserError(
            f"{path}: unknown kind of file {kind!r}{nearest(kind.lower(), _READERS) or known}"
        )
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the file is empty")


def _read(path: Path, limit: int | None) -> pa.Table:
    try:
        table = _READERS[_kind(path)](path, limit)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: not a gzip file that can be read ({error})") from None
    except OSError as error:  # such as a missing permission or a broken disk
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    if table.num_rows == 0:
        raise UserError(f"{path}: the file has no rows")
    # Drop metadata of other libraries, such as pandas' index.
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
    """Memory-map an Arrow stream, which `datasets` writes, or an Arrow file."""
    source = pa.memory_map(str(path))
    try:
        try:
            table = pa.ipc.open_stream(source).read_all()
        except pa.ArrowInvalid:
            table = pa.ipc.open_file(source).read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: not an Arrow file that can be read ({error})") from None
    return table.slice(0, limit)


def _read_json_lines(path: Path, limit: int | None) -> pa.Table:
    def rows() -> Iterator[tuple[str, Any]]:
        for number, line in itertools.islice(_lines(path), limit):
            place = f"{path}, line {number}"
            yield place, _parsed(place, line)

    return _table(rows(), str(path), " on one line")


def _parsed(place: str, line: bytes) -> Any:
    """Parse a line of JSON. pyarrow's JSON reader changes values, and crashes on some files."""
    _refuse_deep(place, line)
    try:
        return json.loads(line.decode().strip())
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 ({error})") from None
    except ValueError as error:
        raise UserError(f"{place}: not JSON ({error}): {start_of(line.decode().strip())}") from None


def _table(rows: Iterable[tuple[str, Any]], source: str, where: str = "") -> pa.Table:
    """Convert rows, as pairs (place, value), to a table without changing values. `where`, for
    example " on one line", says in an error where the source must have an object; it is empty for
    rows that are not lines of a file."""
    parts: list[pa.Table] = []
    rows = iter(rows)
    while part := list(itertools.islice(rows, _ROWS)):
        for place, row in part:
            if not isinstance(row, Mapping):
                raise UserError(f"{place}: a row is an object {{...}}{where}, not {short(row)}")
        keys = dict.fromkeys(key for _, row in part for key in row)
        # Keep rows without keys.
        without_columns = pa.table({"": pa.nulls(len(part))}).select([])
        parts.append(pa.table({key: _column(key, part) for key in keys}) if keys else without_columns)
    if not parts:
        raise UserError(f"{source}: {'the file has' if where else 'there are'} no rows")
    names = list(dict.fromkeys(name for part in parts for name in part.column_names))
    if not names:
        raise UserError(f"{source}: the rows have no columns: each is an empty object {{}}")

    def column(part: pa.Table, name: str) -> pa.ChunkedArray:
        has = name in part.column_names
        return part.column(name) if has else pa.chunked_array([pa.nulls(len(part))])

    return pa.table({name: joined([column(part, name) for part in parts]) for name in names})


def _numbered(rows: Iterable[Any], name: object) -> Iterator[tuple[str, Any]]:
    return ((f"{name}, row {number}", row) for number, row in enumerate(rows, start=1))


def _column(key: Any, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> pa.Array:
    if not isinstance(key, str) or lone_surrogate(key):
        place = next(place for place, row in rows if key in row)
        raise UserError(f"{place}: the name of a column is text, not {key!a}")
    try:
        return exact_array([row.get(key) for _, row in rows])
    except CANNOT_HOLD as error:
        _refuse_values(key, rows)
        raise UserError(f"{rows[0][0]}: column {key!r} cannot be read ({error})") from None


def _read_json(path: Path, limit: int | None) -> pa.Table:
    data = _bytes(path)
    _refuse_deep(str(path), data)
    try:
        # `utf-8-sig` accepts a byte order mark.
        rows = itertools.islice(_values(data.decode("utf-8-sig")), limit)
        return _table(_numbered(rows, path), str(path))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None


_BLANK = re.compile(r"\s*")
_decode = json.JSONDecoder().raw_decode


def _after_blank(text: str, at: int) -> int:
    return _BLANK.match(text, at).end()  # type: ignore[union-attr]  # it always matches


def _values(text: str) -> Iterator[Any]:
    at = _after_blank(text, 0)
    is_array = text.startswith("[", at)
    at = _after_blank(text, at + is_array)
    while not text.startswith("]", at) if is_array else at < len(text):
        value, end = _decode(text, at)
        yield value
        at = _after_blank(text, end)
        if is_array and text.startswith(",", at):
            at = _after_blank(text, at + 1)
        elif is_array and not text.startswith("]", at):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
    if is_array and (end := _after_blank(text, at + 1)) < len(text):
        raise json.JSONDecodeError("Text after the array", text, end)


def _read_csv(path: Path, limit: int | None, delimiter: str = ",") -> pa.Table:
    """Read a CSV file with a header. All columns are text."""
    import pyarrow.csv

    data = _bytes(path)
    head = data[: 2**20].decode("utf-8-sig", errors="replace")
    header = next(csv.reader(io.StringIO(head, newline=""), delimiter=delimiter), [])
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{path}: the header has {twice!r} twice ({', '.join(header)})")
    # With semicolons as separators, the file would have a single column.
    if len(header) == 1 and ";" in header[0]:
        raise UserError(
            f"{path}: the header is {header[0]!r}; fields are separated by {delimiter!r}, not by ';'"
        )
    # pyarrow could read all rows after an open quote as one field.
    _refuse_open_quote(path, data, delimiter)
    types = dict.fromkeys(header, pa.string())
    try:
        table = pyarrow.csv.read_csv(
            pa.BufferReader(data.removeprefix(codecs.BOM_UTF8)),
            pyarrow.csv.ReadOptions(block_size=max(len(data), 1) if len(data) < _ONE_BLOCK else _BLOCK),
            pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=False),
        )
    except pa.ArrowInvalid as error:
        _explain_csv(path, data, delimiter)
        raise UserError(f"{path}: {error}") from None
    return table.slice(0, limit)


def _bytes(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == _COMPRESSED else data


_READERS: dict[str, Callable[[Path, int | None], pa.Table]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": functools.partial(_read_csv, delimiter="\t"),
    ".arrow": _read_arrow,
}


def _concat(tables: Sequence[pa.Table], files: Sequence[str]) -> pa.Table:
    first = tables[0]
    for table, file in zip(tables[1:], files[1:], strict=True):
        for there, here, whose, other in (
            (first, table, file, files[0]),
            (table, first, files[0], file),
        ):
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
        except CANNOT_HOLD:
            kinds = [table.schema.field(column).type for table in tables]
            file, kind = next(pair for pair in zip(files, kinds, strict=True) if pair[1] != kinds[0])
            raise UserError(
                f"{file}: column {column!r} is {kind}, but {kinds[0]} in {files[0]}"
            ) from None
    return pa.table(columns)


# Damaged files


MAX_NESTING = 100
"""Maximum nesting depth of objects and lists in a row. Recursive parsers would crash the process at
tens of thousands of levels."""
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]', re.DOTALL)
_CLOSING_QUOTE = re.compile(rb'[^"]*(?:""[^"]*)*"(?!")')
_SURROGATE = re.compile("[\ud800-\udfff]")


def _refuse_deep(place: str, text: bytes) -> None:
    """Raise a UserError if unparsed JSON is nested more than MAX_NESTING levels deep."""
    # Almost all rows pass this fast check.
    if text.count(b"[") + text.count(b"{") <= MAX_NESTING:
        return
    level = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        mark = found[0][:1]
        level += (mark in b"[{") - (mark in b"]}")
        if level > MAX_NESTING:
            raise UserError(f"{place}: objects and lists are nested more than {MAX_NESTING} deep")


def _refuse_values(key: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise a UserError for lone surrogates and for values without a JSON form."""
    for place, row in rows:
        half = lone_surrogate(row.get(key))
        if half is not None:
            raise UserError(
                f"{place}: {key!r} holds the lone surrogate {half!a}, which is half of a character: the text was cut or decoded "
                "wrongly; repair it, or remove it with text.encode(errors='ignore').decode()"
            )
    for place, row in rows:
        kind = _json_type(row.get(key))
        if kind.startswith("a ") and kind not in ("a boolean", "a number", "a list"):
            raise UserError(
                f"{place}: {key!r} is {kind}; a value is text, a number, a boolean, a list, an object or null"
            )


def lone_surrogate(value: object) -> str | None:
    """Return the first lone surrogate (half a character) in a text, list or object, or None.

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


def _explain_csv(path: Path, data: bytes, delimiter: str) -> None:
    """Raise a UserError for the first invalid row of a CSV file that pyarrow cannot read."""
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


def _refuse_open_quote(path: Path, data: bytes, delimiter: str) -> None:
    """Raise a UserError if CSV ends inside quotes: it is cut off or has an extra quote."""
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


def refuse_mixed(name: str, rows: Rows) -> None:
    """Raise a UserError if a field has values of different types in different rows."""
    seen: dict[str, tuple[str, int]] = {}

    def visit(name: str, value: Any, row: int) -> None:
        kind = _json_type(value)
        if kind == "null":
            return
        was, first = seen.setdefault(name, (kind, row))
        if was != kind:
            where = rows.place(first).rpartition(", ")[2]
            raise rows.error(
                f"{name!r} is {kind} ({short(value)}), but {was} in {where}; one column, one type", row
            )
        if isinstance(value, Mapping):
            for key, inner in value.items():
                visit(f"{name}.{key}", inner, row)
        elif isinstance(value, list):
            for inner in value:
                visit(f"{name}[]", inner, row)

    for row, value in enumerate(rows.table.column(name).to_pylist()):
        visit(name, value, row)


def short(value: Any) -> str:
    """Return a value as JSON of at most 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    # Escape lone surrogates, which cannot be printed.
    return beginning(_SURROGATE.sub(lambda half: ascii(half[0])[1:-1], text), 60)


def start_of(text: str) -> str:
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
