r"""The marks of a final answer, in worked solutions as in responses: `\boxed{}` and `####`.

Both functions scan a text once, so a text of 100,000 characters costs no more than its length.
"""

from __future__ import annotations

import re
from itertools import pairwise

_BOX = re.compile(r"\\(?:boxed|fbox|beginboxed)\s*(?=\{)|\\(?:boxed|fbox)(?:\s+\$?|\$|(?=[\d-]))(?P<bare>[^\s${}\\]+)")


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""Start, end and content of each `\boxed{...}` or `\fbox{...}`, in the order of the text.

    A box that is never closed is left out. Of nested boxes only the innermost counts.

    >>> boxes(r"first \boxed{\frac{1}{2}}, then \boxed 7 and \boxed{")
    [(6, 25, '\\frac{1}{2}'), (32, 40, '7')]
    """
    closing = _closing_braces(text)
    places: list[tuple[int, int, int, int]] = []
    """Start and end of a box, and of what is in it."""
    for match in _BOX.finditer(text):
        inside = match.span("bare")
        if match["bare"] is None and match.end() in closing:
            inside = (match.end() + 1, closing[match.end()])
        if inside[0] >= 0:
            places.append((match.start(), inside[1] + (match["bare"] is None), *inside))
    innermost = [one for one, following in pairwise([*places, (len(text),) * 4]) if one[1] <= following[0]]
    return [(start, end, text[inside:outside].rstrip(".,;")) for start, end, inside, outside in innermost]


def after_hashes(text: str, *, at_end: bool = False) -> str | None:
    """The rest of the line after the last `####`, which is where GSM8K has its answers.

    Args:
        text: a worked solution or a response.
        at_end: only where no line follows, so that a heading of a section does not count.

    Returns:
        The answer, or None where the text marks none.

    >>> after_hashes("6 * 7 = 42\\n#### 42")
    '42'
    """
    _, found, rest = text.rstrip().removesuffix("####").rpartition("####")
    answer, _, below = rest.strip().partition("\n")
    if not found or (at_end and below):
        return None
    return answer.strip() or None


def _closing_braces(text: str) -> dict[int, int]:
    """Place of each brace that opens -> place of the one that closes it."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for match in re.finditer(r"\\[{}]|[{}]", text):
        if match.group() == "{":
            opened.append(match.start())
        elif match.group() == "}" and opened:
            closing[opened.pop()] = match.start()
    return closing
