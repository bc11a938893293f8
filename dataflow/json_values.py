"""JsonType: an Arrow type for columns of Python values that no plain Arrow type preserves exactly.

Arrow gives all objects in a column the same keys, turns integers into floats if a column has both,
and rejects a mix of numbers and text. Reward functions must get the original values, so Weft stores
such columns as JSON text of the type `JsonType`. `to_pylist` and `as_py` return the original
values. Readers that do not know the type, such as DuckDB, see the text.

>>> exact_array([5, "five", {"a": 1}, {"b": None}, None]).to_pylist()
[5, 'five', {'a': 1}, {'b': None}, None]
>>> exact_array([1, 2.5]).to_pylist(), exact_array([1, 2]).type
([1, 2.5], DataType(int64))
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa

_CHUNK = 8192

CANNOT_HOLD = (pa.ArrowException, OverflowError, TypeError, ValueError)
"""Errors that Arrow raises for values without a common type."""


class _JsonScalar(pa.ExtensionScalar):
    def as_py(self, **_: Any) -> Any:
        return None if self.value is None else json.loads(self.value.as_py())


class JsonType(pa.ExtensionType):
    """Arrow extension type: JSON text that Python reads as the value it encodes."""

    def __init__(self, storage: pa.DataType = pa.string()) -> None:
        super().__init__(storage, "weft.json")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> JsonType:
        return cls(storage_type)

    def __arrow_ext_scalar_class__(self) -> type[_JsonScalar]:
        return _JsonScalar

    def __hash__(self) -> int:
        return hash((JsonType, self.storage_type))

    def __str__(self) -> str:
        return "values of several types"


pa.register_extension_type(JsonType())


def is_json(kind: pa.DataType) -> bool:
    return isinstance(kind, JsonType)


def exact_array(values: Sequence[Any]) -> pa.Array:
    """Create an array that preserves each value.

    Returns:
        An array of a plain Arrow type if that preserves all values, otherwise of `JsonType`. Tuples
        become lists. If JSON cannot hold objects or lists, such as objects with dates and different
        keys, Arrow converts them.

    Raises:
        ValueError or TypeError: neither Arrow nor JSON can represent the values.
    """
    try:
        array = pa.array(values)
    except CANNOT_HOLD:
        return json_array(values)
    # Arrow may have converted values, such as integers to floats.
    if _gives_back(array, values):
        return array
    try:
        return json_array(values)
    except (TypeError, ValueError):
        # JSON failed too. Accept Arrow's conversion of nested values.
        if pa.types.is_nested(array.type):
            return array
        raise


def json_array(values: Iterable[Any]) -> pa.Array:
    """Create a `JsonType` array. Raises a ValueError or TypeError if a value has no JSON form."""
    texts = [
        None if value is None else json.dumps(_plain(value), ensure_ascii=False) for value in values
    ]
    return pa.ExtensionArray.from_storage(JsonType(), pa.array(texts, pa.string()))


def as_json(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert a column to `JsonType`. Raises the errors of `json_array`."""
    if is_json(column.type):
        return column
    chunks = [
        json_array(column.slice(start, _CHUNK).to_pylist()) for start in range(0, len(column), _CHUNK)
    ]
    return pa.chunked_array(chunks, JsonType())


def joined(columns: Sequence[pa.ChunkedArray]) -> pa.ChunkedArray:
    """Concatenate columns, preserving all values. Raises the errors of `json_array`."""
    kinds = list(dict.fromkeys(column.type for column in columns if not pa.types.is_null(column.type)))
    if not kinds:
        return pa.chunked_array([chunk for column in columns for chunk in column.chunks], pa.null())
    kind = kinds[0] if len(kinds) == 1 else _holds_all(kinds)
    if kind is None:
        columns, kind = [as_json(column) for column in columns], JsonType()
    chunks: list[pa.Array] = []
    for column in filter(len, columns):
        is_null = pa.types.is_null(column.type)
        chunks += [pa.nulls(len(column), kind)] if is_null else column.cast(kind).chunks
    return pa.chunked_array(chunks, kind)


def readable_by_arrow(table: pa.Table) -> pa.Table:
    """Convert `JsonType` columns to plain Arrow types where possible, even if values change."""
    for at, name in enumerate(table.column_names):
        if is_json(table.schema.field(name).type):
            with suppress(*CANNOT_HOLD):
                table = table.set_column(at, name, pa.array(table.column(name).to_pylist()))
    return table


def _holds_all(kinds: Sequence[pa.DataType]) -> pa.DataType | None:
    """Return the Arrow type that represents values of all these types unchanged, or None."""
    if any(map(is_json, kinds)):
        return None
    schemas = [pa.schema([("x", kind)]) for kind in kinds]
    try:
        kind = pa.unify_schemas(schemas, promote_options="permissive").field("x").type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None
    return kind if all(_same_values(each, kind) for each in kinds) else None


def _same_values(kind: pa.DataType, wider: pa.DataType) -> bool:
    """Whether a cast to the wider type preserves all values."""
    if pa.types.is_null(kind) or kind == wider:
        return True
    if pa.types.is_dictionary(kind):
        return _same_values(kind.value_type, wider)
    if pa.types.is_struct(kind):
        names = {field.name for field in kind}
        return names == {field.name for field in wider} and all(
            _same_values(kind.field(name).type, wider.field(name).type) for name in names
        )
    if kind.num_fields and wider.num_fields:  # lists
        return _same_values(kind.field(0).type, wider.field(0).type)
    # A cast of integers is lossy: they would come back as floats.
    return not (pa.types.is_integer(kind) and not pa.types.is_integer(wider))


def _gives_back(array: pa.Array, values: Sequence[Any]) -> bool:
    """Whether `array`, which was created from `values`, preserves each of them."""
    kind, types = array.type, pa.types
    if any(of(kind) for of in (types.is_string, types.is_boolean, types.is_integer, types.is_null)):
        return True  # Arrow never converts other types to these
    present = [value for value in values if value is not None]
    if pa.types.is_floating(kind):
        return all(isinstance(value, float | np.floating) for value in present)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _gives_back(array.flatten(), [item for value in present for item in value])
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        if not all(isinstance(value, Mapping) and value.keys() == set(names) for value in present):
            return False
        # Drop the array's nulls too, to align it with `present`.
        whole = array.drop_null()
        return all(_gives_back(whole.field(name), [value[name] for value in present]) for name in names)
    # Arrow stores text as bytes if a column has both.
    if pa.types.is_binary(kind):
        return all(isinstance(value, bytes | bytearray | memoryview) for value in present)
    return array.to_pylist() == list(values)


def _plain(value: Any) -> Any:
    """Convert a value to JSON types. Raises a TypeError if it has none."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        # `json.dumps` would silently convert keys that are not text.
        if foreign := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"the keys of an object must be text, not {foreign[0]!r}")
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist())
    raise TypeError(f"a {type(value).__name__} cannot be converted to JSON")
