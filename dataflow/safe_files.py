"""Read files that may be replaced or damaged. Reads never hang, and errors name the file.

open_file   opens regular files only, because opening a pipe or device could block
read_file   also limits the size of the file
read_json   also requires a JSON object with limited nesting
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any, BinaryIO

from .errors import UserError

MAX_BYTES = 64 << 20
"""[bytes] Maximum size of a file that is read whole."""
MAX_DEPTH = 64
"""Maximum nesting depth of JSON. Weft's files stay below 20."""
_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises an OSError if it cannot be opened or is a folder, and
    a UserError if it is, for example, a named pipe."""
    mode = path.stat().st_mode  # check before opening: opening a pipe waits for its writer
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        raise UserError(f"{path} is {kind}, not a file")
    return path.open("rb")


def read_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file. Raises an OSError if it cannot be read, and a UserError
    if it is too large or not a regular file."""
    with open_file(path) as file:
        data = file.read(max_bytes + 1)  # the extra byte shows whether the file is too large
    if len(data) > max_bytes:
        raise UserError(f"{path} has more than {max_bytes} bytes, the limit for such a file")
    return data


def parse_json(text: bytes | str, of: object) -> Any:
    """Parse JSON. `of` names the text in error messages. Raises a UserError if the text is not JSON
    or is nested too deep."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise UserError(f"{of} is damaged: its JSON is nested too deep") from None
    except ValueError as error:
        raise UserError(f"{of} is damaged: it is not JSON ({error})") from None
    # Measure the depth level by level, because recursion could overflow the stack.
    level, depth = [value] if isinstance(value, dict | list) else [], 0
    while level:
        if (depth := depth + 1) > MAX_DEPTH:
            raise UserError(f"{of} is damaged: its JSON is nested more than {MAX_DEPTH} deep")
        inside = (one.values() if isinstance(one, dict) else one for one in level)
        level = [each for values in inside for each in values if isinstance(each, dict | list)]
    return value


def parse_object(text: bytes | str, of: object) -> dict[str, Any]:
    """Parse a JSON object. Raises a UserError for other values, and the errors of `parse_json`."""
    value = parse_json(text, of)
    if not isinstance(value, dict):
        raise UserError(f"{of} is damaged: it holds a {type(value).__name__}, not an object")
    return value


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file. Raises the errors of `read_file` and `parse_object`."""
    return parse_object(read_file(path, max_bytes), path)
