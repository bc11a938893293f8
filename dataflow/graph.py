"""Graph: what happens, as plain data.

Edges are columns: a node depends on the nodes that wrote what it reads, on the filters that its rows passed, and on the
expansion that made them; nothing else. Where nodes run is a placement, when they run is a schedule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from .drawing import as_mermaid, graph_text
from .errors import UserError, nearest
from .handle import Handle
from .node import SOURCE, Node, ParameterEdge
from .operation import Operation, Shape
from .source import Source, TableSource
from .takes import takes_as_json, takes_from_json
from .validation import following_problems, refuse, rows_problems

TRAIN = "train"
"""Name of the graph of a run that trains."""


@dataclass(frozen=True)
class Graph:
    """What a `@graph` function describes: printed by `print`, drawn by `mermaid()`, checked by `validate()`, walked by any schedule."""

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

    def validate(self, also: Iterable[Graph] = ()) -> Graph:
        """This graph, if it breaks no rule.

        Args:
            also: the other graphs of the run, whose updates this one may follow.

        Raises:
            GraphError: the graph breaks rules. The message names, for each, the node, the column and the nearest column that exists.
        """
        updated = [n.group for g in (self, *also) for n in g.nodes if n.operation.updates]
        edges = self.follows
        refuse([*rows_problems(self.source, self.nodes, edges), *following_problems(edges, updated)])
        return self

    def __str__(self) -> str:
        return graph_text(self.name, self.source, self.nodes, self.follows, self.levels)

    def mermaid(self) -> str:
        """The graph as a Mermaid flowchart."""
        return as_mermaid(self.source, self.nodes, self.follows)

    def structure(self) -> dict[str, Any]:
        """What a person looks at, as JSON values: its source, its nodes with their code, and who follows whom."""
        return {
            "source": {"name": self.source.name, "columns": [*self.source.columns]},
            "nodes": [
                {
                    "name": n.name,
                    "group": n.group,
                    "shape": n.operation.shape.value,
                    "takes": str(takes_as_json(n.operation.takes)),
                    "updates": n.operation.updates,
                    "reads": [*n.reads],
                    "writes": [*n.writes],
                    "writers": dict(n.writers),
                    "after": [*n.after],
                    "level": self.levels[n.level],
                    "path": [*n.path],
                    "code": place_of(n.function),
                }
                for n in self.nodes
            ],
            "follows": [asdict(edge) for edge in self.follows],
        }

    def outline(self) -> dict[str, Any]:
        """What a ledger needs to know about the graph, as JSON values. With it, a run can be inspected without the user's code."""
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
        """The graph of an outline. A ledger can walk it, but it cannot be run, and its source has no rows.

        Args:
            outline: what `outline()` returned.
        """
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


def place_of(function: Callable[..., Any]) -> dict[str, Any] | None:
    """File and first line of a function; None where it has none that can be read."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else {"file": code.co_filename, "line": code.co_firstlineno}


def _without_code(rows: object) -> None:
    raise UserError("this graph was read from the log of a run: it has no code to run")
