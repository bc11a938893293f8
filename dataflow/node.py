"""Node: one operation of a graph, with what it waits for. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .operation import Operation

SOURCE = 0
"""Level of the rows that come from the source; each EXPAND makes a further level."""


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
    """Columns that it is given: all that it requires, and those it may use that exist."""
    missing: tuple[str, ...]
    """Columns that it requires and that do not reach it (an error)."""
    writes: tuple[str, ...]
    level: int
    """Level of the rows that it takes."""
    makes_level: int | None
    """Level of the rows that it makes (EXPAND only)."""
    writers: Mapping[str, str]
    """For each of `reads`, the node that wrote it ("" for the source)."""
    after: tuple[str, ...]
    """Nodes that must be done with a row (or its ancestor) before this node sees it."""
    path: tuple[str, ...] = ()
    """Names of the nested graphs that contain it."""


@dataclass(frozen=True)
class ParameterEdge:
    """`follower` loads the weights of `leader` after every `every`-th update of it."""

    follower: str
    leader: str
    every: int
