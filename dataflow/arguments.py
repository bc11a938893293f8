"""Arguments by name: bound to a signature, with the nearest right name offered for a wrong one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .errors import UserError, nearest

T = TypeVar("T")


def parameter_names(function: Callable[..., Any], skip: int = 0) -> list[str]:
    """Names of the parameters that can be given by name, without the first `skip`; `*args` and `**kwargs` have none.

    >>> parameter_names(lambda rows, n, *rest, by="reward", **more: None, skip=1)
    ['n', 'by']
    """
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def bind(function: Callable[..., Any], skip: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a traced call by name, defaults filled in.

    Args:
        function: what is called.
        skip: leading parameters that are left out (self, the rows).
        args: arguments given by position.
        kwargs: arguments given by name.

    Raises:
        UserError: for an argument that the function does not take, with the nearest one that it does.
    """
    bound = bind_signature(function, skip, args, kwargs)
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL and value:
            raise UserError(f"{function.__qualname__}: give the arguments of a node by name, not as *{name}")
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        elif kind is not inspect.Parameter.VAR_POSITIONAL:
            arguments[name] = value
    return arguments


def bind_signature(
    function: Callable[..., Any],
    skip: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    name: str | None = None,
) -> inspect.BoundArguments:
    """`inspect.Signature.bind` with defaults filled in and errors that name the nearest right argument.

    Args:
        function: what is called.
        skip: leading parameters that are left out.
        args: arguments given by position.
        kwargs: arguments given by name.
        name: what a message calls the function; None: its own name.

    Raises:
        UserError: for an argument that is unknown, missing, given twice or one too many.
    """
    who = name or function.__qualname__
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    named = parameter_names(function, skip)
    takes = ", ".join(named) or "only rows"
    for given, value in kwargs.items():
        if given not in named and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            hint = nearest(given, named) or f"; it takes {takes}"
            raise UserError(f"{who} takes no argument {given!r} (value {value!r}){hint}")
    try:
        bound = inspect.Signature(parameters).bind(*args, **kwargs)
    except TypeError as error:  # one too many, one that must be given, or one given twice
        raise UserError(f"{who}: {error}; it takes {takes}") from None
    bound.apply_defaults()
    return bound


def names_arguments(cls: type[T]) -> type[T]:
    """A class whose constructor refuses wrong arguments in the words of `bind_signature`.

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
