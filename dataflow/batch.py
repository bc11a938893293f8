"""Batch: Weft's record type, an immutable columnar table backed by a `pyarrow.RecordBatch`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from .column import ANSWER, KNOWN
from .errors import UserError, nearest
from .json_values import JsonType, exact_array, is_json
from .lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


MAX_OFFSET = 2**31 - 1
"""Maximum number of text bytes or list items in one Arrow array with 32-bit offsets."""


class Batch:
    """Immutable rows with named, typed columns. Methods return new batches that share buffers.

    >>> batch = Batch.of(reward=[1.0, 0.0], response_ids=[[5, 6, 7], [8]])
    >>> len(batch), batch.columns
    (2, ('reward', 'response_ids'))
    >>> values, cu_seqlens = batch.ragged("response_ids")
    >>> values.tolist(), cu_seqlens.tolist()
    ([5, 6, 7, 8], [0, 3, 4])
    >>> batch.take([1])["response_ids"].to_pylist()
    [[8]]
    """

    __slots__ = ("record",)

    def __init__(self, record: pa.RecordBatch) -> None:
        self.record = record

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle as one Arrow IPC message: Arrow's own pickle of a slice contains the whole batch.
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.record.schema) as writer:
            writer.write_batch(self.record)
        return _from_message, (sink.getvalue(),)

    @classmethod
    def of(cls, /, **columns: Any) -> Batch:
        """Create a batch from columns.

        Args:
            columns: one value per row, as an Arrow array, numpy array, tensor or list. A ragged
                column may also be a pair of values `[T]` and cu_seqlens `[rows + 1]`. Weft converts
                the columns that it declares (`dataflow/column.py`) to their declared type.
        """
        return _batch({name: _array(name, data) for name, data in columns.items()})

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Create a batch from one mapping per row. All mappings must have the same keys."""
        return cls.of(**{name: [row[name] for row in rows] for name in (rows[0] if rows else {})})

    @classmethod
    def of_table(cls, table: pa.Table, *, max_bytes: int = MAX_OFFSET) -> Batch:
        """Create a batch from a table. Columns with a single chunk are not copied.

        Columns with several chunks and more than `max_bytes` bytes are converted to types with
        64-bit offsets (`large_string`, `large_list`).

        Raises:
            UserError: a column needs 64-bit offsets, but its type has no such variant.

        >>> text = pa.chunked_array([["a", "b"], ["c"]])
        >>> Batch.of_table(pa.table({"text": text}), max_bytes=10)
        Batch(3 rows; text: large_string)
        """
        columns = {name: _joined(name, table.column(name), max_bytes) for name in table.column_names}
        # Keep the number of rows of a table without columns.
        if not columns:
            return cls(table.to_batches()[0] if table.num_rows else pa.RecordBatch.from_pylist([]))
        return _batch(columns)

    @classmethod
    def concat(cls, batches: Iterable[Batch]) -> Batch:
        """Concatenate batches with the same columns, in order.

        A column's types may differ if Arrow can promote one to the other (integers to floats).

        Raises:
            UserError: there are no batches, their columns differ, or types are incompatible.
        """
        records = [b.record for b in batches]
        if not records:
            raise UserError("Batch.concat needs at least one batch")
        # Common case: equal schemas need no type promotion.
        if all(r.schema.equals(records[0].schema) for r in records):
            return cls(records[0]) if len(records) == 1 else cls(pa.concat_batches(records))
        for record in records:
            if set(record.schema.names) != set(records[0].schema.names):
                names = (", ".join(r.schema.names) or "none" for r in (records[0], record))
                raise UserError(
                    "batches to concatenate must have the same columns, not {} and {}".format(*names)
                )
        tables = [pa.Table.from_batches([r]) for r in records]
        try:
            table = pa.concat_tables(tables, promote_options="permissive")
        except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
            raise UserError(
                f"batches to concatenate must have columns of the same types: {error}"
            ) from None
        return cls.of(**{name: table.column(name) for name in table.column_names})

    def __len__(self) -> int:
        return self.record.num_rows

    def __contains__(self, column: object) -> bool:
        return str(column) in self.record.schema.names

    def __getitem__(self, column: object) -> pa.Array:
        """Return the column with this name as an Arrow array. Raises a `UserError` that suggests
        the closest name if there is no such column."""
        name = str(column)
        if name not in self.record.schema.names:
            hint = nearest(name, self.columns) or f"; it has {', '.join(self.columns)}"
            raise UserError(f"batch has no column {name!r}{hint}")
        return self.record.column(name)

    def __repr__(self) -> str:
        fields = ", ".join(f"{f.name}: {f.type}" for f in self.record.schema)
        return f"Batch({len(self)} rows; {fields})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Batch) and self.record.equals(other.record)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.record.schema.names)

    @property
    def num_bytes(self) -> int:
        return self.record.nbytes

    # Reading columns

    def numpy(self, column: object) -> np.ndarray:
        """Return a column as an array `[rows]`.

        Fixed-width columns are returned as read-only views, without a copy. Strings become Python
        objects. A `JsonType` column becomes float64 if it has only numbers, else objects.
        """
        array = self[column]
        if is_json(array.type):
            values = array.to_pylist()
            numbers = all(isinstance(value, int | float) for value in values)
            # `np.array` would turn lists of equal length into a matrix.
            return np.array(values, np.float64) if numbers else np.fromiter(values, object, len(values))
        return array.to_numpy(zero_copy_only=_has_fixed_width(array.type) and array.null_count == 0)

    def tensor(self, column: object) -> Tensor:
        """Return a column with one number per row as a torch tensor `[rows]`. The tensor shares
        memory with the batch, so do not write to it. Raises a `UserError` for other columns."""
        array = self[column]
        if pa.types.is_boolean(array.type):  # Arrow packs booleans into bits, so copy them
            return torch.from_numpy(array.to_numpy(zero_copy_only=False))
        if not _has_fixed_width(array.type):
            better = "ragged()" if is_ragged(array.type) else "numpy()"
            raise UserError(
                f"column {str(column)!r} is {array.type}, not one number a row; read it with {better}"
            )
        return _tensor(array)

    def ragged(self, column: object) -> tuple[Tensor, Tensor]:
        """Return a ragged column as tensors that share memory with the batch. Do not write to them.

        Returns:
            The values `[T]` and cu_seqlens `[rows + 1]`, int32 (int64 for more than 2**31 - 1
            values). Row i is `values[cu_seqlens[i]:cu_seqlens[i + 1]]`.

        Raises:
            UserError: the column is not ragged.
        """
        values, offsets = self._lists(column)
        return _tensor(values), _tensor(offsets)

    def ragged_numpy(self, column: object) -> tuple[np.ndarray, np.ndarray]:
        """Like `ragged`, but return numpy arrays, without importing torch."""
        values, offsets = self._lists(column)
        return values.to_numpy(), offsets.to_numpy()

    def lengths(self, column: object) -> np.ndarray:
        """Return the number of items in each row of a ragged column, `[rows]`."""
        return np.diff(self._lists(column)[1].to_numpy())

    def padded(self, column: object, *, fill: float = 0, left: bool = False) -> Tensor:
        """Return a copy of a ragged column, padded with `fill` to `[rows, longest]`."""
        values, cu_seqlens = self.ragged(column)
        lengths = cu_seqlens.diff()
        longest = int(lengths.max()) if len(lengths) else 0
        positions = torch.arange(longest).expand(len(lengths), longest)
        inside = positions >= (longest - lengths)[:, None] if left else positions < lengths[:, None]
        out = torch.full((len(lengths), longest), fill, dtype=values.dtype)
        out[inside] = values
        return out

    def to_rows(self) -> list[dict[str, Any]]:
        """Return the rows as dictionaries. Slow: only for reward functions and inspection."""
        return self.record.to_pylist()

    # Deriving new batches

    def select(self, columns: Iterable[object]) -> Batch:
        chosen = {str(c): self[c] for c in columns}
        # For an empty selection, only Arrow's `select` keeps the number of rows.
        return _batch(chosen) if chosen else Batch(self.record.select([]))

    def take(self, rows: Sequence[int] | np.ndarray) -> Batch:
        """Return the rows with these indices, in this order."""
        return Batch(self.record.take(pa.array(np.asarray(rows, dtype=np.int64))))

    def slice(self, start: int, length: int) -> Batch:
        return Batch(self.record.slice(start, length))

    def split(self, sizes: Sequence[int]) -> list[Batch]:
        """Split the batch into consecutive parts of these sizes, without copying. Raises a
        `UserError` if the sizes do not add up to the number of rows."""
        if sum(sizes) != len(self):
            raise UserError(
                f"split sizes {list(sizes)} add up to {sum(sizes)}, not to the {len(self)} rows of the batch"
            )
        starts = np.cumsum([0, *sizes])
        return [self.slice(int(start), size) for start, size in zip(starts, sizes, strict=False)]

    def with_columns(self, /, **columns: Any) -> Batch:
        """Return the batch with these columns added or replaced, in any form that `Batch.of`
        accepts. Raises a `UserError` if a column does not have one value per row."""
        merged: dict[str, Any] = {name: self.record.column(name) for name in self.columns}
        for name, data in columns.items():
            merged[name] = _array(name, data)
            if len(merged[name]) != len(self):
                raise UserError(
                    f"column {name!r} has {len(merged[name])} values for a batch of {len(self)} rows"
                )
        return _batch(merged)

    def groups(self, by: object = "group_id") -> tuple[np.ndarray, np.ndarray]:
        """Group the rows by the values of a column. Rows of a group need not be adjacent.

        Returns:
            Sorted, distinct `keys` `[groups]`, and `index` `[rows]`: row i has `keys[index[i]]`.
        """
        keys, index = np.unique(self.numpy(by), return_inverse=True)
        return keys, index

    def _lists(self, column: object) -> tuple[pa.Array, pa.Array]:
        array = self[column]
        if not is_ragged(array.type):
            raise UserError(
                f"column {str(column)!r} is {array.type}, not a ragged column; read it with tensor() or numpy()"
            )
        offsets = array.offsets
        start = offsets[0].as_py() if len(offsets) else 0
        # `array.values` ignores slicing of the list array, so slice the values here.
        values = array.values.slice(start, offsets[-1].as_py() - start) if len(offsets) else array.values
        if start:  # a slice of a larger batch: rebase the offsets
            offsets = pa.array(offsets.to_numpy() - offsets.type.to_pandas_dtype()(start))
        return values, offsets


def _batch(columns: Mapping[str, pa.Array]) -> Batch:
    return Batch(pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns)))


def _from_message(message: pa.Buffer) -> Batch:
    return Batch(pa.ipc.open_stream(message).read_next_batch())


def ragged_array(values: np.ndarray, offsets: np.ndarray, item: pa.DataType | None = None) -> pa.Array:
    """Create an Arrow list array.

    Args:
        values: `[T]`.
        offsets: `[rows + 1]` integers; row i is `values[offsets[i]:offsets[i + 1]]`.
        item: Arrow type of the items. Default: the type of `values`.

    Returns:
        An array with 32-bit offsets, or with 64-bit offsets for more than `MAX_OFFSET` items.
    """
    if offsets[-1] > MAX_OFFSET:
        return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values, type=item))
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32, copy=False)), pa.array(values, type=item)
    )


def is_ragged(type: pa.DataType) -> bool:
    return pa.types.is_list(type) or pa.types.is_large_list(type)


def _joined(name: str, column: pa.ChunkedArray, max_bytes: int) -> pa.Array:
    """Like `Table.combine_chunks` for one column, but also works for more than 2 GiB of text."""
    if column.num_chunks == 1:
        return column.chunk(0)
    # Arrow cannot cast an extension type, so cast its storage.
    if column.nbytes > max_bytes and is_json(column.type):
        storage = [chunk.storage.cast(pa.large_string()) for chunk in column.chunks]
        return pa.ExtensionArray.from_storage(JsonType(pa.large_string()), pa.concat_arrays(storage))
    if column.nbytes > max_bytes:
        column = column.cast(_wide(column.type))
    try:
        return column.combine_chunks()
    except pa.ArrowInvalid as error:
        raise UserError(
            f"column {name!r} ({column.type}, {column.nbytes} bytes) does not fit one array: {error}"
        ) from None


def _wide(type: pa.DataType) -> pa.DataType:
    if pa.types.is_string(type):
        return pa.large_string()
    if pa.types.is_binary(type):
        return pa.large_binary()
    if pa.types.is_list(type):
        return pa.large_list(type.value_field.with_type(_wide(type.value_type)))
    if pa.types.is_struct(type):
        return pa.struct([field.with_type(_wide(field.type)) for field in type])
    return type


def _has_fixed_width(type: pa.DataType) -> bool:
    return pa.types.is_primitive(type) and not pa.types.is_boolean(type)


def _tensor(array: pa.Array) -> Tensor:
    if len(array) == 0:  # an empty Arrow buffer has no memory to share
        return torch.from_numpy(np.empty(0, dtype=array.type.to_pandas_dtype()))
    return torch.from_dlpack(array)


def _array(name: str, data: Any) -> pa.Array:
    # Answers may have any type, which `exact_array` chooses below.
    wanted = KNOWN[name].type if name in KNOWN and name != str(ANSWER) else None
    if isinstance(data, pa.ChunkedArray):
        data = _joined(name, data, MAX_OFFSET)
    if name == str(ANSWER) and isinstance(data, list):
        is_null = all(value is None for value in data)
        return pa.array(data, pa.string()) if is_null else exact_array(data)
    if isinstance(data, pa.Array):
        return data if wanted is None or data.type == wanted else data.cast(wanted)
    if isinstance(data, tuple) and len(data) == 2:
        values, offsets = (_numpy(part) for part in data)
        return ragged_array(values, offsets, wanted.value_type if wanted is not None else None)
    if isinstance(data, np.ndarray) or hasattr(data, "detach"):
        return pa.array(_numpy(data), type=wanted)
    return pa.array(data, type=wanted)


def _numpy(data: Any) -> np.ndarray:
    return data.detach().cpu().numpy() if hasattr(data, "detach") else np.asarray(data)
