"""Finished leases: the work that some nodes of a run have completed, according to its log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import FormatError, UserError
from ..graph import Node
from .log import LogReader, Position, damage_note, described_graph


@dataclass(frozen=True)
class FinishedLease:
    """A lease whose node is done with all of its rows."""

    graph: str
    node: str
    number: int
    rows: int
    """Number of rows."""
    step: int | None
    """The step that an update is part of; None for other nodes."""


def finished_leases(
    log: Path, of: Callable[[Node], bool], *, end: Position | None = None, notes: list[str] | None = None
) -> list[FinishedLease] | None:
    """The finished leases of some nodes, in the order of the log.

    Args:
        log: path of the log.
        of: selects the nodes.
        end: position up to which the log is read; None reads all that is sound.
        notes: gets a line if records of the log are lost.

    Returns:
        The leases; None if no graph of the run has such a node.

    Raises:
        FormatError: another version of Weft wrote the log.
    """
    nodes: set[tuple[str, str]] = set()
    open_leases: dict[tuple[str, int], tuple[str, int]] = {}
    finished: list[FinishedLease] = []
    reader = LogReader(log)
    for record in reader:
        if end is not None and reader.end.offset > end.offset:
            break
        match record["do"]:
            case "graph":
                nodes |= {(record["graph"], node.name) for node in described_graph(record).nodes if of(node)}
            case "claim" if (record["graph"], record["node"]) in nodes:
                open_leases[record["graph"], record["lease"]] = record["node"], len(record["ids"])
            case "finish" if lease := open_leases.pop((record["graph"], record["lease"]), None):
                name, rows = lease
                finished.append(FinishedLease(record["graph"], name, record["lease"], rows, record.get("step")))
            case _:
                pass
    if notes is not None:
        notes += damage_note(reader)
    return finished if nodes else None


def samples_by_step(log: Path, last: int, end: Position) -> list[dict[str, float]]:
    """Metrics of the steps 0 to `last` that can be recovered from the log when the metrics are lost: how many samples each trained on.

    Args:
        log: path of the log.
        last: the last step.
        end: position up to which the log is read.

    Returns:
        One row per step, with `step` and, where the log has it, `samples`.
    """
    trained: dict[int, Counter[str]] = {}
    try:
        for lease in finished_leases(log, lambda node: node.operation.updates, end=end) or ():
            if lease.step is not None:
                trained.setdefault(lease.step, Counter())[lease.node] += lease.rows
    except (OSError, LookupError, TypeError, FormatError, UserError):  # the rows then have only their steps
        pass
    rows: list[dict[str, float]] = []
    for step in range(last + 1):
        samples = {"samples": float(max(trained[step].values()))} if step in trained else {}
        rows.append({"step": float(step), **samples})
    return rows
