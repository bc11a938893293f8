"""How weights went from those that train to those that generate: each version, how long it took, and how long generation stood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .call_log import CallLog
from .graph_page import RECEIVE
from .metrics import MetricLog

MOST = 2000
"""Versions that are sent, the latest."""


def weights_page(
    calls: CallLog, metrics: MetricLog, edges: Sequence[Mapping[str, Any]], began_at: float | None
) -> dict[str, Any]:
    """The versions that followers received.

    Args:
        calls: of the run.
        metrics: of the run.
        edges: who follows whom, with the versions that they hold now.
        began_at: when the run began, in seconds since 1970, if that is known.
    """
    c, nodes, groups = calls.columns, calls.words("node"), calls.words("group")
    pauses = {edge["to"]: metrics.series(f"{edge['to']}/weights_pause_s") for edge in edges}
    sizes = {edge["to"]: metrics.series(f"{edge['from']}/weights_bytes") for edge in edges}
    versions: list[dict[str, Any]] = []
    if RECEIVE in nodes:
        for row in np.flatnonzero(c["node"] == nodes.index(RECEIVE))[-MOST:].tolist():
            follower, step = groups[int(c["group"][row])], int(c["step"][row])
            versions.append(
                {
                    "version": step,
                    "step": step,
                    "to": follower,
                    "at_s": round(float(c["end_s"][row]), 4),
                    "at": None if began_at is None else began_at + float(c["end_s"][row]),
                    "took_s": round(float(c["end_s"][row] - c["start_s"][row]), 6),
                    "transfer_s": round(float(c["worker_s"][row]), 6),
                    "pause_s": _at(step, pauses.get(follower)),
                    "bytes": _at(step, sizes.get(follower)),
                }
            )
    names = [
        name for name in metrics.names if name.endswith(("weights_transfer_s", "weights_pause_s", "changed_share"))
    ]
    return {"edges": [*edges], "versions": versions, "metrics": names, "ranks": []}


def _at(step: int, series: tuple[np.ndarray, np.ndarray] | None) -> float | None:
    """The value of a step; None: it has none."""
    steps, values = series or (np.empty(0), np.empty(0))
    at = np.searchsorted(steps, step)
    return float(values[at]) if at < len(steps) and steps[at] == step else None
