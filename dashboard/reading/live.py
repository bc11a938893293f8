"""What `live.json` and `graph.json` say of a run: rows at each node, groups, leases, memory; nodes and who follows whom.

A damaged file counts as missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, RootModel, ValidationError

from ...controllers.run_directory import GRAPH
from ...dataflow.buffer.run_files import LIVE
from ...dataflow.safe_files import read_json

MOST_BYTES = 32 << 20
"""Most bytes of a file that is read; of a larger one nothing is: no driver writes so much, and pages ask for it again and again."""


class _Open(BaseModel):
    """Fields that pages rely on; others pass."""

    model_config = ConfigDict(extra="allow")


class _NodeState(_Open):
    todo: float
    ready: float
    leased: float
    done: float
    held: float


class _Lease(_Open):
    lease: int
    node: str
    left: int


class _OldGroup(_Open):
    group: int
    step: int
    waits: list[str]


class _GraphState(_Open):
    nodes: dict[str, _NodeState]
    issued: int
    in_flight: int
    done: int
    dropped: dict[str, int]
    steps: dict[str, tuple[int, float]]
    leases: list[_Lease]
    oldest: list[_OldGroup]


class _Call(_Open):
    what: str
    rows: int
    waits_for: list[int]
    since_s: float


class _GroupState(_Open):
    version: int
    ranks: int
    calls: list[_Call]
    absent: list[int]
    starting: list[int]
    lacking: list[int]


class _Host(_Open):
    processes: dict[str, tuple[int, int]]


class _Stack(_Open):
    at: float
    text: str


class _Live(_Open):
    at: float
    time_s: float
    step: int
    graphs: dict[str, _GraphState]
    groups: dict[str, _GroupState]
    hosts: dict[str, _Host]
    stacks: dict[str, _Stack]


class _Source(_Open):
    name: str
    columns: list[str]


class _Node(_Open):
    name: str
    group: str | None
    reads: list[str]
    writes: list[str]
    writers: dict[str, str]
    after: list[str]


class _Edge(_Open):
    follower: str
    leader: str


class _Structure(_Open):
    source: _Source
    nodes: list[_Node]
    follows: list[_Edge]


_Graphs = RootModel[dict[str, _Structure]]


def read_live(run: Path) -> dict[str, Any]:
    """The state of a run as its driver wrote it last; empty where there is none that can be read."""
    return _read(run / LIVE, _Live)


def read_graphs(run: Path) -> dict[str, Any]:
    """Graphs of the run by name, with source, nodes and followers; empty where they cannot be read."""
    return _read(run / GRAPH, _Graphs)


def _read(path: Path, model: type[BaseModel]) -> dict[str, Any]:
    try:
        found = read_json(path, MOST_BYTES)
        model.model_validate(found)
    except (OSError, ValueError, ValidationError):
        return {}
    return found


def nested(value: Any, *names: str) -> dict[str, Any]:
    """An object within an object; empty where it is not there, or is something else.

    >>> nested({"a": {"b": {"c": 1}}}, "a", "b"), nested({"a": 1}, "a", "b")
    ({'c': 1}, {})
    """
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return dict(value) if isinstance(value, Mapping) else {}
