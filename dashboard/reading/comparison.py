"""Comparison: where two runs differ in settings, versions, data and metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...dataflow.buffer.run_tables import present, read_metrics

OF_ONE_START = ("origin", "starts", "versions", "sources", "data")
"""Parts of a configuration that are compared by themselves, or not at all."""
OF_THE_CLOCK = ("_s", "idle_share", "_bytes")
"""Ends of the names of metrics that differ from run to run by themselves."""
MISSING = "(not there)"


def compare_configs(
    a: Mapping[str, Any], b: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What differs between two configurations: (settings, versions, data), each as name -> both values."""
    own = [{key: value for key, value in one.items() if key not in OF_ONE_START} for one in (a, b)]
    for one in own:
        if isinstance(one.get("graphs"), Mapping):
            one["graphs"] = {name: _nodes(lines) for name, lines in one["graphs"].items()}
    data = [{"sources": one.get("sources", {}), "data": one.get("data", {})} for one in (a, b)]
    return (
        dict(_differences(own[0], own[1])),
        dict(_differences(a.get("versions", {}), b.get("versions", {}))),
        dict(_differences(data[0], data[1])),
    )


def _nodes(lines: Any) -> Any:
    """The printed lines of a graph as a mapping of its nodes, so that a comparison names the node and what differs in it.

    >>> _nodes(["graph grpo", "  source train: prompt_ids", "  1. reward.score  [map; takes rows]", "       writes reward"])
    {'graph': 'grpo', 'source train': 'prompt_ids', 'reward.score': {'kind': 'map; takes rows', 'writes': 'reward'}}
    """
    if not isinstance(lines, list):
        return lines
    found: dict[str, Any] = {}
    node: dict[str, str] | None = None
    for text in map(str.strip, map(str, lines)):
        first, _, rest = text.partition(" ")
        if header := re.fullmatch(r"\d+\. (\S+)\s+\[(.*)\]", text):
            node = found[header[1]] = {"kind": header[2]}
        elif node is not None and first in ("reads", "writes"):
            node[first] = rest
        elif ": " in text:
            name, _, value = text.partition(": ")
            found[name] = value
        elif " follows " in text:
            name, _, value = text.partition(" follows ")
            found[f"{name} follows"] = value
        else:
            found[first] = rest
    return found


def _differences(a: Any, b: Any, name: str = "") -> Iterator[tuple[str, list[Any]]]:
    """The name, with dots, and both values of whatever differs. What one run lacks altogether, such as a held-out set, is one value.

    >>> dict(_differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "c": 2}, "d": {"e": 4, "f": 5}}))
    {'a.b': [1, 3], 'd': ['(not there)', {'e': 4, 'f': 5}]}
    """
    if _are_records(a) and _are_records(b) and len(a) == len(b):
        a, b = ({str(place): entry for place, entry in enumerate(one)} for one in (a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys([*a, *b]):
            yield from _differences(a.get(key, MISSING), b.get(key, MISSING), f"{name}.{key}" if name else str(key))
    elif a != b:
        yield name, [a, b]


def _are_records(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value)


def compare_metrics(
    a: Mapping[int, Mapping[str, float]], b: Mapping[int, Mapping[str, float]]
) -> tuple[int | None, dict[str, list[float]]]:
    """The first step of which a metric differs, and the metrics that differ then, the largest differences first.

    Args:
        a, b: step -> metric -> value; what a clock measures is passed over.
    """
    for step in sorted(set(a) & set(b)):
        names = [name for name in a[step] if name in b[step] and not name.endswith(OF_THE_CLOCK)]
        pairs = {name: [a[step][name], b[step][name]] for name in names if not _same(a[step][name], b[step][name])}
        if pairs:
            return step, dict(sorted(pairs.items(), key=lambda item: -_relative(*item[1])))
    return None, {}


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _relative(a: float, b: float) -> float:
    largest = max(abs(a), abs(b))
    return abs(a - b) / largest if math.isfinite(a - b) else math.inf


def at_last_common_step(
    a: Mapping[int, Mapping[str, float]], b: Mapping[int, Mapping[str, float]]
) -> tuple[int | None, list[dict[str, Any]]]:
    """The last step that both runs have made, and the metrics of both at it.

    >>> at_last_common_step({1: {"loss": 1.0}, 2: {"loss": 0.5}}, {1: {"loss": 2.0}})
    (1, [{'name': 'loss', 'a': 1.0, 'b': 2.0}])
    """
    step = max(set(a) & set(b), default=None)
    if step is None:
        return None, []
    names = dict.fromkeys([*a[step], *b[step]])
    return step, [{"name": n, "a": a[step].get(n), "b": b[step].get(n)} for n in names if n != "step"]


def metrics_of(run: Path, notes: list[str]) -> dict[int, dict[str, float]]:
    """The metrics of each step of a run.

    Args:
        run: its directory.
        notes: gets a line if they cannot be read.
    """
    try:
        table = read_metrics(run)
    except (OSError, pa.ArrowException) as error:
        notes.append(f"damaged: metrics of {run}: {error}")
        return {}
    if table is None or "step" not in table.column_names:
        return {}
    return {int(row["step"]): present(row) for row in table.to_pylist() if row["step"] is not None}
