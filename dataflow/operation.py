"""Operation: what a node does to rows. A declaration stands beside the code; a call in a graph makes an operation from it."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

from .arguments import parameter_names
from .column import Column
from .errors import UserError, nearest
from .metrics import Metrics

# Takes
#
# What an operation takes in one call: rows, groups, a quorum of a group, or a training batch.


class Unit(enum.Enum):
    """What an operation takes when it has no parameters."""

    ROWS = "rows"
    """Rows as they become ready, of any number of groups."""
    GROUPS = "groups"
    """All rows of a group together."""
    FINISHED_GROUPS = "finished groups"
    """Groups that all other nodes are done with. Nothing waits for this node: neither the end of a step nor the next prompts."""


ROWS, GROUPS, FINISHED_GROUPS = Unit


@dataclass(frozen=True)
class Quorum:
    """The first rows of a group that are ready; the others are cancelled. For a filter."""

    n: int
    """Number of rows of a group that suffice."""
    deadline_s: float | None = None
    """Seconds after the first row is ready until the ready rows go on without the others; None: wait for `n`."""


@dataclass(frozen=True)
class TrainingBatch:
    """The groups of one update, which makes a new version of the parameters of its worker group."""

    whole_groups: bool = False
    """The rows of a group stay together on one rank."""
    accumulates: bool = False
    """The rows may come in several calls; each says whether it is the last (`last=True`)."""


Takes: TypeAlias = Unit | Quorum | TrainingBatch

_RECORDS: Mapping[str, type[Quorum] | type[TrainingBatch]] = {"quorum": Quorum, "training batch": TrainingBatch}


def takes_as_json(takes: Takes) -> dict[str, Any]:
    """The value as JSON, for `takes_from_json`.

    >>> takes_as_json(Quorum(2))
    {'kind': 'quorum', 'n': 2, 'deadline_s': None}
    """
    if isinstance(takes, Unit):
        return {"kind": takes.value}
    return {"kind": next(kind for kind, record in _RECORDS.items() if record is type(takes)), **asdict(takes)}


def takes_from_json(fields: Mapping[str, Any]) -> Takes:
    """The value that `takes_as_json` described.

    >>> takes_from_json({"kind": "rows"}) is ROWS
    True
    """
    kind, rest = fields["kind"], {k: v for k, v in fields.items() if k != "kind"}
    return _RECORDS[kind](**rest) if kind in _RECORDS else Unit(kind)


P = ParamSpec("P")
R = TypeVar("R")

Columns: TypeAlias = tuple[str | Column, ...] | Callable[..., Iterable[str | Column]]
"""Columns of a declaration: a tuple, or a function of the call's arguments that returns them.

A `Column` is one of Weft's: nodes or the reader of the data make it. A column of the user's file is never taken for it, whatever its
name. A string means any column of that name."""

ALL_COLUMNS = "*"
"""In `may_read`: every column that the rows have."""
CONFIG = "config"
"""The parameter by which a function in a declaration gets the configuration of the worker group."""


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


@dataclass(frozen=True)
class Operation:
    """What a node does in one call: plain data, which is written to the log and sent to ranks."""

    name: str
    shape: Shape = Shape.MAP
    reads: tuple[str, ...] = ()
    """Columns that it requires."""
    may_read: tuple[str, ...] = ()
    """Columns that it uses if they exist; "*" is all of them."""
    writes: tuple[str, ...] = ()
    takes: Takes = ROWS
    interruptible: bool = False
    """A generator that lets other calls on its worker have a turn each time it yields; so several may be under way."""

    @property
    def takes_groups(self) -> bool:
        """Whether it claims groups, not single rows."""
        return self.takes is not ROWS

    @property
    def whole_groups(self) -> bool:
        """Whether all rows of a group are in one call, on one rank."""
        return self.takes.whole_groups if isinstance(self.takes, TrainingBatch) else self.takes is not ROWS

    @property
    def updates(self) -> bool:
        """Whether it makes a new version of its worker group's parameters."""
        return isinstance(self.takes, TrainingBatch)

    @property
    def accumulates(self) -> bool:
        """Whether it is an update whose rows may come in several calls."""
        return isinstance(self.takes, TrainingBatch) and self.takes.accumulates

    @property
    def behind(self) -> bool:
        """Whether it follows behind the run, which never waits for it."""
        return self.takes is FINISHED_GROUPS

    @property
    def quorum(self) -> Quorum | None:
        """The quorum that it takes; None if it takes none."""
        return self.takes if isinstance(self.takes, Quorum) else None


@dataclass(frozen=True)
class Declaration:
    """What `@remote` and `@node` attach to a method or function.

    What depends on the arguments of a call is a function of them. Its parameters have the names of those arguments that it
    needs; `config` is the configuration of the worker group.

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
    """None: groups for a GROUP, rows for all others."""
    interruptible: bool = False

    @property
    def is_node(self) -> bool:
        """Whether it takes rows; other remote methods (saving, publishing weights) are called beside the graph."""
        declared = (self.reads, self.may_read, self.writes, self.takes)
        return any(declared) or self.shape is not Shape.MAP

    def called_with(self, arguments: Mapping[str, Any]) -> Operation:
        """The operation of one call.

        Raises:
            UserError: a function of the declaration fails with these arguments, or its result breaks a rule.
        """
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
        """Names of the columns that one call reads and that are declared as a `Column`."""
        named = [name for part in ("reads", "may_read") for name in self._value(part, getattr(self, part), arguments)]
        return frozenset(str(name) for name in named if isinstance(name, Column))

    def check(self, function: Callable[..., Any], skip: int) -> Declaration:
        """This declaration, if it breaks no rule.

        Args:
            function: the declared function.
            skip: number of its leading parameters that are not arguments of a call: the rows (1), or self and the rows (2).

        Raises:
            UserError: naming the part of the declaration, with the nearest argument that there is.
        """
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
        if isinstance(names, str | Column) or not isinstance(names, Iterable):
            raise UserError(f"{self.name}: {part} must be a tuple of columns, such as ({str(names)!r},), not {names!r}")
        return tuple(dict.fromkeys(str(name) for name in cast(Iterable[object], names)))

    def _value(self, part: str, value: object, arguments: Mapping[str, Any]) -> Any:
        """A part of the declaration for these arguments."""
        if not callable(value):
            return value
        self._refuse_unknown(part, value, arguments)
        given = {name: arguments[name] for name in parameter_names(value)}
        try:
            return value(**given)
        except (AttributeError, TypeError) as error:
            of = ", ".join(f"{name}={argument!r}" for name, argument in given.items())
            raise UserError(f"{self.name}: {part} cannot be worked out from {of}: {error}") from error

    def _refuse_unknown(self, part: str, function: Callable[..., Any], known: Iterable[str]) -> None:
        names = list(known)
        for name in parameter_names(function):
            if name not in names:
                hint = nearest(name, names) or f"; there are {', '.join(names) or 'none'}"
                raise UserError(f"{self.name}: {part} depends on {name!r}, which is no argument of it{hint}")

    def _checked_takes(self, takes: object) -> Takes:
        if takes is None:
            return GROUPS if self.shape is Shape.GROUP else ROWS
        if not isinstance(takes, Takes):
            raise UserError(f"{self.name}: takes is {takes!r}; it must be ROWS, GROUPS, a Quorum or a TrainingBatch")
        if self.shape is Shape.MAP and takes is GROUPS:
            raise UserError(f"{self.name}: a map that sees complete groups is declared with shape=Shape.GROUP")
        if self.shape is Shape.GROUP and takes not in (GROUPS, FINISHED_GROUPS):
            raise UserError(f"{self.name}: a node of shape GROUP takes groups, not {takes}")
        if isinstance(takes, Quorum) and self.shape is not Shape.FILTER:
            raise UserError(
                f"{self.name}: a quorum drops the other rows of its group; declare it with shape=Shape.FILTER"
            )
        return takes


def declaration_of(function: object) -> Declaration | None:
    """The declaration attached to a method or function, or None."""
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
    """Make a pure function `Batch -> Batch` usable as a node of a graph.

    Called with a `Batch` it computes; called with the rows of a graph that is being traced it adds a node.
    A map or group returns the rows in the order given with the columns of `writes` added; a filter returns the rows
    that it keeps; an expand returns new rows with a `parent_id` column.

    Args:
        shape: what comes out of the node.
        reads: columns that it requires, or a function of the call's arguments that returns them: `lambda by: (by,)`.
        may_read: columns that it uses if they exist.
        writes: columns that it adds.
        takes: what it is given in one call; None: groups for a GROUP, rows for all others.
        measure: called with the rows and arguments of each call in a run; its result becomes metrics of the step. A function whose
            metrics need its intermediate results returns them itself, as a pair with the rows.

    Raises:
        UserError: the declaration breaks a rule, for example `reads` depends on an argument that the function does not have.

    >>> @node(reads=lambda of: (of,), writes=("doubled",))
    ... def double(batch, *, of="reward"):
    ...     return batch.with_columns(doubled=batch.numpy(of) * 2)
    >>> from weft.dataflow.batch import Batch
    >>> double(Batch.of(reward=[1.0, 2.0])).numpy("doubled").tolist()
    [2.0, 4.0]
    """

    def attach(function: Callable[P, R]) -> Callable[P, R]:
        declaration = Declaration(function.__name__, shape, reads, may_read, writes, takes).check(function, 1)

        @functools.wraps(function)
        def compute_or_trace(*args: P.args, **kwargs: P.kwargs) -> R:
            add_node = getattr(args[0], "__trace__", None) if args else None  # only symbolic rows have it
            if add_node is None:
                return function(*args, **kwargs)
            return add_node(None, compute_or_trace, declaration, args[1:], kwargs)

        compute_or_trace.__declaration__ = declaration  # pyright: ignore[reportAttributeAccessIssue]
        compute_or_trace.__measure__ = measure  # pyright: ignore[reportAttributeAccessIssue]
        return compute_or_trace

    return attach
