"""Operation: what a node does to rows, declared beside the code that does it."""

from __future__ import annotations

import enum
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

from .errors import UserError, nearest
from .metrics import Metrics

P = ParamSpec("P")
R = TypeVar("R")


class Shape(enum.Enum):
    """What comes out of a node, given rows."""

    MAP = "map"
    """The same rows, with more columns."""
    GROUP = "group"
    """The same, but the node sees all rows of a group together."""
    FILTER = "filter"
    """Some of the rows; the others are dropped, with a reason."""
    EXPAND = "expand"
    """New rows that know their parent: samples of a prompt, pairs made of samples, turns of a dialogue."""


ALL_COLUMNS = "*"
"""Among what an operation may read: every column that its rows have."""


@dataclass(frozen=True)
class Operation:
    """The declaration that `@remote` and `@node` attach to a method or function.

    `reads`, `may_read` (used where present; "*" is all that there are) and `writes` are column names. "{into}", alone or
    within a name, stands for the value of that argument of the call, "{loss.reads}" for the names in that attribute of it,
    and "{config.reads}" for those in the worker group's configuration, so that what a node reads can depend on how it is
    made and called.
    """

    name: str
    shape: Shape = Shape.MAP
    reads: tuple[str, ...] = ()
    may_read: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    whole_groups: bool = False
    """Sees all rows of a group at once (always true of GROUP; a FILTER or EXPAND may ask for it)."""
    whole_groups_if: str | None = None
    """An argument, or an attribute of one ("loss.whole_groups"), that says whether a call sees all rows of a group at once."""
    updates: bool = False
    """Waits for a whole training batch and makes a new version of its worker group's parameters."""
    interruptible: bool = False
    """A generator that lets other calls on its worker have a turn each time it yields; so several may be under way."""
    accumulates: tuple[str, ...] | None = None
    """An update whose rows may come in several calls, the last of which says so (`last=True`), as long as these arguments are
    1; None: it takes its batch at once."""
    behind: bool = False
    """Follows behind: it is given a group when nothing else is left to do with it, and nothing waits for it, neither the end of a step
    nor the next prompts."""
    quorum: bool = False
    """A FILTER that is given the first `n` rows of a group (its argument) as soon as they are ready, or what there is when its
    `deadline_s` (the other argument, or None) has passed since the first was; the others of the group are cancelled."""

    @property
    def takes_groups(self) -> bool:
        """Claims whole groups rather than rows."""
        return self.whole_groups or self.updates

    @property
    def takes_rows(self) -> bool:
        """It can be a node; other remote methods (saving, publishing weights) are called beside the graph."""
        return bool(self.reads or self.may_read or self.writes or self.updates or self.shape is not Shape.MAP)

    def called_with(self, arguments: Mapping[str, Any]) -> Operation:
        """The operation as it is in one call: what depends on the arguments decided.

        >>> Operation("update", whole_groups_if="pairs").called_with({"pairs": True}).whole_groups
        True
        """
        if self.whole_groups_if is None:
            return self
        first, *rest = self.whole_groups_if.split(".")
        value: Any = arguments[first]
        for attribute in rest:
            value = getattr(value, attribute, False)
        return replace(self, whole_groups=self.whole_groups or bool(value))

    def columns(self, templates: Iterable[str], arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Column names for one call: templates filled in from its arguments.

        >>> Operation("logprobs").columns(("prompt_ids", "{into}"), {"into": "reference_logprobs"})
        ('prompt_ids', 'reference_logprobs')
        """
        names: list[str] = []
        for template in templates:
            whole = re.fullmatch(r"\{([\w.]+)\}", template)
            if whole is None:
                names.append(re.sub(r"\{(\w+)\}", lambda part: str(arguments[part[1]]), template))
                continue
            first, *rest = whole[1].split(".")
            value: Any = arguments[first]
            for attribute in rest:
                value = getattr(value, attribute, ())
            names.extend([str(value)] if isinstance(value, str) or not isinstance(value, Iterable) else map(str, value))
        return tuple(dict.fromkeys(names))


def declare(
    function: Callable[..., Any],
    *,
    shape: Shape = Shape.MAP,
    reads: Iterable[object] = (),
    may_read: Iterable[object] = (),
    writes: Iterable[object] = (),
    whole_groups: bool = False,
    whole_groups_if: str | None = None,
    updates: bool = False,
    quorum: bool = False,
    interruptible: bool = False,
    accumulates: tuple[str, ...] | None = None,
    behind: bool = False,
) -> Operation:
    """The `Operation` of a function or method, columns given by name or as `Column`."""
    if whole_groups and shape is Shape.MAP:
        raise UserError(f"{function.__name__}: a map that sees whole groups is declared with shape=Shape.GROUP")
    return Operation(
        name=function.__name__,
        shape=shape,
        reads=tuple(str(c) for c in reads),
        may_read=tuple(str(c) for c in may_read),
        writes=tuple(str(c) for c in writes),
        whole_groups=whole_groups or quorum or shape is Shape.GROUP,
        whole_groups_if=whole_groups_if,
        updates=updates,
        quorum=quorum,
        interruptible=interruptible,
        accumulates=accumulates,
        behind=behind,
    )


def operation_of(function: object) -> Operation | None:
    """The operation attached to a method or function, or None."""
    return getattr(function, "__operation__", None)


def node(
    *,
    shape: Shape = Shape.MAP,
    reads: Iterable[object] = (),
    may_read: Iterable[object] = (),
    writes: Iterable[object] = (),
    whole_groups: bool = False,
    quorum: bool = False,
    measure: Callable[..., Metrics] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a pure function `Batch -> Batch` usable as a node of a graph.

    Called with a `Batch` it computes; called with the rows of a graph that is being recorded it adds a node.
    A map or group returns the rows in the order given with the columns of `writes` added; a filter returns the rows
    that it keeps; an expand returns new rows with a `parent_id` column.

    Args:
        measure: called with the rows and arguments of each call in a run; what it returns is among the metrics of the step. A function
            whose metrics need what it has worked out returns them itself, as a pair with the rows.

    >>> @node(reads=("reward",), writes=("doubled",))
    ... def double(batch):
    ...     return batch.with_columns(doubled=batch.numpy("reward") * 2)
    >>> from weft.dataflow.batch import Batch
    >>> double(Batch.of(reward=[1.0, 2.0])).numpy("doubled").tolist()
    [2.0, 4.0]
    """

    def attach(function: Callable[P, R]) -> Callable[P, R]:
        operation = declare(
            function,
            shape=shape,
            reads=reads,
            may_read=may_read,
            writes=writes,
            whole_groups=whole_groups,
            quorum=quorum,
        )

        @functools.wraps(function)
        def compute_or_record(*args: P.args, **kwargs: P.kwargs) -> R:
            record = getattr(args[0], "__record__", None) if args else None  # symbolic rows carry it: see graph.py
            if record is None:
                return function(*args, **kwargs)
            return record(None, compute_or_record, operation, args[1:], kwargs)

        compute_or_record.__operation__ = operation  # pyright: ignore[reportAttributeAccessIssue]
        compute_or_record.__measure__ = measure  # pyright: ignore[reportAttributeAccessIssue]
        return compute_or_record

    return attach


def bind(function: Callable[..., Any], skip: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a recorded call by name, defaults filled in; `skip` leading parameters (self, the rows) are left out.

    Raises:
        UserError: for an argument that the function does not take, naming the nearest one that it does.
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
    """`inspect.Signature.bind` with defaults filled in, whose errors name the nearest right argument, and what was called by its
    `name` (that of the function, if none is given)."""
    who = name or function.__qualname__
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
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
