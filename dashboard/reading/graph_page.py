"""The graph page: rows and rates of nodes, busy groups, and versions and ages of weights."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...dataflow.buffer.staleness import VersionOf
from ...dataflow.graph import TRAIN
from ...dataflow.metric_names import FUNCTIONS
from ...dataflow.runs.files import BUFFER, SEGMENTS
from ...dataflow.runs.lock import Life
from ..timeline import CallLog
from .metrics import MetricLog, numbers
from .run_reader import RunReader, nested, read_graphs, read_live


def graph_page(run: RunReader) -> dict[str, Any]:
    facts, graphs, live = run.facts, read_graphs(run.path), read_live(run.path)
    goes_on = facts.life is Life.ALIVE
    with run.parts() as (metrics, calls):
        worked = calls.totals("graph")
        weights = _weights(graphs, live, calls, metrics, goes_on=goes_on)
    nodes: list[dict[str, Any]] = []
    edges: list[dict[str, Any]] = []
    for name in graphs:
        described, state = nested(graphs, name), nested(live, "graphs", name)
        source = nested(described, "source")
        issued = {"issued": state.get("issued"), "writes": source.get("columns", [])}
        nodes.append(
            {"name": source.get("name"), "graph": name, "shape": "source", "busy": False, **issued}
        )
        for node in described.get("nodes", ()):
            now = nested(state, "nodes", node["name"])
            group = nested(live, "groups", node.get("group") or FUNCTIONS)
            own = worked.get((name, node["name"]), {})
            place = nested(facts.config, "placement", node.get("group") or FUNCTIONS)
            ranks = group.get("ranks") or place.get("ranks")
            nodes.append(
                {"graph": name, "ranks": ranks, **_node(node, now, group, own, goes_on=goes_on)}
            )
            edges += _edges(str(source.get("name")), node, now)
    shown = {"live": goes_on and bool(live), "at": live.get("at")}
    return {"nodes": nodes, "edges": edges, "weights": weights, **shown}


def _node(
    node: Mapping[str, Any],
    now: Mapping[str, Any],
    group: Mapping[str, Any],
    own: Mapping[str, Any],
    *,
    goes_on: bool,
) -> dict[str, Any]:
    """`now` has a node's current rows, `group` its group in `live.json`, and `own` the totals of
    its calls."""
    busy = any(call.get("what") == node["name"] for call in group.get("calls", ()))
    return {
        **{name: node.get(name) for name in ("name", "shape", "reads", "writes", "code")},
        "group": node.get("group") or FUNCTIONS,
        "waiting": _waiting(now),
        # A driver that has ended holds no leases.
        "leased": now.get("leased") if goes_on else (0 if now else None),
        "done": max(own.get("rows", 0), now.get("done", 0)) if own or now else None,
        "rate_in": now.get("rate_in") if goes_on else None,
        "rate_out": now.get("rate_out") if goes_on else None,
        "busy": goes_on and busy,
        "calls": own.get("calls", 0),
        "seconds": own.get("seconds", 0.0),
        "note": f"{now['held']} groups are too old and wait" if now.get("held") else None,
    }


def _waiting(now: Mapping[str, Any]) -> float | None:
    return max(0, now["todo"] - now["leased"]) if now else None


def _edges(source: str, node: Mapping[str, Any], now: Mapping[str, Any]) -> list[dict[str, Any]]:
    columns: dict[str, list[str]] = {writer: [] for writer in node.get("after", ())}
    for column, writer in nested(node, "writers").items():
        columns.setdefault(writer, []).append(column)
    # Only the last edge shows the waiting rows.
    return [
        {
            "from": writer or source,
            "to": node["name"],
            "columns": own,
            "rows": _waiting(now) if k == len(columns) else None,
        }
        for k, (writer, own) in enumerate(columns.items(), 1)
    ]


def _weights(
    graphs: Mapping[str, Any],
    live: Mapping[str, Any],
    calls: CallLog,
    metrics: MetricLog,
    *,
    goes_on: bool,
) -> list[dict[str, Any]]:
    edges = [edge for graph in graphs for edge in nested(graphs, graph).get("follows", ())]
    found: list[dict[str, Any]] = []
    for leader, follower in dict.fromkeys((edge["leader"], edge["follower"]) for edge in edges):
        ahead, behind = (nested(live, "groups", name).get("version") for name in (leader, follower))
        behind = nested(live, "groups", follower, "versions").get(leader, behind)
        [pause] = numbers(metrics.series(f"{follower}/weights_pause_s")[1][-1:]) or [None]
        [size] = numbers(metrics.series(f"{leader}/weights_bytes")[1][-1:]) or [None]
        row = received(calls, follower)[-1:]
        ended = calls.columns["end_s"][row]
        age = None
        if goes_on and len(row) and "time_s" in live:
            # live.json has the time of its writing, as wall-clock time and as run time.
            age = max(0.0, live["time_s"] + time.time() - live["at"] - float(ended[0]))
        found.append(
            {
                "from": leader,
                "to": follower,
                "version": behind,
                "behind": None if ahead is None or behind is None else ahead - behind,
                "age_s": age,
                "bytes": size,
                "transfer_s": float(calls.columns["worker_s"][row][0]) if len(row) else None,
                "pause_s": pause,
            }
        )
    return found


def received(calls: CallLog, follower: str | None = None) -> np.ndarray:
    """Return indexes of the calls that delivered weights to a follower, or to any."""
    c, nodes, groups = calls.columns, calls.words("node"), calls.words("group")
    own = np.array([name == "receive_weights" for name in nodes], bool)[c["node"]]
    if follower is not None:
        own &= np.array([name == follower for name in groups], bool)[c["group"]]
    return np.flatnonzero(own)


# The buffer page


AGES_S = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0, 10800.0)
"""[s] Upper edges of the age bins; one more bin has older groups."""
MOST_BARS = 200
"""Maximum number of bars, or ranges of steps, in the staleness chart."""


def buffer_page(run: RunReader) -> dict[str, Any]:
    live = read_live(run.path)
    graphs = {name: nested(live, "graphs", name) for name in nested(live, "graphs")}
    dropped = Counter[str]()
    for one in graphs.values():
        dropped.update(nested(one, "dropped"))
    held = [lease for one in graphs.values() for lease in one.get("leases", ())]
    shown = ("lease", "node", "rows", "age_s")
    leases = [{"rank": lease.get("holder"), **{k: lease.get(k) for k in shown}} for lease in held]
    leased = sum(lease.get("left", 0) for lease in held)
    issued, flying, done = (
        sum(one.get(key, 0) for one in graphs.values()) for key in ("issued", "in_flight", "done")
    )
    waiting = [
        _waiting_group(one, oldest) for one in graphs.values() for oldest in one.get("oldest", ())
    ]
    totals = {"issued": issued, "waiting": max(0, flying - leased), "leased": leased, "done": done}
    files, size = _folder_bytes(run.path / BUFFER / SEGMENTS)
    budget = nested(run.facts.config, "buffer").get("memory_bytes")
    return {
        "totals": {**totals, "dropped": dropped.total()},
        "drops": [{"reason": reason, "rows": rows} for reason, rows in dropped.most_common()],
        "waiting": waiting,
        "ages": _ages(graphs.get(TRAIN, {})),
        "staleness": staleness(run.samples.table()),
        "staleness_of": _named(run.version_of),
        "leases": leases,
        "segments": {"count": files, "bytes": size, "budget_bytes": budget},
    }


def _waiting_group(graph: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    step = nested(graph, "steps").get(str(group["step"]))
    age = step[1] if isinstance(step, list) else None
    return {"group": group["group"], "age_s": age, "for": "; ".join(group["waits"])}


def _ages(train: Mapping[str, Any]) -> dict[str, Any]:
    """Count groups in flight by the time since their step's first group was issued.

    >>> _ages({"steps": {"3": [4, 0.5], "2": [1, 70.0]}})
    {'edges_s': [0.0, 1.0, 3.0, 10.0, 30.0, 100.0], 'counts': [4, 0, 0, 0, 1]}
    """
    found = [value for value in nested(train, "steps").values() if isinstance(value, list)]
    if not found:
        return {"edges_s": [], "counts": []}
    bins = [bisect_left(AGES_S, age) for _, age in found]
    counts = [0] * (max(bins) + 1)
    for (groups, _), place in zip(found, bins, strict=True):
        counts[place] += groups
    return {"edges_s": [0.0, *AGES_S[: len(counts)]], "counts": counts}


def _named(version_of: VersionOf) -> str:
    """Name the part of an episode whose staleness counts.

    >>> _named("newest_turn"), _named(0.25)
    ('newest turn', 'at most 25 % of its tokens are older')
    """
    if isinstance(version_of, str):
        return version_of.replace("_", " ")
    return f"at most {100 * version_of:g} % of its tokens are older"


def staleness(samples: pa.Table) -> list[dict[str, Any]]:
    """For each range of steps, beginning with `step`, count trained samples by the lag of their
    version behind the trained weights [versions].

    >>> columns = {"graph": ["train"] * 3, "step": [1, 2, 2], "_version": [0, 1, 0]}
    >>> staleness(pa.table(columns))
    [{'step': 1, 'counts': {'0': 1}}, {'step': 2, 'counts': {'0': 1, '1': 1}}]
    """
    if "_version" not in samples.column_names:
        return []
    own = samples.select(["graph", "step", "_version"]).filter(pc.field("graph") == "train").drop_null()
    if not len(own):
        return []
    steps = own["step"].to_numpy()
    # Step s trains on samples of version s - 1 at best.
    lags = np.clip(steps - 1 - own["_version"].to_numpy(), 0, 1000)
    first, last = int(steps.min()), int(steps.max())
    width = -(-(last - first + 1) // MOST_BARS)
    bars = (steps - first) // width
    # One number for each pair of bar and lag, which is at most 1000.
    keys, numbers = np.unique(bars * 1001 + lags, return_counts=True)
    found: dict[int, dict[str, int]] = {}
    for key, number in zip(keys.tolist(), numbers.tolist(), strict=True):
        found.setdefault(key // 1001, {})[str(key % 1001)] = number
    return [{"step": first + bar * width, "counts": counts} for bar, counts in found.items()]


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
