"""Lanes: what each worker group did in a window of time, why it stood idle between two calls, and the critical path of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...dataflow.graph import TRAIN
from ..busy_time import covered, idle_stretches
from .call_log import CallLog
from .live import nested

MOST_CALLS = 1500
"""Calls of a lane that are sent one by one; of more, the share of time in each of `width / 3` stretches."""
MOST_GAPS = 60
"""Gaps of a lane that are told, the longest."""
SHORTEST_GAP = 0.002
"""Of the window: shorter gaps cannot be seen."""
TOUCHING_S = 0.05
"""A call that ended so long before another began may have let it begin."""
WEIGHTS = (
    "publish_weights", "send_weights", "receive_weights", "finish_publishing", "canary", "compare_canaries", "register",
)  # fmt: skip
CHECKPOINTS = ("save_checkpoint", "load_checkpoint", "checkpoint_written", "save")


@dataclass(frozen=True)
class Window:
    """A stretch of a run, in seconds since its start."""

    start_s: float
    end_s: float
    width: int = 1200
    """Of the screen, in pixels."""

    @property
    def seconds(self) -> float:
        return max(self.end_s - self.start_s, 1e-9)


class Lanes:
    """The timeline of a run in a window.

    Args:
        calls: of the run.
        graphs: as `graph.json` has them.
        config: of the run, for pools that groups share.
    """

    def __init__(self, calls: CallLog, graphs: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._columns = calls.columns
        self._nodes, self._groups, self._graphs = (calls.words(name) for name in ("node", "group", "graph"))
        self._upstream = _upstream(graphs)
        self._pools = {name: str(nested(config, "placement", name).get("pool")) for name in self._groups}

    def _name(self, column: str, row: int) -> str:
        """Node or group of a call."""
        return (self._nodes if column == "node" else self._groups)[int(self._columns[column][row])]

    @property
    def total_s(self) -> float:
        """Seconds until the last call ended."""
        ends = self._columns["end_s"]
        return float(ends.max()) if len(ends) else 0.0

    @property
    def steps(self) -> list[tuple[int, float]]:
        """Each step with the second in which its last call ended."""
        steps, ends = self._columns["step"].astype(np.int64), self._columns["end_s"]
        if not len(steps):
            return []
        last = np.zeros(int(steps.max()) + 1)
        np.maximum.at(last, np.maximum(steps, 0), ends)
        return [(step, float(last[step])) for step in np.unique(steps).tolist() if step >= 0]

    def of(self, window: Window) -> dict[str, Any]:
        """Lanes, ends of steps, and the critical path of the step at the end of the window."""
        c = self._columns
        inside = np.flatnonzero((c["end_s"] >= window.start_s) & (c["start_s"] <= window.end_s))
        # Rounded before they are compared: a page that asks for a stretch until the end of a step knows the rounded one.
        ends = ((step, round(end, 6)) for step, end in self.steps)
        steps = [(step, end) for step, end in ends if window.start_s <= end <= window.end_s]
        rows = [(name, "group", inside[c["group"][inside] == number]) for number, name in enumerate(self._groups)]
        rows += [
            (name, "evaluation", inside[c["graph"][inside] == number])
            for number, name in enumerate(self._graphs)
            if name not in ("", TRAIN)
        ]
        every = max(1, -(-len(steps) // 200))
        return {
            "start_s": window.start_s,
            "end_s": window.end_s,
            "total_s": self.total_s,
            "nodes": [*self._nodes],
            "lanes": [
                self._lane(name, own[np.argsort(c["start_s"][own], kind="stable")], window, kind)
                for name, kind, own in rows
                if kind == "group" or len(own)
            ],
            "steps": [{"step": step, "end_s": end} for step, end in steps[::every]],
            "critical": self.critical(steps[-1][0]) if steps and len(steps) <= 50 else [],
            "critical_step": steps[-1][0] if steps else None,
        }

    def _lane(self, name: str, rows: np.ndarray, window: Window, kind: str) -> dict[str, Any]:
        """A group, or an evaluation with its calls on all groups."""
        c = self._columns
        idle = idle_stretches(c["start_s"][rows], c["end_s"][rows], window.start_s, window.start_s + window.seconds)
        begins, stops, after = idle.start_s, idle.end_s, idle.after
        lengths = stops - begins
        told = np.flatnonzero(lengths >= SHORTEST_GAP * window.seconds)
        told = np.sort(told[np.argsort(-lengths[told], kind="stable")[:MOST_GAPS]]).tolist()
        few = len(rows) <= MOST_CALLS
        return {
            "lane": name,
            "group": name if kind == "group" else None,
            "kind": kind,
            "busy_share": round(1 - float(lengths.sum()) / window.seconds, 4),
            "num_calls": len(rows),
            "calls": [self._call(row) for row in rows.tolist()] if few else [],
            "bins": None if few else self._bins(rows, window),
            "gaps": [self._gap(name, float(begins[k]), float(stops[k]), rows, int(after[k])) for k in told]
            if kind == "group"
            else [],
        }

    def _call(self, row: int) -> list[Any]:
        c = self._columns
        times = [round(float(c[name][row]), 6) for name in ("start_s", "end_s")]
        return [
            *times,
            int(c["node"][row]),
            int(c["rows"][row]),
            int(c["step"][row]),
            round(float(c["worker_s"][row]), 6),
        ]

    def _bins(self, rows: np.ndarray, window: Window) -> dict[str, Any]:
        """Share of each stretch that the group spent on each node; calls that overlap share it."""
        number = max(50, window.width // 3)
        width = window.seconds / number
        c = self._columns
        nodes = np.unique(c["node"][rows]).tolist()
        shares = np.zeros((len(nodes), number))
        for place, node in enumerate(nodes):
            own = rows[c["node"][rows] == node]
            shares[place] = covered(c["start_s"][own], c["end_s"][own], window.start_s, width, number)
        shares /= np.maximum(1.0, shares.sum(axis=0))
        return {"t0": window.start_s, "dt": width, "nodes": nodes, "shares": np.round(shares.T, 3).tolist()}

    # Why a group stood idle

    def _gap(self, group: str, start: float, end: float, rows: np.ndarray, after: int) -> dict[str, Any]:
        next_node = self._name("node", int(rows[after])) if after >= 0 else None
        reason, text = self._reason(group, start, end, next_node)
        return {"start_s": round(start, 6), "end_s": round(end, 6), "reason": reason, "text": text}

    def _reason(self, group: str, start: float, end: float, next_node: str | None) -> tuple[str, str]:
        c = self._columns
        near = np.flatnonzero((c["end_s"] > start) & (c["start_s"] < end))
        others = [row for row in near.tolist() if self._name("group", row) != group]
        if not others:
            return (
                "unknown",
                "nothing was under way: the driver, or the end of the run"
                if next_node is None
                else "nothing was under way",
            )
        if next_node is None:
            last = max(others, key=lambda row: c["end_s"][row])
            return "rows", f"no more work in this window; {self._what(last)} went on"
        method = next_node.rpartition(".")[2]
        upstream = self._upstream.get(next_node, frozenset())
        fed = [row for row in others if self._name("node", row) in upstream and c["end_s"][row] <= end + TOUCHING_S]
        if method in WEIGHTS:
            giving = [row for row in others if self._name("node", row).rpartition(".")[2] not in CHECKPOINTS]
            return (
                "weights",
                f"waits for weights of {self._what(max(giving or others, key=lambda row: c['end_s'][row]))}",
            )
        last = max(fed or others, key=lambda row: min(c["end_s"][row], end))
        if fed:
            return "rows", f"{next_node} waits for rows of {self._what(last)}"
        name = self._name("node", last).rpartition(".")[2]
        if name in CHECKPOINTS:
            return "disk", f"{self._what(last)} is written"
        if name in WEIGHTS:
            return "weights", f"{next_node} waits until {self._what(last)} is over"
        same = [row for row in others if self._pools.get(self._name("group", row)) == self._pools.get(group)]
        if same and self._pools.get(group) not in (None, "None"):
            return "device", f"{self._what(max(same, key=lambda row: c['end_s'][row]))} has the devices of the pool"
        return "rows", f"{next_node} waits for {self._what(last)}"

    def _what(self, row: int) -> str:
        c = self._columns
        node, group, rows = self._name("node", row), self._name("group", row), int(c["rows"][row])
        of = node if node.startswith(f"{group}.") else f"{node} on {group}"
        return f"{of} ({rows} rows)" if rows else of

    # The critical path

    def critical(self, step: int) -> list[dict[str, Any]]:
        """The calls that a step had to wait for one after the other, and the time between them that no call explains."""
        c = self._columns
        ends = dict(self.steps)
        if step not in ends:
            return []
        begin = max((end for other, end in ends.items() if other < step), default=0.0)
        own = np.flatnonzero((c["end_s"] > begin) & (c["end_s"] <= ends[step] + 1e-9))
        own = own[[self._name("node", row) != "recorder.record" for row in own.tolist()]] if len(own) else own
        path: list[dict[str, Any]] = []
        at = ends[step]
        while len(own) and at > begin:
            before = own[c["end_s"][own] <= at + 1e-9]
            if not len(before):
                break
            row = int(before[np.lexsort((-c["start_s"][before], c["end_s"][before]))[-1]])
            end, start = float(c["end_s"][row]), max(begin, float(c["start_s"][row]))
            if at - end > 1e-4:
                path.append({"lane": None, "node": None, "start_s": round(end, 6), "end_s": round(at, 6)})
            names = {"lane": self._name("group", row), "node": self._name("node", row)}
            path.append({**names, "start_s": round(start, 6), "end_s": round(end, 6)})
            own = own[(c["end_s"][own] <= start + 1e-9)]
            at = start
        if at - begin > 1e-4:
            path.append({"lane": None, "node": None, "start_s": round(begin, 6), "end_s": round(at, 6)})
        return path[::-1]


def _upstream(graphs: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Node -> the nodes that it waits for."""
    found: dict[str, set[str]] = {}
    for graph in graphs:
        for node in nested(graphs, graph).get("nodes", ()):
            found.setdefault(node["name"], set()).update(node.get("after", ()))
    return {name: frozenset(names) for name, names in found.items()}
