"""Images of prompts: find their column, and place them in messages.

Rows keep images encoded (PNG, JPEG, ...). The model's processor (`workers/models/images.py`)
decides how the model sees an image, and how many tokens it takes. The chat template writes one
placeholder per image.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ..column import IMAGES
from ..errors import UserError
from .files import Origin, short
from .formats import is_text, type_name

COLUMNS = ("images", "image")
"""Columns to search for images: the names of TRL, verl, OpenRLHF and `datasets`."""
PROGRAM = "it is PostScript, which is a program, and is not run"
_MARK = re.compile(r"(<image>)")
"""Mark for the place of an image in a text, as in verl."""


@dataclass(frozen=True)
class Images:
    """The images of all rows."""

    column: str
    values: pa.Array
    """[rows] lists of encoded images."""

    @property
    def counts(self) -> np.ndarray:
        """[rows] number of images in each row."""
        return np.diff(self.values.offsets.to_numpy())

    def __str__(self) -> str:
        counts = self.counts
        having = int((counts > 0).sum())
        return (
            f"{int(counts.sum()):,} in {having:,} of {len(counts):,} rows, up to {int(counts.max())} in one, from {self.column!r} "
            f"({self.values.values.nbytes:,} bytes)"
        )


def find_images(table: pa.Table, origin: Origin) -> Images | None:
    """Return the images of rows, or None.

    A column has bytes, or structs with a field `bytes` as written by `datasets`; one or a list of
    them per row.

    Raises:
        UserError: a value is not an encoded image, or it has too many pixels. The message names the
            row.
    """
    found = [name for name in COLUMNS if name in table.column_names and _holds_any(table.column(name))]
    if not found:
        return None
    if len(found) > 1:
        raise UserError(
            f"{origin.files}: columns {found[0]!r} and {found[1]!r} both hold images; put them into one"
        )
    column = found[0]
    values = pa.chunked_array([_as_lists(chunk) for chunk in table.column(column).chunks], IMAGES.type)
    values = values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)
    _check(values, column, table.schema.field(column).type, origin)
    return Images(column, values)


def _holds_any(column: pa.ChunkedArray) -> bool:
    if is_text(column.type):
        return any(value.as_py() for value in column)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return any(len(chunk.flatten()) for chunk in column.chunks)
    return column.null_count < len(column)


def _as_lists(chunk: pa.Array) -> pa.Array:
    """Return a list of images for each row; values that are not images become null."""
    if pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type):
        counts, items = chunk.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), chunk.flatten()
    else:
        counts, items = chunk.is_valid().to_numpy(zero_copy_only=False), chunk.drop_null()
    if pa.types.is_struct(items.type):
        names = [field.name for field in items.type]
        items = items.flatten()[names.index("bytes")] if "bytes" in names else pa.nulls(len(items))
    if not (pa.types.is_binary(items.type) or pa.types.is_large_binary(items.type)):
        items = pa.nulls(len(items))
    offsets = pa.array(np.cumsum([0, *counts]), pa.int32())
    return pa.ListArray.from_arrays(offsets, items.cast(pa.large_binary()))


def _check(values: pa.Array, column: str, kind: pa.DataType, origin: Origin) -> None:
    for row, images in enumerate(values):
        for number, image in enumerate(images.values, start=1):
            wrong = why_unreadable(image.as_buffer()) if image.is_valid else _what_instead(kind)
            if wrong:
                raise UserError(
                    f"{origin(row)}: column {column!r}, image {number}: {wrong}; leave the column out, or rename it if only a reward "
                    "function is to have it"
                )


def _what_instead(kind: pa.DataType) -> str:
    what = f"is {type_name(kind)} without the bytes of an image"
    return (
        f"the column {what}: an image is its file's content (PNG, JPEG, ...), or an object with that as 'bytes'; paths and addresses "
        "are not followed"
    )


def why_unreadable(encoded: pa.Buffer) -> str:
    """Check the header of an encoded image. Return the problem, or an empty string."""
    from PIL import Image

    # Pillow only warns about large images; treat this as an error.
    with warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning):
        try:
            with Image.open(pa.BufferReader(encoded)) as image:
                return PROGRAM if image.format == "EPS" else ""
        except (Image.DecompressionBombWarning, Image.DecompressionBombError):
            return f"it has more than the {Image.MAX_IMAGE_PIXELS:,} pixels that Pillow takes for safe"
        except Exception as error:  # a decoder can fail in any way
            return f"it is not an image that Pillow can read ({short(str(error)) if str(error) else 'its header is cut off'})"


def with_places(messages: Sequence[dict[str, Any]], images: int) -> list[dict[str, Any]]:
    """Return messages with a content block of type `image` for each image, for the chat template.

    The places are such blocks in the messages, or else the marks `<image>` in their texts (as in
    verl), or else the beginning of the first user message (as in TRL).

    Args:
        images: number of images in the row.

    Raises:
        UserError: the number of places differs from the number of images.

    >>> with_places([{"role": "user", "content": "What is it?"}], 1)
    [{'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': 'What is it?'}]}]
    """
    placed = [dict(message) for message in messages]
    places = sum(block.get("type") == "image" for message in placed for block in _blocks(message))
    what = "a content block of type 'image'"
    if not places:
        marked = [
            {**message, "content": _parted(message)} if _has_mark(message) else message
            for message in placed
        ]
        places = sum(block.get("type") == "image" for message in marked for block in _blocks(message))
        placed, what = (marked, "a mark <image>") if places else (placed, what)
    if not places and images:
        first = next((message for message in placed if message.get("role") == "user"), None)
        if first is None:
            raise UserError(
                f"the row has {_counted(images)}, and no message of the user to put them into"
            )
        # TRL puts all images before the text of the first user message.
        first["content"] = [{"type": "image"}] * images + _blocks(first)
    elif places != images:
        raise UserError(
            f"the row has {_counted(images)}, and its messages have places for {places} ({what} each)"
        )
    return placed


def refuse_places(messages: Sequence[dict[str, Any]]) -> None:
    """Refuse content blocks of type `image` in responses, and in rows without images."""
    for message in messages:
        if any(block.get("type") == "image" for block in _blocks(message)):
            raise UserError(
                f"a message of role {message.get('role')!r} has a content block of type 'image', but no image belongs to it: images "
                "must be in the prompt, and in the column 'images'"
            )


def _counted(images: int) -> str:
    return f"{images} image" if images == 1 else f"{images} images"


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def _has_mark(message: dict[str, Any]) -> bool:
    return any(_MARK.search(str(block.get("text", ""))) for block in _blocks(message))


def _parted(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for block in _blocks(message) for part in _parts(block)]


def _parts(block: dict[str, Any]) -> list[dict[str, Any]]:
    text = block.get("text")
    if not isinstance(text, str):  # a block of another kind
        return [block]
    parts = filter(None, _MARK.split(text))
    return [
        {"type": "image"} if _MARK.fullmatch(part) else {"type": "text", "text": part} for part in parts
    ]
