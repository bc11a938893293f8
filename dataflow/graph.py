"""Graph: the nodes of a run and their dependencies, as plain data.

A node depends on the nodes that wrote its columns, on the filters that its rows passed, and on the
EXPAND node that created its rows. The placement decides where a node runs; the schedule decides
when.
"""

from __future__ import annotations

import graphlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import pyarrow as pa

from .column import IDENTITY, KNOWN, not_inherited
from .config import Config
from .errors import GraphError, NoSuchNodeError, UserError, nearest
from .operation import Declaration, Operation, Shape, declaration_of, takes_as_json, takes_from_json
from .source import Source, TableSource, file_columns

# Node: one operation of a graph and its dependencies.

SOURCE = 0
"""Level of the source's rows. The output rows of each EXPAND have their own level."""
POLICY_ARGUMENT = "policy"
"""Argument of a generating node: the leader whose weights sample, if its group follows several."""


@dataclass(frozen=True)
class Node:
    name: str
    group: str | None
    """Worker group that runs the node; None for a pure function."""
    operation: Operation
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    reads: tuple[str, ...]
    """Columns that the node gets: required columns, and optional ones that exist."""
    missing: tuple[str, ...]
    """Required columns that do not exist; `Graph.validate` rejects such a graph."""
    writes: tuple[str, ...]
    level: int
    """Level of the input rows."""
    makes_level: int | None
    """Level of the output rows (EXPAND only)."""
    writers: Mapping[str, str]
    """Maps each column of `reads` to the node that wrote it, or "" for the source."""
    after: tuple[str, ...]
    """Nodes that must finish a row (or its ancestor) before this node gets it."""
    path: tuple[str, ...] = ()
    """Nested graphs that contain the node, outermost first."""
    uses: tuple[str, ...] = ()
    """Other worker groups that work for the node: those among its arguments."""

    @property
    def policy(self) -> str:
        """Name of the leader whose weights sample, if the node names one; otherwise ""."""
        named = self.arguments.get(POLICY_ARGUMENT) if self.operation.samples else None
        return named if isinstance(named, str) else ""


@dataclass(frozen=True)
class ParameterEdge:
    """`follower` loads the weights of `leader` after every `every`-th update of `leader`."""

    follower: str
    leader: str
    every: int


# Handle: a worker group in a script, before its processes start.


W = TypeVar("W")


def _from_here(config: Any) -> Any:
    """Make model and tokenizer paths absolute, because reward functions may change directory."""
    found: dict[str, Any] = {}
    for name, value in dict(config).items() if isinstance(config, Config) else ():
        if isinstance(value, str | Path) and ("model" in name or "tokenizer" in name):
            folder = Path(value).expanduser()
            if not Path(value).is_absolute() and folder.is_dir():
                found[name] = type(value)(folder.absolute())
    return config.model_copy(update=found) if found else config


class Handle:
    """A worker group in a script: its worker class, configuration and name.

    A method call with rows inside a `@graph` function records a node. `weft.group` declares the
    worker class as its return type, so that "go to definition" works on `rollout.generate`.
    """

    def __init__(self, worker_class: type, config: Any, name: str | None) -> None:
        self.worker_class = worker_class
        self.given = config
        """The configuration that the user gave."""
        self.config = _from_here(config)
        """The configuration that the run uses, with absolute paths and the leaders' LoRA
        settings."""
        self.name = name
        self.leaders: tuple[Handle, ...] = ()
        """The worker groups whose weights this group loads: one, or several with an adapter each."""
        self.follows_every = 1
        """Load the weights after every this many updates of the leader."""

    @property
    def called(self) -> str:
        """The given name, or a name derived from the class: "actor" for `ActorWorker`."""
        return self.name or self.worker_class.__name__.removesuffix("Worker").lower()

    @property
    def transport(self) -> str:
        """How followers get this group's weights; "auto" if the worker has no such setting."""
        return getattr(self.given, "transport", "auto")

    @property
    def vllm_backend(self) -> str:
        """The vLLM backend that sends this group's weights, or ""."""
        return getattr(self.given, "vllm_backend", "")

    def __repr__(self) -> str:
        return f"<handle {self.name or '(unnamed)'}: {self.worker_class.__name__}>"

    def follows(self, *leaders: object, every: int = 1) -> None:
        """Make this group load the weights of a leader after every `every`-th update. A rollout can
        follow several actors that train adapters of one model: `rollout.follows(a, b)`. Raises a
        `UserError` if a leader cannot publish weights or this group cannot receive them."""
        if not isinstance(every, int) or every < 1:
            raise UserError(f"{self!r}.follows(every={every!r}): every must be an integer of at least 1")
        found: list[Handle] = []
        for leader in leaders or (None,):
            if not isinstance(leader, Handle):
                raise UserError(
                    f"{self.name or self.worker_class.__name__}.follows() takes a handle, not {leader!r}"
                )
            if leader in found:
                raise UserError(f"{self!r}.follows() names {leader!r} twice; name each leader once")
            found.append(leader)
            wanted = (
                (leader, "publish_weights"),
                (leader, "finish_publishing"),
                (self, "receive_weights"),
            )
            for handle, method in wanted:
                if not hasattr(handle.worker_class, method):
                    raise UserError(
                        f"{self!r} cannot follow {leader!r}: {handle.worker_class.__name__} has no {method}()"
                    )
        if self.leaders and self.leaders != tuple(found):
            raise UserError(
                f"{self!r} follows {', '.join(map(repr, self.leaders))} already; name all leaders in one call of follows()"
            )
        self.leaders, self.follows_every = tuple(found), every

    def __getattr__(self, method: str) -> Any:
        # Pickle and copy look up special methods on instances.
        if method.startswith("__"):
            raise AttributeError(method)
        # `getattr_static` does not run properties or descriptors of the class.
        function = inspect.getattr_static(self.worker_class, method, None)
        declaration = declared(self.worker_class, method)
        if declaration is None or not declaration.is_node:
            declarations = ((n, declared(self.worker_class, n)) for n in dir(self.worker_class))
            known = [name for name, each in declarations if each is not None and each.is_node]
            hint = nearest(method, known) or f"; it has {', '.join(known) or 'none'}"
            raise NoSuchNodeError(f"{self.worker_class.__name__} has no node {method!r}{hint}")

        def call(*args: Any, **kwargs: Any) -> Any:
            add_node = getattr(args[0], "__trace__", None) if args else None
            if add_node is None:
                raise UserError(
                    f"{self!r}.{method}() takes the symbolic rows of a graph first; call it inside a @weft.graph function"
                )
            return add_node(self, function, declaration, args[1:], kwargs)

        return call


def declared(worker_class: type, method: str) -> Declaration | None:
    """Return the declaration of a worker's method, possibly inherited; None if not remote."""
    for each in worker_class.__mro__:
        declaration = declaration_of(vars(each).get(method))
        if declaration is not None:
            return declaration
    return None


def group(worker_class: type[W], *, name: str | None = None, **settings: Any) -> W:
    """Create a handle for a worker group. `settings` are the fields of `worker_class.Config`. The
    default name is that of the first graph parameter that the handle is passed to."""
    made_of = getattr(worker_class, "Config", None)
    if not isinstance(made_of, type):
        raise UserError(
            f"weft.group({getattr(worker_class, '__name__', repr(worker_class))}): the class has no settings class `Config`; "
            "derive it from weft.Worker and set `Config = MyConfig`, where MyConfig is a weft.Config"
        )
    config = cast(Any, made_of)(**settings)
    return cast(W, Handle(worker_class, config, name))


# Drawing: a graph as text, or as a Mermaid flowchart.


def _text(graph: Graph) -> str:
    source, levels = graph.source, graph.levels
    lines = [
        f"graph {graph.name}",
        f"  source {source.name}: {', '.join(source.columns) or 'no columns declared'}",
    ]
    for number, node in enumerate(graph.nodes, 1):
        rows = levels[node.level]
        if node.makes_level is not None:
            rows += f" -> {levels[node.makes_level]}"
        operation = node.operation
        taken = "a batch" if operation.updates else "groups" if operation.whole_groups else "rows"
        kind = f"{operation.shape.value}; {rows}; takes {taken}"
        lines.append(f"  {number}. {'/'.join((*node.path, node.name))}  [{kind}]")
        lines.append(f"       reads {', '.join(node.reads) or '-'}")
        if node.writes:
            lines.append(f"       writes {', '.join(node.writes)}")
        if node.uses:
            lines.append(f"       uses {', '.join(node.uses)}")
    lines += [f"  {e.follower} follows {e.leader}, {_every(e.every)}" for e in graph.follows]
    return "\n".join(lines)


_BOXES = {Shape.MAP: "[{}]", Shape.GROUP: "[[{}]]", Shape.FILTER: "{{{}}}", Shape.EXPAND: "[/{}/]"}


def _mermaid(graph: Graph) -> str:
    """Return a Mermaid flowchart. Solid edges carry columns; dotted edges carry weights."""
    ids = {"": "source"} | {n.name: f"n{i}" for i, n in enumerate(graph.nodes)}
    lines = ["flowchart LR", f"  source[({_quoted(graph.source.name)})]"]
    for path in dict.fromkeys(n.path for n in graph.nodes):
        inside = [n for n in graph.nodes if n.path == path]
        boxes = ["([{}])" if n.operation.updates else _BOXES[n.operation.shape] for n in inside]
        drawn = [
            f"  {ids[n.name]}{b.format(_quoted(n.name))}" for n, b in zip(inside, boxes, strict=True)
        ]
        if path:
            drawn = [f"  subgraph {_quoted('/'.join(path))}", *("  " + d for d in drawn), "  end"]
        lines += drawn
    for node in graph.nodes:
        carried: dict[str, list[str]] = {w: [] for w in node.after}
        for column in node.reads:
            carried.setdefault(node.writers[column], []).append(column)
        for writer, columns in carried.items():
            label = f"-- {_quoted(', '.join(columns))} " if columns else ""
            lines.append(f"  {ids[writer]} {label}--> {ids[node.name]}")
    return "\n".join([*lines, *_parameter_edges(ids, graph)]) + "\n"


def _parameter_edges(ids: Mapping[str, str], graph: Graph) -> list[str]:
    """Return the dotted edges, from the node that updates the weights to the nodes that use them.

    A group without such a node gets a separate box. Another graph may contain the node.
    """
    groups = dict.fromkeys(g for e in graph.follows for g in (e.leader, e.follower))
    alone = {g: f"g{i}" for i, g in enumerate(groups)}
    drawn_alone: dict[str, None] = {}
    lines: list[str] = []
    for edge in graph.follows:
        updates = [ids[n.name] for n in graph.nodes if n.group == edge.leader and n.operation.updates]
        # With several updates, followers load the weights after the last one.
        start = updates[-1] if updates else alone[edge.leader]
        users = [n for n in graph.nodes if n.group == edge.follower and n.policy in ("", edge.leader)]
        ends = [ids[n.name] for n in users] or [alone[edge.follower]]
        drawn_alone |= dict.fromkeys(
            g for g in (edge.leader, edge.follower) if alone[g] in (start, *ends)
        )
        label = _quoted(f"weights, {_every(edge.every)}")
        lines += [f"  {start} -. {label} .-> {end}" for end in ends]
    return [f"  {alone[g]}[{_quoted(g)}]" for g in drawn_alone] + lines


def _quoted(text: str) -> str:
    return '"' + text.replace('"', "#quot;") + '"'


def _every(every: int) -> str:
    return "every update" if every == 1 else f"every {every} updates"


# Validation: one line per broken rule, with the node, the column and the closest valid name.


def _column_problems(graph: Graph) -> Iterable[str]:
    source, identity = graph.source, {str(c) for c in IDENTITY}
    # A node may replace a column of the user's file, but not a column that Weft wrote.
    made = [column for column in source.columns if column not in file_columns(source)]
    written: dict[str, list[tuple[int, str]]] = {c: [(SOURCE, f"source {source.name!r}")] for c in made}
    """Column -> the levels that have it, and who wrote it there."""
    for position, node in enumerate(graph.nodes):
        level = node.level if node.makes_level is None else node.makes_level
        for column in node.missing:
            yield f"node {node.name!r} reads column {column!r}, {_why_missing(column, position, graph)}"
        for column in node.writes:
            if column in identity:
                yield f"node {node.name!r} writes column {column!r}, which identifies rows and belongs to the buffer"
            # An EXPAND creates new rows, so a dialogue may write each turn's prompt to one column.
            elif node.makes_level is None:
                for other, already in written.get(column, ()):
                    if _on_one_branch(level, other, graph):
                        yield f"node {node.name!r} writes column {column!r}, which {already} writes already; rename it (into=...)"
                        break
            written.setdefault(column, []).append((level, f"node {node.name!r}"))


def _why_missing(column: str, position: int, graph: Graph) -> str:
    source, nodes = graph.source, graph.nodes
    reader = nodes[position]
    at, writer = next(
        ((i, n.name) for i, n in reversed([*enumerate(nodes)]) if column in n.writes), (position, "")
    )
    if writer == reader.name:
        return "which it writes itself"
    if at > position:
        return f"which only {writer!r} writes, later"
    if writer:
        for node in nodes[at + 1 : position]:
            # A node between writer and reader replaced the tokens that the column describes.
            if column in not_inherited(node.writes) and _descends(reader.level, node, nodes):
                return (
                    f"which {writer!r} writes for other tokens: {node.name!r} makes rows with new tokens; let it write "
                    f"{column!r} as well, or read the column before it"
                )
        return f"which {writer!r} writes on another branch; pass its result, or join the two with |"
    if column in KNOWN and KNOWN[column].made:
        way = f"; {KNOWN[column].made}"
    else:
        known = [*(c for c in source.columns if c != column), *(c for n in nodes for c in n.writes)]
        near = nearest(column, [c for c in known if c not in reader.writes])
        way = near or f"; there are {', '.join(dict.fromkeys(known)) or 'none'}"
    if column in file_columns(source):
        return (
            f"which no node writes. The column {column!r} of {source.name!r} belongs to your file, and Weft does not use it as its own"
            f"{way}"
        )
    return f"which no node writes{way}"


def _descends(level: int, node: Node, nodes: Sequence[Node]) -> bool:
    """Whether the rows of a level descend from rows that `node` created."""
    while level != SOURCE:
        if level == node.makes_level:
            return True
        level = next(n.level for n in nodes if n.makes_level == level)
    return False


def _on_one_branch(level: int, other: int, graph: Graph) -> bool:
    """Whether the rows of one of these levels descend from the rows of the other, or are the same."""
    return level in graph.line(other) or other in graph.line(level)


def _group_problems(graph: Graph) -> Iterable[str]:
    for node in graph.nodes:
        if node.operation.whole_groups and node.level == SOURCE:
            yield (
                f"node {node.name!r} sees complete groups, but each row of the source {graph.source.name!r} is a separate group; "
                "put it after a node that expands rows (such as generate)"
            )
        n = node.operation.quorum.n if node.operation.quorum else 1
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:  # pyright: ignore[reportUnnecessaryIsInstance]  a user's argument
            yield f"node {node.name!r} takes the first n={n!r} rows of a group; n must be an integer of at least 1"


def _cycle_problems(graph: Graph) -> Iterable[str]:
    if cycle := _cycle({n.name: n.after for n in graph.nodes}):
        yield f"nodes wait for each other: {' -> '.join(cycle)}"
    leaders: dict[str, list[str]] = {}
    for edge in graph.follows:
        leaders.setdefault(edge.follower, []).append(edge.leader)
    if cycle := _cycle(leaders):
        yield f"worker groups follow each other's weights: {' -> '.join(cycle)}"


def _cycle(after: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """Return the names along one cycle of a dependency graph; empty if there is no cycle."""
    try:
        graphlib.TopologicalSorter(after).prepare()
    except graphlib.CycleError as error:
        # graphlib lists a predecessor before its successor; list the waiting node first.
        return tuple(reversed(error.args[1]))
    return ()


# Graph

TRAIN = "train"
"""Name of a run's training graph."""


@dataclass(frozen=True)
class Graph:
    """The result of a `@graph` function. You can print, draw (`mermaid`) and `validate` it."""

    name: str
    source: Source
    nodes: tuple[Node, ...]
    handles: Mapping[str, Handle] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(
            f"graph {self.name!r} has no node {name!r}{nearest(name, [n.name for n in self.nodes])}"
        )

    @property
    def follows(self) -> tuple[ParameterEdge, ...]:
        """The parameter edges into this graph's worker groups and, recursively, their leaders."""
        edges: list[ParameterEdge] = []
        # A leader may follow another leader, so walk up until no new handle appears.
        pending, seen = list(self.handles.values()), set[int]()
        for handle in pending:
            for leader in handle.leaders if id(handle) not in seen else ():
                edges.append(ParameterEdge(handle.called, leader.called, handle.follows_every))
                pending.append(leader)
            seen.add(id(handle))
        return tuple(edges)

    @property
    def levels(self) -> dict[int, str]:
        """Maps each level to the node that created its rows; level 0 to the source."""
        return {SOURCE: self.source.name} | {
            n.makes_level: n.name for n in self.nodes if n.makes_level is not None
        }

    def parent_level(self, level: int) -> int:
        return next(n.level for n in self.nodes if n.makes_level == level)

    def line(self, level: int) -> list[int]:
        """Return a level and the levels of its ancestors, up to the source."""
        found = [level]
        while found[-1] != SOURCE:
            found.append(self.parent_level(found[-1]))
        return found

    def level_of(self, writer: str) -> int:
        """Return the level of the rows that a node ("" for the source) writes its columns to."""
        if not writer:
            return SOURCE
        node = self[writer]
        return node.level if node.makes_level is None else node.makes_level

    def validate(self, also: Iterable[Graph] = ()) -> Graph:
        """Check the rules of the graph, and return the graph.

        Args:
            also: the other graphs of the run, which may update leaders of this graph's groups.

        Raises:
            GraphError: the graph breaks rules; the message has one line per rule.
        """
        updated = [n.group for g in (self, *also) for n in g.nodes if n.group and n.operation.updates]
        followers = {e.follower for e in self.follows}
        some = ", ".join(dict.fromkeys(updated)) or "none"
        self.refuse_problems(
            f"{e.follower!r} follows {e.leader!r}, which no node updates; updated groups: {some}"
            for e in self.follows
            if e.leader not in updated and e.leader not in followers
        )
        return self

    def refuse_problems(self, more: Iterable[str] = ()) -> None:
        """Raise a `GraphError` if there are `more` problems, or if the graph alone breaks rules."""
        own = (*_column_problems(self), *_group_problems(self), *_cycle_problems(self))
        if problems := [*own, *more]:
            raise GraphError("\n".join(problems))

    def __str__(self) -> str:
        return _text(self)

    def mermaid(self) -> str:
        return _mermaid(self)

    def structure(self) -> dict[str, Any]:
        """Return the graph as JSON values, for the dashboard."""
        shown = ("name", "group", "reads", "writes", "writers", "after", "path")
        return {
            "source": {"name": self.source.name, "columns": [*self.source.columns]},
            "nodes": [
                {
                    **{name: getattr(n, name) for name in shown},
                    "shape": n.operation.shape.value,
                    "takes": str(takes_as_json(n.operation.takes)),
                    "updates": n.operation.updates,
                    "level": self.levels[n.level],
                    "code": _place_of(n.function),
                }
                for n in self.nodes
            ],
            "follows": [asdict(edge) for edge in self.follows],
        }

    def outline(self) -> dict[str, Any]:
        """Return the parts of the graph that the ledger needs, as JSON values."""
        kept = ("reads", "writes", "level", "makes_level", "writers", "after")
        nodes: list[dict[str, Any]] = []
        for n in self.nodes:
            operation = asdict(n.operation) | {
                "shape": n.operation.shape.value,
                "takes": takes_as_json(n.operation.takes),
            }
            fields = {name: getattr(n, name) for name in kept}
            nodes.append({"name": n.name, "group": n.group, "operation": operation, **fields})
        return {"name": self.name, "source": self.source.name, "nodes": nodes}

    @classmethod
    def from_outline(cls, outline: Mapping[str, Any]) -> Graph:
        """Create a graph for a ledger. It cannot run, and its source is empty."""
        nodes: list[Node] = []
        for fields in outline["nodes"]:
            # JSON has no tuples, so restore them.
            operation = dict(fields["operation"])
            operation |= {k: tuple(operation[k]) for k in ("reads", "may_read", "writes")}
            operation["shape"] = Shape(operation["shape"])
            operation["takes"] = takes_from_json(operation["takes"])
            columns = {k: tuple(fields[k]) for k in ("reads", "writes", "after")}
            known = {**fields, **columns, "operation": Operation(**operation)}
            nodes.append(Node(**known, function=_without_code, arguments={}, missing=()))
        return cls(outline["name"], TableSource(outline["source"], pa.table({})), tuple(nodes))


def _place_of(function: Callable[..., Any]) -> dict[str, Any] | None:
    # Show the user's function, not the wrapper that `node` puts around it.
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else {"file": code.co_filename, "line": code.co_firstlineno}


def _without_code(rows: object) -> None:
    raise UserError("this graph comes from the log of a run, and has no code to run")
