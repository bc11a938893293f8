"""Validation: the rules of a graph, each broken one as a line that names the node, the column and the nearest right name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .column import IDENTITY, KNOWN, not_inherited
from .errors import GraphError, nearest
from .node import SOURCE, Node, ParameterEdge
from .source import Source, file_columns


def refuse(problems: Sequence[str]) -> None:
    """Raise a `GraphError` with a line for each problem, if there are any."""
    if problems:
        raise GraphError("\n".join(problems))


def rows_problems(source: Source, nodes: Sequence[Node], edges: Sequence[ParameterEdge]) -> list[str]:
    """Problems of a graph by itself: columns, groups and cycles."""
    return [*_column_problems(source, nodes), *_group_problems(source, nodes), *_cycle_problems(nodes, edges)]


def following_problems(edges: Sequence[ParameterEdge], updated: Sequence[str | None]) -> Iterable[str]:
    """Problems of followers whose leader no node updates.

    Args:
        edges: the parameter edges of a graph.
        updated: names of the groups that any graph of the run updates.
    """
    followers = {e.follower for e in edges}
    for edge in edges:
        if edge.leader not in updated and edge.leader not in followers:
            some = ", ".join(dict.fromkeys(g for g in updated if g)) or "none"
            yield f"{edge.follower!r} follows {edge.leader!r}, which no node updates; updated groups: {some}"


def _column_problems(source: Source, nodes: Sequence[Node]) -> Iterable[str]:
    made = [column for column in source.columns if column not in file_columns(source)]
    written: dict[str, str] = dict.fromkeys(made, f"source {source.name!r}")
    for position, node in enumerate(nodes):
        for column in node.missing:
            yield f"node {node.name!r} reads column {column!r}, {_why_missing(column, position, source, nodes)}"
        for column in node.writes:
            if column in {str(c) for c in IDENTITY}:
                yield f"node {node.name!r} writes column {column!r}, which identifies rows and belongs to the buffer"
            # The rows of an EXPAND are new: the prompt of a dialogue's next turn may be called what the first was called.
            elif column in written and node.makes_level is None:
                already = written[column]
                yield f"node {node.name!r} writes column {column!r}, which {already} writes already; rename it (into=...)"
            written.setdefault(column, f"node {node.name!r}")


def _why_missing(column: str, position: int, source: Source, nodes: Sequence[Node]) -> str:
    """Why a column does not reach the node at this position."""
    reader = nodes[position]
    at, writer = next(((i, n.name) for i, n in reversed([*enumerate(nodes)]) if column in n.writes), (position, ""))
    if writer == reader.name:
        return "which it writes itself"
    if at > position:
        return f"which only {writer!r} writes, later"
    if writer:
        for node in nodes[at + 1 : position]:
            if column in not_inherited(node.writes) and _descends(reader.level, node, nodes):
                return (
                    f"which {writer!r} writes of other tokens: {node.name!r} makes rows with tokens of their own; let it write "
                    f"{column!r}, too, or read it before"
                )
        return f"which {writer!r} writes on another branch; pass its result, or join the two with |"
    for node in nodes:
        for value in node.arguments.values():
            reasons = getattr(value, "leaves_out", None)
            if isinstance(reasons, Mapping) and column in reasons:
                return f"which node {node.name!r} leaves out: {reasons[column]}"
    if column in file_columns(source):
        return (
            f"which no node writes. The column {column!r} of {source.name!r} belongs to your file, and Weft never takes it for its own"
            f"{_how_to_have(column, reader, source, nodes)}"
        )
    return f"which no node writes{_how_to_have(column, reader, source, nodes)}"


def _descends(level: int, node: Node, nodes: Sequence[Node]) -> bool:
    """Whether the rows of a level are made, in one step or several, of those that a node makes."""
    while level != SOURCE:
        if level == node.makes_level:
            return True
        level = next(n.level for n in nodes if n.makes_level == level)
    return False


def _how_to_have(column: str, reader: Node, source: Source, nodes: Sequence[Node]) -> str:
    """How to get a column that no node writes; if that is not known, the column with the nearest name."""
    if column in KNOWN and KNOWN[column].made:
        return f"; {KNOWN[column].made}"
    known = [*(c for c in source.columns if c != column), *(c for n in nodes for c in n.writes)]
    near = nearest(column, [c for c in known if c not in reader.writes])
    return near or f"; there are {', '.join(dict.fromkeys(known)) or 'none'}"


def _group_problems(source: Source, nodes: Sequence[Node]) -> Iterable[str]:
    for node in nodes:
        if node.operation.whole_groups and node.level == SOURCE:
            yield (
                f"node {node.name!r} sees complete groups, but each row of the source {source.name!r} is a group of its own; "
                "put it after a node that expands rows (such as generate)"
            )
        n = node.operation.quorum.n if node.operation.quorum else 1
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:  # pyright: ignore[reportUnnecessaryIsInstance]  a user's argument
            yield f"node {node.name!r} takes the first n={n!r} rows of a group; n must be an integer of at least 1"


def _cycle_problems(nodes: Sequence[Node], edges: Sequence[ParameterEdge]) -> Iterable[str]:
    cycle = _cycle({n.name: n.after for n in nodes})
    if cycle:
        yield f"nodes wait for each other: {' -> '.join(cycle)}"
    cycle = _cycle({e.follower: (e.leader,) for e in edges})
    if cycle:
        yield f"worker groups follow each other's weights: {' -> '.join(cycle)}"


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
