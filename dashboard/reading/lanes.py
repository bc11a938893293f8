"""Lanes of the timeline: the calls of each worker group and rank in a time window.

There are lanes for weights, checkpoints and evaluations, reasons for idle gaps, and the critical
path of a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from ...controllers.own_groups import RECORDER
from ...dataflow.graph import TRAIN
from ..timeline import covered, idle_stretches
from .call_log import CallLog
from .run_reader import nested

MOST_CALLS = 1500
"""Most calls of a lane to send one by one. Beyond that, send the busy share of `width / 3` bins."""
MOST_GAPS = 60
"""Most gaps of a lane to explain, longest first."""
SHORTEST_GAP = 0.002
"""Shortest gap to explain, as a share of the window. Shorter ones are invisible."""
TOUCHING_S = 0.05
"""[s] A call that ended at most this long before another began may have unblocked it."""
WEIGHTS = (
    "publish_weights", "send_weights", "receive_weights", "finish_publishing", "canary", "compare_canaries", "register",
)  # fmt: skip
SAVE, WRITTEN = "save_checkpoint", "checkpoint_written"
CHECKPOINTS = (SAVE, "load_checkpoint", WRITTEN, "save")
LATE = 0.1
"""A rank is named as the slowest if it answered this much later than the others, as a share of its
time."""


@dataclass(frozen=True)
class Window:
    """A time window of a run, in seconds since its start."""

    start_s: float
    end_s: float
    width: int = 1200
    """Width of the screen in pixels."""

    @property
    def seconds(self) -> float:
        return max(self.end_s - self.start_s, 1e-9)


class Lanes:
    """The timeline of a run in a window.

    Args:
        graphs: the content of `graph.json`.
        config: the configuration of the run, for pools that groups share.
    """

    def __init__(self, calls: CallLog, graphs: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._columns = calls.columns
        self._nodes, self._groups, self._graphs = (
            calls.words(name) for name in ("node", "group", "graph")
        )
        self._upstream = _upstream(graphs)
        self._pools = {name: str(nested(config, "placement", name).get("pool")) for name in self._groups}
        self._of_rank = calls.ranks
        self._num_ranks = {name: self._ranks_of(name, config) for name in self._groups}

    def _name(self, column: str, row: int) -> str:
        return (self._nodes if column == "node" else self._groups)[int(self._columns[column][row])]

    @property
    def total_s(self) -> float:
        """[s] End of the last call."""
        ends = self._columns["end_s"]
        return float(ends.max()) if len(ends) else 0.0

    @property
    def steps(self) -> list[tuple[int, float]]:
        """Each step, with the end of its last call [s]."""
        steps, ends = self._columns["step"].astype(np.int64), self._columns["end_s"]
        if not len(steps):
            return []
        last = np.zeros(int(steps.max()) + 1)
        np.maximum.at(last, np.maximum(steps, 0), ends)
        return [(step, float(last[step])) for step in np.unique(steps).tolist() if step >= 0]

    def window_of(self, first: float, last: float) -> tuple[float, float]:
        """Return the window of some steps, or the whole run if it has none of them.

        It begins at the end of the step before the first and ends with the last.
        """
        steps = self.steps
        own = [end for step, end in steps if first <= step <= last]
        if not own:
            return 0.0, self.total_s
        return max((end for step, end in steps if step < first), default=0.0), max(own)

    def _ranks_of(self, group: str, config: Mapping[str, Any]) -> int:
        known = nested(config, "placement", group).get("ranks")
        return known if isinstance(known, int) else 1

    def of(self, window: Window, unfolded: Collection[str] = ()) -> dict[str, Any]:
        """Return lanes, ends of steps, and the critical path of the last step in the window.

        Args:
            unfolded: groups to show with a lane for each rank.
        """
        c = self._columns
        inside = np.flatnonzero((c["end_s"] >= window.start_s) & (c["start_s"] <= window.end_s))
        # Round before comparing: pages send the rounded end of a step.
        ends = ((step, round(end, 6)) for step, end in self.steps)
        until = round(window.end_s, 6)
        steps = [(step, end) for step, end in ends if window.start_s <= end <= until]
        lanes: list[dict[str, Any]] = []
        for number, name in enumerate(self._groups):
            own = self._sorted(inside[c["group"][inside] == number])
            lanes.append(self._lane(name, own, window, "group"))
            if name in unfolded:
                lanes += self._rank_lanes(number, window)
        for number, name in enumerate(self._graphs):
            own = self._sorted(inside[c["graph"][inside] == number])
            if name not in ("", TRAIN) and len(own):
                lanes.append(self._lane(name, own, window, "evaluation"))
        sent = self._sorted(inside[np.isin(c["node"][inside], self._numbers_of(WEIGHTS))])
        if len(sent):
            lanes.append(self._lane("weights", sent, window, "weights"))
        saved = [
            span for span in self._checkpoints if span[1] >= window.start_s and span[0] <= window.end_s
        ]
        if saved:
            lanes.append(self._checkpoint_lane(saved, window))
        every = max(1, -(-len(steps) // 200))
        return {
            "start_s": window.start_s,
            "end_s": window.end_s,
            "total_s": self.total_s,
            "nodes": [*self._nodes],
            "lanes": lanes,
            "ranks": {name: number for name, number in self._num_ranks.items() if number > 1},
            "steps": [{"step": step, "end_s": end} for step, end in steps[::every]],
            "critical": self.critical(steps[-1][0]) if steps and len(steps) <= 50 else [],
            "critical_step": steps[-1][0] if steps else None,
        }

    def _numbers_of(self, methods: Collection[str]) -> list[int]:
        return [number for number, name in enumerate(self._nodes) if name in methods]

    def _sorted(self, rows: np.ndarray) -> np.ndarray:
        return rows[np.argsort(self._columns["start_s"][rows], kind="stable")]

    def _lane(self, name: str, rows: np.ndarray, window: Window, kind: str) -> dict[str, Any]:
        """Return the lane of a group, or of an evaluation or weights with calls on all groups."""
        c = self._columns
        drawn = _Drawn(rows, c["start_s"][rows], c["end_s"][rows], c["worker_s"][rows])
        lane, gaps = self._drawn_lane(name, drawn, window)
        if kind == "group":
            lane["gaps"] = [self._gap(name, start, end, rows, after) for start, end, _, after in gaps]
        return {**lane, "group": name if kind == "group" else None, "kind": kind}

    def _rank_lanes(self, number: int, window: Window) -> Iterator[dict[str, Any]]:
        """Yield the lanes of a group's ranks, with each rank's time in each call."""
        c, of, group = self._columns, self._of_rank, self._groups[number]
        inside = np.flatnonzero(
            (of["end_s"] >= window.start_s) & (of["end_s"] - of["worker_s"] <= window.end_s)
        )
        inside = inside[c["group"][of["call"][inside]] == number]
        for rank in range(self._num_ranks[group]):
            own = inside[of["rank"][inside] == rank]
            own = own[np.argsort(of["end_s"][own] - of["worker_s"][own], kind="stable")]
            calls, ends, took = of["call"][own], of["end_s"][own], of["worker_s"][own]
            drawn = _Drawn(calls, np.maximum(ends - took, c["start_s"][calls]), ends, took)
            lane, gaps = self._drawn_lane(f"{group}[{rank}]", drawn, window)
            lane["gaps"] = [self._rank_gap(group, *gap[:2], calls, *gap[2:]) for gap in gaps]
            yield {**lane, "group": group, "kind": "rank", "rank": rank}

    def _checkpoint_lane(
        self, saved: Sequence[tuple[float, float, int]], window: Window
    ) -> dict[str, Any]:
        """Return the lane of checkpoints, from the copy of the state until it is on the disk."""
        rows = np.array([row for _, _, row in saved])
        starts, ends = np.array([span[0] for span in saved]), np.array([span[1] for span in saved])
        drawn = _Drawn(rows, starts, ends, self._columns["worker_s"][rows])
        return {**self._drawn_lane("checkpoints", drawn, window)[0], "group": None, "kind": "checkpoint"}

    @cached_property
    def _checkpoints(self) -> list[tuple[float, float, int]]:
        """(start, end, first call) of each checkpoint."""
        c = self._columns
        begun, written = (self._numbers_of((name,)) for name in (SAVE, WRITTEN))
        starts = self._sorted(np.flatnonzero(np.isin(c["node"], begun)))
        new = np.append(True, np.diff(c["step"][starts]) != 0)[: len(starts)]
        first = starts[new].tolist()
        rows = np.flatnonzero(np.isin(c["node"], [*begun, *written]))
        found: list[tuple[float, float, int]] = []
        for row, until in zip(first, [*c["start_s"][first[1:]].tolist(), np.inf], strict=False):
            start = float(c["start_s"][row])
            own = rows[(c["start_s"][rows] >= start) & (c["start_s"][rows] < until)]
            found.append((start, float(c["end_s"][own].max()), row))
        return found

    def _drawn_lane(self, name: str, drawn: _Drawn, window: Window) -> tuple[dict[str, Any], list[_Gap]]:
        """Return a lane without its gaps, and the gaps to explain."""
        idle = idle_stretches(drawn.start_s, drawn.end_s, window.start_s, window.start_s + window.seconds)
        lengths = idle.end_s - idle.start_s
        told = np.flatnonzero(lengths >= SHORTEST_GAP * window.seconds)
        told = np.sort(told[np.argsort(-lengths[told], kind="stable")[:MOST_GAPS]]).tolist()
        few = len(drawn.calls) <= MOST_CALLS
        lane = {
            "lane": name,
            "busy_share": round(1 - float(lengths.sum()) / window.seconds, 4),
            "num_calls": len(drawn.calls),
            "calls": self._bars(drawn) if few else [],
            "bins": None if few else self._bins(drawn, window),
            "gaps": [],
        }
        return lane, [
            (float(idle.start_s[k]), float(idle.end_s[k]), int(idle.before[k]), int(idle.after[k]))
            for k in told
        ]

    def _bars(self, drawn: _Drawn) -> list[list[Any]]:
        """Return each call as [start, end, node, rows, step, seconds in the worker]."""
        c, rows = self._columns, drawn.calls
        return [
            list(bar)
            for bar in zip(
                np.round(drawn.start_s, 6).tolist(),
                np.round(drawn.end_s, 6).tolist(),
                c["node"][rows].tolist(),
                c["rows"][rows].astype(np.int64).tolist(),
                c["step"][rows].astype(np.int64).tolist(),
                np.round(drawn.worker_s.astype(np.float64), 6).tolist(),
                strict=True,
            )
        ]

    def _bins(self, drawn: _Drawn, window: Window) -> dict[str, Any]:
        """Return the share of each bin spent on each node. Overlapping calls share the bin."""
        number = max(50, window.width // 3)
        width = window.seconds / number
        kinds = self._columns["node"][drawn.calls]
        nodes = np.unique(kinds).tolist()
        shares = np.zeros((len(nodes), number))
        for place, node in enumerate(nodes):
            own = kinds == node
            shares[place] = covered(drawn.start_s[own], drawn.end_s[own], window.start_s, width, number)
        shares /= np.maximum(1.0, shares.sum(axis=0))
        return {
            "t0": window.start_s,
            "dt": width,
            "nodes": nodes,
            "shares": np.round(shares.T, 3).tolist(),
        }

    # Reasons for idle gaps

    def _gap(self, group: str, start: float, end: float, rows: np.ndarray, after: int) -> dict[str, Any]:
        next_node = self._name("node", int(rows[after])) if after >= 0 else None
        reason, text = self._reason(group, start, end, next_node)
        return {"start_s": round(start, 6), "end_s": round(end, 6), "reason": reason, "text": text}

    def _rank_gap(
        self, group: str, start: float, end: float, calls: np.ndarray, before: int, after: int
    ) -> dict[str, Any]:
        """Explain the gap of a rank: it waited for other ranks of its call, or had nothing to do."""
        ended = int(calls[before]) if before >= 0 else -1
        until = float(self._columns["end_s"][ended]) if ended >= 0 else start
        # Most of the gap was spent waiting for other ranks of the call.
        if until - start > 0.5 * (end - start):
            last = self._last_rank(ended)
            others = "the other ranks" if last is None else f"{group}[{last}]"
            text = f"finished its part of {self._name('node', ended)}; {others} finished {until - start:.3g} s later"
            return {"start_s": round(start, 6), "end_s": round(end, 6), "reason": "rank", "text": text}
        return self._gap(group, start, end, calls, after)

    def _reason(self, group: str, start: float, end: float, next_node: str | None) -> tuple[str, str]:
        c = self._columns
        near = np.flatnonzero((c["end_s"] > start) & (c["start_s"] < end))
        others = [row for row in near.tolist() if self._name("group", row) not in (group, RECORDER)]
        if not others:
            return (
                "unknown",
                "nothing was under way: the driver, or the end of the run"
                if next_node is None
                else "nothing was under way",
            )
        if next_node is None:
            most = max(others, key=lambda row: min(c["end_s"][row], end) - max(c["start_s"][row], start))
            return "rows", f"no more work in this window; {self._what(most)} was running"
        method = next_node.rpartition(".")[2]
        upstream = self._upstream.get(next_node, frozenset())
        fed = [
            row
            for row in others
            if self._name("node", row) in upstream and c["end_s"][row] <= end + TOUCHING_S
        ]
        if method in WEIGHTS:
            giving = [
                row for row in others if self._name("node", row).rpartition(".")[2] not in CHECKPOINTS
            ]
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
        same = [
            row for row in others if self._pools.get(self._name("group", row)) == self._pools.get(group)
        ]
        if same and self._pools.get(group) not in (None, "None"):
            return (
                "device",
                f"{self._what(max(same, key=lambda row: c['end_s'][row]))} has the devices of the pool",
            )
        return "rows", f"{next_node} waits for {self._what(last)}"

    def _last_rank(self, call: int) -> int | None:
        """Return the rank that the others of a call waited for, or None if none was much later."""
        of = self._of_rank
        first, beyond = np.searchsorted(of["call"], [call, call + 1]).tolist()
        if beyond - first < 2:  # ranks of a call are in the order of their answers
            return None
        late_s = of["end_s"][beyond - 1] - of["end_s"][beyond - 2]
        return int(of["rank"][beyond - 1]) if late_s > LATE * of["worker_s"][beyond - 1] else None

    def _what(self, row: int) -> str:
        c = self._columns
        node, group, rows = self._name("node", row), self._name("group", row), int(c["rows"][row])
        of = node if node.startswith(f"{group}.") else f"{node} on {group}"
        notes = [f"{rows} rows"] if rows else []
        last = self._last_rank(row)
        notes += [] if last is None else [f"{group}[{last}] was the last"]
        return f"{of} ({', '.join(notes)})" if notes else of

    # The critical path

    def critical(self, step: int) -> list[dict[str, Any]]:
        """Return the chain of calls that a step waited for, with unexplained time in between.

        It is traced back from the end of the step. The predecessor of a call is the call that ended
        last before it began. If rows stream from an upstream call, that call is the predecessor.
        """
        c = self._columns
        ends = dict(self.steps)
        if step not in ends:
            return []
        begin = max((end for other, end in ends.items() if other < step), default=0.0)
        own = np.flatnonzero((c["end_s"] > begin) & (c["start_s"] < ends[step]))
        own = own[c["group"][own] != self._recorder]
        path: list[dict[str, Any]] = []
        at, row = ends[step], None
        while at > begin and len(own):
            before = own[(c["end_s"][own] <= at + 1e-9) & (own != row)]
            ended = float(c["end_s"][before].max()) if len(before) else -np.inf
            # Rows may stream from an upstream call that has not ended yet.
            feeding = self._feeding(own, row, at)
            if feeding is not None:
                row, end = feeding, at
            elif ended > begin:
                row = int(before[np.lexsort((-c["start_s"][before], c["end_s"][before]))[-1]])
                end = ended
            else:
                break
            start = max(begin, float(c["start_s"][row]))
            if at - end > 1e-4:
                path.append(self._unexplained(end, at))
            names = {"lane": self._name("group", row), "node": self._name("node", row)}
            path.append({**names, "start_s": round(start, 6), "end_s": round(end, 6)})
            own = own[(c["start_s"][own] < start) | (c["end_s"][own] <= start + 1e-9)]
            own = own[own != row]  # a call may take no time
            at = start
        if at - begin > 1e-4:
            path.append(self._unexplained(begin, at))
        return path[::-1]

    def _feeding(self, own: np.ndarray, row: int | None, at: float) -> int | None:
        """Return the upstream call that was still streaming rows at this time, the latest one.

        Return None if there is none, or if another upstream call had just ended.
        """
        if row is None:
            return None
        c, upstream = self._columns, self._upstream.get(self._name("node", row), frozenset())
        near = own[(c["start_s"][own] < at) & (c["end_s"][own] > at - TOUCHING_S)]
        near = [other for other in near.tolist() if self._name("node", other) in upstream]
        if any(c["end_s"][other] <= at + 1e-9 for other in near):
            return None
        return max(near, key=lambda other: c["start_s"][other], default=None)

    @property
    def _recorder(self) -> int:
        """Number of the recorder group, which no call waits for."""
        return self._groups.index(RECORDER) if RECORDER in self._groups else -1

    def _unexplained(self, start: float, end: float) -> dict[str, Any]:
        """Return a stretch of the critical path without any call that the step waited for."""
        on_disk = sum(max(0.0, min(end, span[1]) - max(start, span[0])) for span in self._checkpoints)
        text = "a checkpoint on its way to the disk" if on_disk > 0.5 * (end - start) else "the driver"
        return {
            "lane": None,
            "node": None,
            "start_s": round(start, 6),
            "end_s": round(end, 6),
            "text": text,
        }


_Gap: TypeAlias = tuple[float, float, int, int]
"""(start, end, index of the call before, index of the call after) in a lane; -1 for no call."""


@dataclass(frozen=True)
class _Drawn:
    """The bars of a lane, sorted by start."""

    calls: np.ndarray
    """[bars] indexes of their calls."""
    start_s: np.ndarray
    """[bars] float64, as is the end."""
    end_s: np.ndarray
    worker_s: np.ndarray
    """[bars] seconds in the worker."""


def _upstream(graphs: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Return node -> the nodes that it waits for."""
    found: dict[str, set[str]] = {}
    for graph in graphs:
        for node in nested(graphs, graph).get("nodes", ()):
            found.setdefault(node["name"], set()).update(node.get("after", ()))
    return {name: frozenset(names) for name, names in found.items()}
