"""Checks of groups that sample with the adapters of several actors."""

from __future__ import annotations

from collections.abc import Sequence

from ...dataflow.column import RESPONSE_IDS, RESPONSE_LOGPROBS, RESPONSE_VERSIONS
from ...dataflow.errors import UserError, nearest
from ...dataflow.graph import POLICY_ARGUMENT, Graph, Node


def check_policies(graphs: Sequence[Graph], *, migrates: bool) -> None:
    """Check that each node that samples names one of its group's leaders if there are several, and
    that an update trains on rows of its policy. Responses of such groups cannot move. Raises a
    UserError."""
    for graph in graphs:
        for node in graph.nodes:
            if node.group is not None:
                leaders = [leader.called for leader in graph.handles[node.group].leaders]
                if node.operation.samples:
                    _check_name(node, node.group, leaders)
                if migrates and len(leaders) > 1:
                    raise UserError(
                        f"Synchronous(migrate=True): {node.group!r} follows several actors ({', '.join(leaders)}), whose responses "
                        "cannot move between replicas; leave out migrate=True"
                    )
            if node.operation.updates:
                _check_rows(graph, node)


def _check_name(node: Node, group: str, leaders: Sequence[str]) -> None:
    policy = node.arguments.get(POLICY_ARGUMENT)
    follows = f"{group!r} follows {', '.join(leaders) or 'no group'}"
    if policy is not None and not isinstance(policy, str):
        raise UserError(
            f"node {node.name!r}: policy={policy!r} is not an actor; give the handle of one: policy=actor"
        )
    if policy and policy not in leaders:
        raise UserError(
            f"node {node.name!r}: policy={policy!r}, but {follows}{nearest(policy, leaders)}; name one of these, "
            f"or add it to {group}.follows(...)"
        )
    if len(leaders) > 1 and not policy and str(RESPONSE_VERSIONS) in node.writes:
        raise UserError(f"node {node.name!r} names no policy, and {follows}; add policy={leaders[0]}")


def _check_rows(graph: Graph, node: Node) -> None:
    for column in (RESPONSE_IDS, RESPONSE_LOGPROBS, RESPONSE_VERSIONS):
        writer = node.writers.get(str(column))
        policy = graph[writer].policy if writer else ""
        if policy and policy != node.group:
            raise UserError(
                f"node {node.name!r} trains {node.group!r} on rows that {writer!r} samples with the adapter of {policy!r}; their versions "
                f"count updates of {policy!r}, so train on rows of policy={node.group}"
            )
