"""Arguments with a wrong name: said like every other mistake of the user's, with the nearest right one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from .errors import UserError, nearest

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


def names_arguments(cls: type[T]) -> type[T]:
    """A class whose constructor refuses an argument that it does not have, or lacks, by name.

    >>> @names_arguments
    ... class Point:
    ...     def __init__(self, *, height: int) -> None: ...
    >>> Point(hieght=1)
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: Point has no argument 'hieght' (value 1); did you mean 'height'?
    >>> Point()
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: Point needs height=...
    """
    construct: Any = cls.__init__
    cls.__init__ = checked_call(construct, cls.__name__, skip=1)
    return cls


def checked_call(function: Callable[P, R], name: str, skip: int = 0) -> Callable[P, R]:
    """The function, which refuses a wrong argument in words of ours.

    Args:
        skip: leading parameters that no caller names.
    """
    signature = inspect.signature(function)
    known = dict(list(signature.parameters.items())[skip:])
    open_ended = any(p.kind is p.VAR_KEYWORD for p in known.values())

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        for wrong in () if open_ended else [n for n in named if n not in known]:
            hint = nearest(wrong, known) or f"; it has {', '.join(known)}"
            raise UserError(f"{name} has no argument {wrong!r} (value {named[wrong]!r}){hint}")
        given = {*list(known)[: max(0, len(arguments) - skip)], *named}
        needed = [
            n for n, p in known.items() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        if missing := [n for n in needed if n not in given]:
            raise UserError(f"{name} needs {', '.join(f'{n}=...' for n in missing)}")
        return function(*arguments, **named)

    return call
