"""Read files that may have been replaced or damaged. A reader never hangs; its error names the file.

open_file   the file must be a regular one: a pipe or a device would be waited for
read_file   it must also have a bounded size
read_json   it must also hold an object of JSON, of bounded depth
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any, BinaryIO

from .errors import UserError

MAX_BYTES = 64 << 20
"""Largest file that is read whole."""
MAX_DEPTH = 64
"""Deepest nesting of JSON. Weft writes none that is deeper than 20."""
_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: it cannot be opened, or is a folder.
        UserError: it is something else, such as a named pipe.
    """
    mode = path.stat().st_mode  # before it is opened, which would wait for the writer of a pipe
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        raise UserError(f"{path} is {kind}, not a file")
    return path.open("rb")


def read_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a regular file.

    Raises:
        OSError: it cannot be read.
        UserError: the path is not a regular file, or the file is larger than `max_bytes`.
    """
    with open_file(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise UserError(f"{path} has more than {max_bytes} bytes, the limit for such a file")
    return data


def parse_json(text: bytes | str, of: object) -> Any:
    """The value of a text of JSON.

    Args:
        text: in UTF-8.
        of: names the text in messages, such as the path of its file.

    Raises:
        UserError: the text is not JSON, or nested too deep.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise UserError(f"{of} is damaged: its JSON is nested too deep") from None
    except ValueError as error:
        raise UserError(f"{of} is damaged: it is not JSON ({error})") from None
    level, depth = [value], 0
    while level:
        if (depth := depth + 1) > MAX_DEPTH:
            raise UserError(f"{of} is damaged: its JSON is nested more than {MAX_DEPTH} deep")
        inside = (
            one.values() if isinstance(one, dict) else one
            for one in level
            if isinstance(one, dict | list)
        )
        level = [each for values in inside for each in values if isinstance(each, dict | list)]
    return value


def parse_object(text: bytes | str, of: object) -> dict[str, Any]:
    """The object of a text of JSON; as `parse_json`.

    Raises:
        UserError: the text is not a JSON object.
    """
    value = parse_json(text, of)
    if not isinstance(value, dict):
        raise UserError(f"{of} is damaged: it holds a {type(value).__name__}, not an object")
    return value


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The object in a file of JSON.

    Raises:
        OSError: the file cannot be read.
        UserError: the path is not a regular file, the file is too large, or it does not hold a JSON object.
    """
    return parse_object(read_file(path, max_bytes), path)
