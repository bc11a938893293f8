"""Operation: what a node reads and writes, and what input each call takes.

`@remote` and `@node` attach a declaration to a method or function. Each call in a graph turns the
declaration into an operation.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

from .column import Column
from .errors import UserError, nearest
from .metrics import Metrics
from .peer_names import peer_hint

# Arguments: bind them to a signature, and suggest a name for a misspelled one.


T = TypeVar("T")


def parameter_names(function: Callable[..., Any], skip: int = 0) -> list[str]:
    """Return a function's parameter names, without the first `skip`, `*args` and `**kwargs`.

    >>> parameter_names(lambda rows, n, *rest, by="reward", **more: None, skip=1)
    ['n', 'by']
    """
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def bind(
    function: Callable[..., Any], skip: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Map parameter names to the arguments of a call. Raises the errors of `bind_signature`."""
    bound = bind_signature(function, skip, args, kwargs)
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL and value:
            raise UserError(
                f"{function.__qualname__}: give the arguments of a node by name, not as *{name}"
            )
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
    """Bind arguments and defaults. Raises a `UserError` with suggestions for wrong arguments.

    Args:
        skip: number of parameters before the arguments (self, the rows).
        name: the function's name in error messages. Default: its qualified name.
        others: text appended to the error about an unknown argument if no name is close.
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
    except TypeError as error:  # too many arguments, a missing one, or one given twice
        raise UserError(f"{who}: {error}; it takes {takes}") from None
    bound.apply_defaults()
    return bound


F = TypeVar("F", bound=Callable[..., Any])


def names_parameters(name: str, others: str = "", *, skip: int = 0) -> Callable[[F], F]:
    """Decorator: check the arguments of each call with `bind_signature`.

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
            bind_signature(function, skip, args[skip:], kwargs, name=name, others=others)
            return function(*args, **kwargs)

        return cast(F, check_and_call)

    return decorate


def names_arguments(cls: type[T]) -> type[T]:
    """Class decorator: check the arguments of the constructor with `bind_signature`.

    >>> @names_arguments
    ... class Point:
    ...     def __init__(self, *, height: int) -> None: ...
    >>> Point()
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: Point: missing a required argument: 'height'; it takes height
    """
    construct: Any = cls.__init__
    cls.__init__ = names_parameters(cls.__name__, skip=1)(construct)
    return cls


# Input of one call: rows, groups, a quorum of a group, or a training batch.


class Unit(enum.Enum):
    """Kinds of input without parameters."""

    ROWS = "rows"
    """Rows as they become ready, possibly of several groups."""
    GROUPS = "groups"
    """All rows of a group together."""
    FINISHED_GROUPS = "finished groups"
    """Groups that all other nodes have finished. Steps do not wait for such a node."""


ROWS, GROUPS, FINISHED_GROUPS = Unit


@dataclass(frozen=True)
class Quorum:
    """The first `n` ready rows of a group; work on the other rows is canceled. For filters."""

    n: int
    deadline_s: float | None = None
    """[s] Maximum wait after the first ready row. None waits for `n` rows without limit."""


@dataclass(frozen=True)
class TrainingBatch:
    """The groups of one update, which makes a new version of the worker group's weights."""

    whole_groups: bool = False
    """Whether to keep all rows of a group on one rank."""
    accumulates: bool = False
    """Whether an update may get its rows in several calls, the last one with `last=True`."""


Takes: TypeAlias = Unit | Quorum | TrainingBatch

_RECORDS: Mapping[str, type[Quorum | TrainingBatch]] = {
    "quorum": Quorum,
    "training batch": TrainingBatch,
}


def takes_as_json(takes: Takes) -> dict[str, Any]:
    """Convert an input to JSON values.

    >>> takes_as_json(Quorum(2))
    {'kind': 'quorum', 'n': 2, 'deadline_s': None}
    """
    if isinstance(takes, Unit):
        return {"kind": takes.value}
    kind = next(kind for kind, record in _RECORDS.items() if record is type(takes))
    return {"kind": kind, **asdict(takes)}


def takes_from_json(fields: Mapping[str, Any]) -> Takes:
    """Invert `takes_as_json`.

    >>> takes_from_json({"kind": "rows"}) is ROWS
    True
    """
    kind, rest = fields["kind"], {k: v for k, v in fields.items() if k != "kind"}
    return _RECORDS[kind](**rest) if kind in _RECORDS else Unit(kind)


# Operation

P = ParamSpec("P")
R = TypeVar("R")

Columns: TypeAlias = tuple[str | Column, ...] | Callable[..., Iterable[str | Column]]
"""Columns of a declaration: a tuple, or a function that computes them from the call's arguments.

A string matches any column with that name. A `Column` matches only if Weft's nodes or data reader
wrote the column, not if it comes from the user's file.
"""

ALL_COLUMNS = "*"
"""In `may_read`: all columns."""
CONFIG = "config"
"""Parameter name for the worker group's configuration. A function in a declaration (`reads=`,
`writes=`, ...) gets the configuration if it has this parameter."""


class Shape(enum.Enum):
    """How a node's output rows relate to its input rows."""

    MAP = "map"
    """The input rows, with added columns."""
    GROUP = "group"
    """Like MAP, but the node sees all rows of a group together."""
    FILTER = "filter"
    """A subset of the input rows. Weft drops the other rows, with a reason."""
    EXPAND = "expand"
    """New rows, each with a parent: samples of a prompt, pairs of samples, turns of a dialogue."""


@dataclass(frozen=True)
class Operation:
    """What a node reads, writes and takes, as plain data for the log and the ranks."""

    name: str
    shape: Shape = Shape.MAP
    reads: tuple[str, ...] = ()
    may_read: tuple[str, ...] = ()
    """Optional columns, read if they exist. "*" stands for all columns."""
    writes: tuple[str, ...] = ()
    takes: Takes = ROWS
    interruptible: bool = False
    """Whether other calls on the worker may run whenever the method yields."""

    @property
    def samples(self) -> bool:
        """Whether the node samples responses, with the weights of a policy."""
        return self.shape is Shape.EXPAND and self.interruptible

    @property
    def takes_groups(self) -> bool:
        """Whether the node claims groups instead of single rows."""
        return self.takes is not ROWS

    @property
    def whole_groups(self) -> bool:
        """Whether one call, on one rank, gets all rows of a group."""
        return self.takes.whole_groups if isinstance(self.takes, TrainingBatch) else self.takes_groups

    @property
    def updates(self) -> bool:
        """Whether the node creates a new version of its worker group's weights."""
        return isinstance(self.takes, TrainingBatch)

    @property
    def accumulates(self) -> bool:
        """Whether the node is an update that may get its rows in several calls."""
        return isinstance(self.takes, TrainingBatch) and self.takes.accumulates

    @property
    def behind(self) -> bool:
        """Whether steps end without waiting for the node."""
        return self.takes is FINISHED_GROUPS

    @property
    def quorum(self) -> Quorum | None:
        return self.takes if isinstance(self.takes, Quorum) else None


@dataclass(frozen=True)
class Declaration:
    """The declaration that `@remote` and `@node` attach to a method or function.

    A field may be a function that computes the field for each call. Its parameters name arguments
    of the call; the parameter `config` gets the worker group's configuration.

    >>> update = Declaration("update", reads=lambda loss: ("response_ids", *loss), takes=lambda epochs: TrainingBatch(epochs > 1))
    >>> update.called_with({"loss": ("advantages",), "epochs": 1}).reads
    ('response_ids', 'advantages')
    """

    name: str
    shape: Shape = Shape.MAP
    reads: Columns = ()
    may_read: Columns = ()
    writes: Columns = ()
    takes: Takes | Callable[..., Takes] | None = None
    """Input of one call. Default: groups for the shape GROUP, rows for other shapes."""
    interruptible: bool = False

    @property
    def samples(self) -> bool:
        """Whether the method samples responses, with the weights of a policy."""
        return self.shape is Shape.EXPAND and self.interruptible

    @property
    def is_node(self) -> bool:
        """Whether the method takes rows. Other remote methods are called outside graphs."""
        # A method that declares no input, no output and no shape is not a node.
        declared = (self.reads, self.may_read, self.writes, self.takes)
        return any(declared) or self.shape is not Shape.MAP

    def called_with(self, arguments: Mapping[str, Any]) -> Operation:
        """Return the operation for a call with these arguments. Raises a `UserError` if a computed
        field is invalid."""
        return Operation(
            self.name,
            self.shape,
            reads=self._columns("reads", self.reads, arguments),
            may_read=self._columns("may_read", self.may_read, arguments),
            writes=self._columns("writes", self.writes, arguments),
            takes=self._checked_takes(self._value("takes", self.takes, arguments)),
            interruptible=self.interruptible,
        )

    def weft_columns(self, arguments: Mapping[str, Any]) -> frozenset[str]:
        """Return the columns that such a call reads and that are declared as a `Column`."""
        parts = (self._value(p, getattr(self, p), arguments) for p in ("reads", "may_read"))
        return frozenset(str(name) for names in parts for name in names if isinstance(name, Column))

    def checked(self, function: Callable[..., Any], skip: int) -> Declaration:
        """Check the declaration of `function`, and return it. `skip` is the number of parameters
        before the arguments (self, the rows)."""
        # Only worker methods have a configuration.
        known = [*parameter_names(function, skip), *([CONFIG] if skip > 1 else [])]
        for part in ("reads", "may_read", "writes", "takes"):
            value = getattr(self, part)
            if callable(value):
                self._refuse_unknown(part, value, known)
            elif part == "takes":
                self._checked_takes(value)
            else:
                self._columns(part, value, {})
        return self

    def _columns(self, part: str, columns: Columns, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        names = self._value(part, columns, arguments)
        # Reject a string: it is iterable, but its letters are not columns.
        if isinstance(names, str | Column) or not isinstance(names, Iterable):
            raise UserError(
                f"{self.name}: {part} must be a tuple of columns, such as ({str(names)!r},), not {names!r}"
            )
        return tuple(dict.fromkeys(str(name) for name in cast(Iterable[object], names)))

    def _value(self, part: str, value: object, arguments: Mapping[str, Any]) -> Any:
        if not callable(value):
            return value
        self._refuse_unknown(part, value, arguments)
        given = {name: arguments[name] for name in parameter_names(value)}
        try:
            return value(**given)
        except (AttributeError, TypeError) as error:
            of = ", ".join(f"{name}={argument!r}" for name, argument in given.items())
            raise UserError(f"{self.name}: {part} cannot be computed from {of}: {error}") from error

    def _refuse_unknown(self, part: str, function: Callable[..., Any], known: Iterable[str]) -> None:
        names = list(known)
        for name in parameter_names(function):
            if name not in names:
                hint = nearest(name, names) or f"; there are {', '.join(names) or 'none'}"
                raise UserError(
                    f"{self.name}: {part} depends on {name!r}, which is not one of its arguments{hint}"
                )

    def _checked_takes(self, takes: object) -> Takes:
        if takes is None:
            return GROUPS if self.shape is Shape.GROUP else ROWS
        if not isinstance(takes, Takes):
            raise UserError(
                f"{self.name}: takes is {takes!r}; it must be ROWS, GROUPS, a Quorum or a TrainingBatch"
            )
        if self.shape is Shape.MAP and takes is GROUPS:
            raise UserError(
                f"{self.name}: a map of complete groups must be declared with shape=Shape.GROUP"
            )
        if self.shape is Shape.GROUP and takes not in (GROUPS, FINISHED_GROUPS):
            raise UserError(f"{self.name}: a node of shape GROUP takes groups, not {takes}")
        if isinstance(takes, Quorum) and self.shape is not Shape.FILTER:
            raise UserError(
                f"{self.name}: a quorum drops the other rows of its group; declare it with shape=Shape.FILTER"
            )
        return takes


def declaration_of(function: object) -> Declaration | None:
    return getattr(function, "__declaration__", None)


def node(
    *,
    shape: Shape = Shape.MAP,
    reads: Columns = (),
    may_read: Columns = (),
    writes: Columns = (),
    takes: Takes | Callable[..., Takes] | None = None,
    measure: Callable[..., Metrics] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: make a pure function `Batch -> Batch` usable as a node of a graph.

    Called with a `Batch`, the function computes its result. Called while a `@graph` function is
    traced, it adds a node to the graph. It must return the rows that its shape requires:

    - MAP and GROUP: the input rows in the same order, with the columns of `writes`.
    - FILTER: the input rows to keep.
    - EXPAND: new rows with a `parent_id` column.

    Args:
        shape: how the output rows relate to the input rows.
        reads: required columns, or a function of the call's arguments: `lambda by: (by,)`.
        may_read: optional columns, read if they exist.
        writes: added columns.
        takes: input of one call. Default: groups for GROUP, rows for all other shapes.
        measure: a function that computes metrics from the rows and arguments of each call. For
            metrics of intermediate results, the node may return a pair of rows and metrics instead.

    Raises:
        UserError: the declaration is invalid.

    >>> @node(reads=lambda of: (of,), writes=("doubled",))
    ... def double(batch, *, of="reward"):
    ...     return batch.with_columns(doubled=batch.numpy(of) * 2)
    >>> from weft.dataflow.batch import Batch
    >>> double(Batch.of(reward=[1.0, 2.0])).numpy("doubled").tolist()
    [2.0, 4.0]
    """

    def attach(function: Callable[P, R]) -> Callable[P, R]:
        declaration = Declaration(function.__name__, shape, reads, may_read, writes, takes)
        declaration.checked(function, 1)

        @functools.wraps(function)
        def compute_or_trace(*args: P.args, **kwargs: P.kwargs) -> R:
            # Only symbolic rows have `__trace__`. `isinstance` would need an import of `tracing`,
            # which imports this module.
            add_node = getattr(args[0], "__trace__", None) if args else None
            if add_node is None:
                return function(*args, **kwargs)
            return add_node(None, compute_or_trace, declaration, args[1:], kwargs)

        compute_or_trace.__declaration__ = declaration  # pyright: ignore[reportAttributeAccessIssue]
        compute_or_trace.__measure__ = measure  # pyright: ignore[reportAttributeAccessIssue]
        return compute_or_trace

    return attach
