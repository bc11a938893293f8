"""Tracing: run a `@graph` function once with symbolic rows, which record the nodes it calls."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .column import DRAW_PATH, IDENTITY, ON_DEMAND, Column, not_inherited
from .errors import GraphError, NoSuchNodeError, UserError
from .graph import POLICY_ARGUMENT, SOURCE, Graph, Handle, Node
from .operation import ALL_COLUMNS, CONFIG, Declaration, Shape, bind, bind_signature
from .source import Source, file_columns

_NO_VALUES = "rows have no values while a graph is traced"
_NODES_OF_PARTS = {
    "advantages": "an estimator is part of a node: group_advantages(rows, estimator=...)",
    "graders": "a grader is part of a reward worker: weft.group(weft.RewardWorker, function=...), and reward.score(rows)",
    "loss": "a loss is part of an update: actor.update(rows, loss=...)",
}
"""Maps a module or folder to advice on how to use its functions, which are arguments of nodes."""


def _no_node(name: str, module: str) -> str:
    """Return the error message for a function that gets symbolic rows but is not a node."""
    known = next((said for part, said in _NODES_OF_PARTS.items() if part in module.split(".")), "")
    return f"{name!r} is not a node; {known or 'make it one with @weft.node, or pass it to the node that takes it'}"


def refusing_rows(part: type) -> None:
    """Make instances of `part`, which are arguments of nodes, reject symbolic rows (UserError)."""
    call: Any = vars(part).get("__call__")
    if call is None:
        return

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, _SymbolicRows) for arg in args):
            # A user's subclass is in the user's module, so also search the modules of its bases.
            kind = type(args[0])
            raise UserError(_no_node(kind.__name__, ".".join(each.__module__ for each in kind.__mro__)))
        return call(*args, **kwargs)

    part.__call__ = called  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True)
class _SymbolicRows:
    """Rows that pass between nodes during tracing. They have columns, but no values."""

    trace: _Trace
    level: int
    writers: Mapping[str, str]
    """Maps each column to the node that wrote it, or "" for the source."""
    filters: tuple[str, ...] = ()
    """Filters that the rows passed."""

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.writers)

    def __contains__(self, column: str | Column) -> bool:
        """Whether the rows have a column. A `Column` never matches a column of the user's file."""
        return str(column) in self.writers and not (
            isinstance(column, Column) and self.is_of_file(str(column))
        )

    def is_of_file(self, column: str) -> bool:
        """Whether the column comes from the user's file, and no node has written it."""
        return not self.writers[column] and column in self.trace.file_columns

    def __trace__(
        self,
        handle: Handle | None,
        function: Callable[..., Any],
        declaration: Declaration,
        args: Any,
        kwargs: Any,
    ) -> _SymbolicRows:
        return self.trace.add_node(self, handle, function, declaration, args, kwargs)

    def __or__(self, other: _SymbolicRows) -> _SymbolicRows:
        """Join two branches over the same rows. A node's column replaces the source's."""
        if other.level != self.level:
            raise UserError(
                "| joins two branches over the same rows; these come from different expansions"
            )
        return _SymbolicRows(
            self.trace,
            self.level,
            {**self.writers, **{c: w for c, w in other.writers.items() if w or c not in self.writers}},
            tuple(dict.fromkeys(self.filters + other.filters)),
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NoSuchNodeError(f"{self._reader()} reads {name!r}, but {_NO_VALUES}")

    def __getitem__(self, key: object) -> Any:
        raise UserError(f"{self._reader()} reads {key!r}, but {_NO_VALUES}")

    def __len__(self) -> int:
        raise UserError(f"{self._reader()} asks for the number of rows, but {_NO_VALUES}")

    def _reader(self) -> str:
        """Start an error message: name the function that needs values, and how to use it."""
        # Skip this method and its caller in this class.
        frame = sys._getframe(2)
        module = frame.f_globals.get("__name__", "")
        while frame.f_back is not None and frame.f_back.f_globals.get("__name__", "") == module:
            if frame.f_code.co_name in (self.trace.name, *self.trace.path):
                break
            frame = frame.f_back  # skip helpers in the same module
        name, owner = frame.f_code.co_name, frame.f_locals.get("self")
        if name in (self.trace.name, *self.trace.path):
            return f"graph {name!r}"
        called = type(owner).__name__ if name == "__call__" and owner is not None else name
        return f"{_no_node(called, module)}. It"

    def __bool__(self) -> bool:
        raise UserError(
            "a graph cannot branch on rows: they have no values while it is traced (use a filter node)"
        )

    def __iter__(self) -> Any:
        raise UserError(
            "a graph cannot loop over rows: they have no values while it is traced (use a map node)"
        )


class _Trace:
    """The graph under construction while its function runs."""

    def __init__(self, name: str, source: Source) -> None:
        self.name = name
        self.source = source
        self.file_columns = file_columns(source)
        self.nodes: list[Node] = []
        self.handles: dict[str, Handle] = {}
        self.path: tuple[str, ...] = ()
        self.num_levels = 1

    def name_handle(self, handle: Handle, parameter: str | None) -> str:
        """Return a worker group's name. The default is the name of its parameter."""
        if handle.name is None:
            handle.name = parameter or handle.called
        other = self.handles.setdefault(handle.name, handle)
        if other is not handle:
            raise GraphError(
                f"two worker groups are called {handle.name!r}: give one of them another name with weft.group(..., name=...)"
            )
        return handle.name

    def _named(self, handle: Handle, *, is_policy: bool) -> str:
        """Return the name of a worker group that is an argument of a node."""
        if not is_policy:
            return self.name_handle(handle, None)
        # The graph only uses a policy's weights, which its follower has.
        handle.name = handle.called
        return handle.name

    def add_node(
        self,
        rows: _SymbolicRows,
        handle: Handle | None,
        function: Callable[..., Any],
        declaration: Declaration,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> _SymbolicRows:
        """Add the node of a call, and return its output rows. Pure functions have no handle."""
        group = self.name_handle(handle, None) if handle else None
        name = _unused(
            f"{group}.{declaration.name}" if group else declaration.name, {n.name for n in self.nodes}
        )
        given = arguments = bind(function, 2 if handle else 1, args, kwargs)
        # A node may name another worker group. Its worker gets the name of the group.
        policy = POLICY_ARGUMENT if declaration.samples else None
        arguments = {
            key: self._named(value, is_policy=key == policy) if isinstance(value, Handle) else value
            for key, value in given.items()
        }
        given = {**given, CONFIG: handle.config} if handle else given
        operation = declaration.called_with(given)
        # Hide a column of the user's file if the node reads the Weft column with the same name.
        own = declaration.weft_columns(given)
        reached = [c for c in rows.writers if not (c in own and rows.is_of_file(c))]
        optional = operation.may_read
        if ALL_COLUMNS in optional:
            optional = [c for c in reached if c not in ON_DEMAND]
        reads = tuple(dict.fromkeys(c for c in (*operation.reads, *optional) if c in reached))
        expands = operation.shape is Shape.EXPAND
        # Only an EXPAND gets a draw path, which seeds its new rows.
        identity = {str(c) for c in IDENTITY if expands or c is not DRAW_PATH}
        node = Node(
            name=name,
            group=group,
            operation=operation,
            function=function,
            arguments=arguments,
            reads=reads,
            missing=tuple(c for c in operation.reads if c not in reached and c not in identity),
            writes=operation.writes,
            level=rows.level,
            makes_level=self.num_levels if expands else None,
            writers={c: rows.writers[c] for c in reads},
            after=self._after(rows, reads, group if operation.updates else None),
            path=self.path,
            uses=tuple(
                arguments[key]
                for key, value in given.items()
                if isinstance(value, Handle) and key != policy
            ),
        )
        self.nodes.append(node)
        self.num_levels += expands
        # New rows with other tokens do not inherit columns that describe the old tokens.
        left = not_inherited(operation.writes) if expands else ()
        writers = {c: w for c, w in rows.writers.items() if c not in left or rows.is_of_file(c)}
        filters = () if expands else rows.filters
        return _SymbolicRows(
            trace=self,
            level=rows.level if node.makes_level is None else node.makes_level,
            writers={**writers, **dict.fromkeys(operation.writes, name)},
            filters=(*filters, name) if operation.shape is Shape.FILTER else filters,
        )

    def _after(
        self, rows: _SymbolicRows, reads: tuple[str, ...], updated: str | None
    ) -> tuple[str, ...]:
        # An update waits for its group's other nodes, which must use the weights from before it.
        makers = [n.name for n in self.nodes if n.makes_level == rows.level]
        users = [
            n.name
            for n in self.nodes
            if updated and n.group == updated and not n.operation.updates and n.level == rows.level
        ]
        waits = [*makers, *rows.filters, *(rows.writers[c] for c in reads), *users]
        return tuple(n for n in dict.fromkeys(waits) if n)

    def graph(self) -> Graph:
        unread = ON_DEMAND.difference(*(node.reads for node in self.nodes))
        nodes = (replace(n, writes=tuple(c for c in n.writes if c not in unread)) for n in self.nodes)
        return Graph(self.name, self.source, tuple(nodes), dict(self.handles))


def graph(function: Callable[..., Any]) -> Callable[..., Graph]:
    """Decorator: trace a function of rows and handles. Called with a source and handles, it returns
    a `Graph`.

    Called with the symbolic rows of another graph, the function adds its nodes to that graph.

    Raises:
        UserError: the function has no parameter for rows, or is called with wrong arguments.
        GraphError: the graph breaks a rule that does not depend on the run's other graphs.
    """
    if not inspect.signature(function).parameters:
        raise UserError(f"graph {function.__name__!r} must take rows as its first parameter")

    @functools.wraps(function)
    def trace(*args: Any, **kwargs: Any) -> Any:
        bound = bind_signature(function, 0, args, kwargs)
        first = next(iter(bound.arguments))
        source = bound.arguments[first]
        outer = source.trace if isinstance(source, _SymbolicRows) else None
        inner = outer or _Trace(function.__name__, _checked_source(function.__name__, source))
        # Name the groups after their parameters first. A node would name them after their class.
        for name, handle in _handles(bound.arguments):
            inner.name_handle(handle, name)
        if outer is not None:
            path, outer.path = outer.path, (*outer.path, function.__name__)
            try:
                return function(*bound.args, **bound.kwargs)
            finally:
                outer.path = path
        bound.arguments[first] = _SymbolicRows(inner, SOURCE, dict.fromkeys(inner.source.columns, ""))
        function(*bound.args, **bound.kwargs)
        finished = inner.graph()
        # Another graph may update the leaders, so the driver checks that.
        finished.refuse_problems()
        return finished

    return trace


def _handles(arguments: Mapping[str, Any]) -> Iterable[tuple[str, Handle]]:
    """Yield (name, handle) for the handles in a graph's arguments. Handles in lists get numbers."""
    for name, value in arguments.items():
        if isinstance(value, Handle):
            yield name, value
        elif isinstance(value, Mapping):
            yield from _handles({str(k): v for k, v in value.items()})
        elif isinstance(value, list | tuple):
            yield from _handles({f"{name}_{k}": v for k, v in enumerate(value)})


def _checked_source(graph_name: str, source: object) -> Source:
    if isinstance(source, Handle) or not all(hasattr(source, a) for a in ("name", "columns", "table")):
        raise UserError(
            f"graph {graph_name!r} takes a source of rows first (weft.Prompts.read(...) or weft.TableSource), not {source!r}"
        )
    return source  # pyright: ignore[reportReturnType]


def _unused(name: str, taken: set[str]) -> str:
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    return candidate
