"""The graph page: rows at each node, rates, busy groups, and the versions and age of weights."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...dataflow.graph import TRAIN
from ...dataflow.metric_names import FUNCTIONS
from ...dataflow.runs.files import BUFFER, LOG, SEGMENTS
from ..timeline import CallLog
from .metrics import MetricLog, numbers
from .run_reader import nested

RECEIVE = "receive_weights"


def graph_page(
    graphs: Mapping[str, Any],
    live: Mapping[str, Any],
    calls: CallLog,
    metrics: MetricLog,
    config: Mapping[str, Any],
    *,
    goes_on: bool,
) -> dict[str, Any]:
    """Return nodes, edges and followers of all graphs of a run.

    Args:
        graphs: the content of `graph.json`.
        live: the content of `live.json`.
        goes_on: whether its driver is alive.
    """
    worked = _by_node(calls)
    nodes: list[dict[str, Any]] = []
    edges: list[dict[str, Any]] = []
    for name in graphs:
        counts = nested(live, "graphs", name)
        described = nested(graphs, name)
        source = nested(described, "source")
        nodes.append(_source(name, source, counts))
        for node in described.get("nodes", ()):
            nodes.append(
                _node(
                    name,
                    node,
                    nested(counts, "nodes", node["name"]),
                    live,
                    worked,
                    config,
                    goes_on=goes_on,
                )
            )
            edges += _edges(name, str(source.get("name")), node, nested(counts, "nodes", node["name"]))
    return {
        "nodes": nodes,
        "edges": edges,
        "weights": _weights(graphs, live, calls, metrics, config, goes_on=goes_on),
        "live": goes_on and bool(live),
        "at": live.get("at"),
    }


def _by_node(calls: CallLog) -> dict[tuple[str, str], dict[str, Any]]:
    """Return (graph, node) -> its calls, rows and seconds."""
    c = calls.columns
    graphs, nodes = calls.words("graph"), calls.words("node")
    found: dict[tuple[str, str], dict[str, Any]] = {}
    if not len(c["node"]):
        return found
    keys = c["graph"].astype(np.int64) * len(nodes) + c["node"]
    for key in np.unique(keys).tolist():
        own = keys == key
        seconds = c["end_s"][own] - c["start_s"][own]
        found[graphs[int(key) // len(nodes)], nodes[int(key) % len(nodes)]] = {
            "calls": int(own.sum()),
            "rows": int(c["rows"][own].sum()),
            "seconds": round(float(seconds.sum()), 4),
            "mean_s": round(float(seconds.mean()), 6),
            "worker_s": round(float(c["worker_s"][own].sum()), 4),
        }
    return found


def _source(graph: str, source: Mapping[str, Any], counts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": source.get("name"),
        "graph": graph,
        "group": None,
        "ranks": None,
        "shape": "source",
        "waiting": None,
        "leased": None,
        "done": None,
        "issued": counts.get("issued"),
        "rate_in": None,
        "rate_out": None,
        "busy": False,
        "calls": None,
        "seconds": None,
        "reads": [],
        "writes": source.get("columns", []),
        "code": None,
        "note": None,
    }


def _node(
    graph: str,
    node: Mapping[str, Any],
    now: Mapping[str, Any],
    live: Mapping[str, Any],
    worked: Mapping[tuple[str, str], Mapping[str, Any]],
    config: Mapping[str, Any],
    *,
    goes_on: bool,
) -> dict[str, Any]:
    group = node.get("group") or FUNCTIONS
    state = nested(live, "groups", group)
    under_way = [call for call in state.get("calls", ()) if call.get("what") == node["name"]]
    own = worked.get((graph, node["name"]), {})
    leased = now.get("leased") if goes_on else (0 if now else None)
    return {
        "name": node["name"],
        "graph": graph,
        "group": group,
        "ranks": state.get("ranks") or nested(config, "placement", group).get("ranks"),
        "shape": node.get("shape"),
        "updates": node.get("updates", False),
        "waiting": max(0, now["todo"] - now["leased"]) if now else None,
        "ready": now.get("ready"),
        "leased": leased,
        "done": max(own.get("rows", 0), now.get("done", 0)) if own or now else None,
        "held": now.get("held"),
        "rate_in": now.get("rate_in") if goes_on else None,
        "rate_out": now.get("rate_out") if goes_on else None,
        "busy": goes_on and bool(under_way),
        "since_s": max((call["since_s"] for call in under_way), default=None) if goes_on else None,
        "calls": own.get("calls", 0),
        "seconds": own.get("seconds", 0.0),
        "mean_s": own.get("mean_s"),
        "worker_s": own.get("worker_s"),
        "reads": node.get("reads", []),
        "writes": node.get("writes", []),
        "level": node.get("level"),
        "path": node.get("path", []),
        "code": node.get("code"),
        "note": f"{now['held']} groups are too old and wait" if now.get("held") else None,
    }


def _edges(
    graph: str, source: str, node: Mapping[str, Any], now: Mapping[str, Any]
) -> list[dict[str, Any]]:
    columns: dict[str, list[str]] = {writer: [] for writer in node.get("after", ())}
    for column, writer in nested(node, "writers").items():
        columns.setdefault(writer, []).append(column)
    waiting = max(0, now["todo"] - now["leased"]) if now else None
    direct = [writer for writer in columns if columns[writer] or writer in node.get("after", ())]
    return [
        {
            "graph": graph,
            "from": writer or source,
            "to": node["name"],
            "columns": columns[writer],
            "rows": waiting if writer == direct[-1] else None,
        }
        for writer in direct
    ]


def _weights(
    graphs: Mapping[str, Any],
    live: Mapping[str, Any],
    calls: CallLog,
    metrics: MetricLog,
    config: Mapping[str, Any],
    *,
    goes_on: bool,
) -> list[dict[str, Any]]:
    """Return each weight edge with the version that the follower holds."""
    edges = {
        (edge["leader"], edge["follower"]): edge.get("every", 1)
        for graph in graphs
        for edge in nested(graphs, graph).get("follows", ())
    }
    found: list[dict[str, Any]] = []
    for (leader, follower), every in edges.items():
        ahead, behind = (nested(live, "groups", name).get("version") for name in (leader, follower))
        received = last_received(calls, follower)
        [pause] = numbers(metrics.series(f"{follower}/weights_pause_s")[1][-1:]) or [None]
        [size] = numbers(metrics.series(f"{leader}/weights_bytes")[1][-1:]) or [None]
        age = None
        if goes_on and received and "time_s" in live:
            # live.json has the time of the run when it was written, and that moment.
            age = max(0.0, live["time_s"] + time.time() - live["at"] - received["at_s"])
        found.append(
            {
                "from": leader,
                "to": follower,
                "every": every,
                "version": behind,
                "leader_version": ahead,
                "behind": None if ahead is None or behind is None else ahead - behind,
                "age_s": age,
                "bytes": size,
                "transfer_s": received["transfer_s"] if received else None,
                "pause_s": pause,
                "max_staleness": nested(config, "schedule").get("max_staleness", 0),
            }
        )
    return found


def last_received(calls: CallLog, follower: str) -> dict[str, Any] | None:
    """Return time and duration of a group's last weight update, or None if there was none."""
    c, nodes, groups = calls.columns, calls.words("node"), calls.words("group")
    if RECEIVE not in nodes or follower not in groups:
        return None
    own = np.flatnonzero((c["node"] == nodes.index(RECEIVE)) & (c["group"] == groups.index(follower)))
    if not len(own):
        return None
    row = int(own[-1])
    return {
        "at_s": float(c["end_s"][row]),
        "transfer_s": float(c["worker_s"][row]),
        "step": int(c["step"][row]),
    }


# The buffer page: rows by state, ages, staleness over time, drops by reason, leases, bytes.


AGES_S = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0, 10800.0)
"""[s] Upper edges of the age bins. One more bin holds older groups."""
MOST_BARS = 200
"""Most bars of the staleness chart; each covers a range of steps."""


def buffer_page(
    run: Path, live: Mapping[str, Any], samples: pa.Table, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state and history of the buffer.

    Args:
        live: the content of `live.json`.
        samples: the index of the run's samples.
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
                key: nested(graphs, name).get(key)
                for key in ("issued", "in_flight", "done", "groups", "groups_behind")
            }
            for name in graphs
        },
        "drops": [
            {"reason": reason, "rows": rows}
            for reason, rows in sorted(dropped.items(), key=lambda item: -item[1])
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
    """Count groups in flight by the time since the first group of their step was issued.

    >>> _ages({"steps": {"3": [4, 0.5], "2": [1, 70.0]}})
    {'edges_s': [0.0, 1.0, 3.0, 10.0, 30.0, 100.0], 'counts': [4, 0, 0, 0, 1]}
    """
    found = [
        value for value in nested(train, "steps").values() if isinstance(value, list) and len(value) == 2
    ]
    number = next(
        (k for k, edge in enumerate(AGES_S) if all(age <= edge for _, age in found)), len(AGES_S)
    )
    edges = [0.0, *AGES_S[: number + 1]]
    counts = [0] * min(number + 1, len(AGES_S) + 1)
    for groups, age in found:
        counts[min(int(np.searchsorted(AGES_S, age)), len(counts) - 1)] += groups
    return {"edges_s": edges, "counts": counts} if found else {"edges_s": [], "counts": []}


def _age(graph: Mapping[str, Any], step: int) -> float | None:
    found = nested(graph, "steps").get(str(step))
    return found[1] if isinstance(found, list) else None


def _numbered(counts: Mapping[str, Any]) -> list[dict[str, int]]:
    return [
        {"key": int(key), "groups": number} for key, number in counts.items() if key.lstrip("-").isdigit()
    ]


def staleness(samples: pa.Table) -> list[dict[str, Any]]:
    """Count trained samples by the lag of their oldest token, for ranges of steps.

    The lag is in versions behind the trained weights.

    >>> columns = {"graph": ["train"] * 3, "step": [1, 2, 2], "version_min": [0, 1, 0]}
    >>> staleness(pa.table(columns))
    [{'step': 1, 'to': 1, 'counts': {'0': 1}}, {'step': 2, 'to': 2, 'counts': {'0': 1, '1': 1}}]
    """
    if "version_min" not in samples.column_names:
        return []
    own = (
        samples.select(["graph", "step", "version_min"]).filter(pc.field("graph") == "train").drop_null()
    )
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
    """Return the number of files below a folder, and their bytes."""
    number = size = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.stat(os.path.join(path, name)).st_size
                number += 1
            except OSError:  # the file was removed in between
                continue
    return number, size
