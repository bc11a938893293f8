"""Answers and images: columns that accompany the texts of rows.

Answers are ground truths for graders. Images stay encoded (PNG, JPEG, ...). The model's processor
(`workers/models/images.py`) converts them to the model's input.
"""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from ..batch import is_ragged
from ..column import IMAGES
from ..errors import nearest
from ..json_values import as_json, exact_array, is_json, json_array
from .files import Rows, short
from .formats import Format, as_text, count_matches, is_text, type_name

# Answer marks
#
# For speed, both functions scan a text only once.


_BOX = re.compile(
    r"\\(?:boxed|fbox|beginboxed)\s*(?=\{)|\\(?:boxed|fbox)(?:\s+\$?|\$|(?=[\d-]))(?P<bare>[^\s${}\\]+)"
)


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""Return (start, end, content) of each `\boxed{...}` or `\fbox{...}`, in text order.

    Skips unclosed boxes, and boxes that contain others.

    >>> boxes(r"first \boxed{\frac{1}{2}}, then \boxed 7 and \boxed{")
    [(6, 25, '\\frac{1}{2}'), (32, 40, '7')]
    """
    closing: dict[int, int] = {}  # maps an opening brace's offset to its closing brace's
    opened: list[int] = []
    for match in re.finditer(r"\\[{}]|[{}]", text):
        if match.group() == "{":
            opened.append(match.start())
        elif match.group() == "}" and opened:
            closing[opened.pop()] = match.start()
    places: list[tuple[int, int, int, int]] = []
    for match in _BOX.finditer(text):
        inside = match.span("bare")
        if match["bare"] is None and match.end() in closing:
            inside = (match.end() + 1, closing[match.end()])
        if inside[0] >= 0:
            places.append((match.start(), inside[1] + (match["bare"] is None), *inside))
    innermost = [
        one for one, following in pairwise([*places, (len(text),) * 4]) if one[1] <= following[0]
    ]
    return [
        (start, end, text[inside:outside].rstrip(".,;")) for start, end, inside, outside in innermost
    ]


def after_hashes(text: str, *, at_end: bool = False) -> str | None:
    """Return the rest of the line after the last `####`, the format of GSM8K's answers. `at_end`
    requires `####` in the last line, to exclude section headings.

    >>> after_hashes("6 * 7 = 42\\n#### 42")
    '42'
    """
    _, found, rest = text.rstrip().removesuffix("####").rpartition("####")
    answer, _, below = rest.strip().partition("\n")
    if not found or (at_end and below):
        return None
    return answer.strip() or None


# Answers


ANSWER_COLUMNS = ("reward_model.ground_truth", "answer", "solution", "ground_truth", "label")
"""Columns to search for ground truths, in this order: verl's column, those of TRL and verifiers,
and the labels of OpenRLHF and slime."""

_CHUNK = 8192

_THOUSANDS = re.compile(r"[-+$]{0,2}\d{1,3}(,\d{3})+(\.\d+)?")


@dataclass(frozen=True)
class Answers:
    column: str
    values: pa.ChunkedArray
    """Text, or the file's values as `JsonType` if they have a JSON form (dates do not)."""
    after_hashes: int = 0
    """Number of rows whose answer comes from after `####`."""
    boxed: int = 0
    r"""Number of rows whose answer comes from the last `\boxed{}`."""
    first_whole: int | None = None
    """The first row whose answer was not extracted, if others were; otherwise None."""

    @property
    def shortened(self) -> int:
        return self.after_hashes + self.boxed


def find_answers(rows: Rows, format: Format, answer: str | None, extract: bool) -> Answers | None:
    """Return the ground truth of each row; None if the rows have none.

    Args:
        answer: column of the ground truth. Default: the first known column in the rows.
        extract: whether to extract the final answer of worked solutions.
    """
    name = answer or _usual_column(rows.table, format)
    if name is None:
        return None
    column = _values(rows, name)
    if not extract or not (is_text(column.type) or is_json(column.type)):
        return Answers(name, column)
    texts = column.cast(pa.string()) if is_json(column.type) else column
    # Fast check, without the Python strings that the loop below creates.
    if not count_matches(texts, r"####|\\boxed|\\fbox"):
        return Answers(name, column)
    chunks: list[pa.Array] = []
    hashes = boxed = 0
    whole: int | None = None
    for start in range(0, len(column), _CHUNK):
        values: list[Any] = column.slice(start, _CHUNK).to_pylist()
        for row, text in enumerate(values):
            worked = isinstance(text, str) and not _is_json_text(text)
            hashed, found = final_answer(text) if worked else (False, None)
            if found is not None:
                values[row] = found
                hashes, boxed = hashes + hashed, boxed + (not hashed)
            elif whole is None and text is not None:
                whole = start + row
        chunks.append(json_array(values) if is_json(column.type) else pa.array(values, column.type))
    return Answers(name, pa.chunked_array(chunks, column.type), hashes, boxed, whole)


def final_answer(text: str) -> tuple[bool, str | None]:
    r"""Return the final answer of a worked solution, and whether it comes after `####`.

    The answer is the text after `####` in the last line, without commas between thousands (as for
    GSM8K), or else the content of the last `\boxed{}`.

    >>> final_answer("5 * 200 = 1000, and 2 more.\n#### 1,002")
    (True, '1002')
    >>> final_answer(r"So $x = \boxed{\frac{1}{2}}$.")
    (False, '\\frac{1}{2}')
    >>> final_answer("It is 4.")
    (False, None)
    """
    if answer := after_hashes(text, at_end=True):
        return True, answer.replace(",", "") if _THOUSANDS.fullmatch(answer) else answer
    found = boxes(text)
    return False, (found[-1][2].strip() or None) if found else None


def _is_json_text(text: str) -> bool:
    # A JSON object or list is data for a grader, not a worked solution.
    if not text.lstrip().startswith(("{", "[")):
        return False
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False


def _usual_column(table: pa.Table, format: Format) -> str | None:
    used = {format.prompt, format.response, format.dialogue, format.text}
    for path in ANSWER_COLUMNS:
        name, _, inner = path.partition(".")
        if name not in table.column_names or path in used:
            continue
        column = table.column(name)
        if inner and is_json(column.type):
            has = any(isinstance(value, dict) and inner in value for value in column.to_pylist())
        elif inner:
            has = pa.types.is_struct(column.type) and column.type.get_field_index(inner) >= 0
        else:
            has = not pa.types.is_boolean(column.type)  # booleans are labels of preferences
        if has:
            return path
    return None


def _values(rows: Rows, path: str) -> pa.ChunkedArray:
    """Return a column or a nested field (`a.b`). Text becomes strings; other values `JsonType`."""
    table = rows.table
    name, *fields = path.split(".")
    is_inside = path not in table.column_names and name in table.column_names
    if is_inside and is_json(table.schema.field(name).type):
        values = table.column(name).to_pylist()
        for field in fields:
            there = dict.fromkeys(key for value in values if isinstance(value, dict) for key in value)
            if field not in there:
                hint = nearest(field, there) or (f"; it has {', '.join(there)}" if there else "")
                raise rows.error(f"column {name!r} has no field {field!r} (answer={path!r}){hint}")
            values = [value.get(field) if isinstance(value, dict) else None for value in values]
        column = pa.chunked_array([exact_array(values)])
    else:
        column = rows.column(path, "answer")
    if is_text(column.type):
        return as_text(column)
    if pa.types.is_null(column.type):
        return column.cast(pa.string())
    try:
        return as_json(column)
    except (TypeError, ValueError):
        return column


# Images


IMAGE_COLUMNS = ("images", "image")
"""Columns to search for images: the names in TRL, verl, OpenRLHF and `datasets`."""
PROGRAM = "it is PostScript, which is a program, and is not run"


@dataclass(frozen=True)
class Images:
    column: str
    values: pa.Array
    """[rows] list of each row's encoded images."""

    @property
    def counts(self) -> np.ndarray:
        """[rows] number of images."""
        return np.diff(self.values.offsets.to_numpy())

    def __str__(self) -> str:
        counts = self.counts
        having = int((counts > 0).sum())
        return (
            f"{int(counts.sum()):,} in {having:,} of {len(counts):,} rows, up to {int(counts.max())} in one, from {self.column!r} "
            f"({self.values.values.nbytes:,} bytes)"
        )


def find_images(rows: Rows) -> Images | None:
    """Return the images of rows; None if there are none.

    A row has one image or a list. An image is bytes or, as in `datasets`, a struct with a field
    `bytes`. Raises a `UserError` for values that are not images or have too many pixels.
    """
    table = rows.table
    found = [name for name in IMAGE_COLUMNS if name in table.column_names and _holds_any(table[name])]
    if not found:
        return None
    if len(found) > 1:
        raise rows.error(f"columns {found[0]!r} and {found[1]!r} both hold images; put them into one")
    column = table[found[0]]
    values = pa.chunked_array([_as_lists(chunk) for chunk in column.chunks], IMAGES.type)
    values = values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)
    for row, images in enumerate(values):
        for number, image in enumerate(images.values, start=1):
            wrong = _why_unreadable(image.as_buffer()) if image.is_valid else _what_instead(column.type)
            if wrong:
                raise rows.error(
                    f"column {found[0]!r}, image {number}: {wrong}; leave the column out, or rename it if only a reward "
                    "function is to have it",
                    row,
                )
    return Images(found[0], values)


def _holds_any(column: pa.ChunkedArray) -> bool:
    if is_text(column.type):
        return any(value.as_py() for value in column)
    if is_ragged(column.type):
        return any(len(chunk.flatten()) for chunk in column.chunks)
    return column.null_count < len(column)


def _as_lists(chunk: pa.Array) -> pa.Array:
    """Return each row's list of images. Values that are not images become null."""
    if is_ragged(chunk.type):
        counts, items = chunk.value_lengths().fill_null(0), chunk.flatten()
    else:
        counts, items = chunk.is_valid(), chunk.drop_null()
    if pa.types.is_struct(items.type):
        names = [field.name for field in items.type]
        items = items.flatten()[names.index("bytes")] if "bytes" in names else pa.nulls(len(items))
    if not (pa.types.is_binary(items.type) or pa.types.is_large_binary(items.type)):
        items = pa.nulls(len(items))
    offsets = pa.array(np.cumsum([0, *counts.to_numpy(zero_copy_only=False)]), pa.int32())
    return pa.ListArray.from_arrays(offsets, items.cast(pa.large_binary()))


def _what_instead(kind: pa.DataType) -> str:
    return (
        f"the column is {type_name(kind)} without the bytes of an image: an image is its file's content (PNG, JPEG, ...), or an object "
        "with that as 'bytes'; paths and addresses are not followed"
    )


def _why_unreadable(encoded: pa.Buffer) -> str:
    """Return the problem with an encoded image's header, or ""."""
    from PIL import Image

    # Treat Pillow's warning about large images as an error.
    with warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning):
        try:
            with Image.open(pa.BufferReader(encoded)) as image:
                return PROGRAM if image.format == "EPS" else ""
        except (Image.DecompressionBombWarning, Image.DecompressionBombError):
            return f"it has more than the {Image.MAX_IMAGE_PIXELS:,} pixels that Pillow takes for safe"
        except Exception as error:  # decoders can raise any error
            return f"it is not an image that Pillow can read ({short(str(error)) if str(error) else 'its header is cut off'})"
