"""Capacity: how many groups of a graph may be issued now, by rows, bytes and staleness."""

from __future__ import annotations

from dataclasses import dataclass

from ..graph import Graph
from ..operation import Shape
from .ledger import Ledger

UNBOUNDED = 1 << 30


@dataclass(frozen=True)
class Capacity:
    """How many groups may be issued now, and which bound allows no more."""

    groups: int
    reason: str = ""


def capacity(
    ledger: Ledger,
    *,
    max_rows: int | None = None,
    max_bytes: int | None = None,
    groups_per_update: int = 1,
    staleness: int | None = None,
    lag: int = 0,
    taken: int = 0,
) -> Capacity:
    """How many groups of a ledger's graph may be issued now.

    Groups are assumed to be as large as the largest that was finished; bytes are no bound before the first is.

    Args:
        ledger: what is in flight.
        max_rows: bound on the rows in flight, of all levels together.
        max_bytes: bound on the bytes of their columns.
        groups_per_update: groups in an update. So many are admitted even where they turn out larger than the bounds
            allow, since nothing becomes free before they are trained on.
        staleness: updates that a row may lag the weights that it trains. Only as many groups are admitted as will be
            trained within that: the bound is kept by waiting, not by discarding. None: no bound.
        lag: updates by which the weights that generate now are behind those that are trained.
        taken: groups that the update under way has claimed so far, finished or not.

    Returns:
        The smallest of the bounds, never negative, and the reason for it.
    """
    updates = [n for n in ledger.graph.nodes if n.operation.updates]
    missing = groups_per_update - ledger.live.groups_at_work + max(map(ledger.readiness.too_old, updates), default=0)
    bounds: list[tuple[int, str]] = []
    if max_rows is not None:
        each = max(expected_rows(ledger.graph), ledger.live.largest_group)
        free = max_rows // each - len(ledger.live.groups)
        free = max(free, missing) if ledger.live.largest_group > expected_rows(ledger.graph) else free
        bounds.append((free, f"{len(ledger.live.rows)} rows in flight, max_rows={max_rows}, {each} a group"))
    if max_bytes is not None:
        each_bytes = ledger.parts.largest_group_bytes
        written = round(ledger.parts.published_bytes - ledger.parts.finished_bytes)  # by groups in flight
        expected = ledger.parts.num_bytes + max(0, each_bytes * len(ledger.live.groups) - written)
        free = (max_bytes - expected) // each_bytes if each_bytes else UNBOUNDED
        reason = f"{ledger.parts.num_bytes} bytes in flight, max_bytes={max_bytes}, up to {each_bytes} a group"
        bounds.append((max(free, missing), reason))
    if staleness is not None and updates:
        ahead = max(ledger.readiness.unclaimed(n) + max(taken, ledger.leases.num_groups(n)) for n in updates)
        free = (staleness + 1 - lag) * groups_per_update - ahead
        bounds.append((free, f"{ahead} groups wait to be trained on, max_staleness={staleness}"))
    free, reason = min(bounds, default=(UNBOUNDED, ""))
    return Capacity(max(0, free), reason)


def expected_rows(graph: Graph) -> int:
    """Rows that a group will have on all levels together, as far as the graph tells: by the argument `n` of its expansions."""
    sizes = {0: 1}
    for node in graph.nodes:
        if node.operation.shape is Shape.EXPAND and node.makes_level is not None:
            number = node.arguments.get("n", 1)
            sizes[node.makes_level] = sizes[node.level] * (number if isinstance(number, int) and number > 0 else 1)
    return sum(sizes.values())
