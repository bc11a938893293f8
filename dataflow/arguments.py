"""Arguments by name: bound to a signature, with the nearest right name offered for a wrong one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from .errors import UserError, nearest
from .peer_names import peer_hint

T = TypeVar("T")


def parameter_names(function: Callable[..., Any], skip: int = 0) -> list[str]:
    """Names of the parameters after the first `skip`, without `*args` and `**kwargs`.

    >>> parameter_names(lambda rows, n, *rest, by="reward", **more: None, skip=1)
    ['n', 'by']
    """
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def bind(function: Callable[..., Any], skip: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a traced call by name, with defaults.

    Args:
        function: the function that is called.
        skip: number of leading parameters that are left out (self, the rows).
        args: arguments given by position.
        kwargs: arguments given by name.

    Raises:
        UserError: the function does not take an argument; the message offers the nearest one that it takes.
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
    others: str = "",
) -> inspect.BoundArguments:
    """`inspect.Signature.bind` with defaults filled in and errors that name the nearest right argument.

    Args:
        function: the function that is called.
        skip: number of leading parameters that are left out.
        args: arguments given by position.
        kwargs: arguments given by name.
        name: the function's name in messages; None: its own name.
        others: end of the message about an unknown argument that is near no known one.

    Raises:
        UserError: an argument is unknown, missing, given twice, or one too many.
    """
    who = name or function.__qualname__
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    named = parameter_names(function, skip)
    takes = ", ".join(named) or "only rows"
    for given, value in kwargs.items():
        if given not in named and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            hint = peer_hint(given, named) or nearest(given, named) or f"; it takes {takes}{others}"
            raise UserError(f"{who} takes no argument {given!r} (value {value!r}){hint}")
    try:
        bound = inspect.Signature(parameters).bind(*args, **kwargs)
    except TypeError as error:  # one too many, one that must be given, or one given twice
        raise UserError(f"{who}: {error}; it takes {takes}") from None
    bound.apply_defaults()
    return bound


def names_arguments(cls: type[T]) -> type[T]:
    """Make a class refuse wrong arguments of its constructor with the messages of `bind_signature`.

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


F = TypeVar("F", bound=Callable[..., Any])


def names_parameters(name: str, others: str = "") -> Callable[[F], F]:
    """Make a function refuse wrong arguments with the messages of `bind_signature`.

    Args:
        name: the function's name in messages.
        others: see `bind_signature`.

    >>> @names_parameters("measure")
    ... def measure(*, height: int) -> int:
    ...     return height
    >>> measure(hieght=1)
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: measure takes no argument 'hieght' (value 1); did you mean 'height'?
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def check_and_call(*args: Any, **kwargs: Any) -> Any:
            bind_signature(function, 0, args, kwargs, name=name, others=others)
            return function(*args, **kwargs)

        return cast(F, check_and_call)

    return decorate
