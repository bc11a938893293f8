"""Graph: what happens, as plain data. A `@graph` function is called once, with handles; its calls become nodes.

Edges are columns: a node depends on the nodes that wrote what it reads, on the filters that its rows passed, and on the
expansion that made them; nothing else. Where nodes run is a placement, when they run is a schedule.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from .arguments import bind, bind_signature
from .column import DRAW_PATH, IDENTITY, KNOWN
from .errors import GraphError, UserError, nearest
from .handle import Handle
from .operation import ALL_COLUMNS, CONFIG, Declaration, Operation, Shape
from .takes import takes_as_json, takes_from_json

SOURCE = 0
"""Level of the rows that come from the source; each EXPAND makes a further level."""


class Source(Protocol):
    """Where rows come from: a name, the columns that each row has, and the rows themselves."""

    @property
    def name(self) -> str: ...
    @property
    def columns(self) -> tuple[str, ...]: ...
    @property
    def table(self) -> pa.Table: ...


@dataclass(frozen=True)
class Rows:
    """What flows between nodes while a graph is recorded. It has no values: nothing in a graph depends on them."""

    recording: Recording
    level: int
    writers: Mapping[str, str]
    """Column -> the node that wrote it ("" for the source)."""
    filters: tuple[str, ...] = ()
    """Filters that these rows passed."""

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.writers)

    def __record__(
        self, handle: Handle | None, function: Callable[..., Any], declaration: Declaration, args: Any, kwargs: Any
    ) -> Rows:
        return self.recording.add(self, handle, function, declaration, args, kwargs)

    def __or__(self, other: Rows) -> Rows:
        """Two branches over the same rows, joined: the columns of both."""
        if other.level != self.level:
            raise UserError("| joins two branches over the same rows; these were expanded from one another, or apart")
        return Rows(
            self.recording,
            self.level,
            {**self.writers, **other.writers},
            tuple(dict.fromkeys(self.filters + other.filters)),
        )

    def __bool__(self) -> bool:
        raise UserError("a graph cannot branch on rows: they have no values while it is recorded (use a filter node)")

    def __iter__(self) -> Any:
        raise UserError("a graph cannot loop over rows: they have no values while it is recorded (use a map node)")


@dataclass(frozen=True)
class Node:
    """One operation of a graph: reads columns, writes columns."""

    name: str
    group: str | None
    """Name of the worker group that runs it; None for a pure function."""
    operation: Operation
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    reads: tuple[str, ...]
    """Columns that it is given: those it must have and those it may use and that are there."""
    missing: tuple[str, ...]
    """Columns that it must have and that do not reach it (an error)."""
    writes: tuple[str, ...]
    level: int
    """Level of the rows that it takes."""
    makes_level: int | None
    """Level of the rows that it makes (EXPAND only)."""
    writers: Mapping[str, str]
    """For each of `reads`, the node that wrote it ("" for the source)."""
    after: tuple[str, ...]
    """Nodes that must have finished a row (or its ancestor) before this one sees it."""
    path: tuple[str, ...] = ()
    """Names of the nested graphs that it stands in."""


@dataclass(frozen=True)
class ParameterEdge:
    """`follower` takes over `leader`'s weights after each `every`-th update of it."""

    follower: str
    leader: str
    every: int


@dataclass(frozen=True)
class Graph:
    """A recorded graph: printed by `print`, drawn by `mermaid()`, checked by `validate()`, walked by any schedule."""

    name: str
    source: Source
    nodes: tuple[Node, ...]
    handles: Mapping[str, Handle] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(f"graph {self.name!r} has no node {name!r}{nearest(name, [n.name for n in self.nodes])}")

    @property
    def follows(self) -> tuple[ParameterEdge, ...]:
        """The parameter edges that end at this graph's groups, and those that lead up to them."""
        edges: list[ParameterEdge] = []
        pending, seen = list(self.handles.values()), set[int]()
        for handle in pending:
            if handle.leader is not None and id(handle) not in seen:
                edges.append(ParameterEdge(handle.called, handle.leader.called, handle.follows_every))
                pending.append(handle.leader)
            seen.add(id(handle))
        return tuple(edges)

    @property
    def levels(self) -> dict[int, str]:
        """Level -> name of its rows: the source's, or the node that made them."""
        return {SOURCE: self.source.name} | {n.makes_level: n.name for n in self.nodes if n.makes_level is not None}

    def parent_level(self, level: int) -> int:
        """The level whose rows were expanded into this one."""
        return next(n.level for n in self.nodes if n.makes_level == level)

    def level_of(self, writer: str) -> int:
        """The level of the rows that carry the columns written by this node ("" for the source)."""
        if not writer:
            return SOURCE
        node = self[writer]
        return node.level if node.makes_level is None else node.makes_level

    def problems(self, also: Iterable[Graph] = ()) -> list[str]:
        """Every broken rule, a line each; `also` are the other graphs of the run, whose updates this one may follow."""
        return [*self._rows_problems(), *self._following_problems(also)]

    def validate(self, also: Iterable[Graph] = ()) -> Graph:
        """This graph, if it breaks no rule.

        Raises:
            GraphError: naming for each break the node, the rule, the column and the nearest one that exists.
        """
        return self._refuse(self.problems(also))

    def _refuse(self, problems: list[str]) -> Graph:
        if problems:
            raise GraphError("\n".join(problems))
        return self

    def _rows_problems(self) -> list[str]:
        return [*self._column_problems(), *self._group_problems(), *self._cycle_problems()]

    def _column_problems(self) -> Iterable[str]:
        written: dict[str, str] = dict.fromkeys(self.source.columns, f"source {self.source.name!r}")
        everywhere = {c: n.name for n in self.nodes for c in n.writes}
        for node in self.nodes:
            for column in node.missing:
                where = f"node {node.name!r} reads column {column!r}"
                writer = everywhere.get(column)
                if writer == node.name:
                    yield f"{where}, which it writes itself"
                elif writer and [n.name for n in self.nodes].index(writer) > [n.name for n in self.nodes].index(
                    node.name
                ):
                    yield f"{where}, which only {writer!r} writes, later"
                elif writer:
                    yield f"{where}, which {writer!r} writes on another branch; pass its result, or join the two with |"
                else:
                    yield where + (self._left_out(column) or f", which no node writes{self._how_to_have(column, node)}")
            for column in node.writes:
                if column in {str(c) for c in IDENTITY}:
                    yield f"node {node.name!r} writes column {column!r}, which identifies rows and belongs to the buffer"
                # The rows of an EXPAND are new: the prompt of a dialogue's next turn may be called what the first was called.
                elif column in written and node.makes_level is None:
                    already = written[column]
                    yield f"node {node.name!r} writes column {column!r}, which {already} writes already; rename it (into=...)"
                written.setdefault(column, f"node {node.name!r}")

    def _left_out(self, column: str) -> str:
        """Who would write a column if it were called otherwise, and why it does not; "" for nobody."""
        for node in self.nodes:
            for value in node.arguments.values():
                reasons = getattr(value, "leaves_out", None)
                if isinstance(reasons, Mapping) and column in reasons:
                    return f", which node {node.name!r} leaves out: {reasons[column]}"
        return ""

    def _how_to_have(self, column: str, reader: Node) -> str:
        """What makes a column that no node writes; without such a thing, which other one may be meant."""
        if column in KNOWN and KNOWN[column].made:
            return f"; {KNOWN[column].made}"
        known = [*self.source.columns, *(c for n in self.nodes for c in n.writes)]
        near = nearest(column, [c for c in known if c not in reader.writes])
        return near or f"; there are {', '.join(dict.fromkeys(known)) or 'none'}"

    def _group_problems(self) -> Iterable[str]:
        for node in self.nodes:
            if node.operation.whole_groups and node.level == SOURCE:
                yield (
                    f"node {node.name!r} sees whole groups, but each row of the source {self.source.name!r} is a group of its own; "
                    "put it after a node that expands rows (such as generate)"
                )
            n = node.operation.quorum.n if node.operation.quorum else 1
            if not isinstance(n, int) or n < 1:  # pyright: ignore[reportUnnecessaryIsInstance]  a user's argument
                yield f"node {node.name!r} takes the first n={n!r} rows of a group; n must be a whole number of at least 1"

    def _cycle_problems(self) -> Iterable[str]:
        cycle = _cycle({n.name: n.after for n in self.nodes})
        if cycle:
            yield f"nodes wait for each other: {' -> '.join(cycle)}"
        cycle = _cycle({e.follower: (e.leader,) for e in self.follows})
        if cycle:
            yield f"worker groups follow each other's weights: {' -> '.join(cycle)}"

    def _following_problems(self, also: Iterable[Graph]) -> Iterable[str]:
        updated = [n.group for g in (self, *also) for n in g.nodes if n.operation.updates]
        followers = {e.follower for e in self.follows}
        for edge in self.follows:
            if edge.leader not in updated and edge.leader not in followers:
                some = ", ".join(dict.fromkeys(g for g in updated if g)) or "none"
                yield f"{edge.follower!r} follows {edge.leader!r}, which no node updates; updated groups: {some}"

    def outline(self) -> dict[str, Any]:
        """What a ledger needs of the graph, as values of JSON: a run can be looked into without the user's code."""
        return {
            "name": self.name,
            "source": self.source.name,
            "nodes": [
                {
                    "name": n.name,
                    "group": n.group,
                    "operation": {
                        **asdict(n.operation),
                        "shape": n.operation.shape.value,
                        "takes": takes_as_json(n.operation.takes),
                    },
                    "reads": n.reads,
                    "writes": n.writes,
                    "level": n.level,
                    "makes_level": n.makes_level,
                    "writers": n.writers,
                    "after": n.after,
                }
                for n in self.nodes
            ],
        }

    @classmethod
    def from_outline(cls, outline: Mapping[str, Any]) -> Graph:
        """A graph that a ledger can walk and nobody can run; its source has no rows."""
        nodes: list[Node] = []
        for fields in outline["nodes"]:
            operation = dict(fields["operation"])
            operation |= {k: tuple(operation[k]) for k in ("reads", "may_read", "writes")}
            operation["shape"] = Shape(operation["shape"])
            operation["takes"] = takes_from_json(operation["takes"])
            columns = {k: tuple(fields[k]) for k in ("reads", "writes", "after")}
            nodes.append(
                Node(
                    **{**fields, **columns, "operation": Operation(**operation)},
                    function=_without_code,
                    arguments={},
                    missing=(),
                )
            )
        return cls(outline["name"], TableSource(outline["source"], pa.table({})), tuple(nodes))

    def __str__(self) -> str:
        levels = self.levels
        lines = [
            f"graph {self.name}",
            f"  source {self.source.name}: {', '.join(self.source.columns) or 'no columns declared'}",
        ]
        for number, node in enumerate(self.nodes, 1):
            rows = levels[node.level]
            if node.makes_level is not None:
                rows += f" -> {levels[node.makes_level]}"
            waits = "a batch" if node.operation.updates else "groups" if node.operation.whole_groups else "rows"
            lines.append(
                f"  {number}. {'/'.join((*node.path, node.name))}  [{node.operation.shape.value}; {rows}; takes {waits}]"
            )
            lines.append(f"       reads {', '.join(node.reads) or '-'}")
            if node.writes:
                lines.append(f"       writes {', '.join(node.writes)}")
        for edge in self.follows:
            lines.append(f"  {edge.follower} follows {edge.leader}, {_every(edge.every)}")
        return "\n".join(lines)

    def mermaid(self) -> str:
        """The graph as a Mermaid flowchart: solid edges carry columns, dotted ones carry parameters."""
        ids = {"": "source"} | {n.name: f"n{i}" for i, n in enumerate(self.nodes)}
        lines = ["flowchart LR", f"  source[({_quoted(self.source.name)})]"]
        for path in dict.fromkeys(n.path for n in self.nodes):
            drawn = [f"  {ids[n.name]}{_outline(n)}" for n in self.nodes if n.path == path]
            lines += [f"  subgraph {_quoted('/'.join(path))}", *("  " + d for d in drawn), "  end"] if path else drawn
        for node in self.nodes:
            carried: dict[str, list[str]] = {w: [] for w in node.after}
            for column in node.reads:
                carried.setdefault(node.writers[column], []).append(column)
            for writer, columns in carried.items():
                label = f"-- {_quoted(', '.join(columns))} " if columns else ""
                lines.append(f"  {ids[writer]} {label}--> {ids[node.name]}")
        # A parameter edge leaves the node that updates, and reaches each node that uses the weights. A group that has no
        # such node here (it may have one in another graph of the run) is drawn itself.
        groups = dict.fromkeys(g for e in self.follows for g in (e.leader, e.follower))
        updates = {g: [n for n in self.nodes if n.group == g and n.operation.updates] for g in groups}
        uses = {g: [n for n in self.nodes if n.group == g] for g in groups}
        alone = {g: f"g{i}" for i, g in enumerate(groups)}
        drawn_alone: dict[str, None] = {}
        edges: list[str] = []
        for edge in self.follows:
            start = ids[updates[edge.leader][-1].name] if updates[edge.leader] else alone[edge.leader]
            ends = [ids[n.name] for n in uses[edge.follower]] or [alone[edge.follower]]
            drawn_alone |= dict.fromkeys(g for g in (edge.leader, edge.follower) if alone[g] in (start, *ends))
            label = _quoted(f"weights, {_every(edge.every)}")
            edges += [f"  {start} -. {label} .-> {end}" for end in ends]
        lines += [f"  {alone[g]}[{_quoted(g)}]" for g in drawn_alone] + edges
        return "\n".join(lines) + "\n"


class Recording:
    """A graph while its function runs."""

    def __init__(self, name: str, source: Source) -> None:
        self.name = name
        self.source = source
        self.nodes: list[Node] = []
        self.handles: dict[str, Handle] = {}
        self.path: tuple[str, ...] = ()
        self.num_levels = 1

    def name_handle(self, handle: Handle, parameter: str | None) -> str:
        """The group's name; a handle without one takes that of the parameter that it came in."""
        if handle.name is None:
            handle.name = parameter or handle.called
        other = self.handles.setdefault(handle.name, handle)
        if other is not handle:
            raise GraphError(
                f"two worker groups are called {handle.name!r}: give one of them another name with weft.group(..., name=...)"
            )
        return handle.name

    def add(
        self,
        rows: Rows,
        handle: Handle | None,
        function: Callable[..., Any],
        declaration: Declaration,
        args: Any,
        kwargs: Any,
    ) -> Rows:
        group = self.name_handle(handle, None) if handle else None
        name = _unused(f"{group}.{declaration.name}" if group else declaration.name, {n.name for n in self.nodes})
        arguments = bind(function, 2 if handle else 1, args, kwargs)
        described = {**arguments, CONFIG: handle.config} if handle else arguments
        operation = declaration.called_with(described)
        optional = rows.columns if ALL_COLUMNS in operation.may_read else operation.may_read
        identity = {str(c) for c in IDENTITY if operation.shape is Shape.EXPAND or c is not DRAW_PATH}
        reads = tuple(dict.fromkeys(c for c in (*operation.reads, *optional) if c in rows.writers))
        expands = operation.shape is Shape.EXPAND
        # The rows' own history, and with it the order of calls on one group: an update comes after earlier uses of its weights.
        same_group = [
            n.name
            for n in self.nodes
            if operation.updates and n.group == group and not n.operation.updates and n.level == rows.level
        ]
        makers = [n.name for n in self.nodes if n.makes_level == rows.level]
        after = dict.fromkeys([*makers, *rows.filters, *(rows.writers[c] for c in reads), *same_group])
        node = Node(
            name=name,
            group=group,
            operation=operation,
            function=function,
            arguments=arguments,
            reads=reads,
            missing=tuple(c for c in operation.reads if c not in rows.writers and c not in identity),
            writes=operation.writes,
            level=rows.level,
            makes_level=self.num_levels if expands else None,
            writers={c: rows.writers[c] for c in reads},
            after=tuple(a for a in after if a),
            path=self.path,
        )
        self.nodes.append(node)
        self.num_levels += expands
        return Rows(
            recording=self,
            level=rows.level if node.makes_level is None else node.makes_level,
            writers={**rows.writers, **dict.fromkeys(operation.writes, name)},
            filters=(*rows.filters, name) if operation.shape is Shape.FILTER else () if expands else rows.filters,
        )

    def finish(self) -> Graph:
        return Graph(self.name, self.source, tuple(self.nodes), dict(self.handles))


def graph(function: Callable[..., Any]) -> Callable[..., Graph]:
    """Make a function of rows and handles into a recorder: called with a source and handles it returns a `Graph`.

    Called with the rows of a graph that is being recorded, its nodes become part of that graph (graphs nest).

    Raises:
        GraphError: when the rows of the recorded graph break a rule (see `Graph.validate`).
    """
    if not inspect.signature(function).parameters:
        raise UserError(f"graph {function.__name__!r} must take rows as its first parameter")

    @functools.wraps(function)
    def record(*args: Any, **kwargs: Any) -> Any:
        bound = bind_signature(function, 0, args, kwargs)
        first = next(iter(bound.arguments))
        source = bound.arguments[first]
        outer = source.recording if isinstance(source, Rows) else None
        recording = outer or Recording(function.__name__, _checked_source(function.__name__, source))
        for name, handle in _handles(bound.arguments):
            recording.name_handle(handle, name)
        if outer is not None:
            path, outer.path = outer.path, (*outer.path, function.__name__)
            try:
                return function(*bound.args, **bound.kwargs)
            finally:
                outer.path = path
        bound.arguments[first] = Rows(recording, SOURCE, dict.fromkeys(recording.source.columns, ""))
        function(*bound.args, **bound.kwargs)
        finished = recording.finish()
        # Whom a group follows may be updated in another graph of the run: the driver, who knows them all, checks that.
        return finished._refuse(finished._rows_problems())

    return record


@dataclass(frozen=True)
class TableSource:
    """Rows of any Arrow table; see `dataflow/prompts/prompts.py` for prompts from files.

    >>> TableSource("pairs", pa.table({"prompt_ids": [[1, 2]]})).columns
    ('prompt_ids',)
    """

    name: str
    table: pa.Table

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.table.column_names)


def _without_code(rows: object) -> None:
    raise UserError("this graph was read from the log of a run: it has no code to run")


def _handles(arguments: Mapping[str, Any]) -> Iterable[tuple[str, Handle]]:
    """Handles among the arguments of a graph, each with the name that it takes from there; lists are numbered."""
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


_OUTLINES = {Shape.MAP: "[{}]", Shape.GROUP: "[[{}]]", Shape.FILTER: "{{{}}}", Shape.EXPAND: "[/{}/]"}


def _outline(node: Node) -> str:
    return ("([{}])" if node.operation.updates else _OUTLINES[node.operation.shape]).format(_quoted(node.name))


def _quoted(text: str) -> str:
    return '"' + text.replace('"', "#quot;") + '"'


def _every(every: int) -> str:
    return "every update" if every == 1 else f"every {every} updates"


def _unused(name: str, taken: set[str]) -> str:
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    return candidate


def _cycle(after: Mapping[str, Iterable[str]]) -> list[str]:
    """Names along one cycle of a dependency relation, or an empty list."""
    state: dict[str, int] = {}  # 1: on the path being walked, 2: known to be free of cycles

    def walk(name: str, path: list[str]) -> list[str]:
        if state.get(name) == 2:
            return []
        if name in path:
            return [*path[path.index(name) :], name]
        for other in after.get(name, ()):
            found = walk(other, [*path, name])
            if found:
                return found
        state[name] = 2
        return []

    return next((found for name in after if (found := walk(name, []))), [])
