"""Print untrusted text: no terminal escapes, no secrets, and only characters that the stream can encode."""

from __future__ import annotations

import json
import sys
import unicodedata
from typing import Any, TextIO

from .redaction import redacted

JOINERS = "\u200c\u200d"
"""Parts of words and of emoji; they steer nothing."""
STEERING = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Control characters, formats (which reverse text, or hide it), surrogates, separators of lines and of paragraphs."""


def readable(text: str) -> str:
    r"""The text with everything that would steer a terminal written as an escape; lines stay lines.

    >>> print(readable("\x1b[31mred\r\u202etxt.exe"))
    \x1b[31mred\r\u202etxt.exe
    >>> readable("one\n\ttwo")
    'one\n    two'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c if c == "\n" or c in JOINERS or unicodedata.category(c) not in STEERING else _escape(c) for c in text
    )


def _escape(character: str) -> str:
    return "    " if character == "\t" else character.encode("unicode_escape").decode("ascii")


def show(text: str, stream: TextIO | None = None, *, end: str = "\n") -> None:
    """Print a text that may quote prompts, responses, paths or other people's errors. All prints of such text go through here.

    Args:
        text: for a person.
        stream: default: standard error.
        end: printed after it.
    """
    stream = sys.stderr if stream is None else stream
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(encodable(readable(redacted(text)), encoding), file=stream, end=end, flush=True)


def show_json(value: Any, stream: TextIO | None = None) -> None:
    """Print a value as one line of JSON, in ASCII without control characters. Default stream: standard output."""
    line = json.dumps(value, default=str).replace("\x7f", "\\u007f")
    print(line, file=sys.stdout if stream is None else stream, flush=True)


def one_line(text: str) -> str:
    r"""The text in one readable line.

    >>> print(one_line("\x1b[2Jtwo\nlines"))
    \x1b[2Jtwo\nlines
    """
    return readable(text).replace("\n", "\\n")


def encodable(text: str, encoding: str) -> str:
    """The text with an escape for each character that the encoding lacks.

    >>> print(encodable("0.5 ±0.1 \u732b", "ascii"))
    0.5 +/-0.1 \u732b
    """
    try:
        text.encode(encoding)
        return text
    except (UnicodeEncodeError, LookupError):
        known = "ascii" if encoding.lower() in ("ascii", "us-ascii", "ansi_x3.4-1968") else encoding
        try:
            "±".encode(known)
        except (UnicodeEncodeError, LookupError):
            text = text.replace("±", "+/-")
        try:
            return text.encode(known, "backslashreplace").decode(known)
        except LookupError:
            return text.encode("ascii", "backslashreplace").decode("ascii")


def cut(text: str, characters: int) -> str:
    """How a long text begins and how it ends.

    >>> cut("0123456789", 4)
    '01 ... (6 characters) ... 89'
    """
    if len(text) <= characters:
        return text
    half = characters // 2
    return f"{text[:half]} ... ({len(text) - 2 * half:,} characters) ... {text[-half:]}"


def cut_lines(text: str, lines: int) -> str:
    r"""The same of a text of many lines.

    >>> cut_lines("1\n2\n3\n4\n5\n6", 4)
    '1\n2\n... (2 lines) ...\n5\n6'
    """
    every = text.split("\n")
    if len(every) <= lines:
        return text
    half = lines // 2
    return "\n".join([*every[:half], f"... ({len(every) - 2 * half:,} lines) ...", *every[-half:]])
