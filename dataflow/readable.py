"""Text of a model or of data, made harmless for a terminal: whatever would steer it is shown as an escape sequence."""

from __future__ import annotations

import unicodedata

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
