"""Drawing: a graph as text, and as a Mermaid flowchart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .node import Node, ParameterEdge
from .operation import Operation, Shape
from .source import Source


def graph_text(
    name: str, source: Source, nodes: Sequence[Node], edges: Sequence[ParameterEdge], levels: Mapping[int, str]
) -> str:
    """A line for the source and each edge, two or three for each node."""
    lines = [f"graph {name}", f"  source {source.name}: {', '.join(source.columns) or 'no columns declared'}"]
    for number, node in enumerate(nodes, 1):
        rows = levels[node.level]
        if node.makes_level is not None:
            rows += f" -> {levels[node.makes_level]}"
        kind = f"{node.operation.shape.value}; {rows}; takes {_taken(node.operation)}"
        lines.append(f"  {number}. {'/'.join((*node.path, node.name))}  [{kind}]")
        lines.append(f"       reads {', '.join(node.reads) or '-'}")
        if node.writes:
            lines.append(f"       writes {', '.join(node.writes)}")
    lines += [f"  {edge.follower} follows {edge.leader}, {_every(edge.every)}" for edge in edges]
    return "\n".join(lines)


def as_mermaid(source: Source, nodes: Sequence[Node], edges: Sequence[ParameterEdge]) -> str:
    """A flowchart: solid edges carry columns, dotted ones carry parameters."""
    ids = {"": "source"} | {n.name: f"n{i}" for i, n in enumerate(nodes)}
    lines = ["flowchart LR", f"  source[({_quoted(source.name)})]"]
    for path in dict.fromkeys(n.path for n in nodes):
        drawn = [f"  {ids[n.name]}{_box(n)}" for n in nodes if n.path == path]
        lines += [f"  subgraph {_quoted('/'.join(path))}", *("  " + d for d in drawn), "  end"] if path else drawn
    for node in nodes:
        carried: dict[str, list[str]] = {w: [] for w in node.after}
        for column in node.reads:
            carried.setdefault(node.writers[column], []).append(column)
        for writer, columns in carried.items():
            label = f"-- {_quoted(', '.join(columns))} " if columns else ""
            lines.append(f"  {ids[writer]} {label}--> {ids[node.name]}")
    return "\n".join([*lines, *_parameter_edges(ids, nodes, edges)]) + "\n"


def _parameter_edges(ids: Mapping[str, str], nodes: Sequence[Node], edges: Sequence[ParameterEdge]) -> list[str]:
    """Lines of the dotted edges. Each leaves the node that updates, and reaches every node that uses the weights. A group that has
    no such node here (it may have one in another graph of the run) has a box of its own."""
    groups = dict.fromkeys(g for e in edges for g in (e.leader, e.follower))
    alone = {g: f"g{i}" for i, g in enumerate(groups)}
    drawn_alone: dict[str, None] = {}
    lines: list[str] = []
    for edge in edges:
        updates = [ids[n.name] for n in nodes if n.group == edge.leader and n.operation.updates]
        start = updates[-1] if updates else alone[edge.leader]
        ends = [ids[n.name] for n in nodes if n.group == edge.follower] or [alone[edge.follower]]
        drawn_alone |= dict.fromkeys(g for g in (edge.leader, edge.follower) if alone[g] in (start, *ends))
        label = _quoted(f"weights, {_every(edge.every)}")
        lines += [f"  {start} -. {label} .-> {end}" for end in ends]
    return [f"  {alone[g]}[{_quoted(g)}]" for g in drawn_alone] + lines


_BOXES = {Shape.MAP: "[{}]", Shape.GROUP: "[[{}]]", Shape.FILTER: "{{{}}}", Shape.EXPAND: "[/{}/]"}


def _box(node: Node) -> str:
    return ("([{}])" if node.operation.updates else _BOXES[node.operation.shape]).format(_quoted(node.name))


def _taken(operation: Operation) -> str:
    return "a batch" if operation.updates else "groups" if operation.whole_groups else "rows"


def _quoted(text: str) -> str:
    return '"' + text.replace('"', "#quot;") + '"'


def _every(every: int) -> str:
    return "every update" if every == 1 else f"every {every} updates"
