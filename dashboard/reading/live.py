"""What `live.json` says of a run: rows at each node, groups, leases, memory. A run that is over has its last state there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...controllers.loop.live_state import FILE
from ...controllers.run_directory import GRAPH


def read_live(run: Path) -> dict[str, Any]:
    """The state of a run as its driver wrote it last; empty where there is none that can be read."""
    return _object(run / FILE)


def read_graphs(run: Path) -> dict[str, Any]:
    """Graphs of the run by name, with source, nodes and followers; empty where they cannot be read."""
    return _object(run / GRAPH)


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def part(value: Any, *names: str) -> dict[str, Any]:
    """An object within an object; empty where it is not there, or is something else.

    >>> part({"a": {"b": {"c": 1}}}, "a", "b"), part({"a": 1}, "a", "b")
    ({'c': 1}, {})
    """
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return dict(value) if isinstance(value, Mapping) else {}
