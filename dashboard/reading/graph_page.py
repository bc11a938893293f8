"""The graph of a run as it stands: rows at each node, rates, which group is busy, and the weights' versions and age."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...dataflow.metric_names import FUNCTIONS
from .follow import CallLog
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
    """Nodes, edges and followers of all graphs of a run.

    Args:
        graphs: as `graph.json` has them.
        live: as `live.json` has it.
        calls: of the run.
        metrics: of the run.
        config: of the run.
        goes_on: its driver lives.
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
                _node(name, node, nested(counts, "nodes", node["name"]), live, worked, config, goes_on=goes_on)
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
    """Graph and node -> calls, rows and seconds of it."""
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


def _edges(graph: str, source: str, node: Mapping[str, Any], now: Mapping[str, Any]) -> list[dict[str, Any]]:
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
    """Each parameter edge with the version that the follower holds."""
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
    """When a group received weights last, and how long that took; None: it never did."""
    c, nodes, groups = calls.columns, calls.words("node"), calls.words("group")
    if RECEIVE not in nodes or follower not in groups:
        return None
    own = np.flatnonzero((c["node"] == nodes.index(RECEIVE)) & (c["group"] == groups.index(follower)))
    if not len(own):
        return None
    row = int(own[-1])
    return {"at_s": float(c["end_s"][row]), "transfer_s": float(c["worker_s"][row]), "step": int(c["step"][row])}
