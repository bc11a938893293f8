"""Arguments with a wrong name: said like every other mistake of the user's, with the nearest right one."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from .operation import bind_signature

T = TypeVar("T")


def names_arguments(cls: type[T]) -> type[T]:
    """A class whose constructor refuses wrong arguments in the words in which a node of a graph does (`bind_signature`).

    >>> @names_arguments
    ... class Point:
    ...     def __init__(self, *, height: int) -> None: ...
    >>> Point(hieght=1)
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: Point takes no argument 'hieght' (value 1); did you mean 'height'?
    >>> Point()
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: Point: missing a required argument: 'height'; it takes height
    """
    construct: Any = cls.__init__

    @functools.wraps(construct)
    def check_and_construct(self: T, *args: Any, **kwargs: Any) -> None:
        bind_signature(construct, 1, args, kwargs, name=cls.__name__)
        construct(self, *args, **kwargs)

    cls.__init__ = check_and_construct
    return cls
