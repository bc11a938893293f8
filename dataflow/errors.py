"""What the user got wrong, said once: the place, the rule, the value, the nearest right name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what the user wrote (settings, graph, data, placement); the command line ends with exit code 2."""


def nearest(name: str, candidates: Iterable[str]) -> str:
    """The tail of an error message that offers the nearest right name, or nothing when none is near.

    >>> nearest("advantage", ["advantages", "reward"])
    "; did you mean 'advantages'?"
    >>> nearest("xyz", ["advantages"])
    ''
    """
    close = difflib.get_close_matches(str(name), [str(c) for c in candidates], n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
