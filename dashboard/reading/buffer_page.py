"""The sample buffer of a run: rows by state, ages, staleness over time, drops by reason, leases, bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...dataflow.graph import TRAIN
from ...dataflow.runs.files import BUFFER, LOG, SEGMENTS
from .run_reader import nested

AGES_S = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0, 10800.0)
"""Ends of the stretches in which ages are counted; what is older is in one more."""
MOST_BARS = 200
"""Stretches of steps for which staleness is counted."""


def buffer_page(run: Path, live: Mapping[str, Any], samples: pa.Table, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the buffer holds, and held.

    Args:
        run: its directory.
        live: as `live.json` has it.
        samples: the index of the run's samples.
        config: of the run.
    """
    graphs = nested(live, "graphs")
    counts = [nested(graphs, name) for name in graphs]
    dropped: dict[str, int] = {}
    for one in counts:
        for reason, rows in nested(one, "dropped").items():
            dropped[reason] = dropped.get(reason, 0) + rows
    leases = [
        {"graph": name, "rank": lease.get("holder"), **lease}
        for name in graphs
        for lease in nested(graphs, name).get("leases", ())
    ]
    leased = sum(lease.get("left", 0) for lease in leases)
    flying = sum(one.get("in_flight", 0) for one in counts)
    train = nested(graphs, TRAIN)
    return {
        "known": bool(live),
        "at": live.get("at"),
        "totals": {
            "issued": sum(one.get("issued", 0) for one in counts),
            "waiting": max(0, flying - leased),
            "leased": leased,
            "done": sum(one.get("done", 0) for one in counts),
            "dropped": sum(dropped.values()),
        },
        "graphs": {
            name: {
                key: nested(graphs, name).get(key) for key in ("issued", "in_flight", "done", "groups", "groups_behind")
            }
            for name in graphs
        },
        "drops": [
            {"reason": reason, "rows": rows} for reason, rows in sorted(dropped.items(), key=lambda item: -item[1])
        ],
        "stale": nested(train, "stale"),
        "waiting": [
            {
                "graph": name,
                "group": one["group"],
                "step": one["step"],
                "age_s": _age(nested(graphs, name), one["step"]),
                "for": "; ".join(one["waits"]),
                "prompt": None,
            }
            for name in graphs
            for one in nested(graphs, name).get("oldest", ())
        ],
        "ages": _ages(train),
        "versions": _numbered(nested(train, "versions")),
        "staleness": staleness(samples),
        "leases": leases,
        "segments": _segments(run, config, live),
    }


def _ages(train: Mapping[str, Any]) -> dict[str, Any]:
    """Groups in flight by the time since others of their step were issued first.

    >>> _ages({"steps": {"3": [4, 0.5], "2": [1, 70.0]}})
    {'edges_s': [0.0, 1.0, 3.0, 10.0, 30.0, 100.0], 'counts': [4, 0, 0, 0, 1]}
    """
    found = [value for value in nested(train, "steps").values() if isinstance(value, list) and len(value) == 2]
    number = next((k for k, edge in enumerate(AGES_S) if all(age <= edge for _, age in found)), len(AGES_S))
    edges = [0.0, *AGES_S[: number + 1]]
    counts = [0] * min(number + 1, len(AGES_S) + 1)
    for groups, age in found:
        counts[min(int(np.searchsorted(AGES_S, age)), len(counts) - 1)] += groups
    return {"edges_s": edges, "counts": counts} if found else {"edges_s": [], "counts": []}


def _age(graph: Mapping[str, Any], step: int) -> float | None:
    found = nested(graph, "steps").get(str(step))
    return found[1] if isinstance(found, list) else None


def _numbered(counts: Mapping[str, Any]) -> list[dict[str, int]]:
    return [{"key": int(key), "groups": number} for key, number in counts.items() if key.lstrip("-").isdigit()]


def staleness(samples: pa.Table) -> list[dict[str, Any]]:
    """For stretches of steps: trained samples by how many versions their oldest token lagged behind the weights that it trained.

    >>> columns = {"graph": ["train"] * 3, "step": [1, 2, 2], "version_min": [0, 1, 0]}
    >>> staleness(pa.table(columns))
    [{'step': 1, 'to': 1, 'counts': {'0': 1}}, {'step': 2, 'to': 2, 'counts': {'0': 1, '1': 1}}]
    """
    if "version_min" not in samples.column_names:
        return []
    own = samples.select(["graph", "step", "version_min"]).filter(pc.field("graph") == "train").drop_null()
    if not len(own):
        return []
    steps = own["step"].to_numpy()
    lags = np.clip(steps - 1 - own["version_min"].to_numpy(), 0, 1000)
    first, last = int(steps.min()), int(steps.max())
    width = -(-(last - first + 1) // MOST_BARS)
    bars = (steps - first) // width
    keys, numbers = np.unique(bars * 1001 + lags, return_counts=True)
    found: dict[int, dict[str, int]] = {}
    for key, number in zip(keys.tolist(), numbers.tolist(), strict=True):
        found.setdefault(key // 1001, {})[str(key % 1001)] = number
    return [
        {"step": first + bar * width, "to": min(last, first + (bar + 1) * width - 1), "counts": counts}
        for bar, counts in found.items()
    ]


def _segments(run: Path, config: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    files, size = _folder_bytes(run / BUFFER / SEGMENTS)
    history_files, history = _folder_bytes(run / BUFFER / "history")
    try:
        log = (run / BUFFER / LOG).stat().st_size
    except OSError:
        log = 0
    limits = nested(config, "buffer")
    return {
        "count": files,
        "bytes": size,
        "in_flight_bytes": live.get("segment_bytes"),
        "spilled_bytes": None,
        "budget_bytes": limits.get("memory_bytes"),
        "max_bytes": limits.get("max_bytes"),
        "max_rows": limits.get("max_rows"),
        "log_bytes": log,
        "history_bytes": history,
        "history_parts": history_files,
    }


def _folder_bytes(folder: Path) -> tuple[int, int]:
    """Number of files below a folder, and their bytes."""
    number = size = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.stat(os.path.join(path, name)).st_size
                number += 1
            except OSError:  # it was removed meanwhile
                continue
    return number, size
