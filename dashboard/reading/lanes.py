"""The timeline page: lanes of groups, ranks, weights, checkpoints and evaluations, the reasons for
idle gaps, and the critical path of a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ...controllers.own_groups import RECORDER
from ...dataflow.graph import TRAIN
from ..critical_path import CHECKPOINTS, TOUCHING_S, WEIGHTS, CriticalPaths
from ..timeline import CallLog, Gap, Lane, Timeline
from .run_reader import RunReader, nested, read_graphs

MOST_CALLS = 1500
"""Maximum number of calls of a lane to send. With more calls, the page gets the busy shares of
`width / 3` bins."""
MOST_GAPS = 60
"""Maximum number of gaps of a lane to explain, longest first."""
SHORTEST_GAP = 0.002
"""Shortest gap to explain, as a share of the window."""
LATE = 0.1
"""Name a rank as the slowest if it finished later than the others by this share of its time."""


def timeline_page(
    run: RunReader,
    start: float | None,
    end: float | None,
    width: int,
    unfolded: Collection[str],
    steps: tuple[float, float] | None,
) -> dict[str, Any]:
    graphs, config = read_graphs(run.path), run.facts.config
    with run.parts() as (_, calls):
        return _Lanes(calls, graphs, config).page(start, end, width, unfolded, steps)


class _Lanes:
    """Lanes of a run's timeline. `graphs` is the content of `graph.json`; `config` has the ranks
    and pools of groups."""

    def __init__(self, log: CallLog, graphs: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self.log = log
        self._columns, self._nodes, self._groups = log.columns, log.words("node"), log.words("group")
        places = {name: nested(config, "placement", name) for name in self._groups}
        self._pools = {name: place.get("pool") for name, place in places.items()}
        known = {name: place.get("ranks") for name, place in places.items()}
        self._num_ranks = {name: n if isinstance(n, int) else 1 for name, n in known.items()}
        self._paths = CriticalPaths(log, graphs)

    @property
    def total_s(self) -> float:
        """[s] End of the last call."""
        return float(self._columns["end_s"].max(initial=0.0))

    def page(
        self,
        start: float | None = None,
        end: float | None = None,
        width: int = 1200,
        unfolded: Collection[str] = (),
        steps: tuple[float, float] | None = None,
    ) -> dict[str, Any]:
        """Return lanes, ends of steps, and the critical path of the last step in a window.

        Args:
            start: start of the window, in seconds since the start of the run.
            end: end of the window in these seconds; None for the end of the run.
            width: width of the screen in pixels.
            unfolded: groups that get a lane for each rank.
            steps: first and last step, which replace `start` and `end`.
        """
        total = self.total_s
        if steps is not None:
            chosen = self.log.of_steps(*steps)
            start, end = (chosen.start_s, chosen.end_s) if chosen else (0.0, total)
        last = total if end is None else min(end, total)
        first = min(last, 0.0 if start is None else max(0.0, start))
        timeline = Timeline(self.log, first, max(last, first + 1e-9))
        # Pages send the rounded end of a step.
        ends = ((step, round(end, 6)) for step, end in self.log.steps)
        shown = [(step, end) for step, end in ends if first <= end <= round(last, 6)]
        return {
            "start_s": first,
            "end_s": last,
            "total_s": total,
            "nodes": [*self._nodes],
            "lanes": self._lanes(timeline, width, unfolded),
            "ranks": {name: number for name, number in self._num_ranks.items() if number > 1},
            "steps": [
                {"step": step, "end_s": end} for step, end in shown[:: max(1, -(-len(shown) // 200))]
            ],
            "critical": self.critical(shown[-1][0]) if shown and len(shown) <= 50 else [],
        }

    def _lanes(self, timeline: Timeline, width: int, unfolded: Collection[str]) -> list[dict[str, Any]]:
        c, rows = self._columns, timeline.rows
        lanes: list[dict[str, Any]] = []
        for name in self._groups:
            lane = timeline.group_lane(name)
            gaps = [self._gap(name, gap, lane) for gap in self._told(lane)]
            lanes.append({**self._drawn(lane, width, "group"), "group": name, "gaps": gaps})
            ranks = range(self._num_ranks[name])
            folded = name not in unfolded
            for own in () if folded else timeline.rank_lanes(name, ranks):
                gaps = [self._rank_gap(name, gap, own) for gap in self._told(own)]
                lanes.append({**self._drawn(own, width, "rank"), "group": name, "gaps": gaps})
        for number, name in enumerate(self.log.words("graph")):
            own = timeline.lane(name, rows[c["graph"][rows] == number])
            if name not in ("", TRAIN) and len(own.calls):
                lanes.append(self._drawn(own, width, "evaluation"))
        sent = timeline.lane("weights", rows[np.isin(c["node"][rows], self._paths.numbers_of(*WEIGHTS))])
        if len(sent.calls):
            lanes.append(self._drawn(sent, width, "weights"))
        calls, starts, ends = self._paths.checkpoints
        inside = (ends >= timeline.start_s) & (starts <= timeline.end_s)
        if inside.any():
            saved = calls[inside], starts[inside], ends[inside], c["worker_s"][calls[inside]]
            lanes.append(self._drawn(Lane("checkpoints", timeline, *saved), width, "checkpoint"))
        return lanes

    def _drawn(self, lane: Lane, width: int, kind: str) -> dict[str, Any]:
        few = len(lane.calls) <= MOST_CALLS
        return {
            "lane": lane.name,
            "kind": kind,
            "group": None,
            "busy_share": round(1 - lane.idle_share, 4),
            "calls": self._bars(lane) if few else [],
            "bins": None if few else _bins(lane, max(50, width // 3)),
            "gaps": [],
        }

    def _bars(self, lane: Lane) -> list[list[Any]]:
        """Return each call as [start, end, node, rows, step, seconds in the worker]."""
        c = self._columns
        times = (np.round(lane.start_s, 6), np.round(lane.end_s, 6))
        counts = (c[name][lane.calls].astype(np.int64) for name in ("node", "rows", "step"))
        columns = (*times, *counts, np.round(lane.worker_s.astype(np.float64), 6))
        return [list(bar) for bar in zip(*(column.tolist() for column in columns), strict=True)]

    # Reasons for idle gaps

    def _told(self, lane: Lane) -> list[Gap]:
        return lane.gaps(MOST_GAPS, SHORTEST_GAP * lane.timeline.seconds)

    def _gap(self, group: str, gap: Gap, lane: Lane) -> dict[str, Any]:
        reason, text = self._reason(group, gap, lane.node_at(gap.after) if gap.after >= 0 else None)
        return _part(gap.start_s, gap.end_s, reason=reason, text=text)

    def _rank_gap(self, group: str, gap: Gap, lane: Lane) -> dict[str, Any]:
        """Explain a rank's gap: it waited for other ranks of its call, or had nothing to do."""
        if gap.before >= 0:
            call = int(lane.calls[gap.before])
            waited = float(self._columns["end_s"][call]) - gap.start_s
            # The rank waited for other ranks for most of the gap.
            if waited > 0.5 * gap.seconds:
                last = self._last_rank(call)
                others = "the other ranks" if last is None else f"{group}[{last}]"
                text = f"finished its part of {self._node(call)}; {others} finished {waited:.3g} s later"
                return _part(gap.start_s, gap.end_s, reason="rank", text=text)
        return self._gap(group, gap, lane)

    def _reason(self, group: str, gap: Gap, next_node: str | None) -> tuple[str, str]:
        c, end = self._columns, gap.end_s
        near = np.flatnonzero((c["end_s"] > gap.start_s) & (c["start_s"] < end))
        others = [row for row in near.tolist() if self._group(row) not in (group, RECORDER)]
        if not others:
            over = ": the driver, or the end of the run" if next_node is None else ""
            return "unknown", f"nothing was under way{over}"
        if next_node is None:
            overlap = (min(c["end_s"][row], end) - max(c["start_s"][row], gap.start_s) for row in others)
            most = max(zip(others, overlap, strict=True), key=lambda one: one[1])[0]
            return "rows", f"no more work in this window; {self._what(most)} was running"
        if _method(next_node) in WEIGHTS:
            giving = [row for row in others if _method(self._node(row)) not in CHECKPOINTS] or others
            return (
                "weights",
                f"waits for weights of {self._what(max(giving, key=c['end_s'].__getitem__))}",
            )
        upstream = self._paths.upstream.get(next_node, ())
        fed = [
            row for row in others if self._node(row) in upstream and c["end_s"][row] <= end + TOUCHING_S
        ]
        last = max(fed or others, key=lambda row: min(c["end_s"][row], end))
        if fed:
            return "rows", f"{next_node} waits for rows of {self._what(last)}"
        method = _method(self._node(last))
        if method in CHECKPOINTS:
            return "disk", f"{self._what(last)} is written"
        if method in WEIGHTS:
            return "weights", f"{next_node} waits until {self._what(last)} is over"
        pool = self._pools.get(group)
        same = [row for row in others if pool is not None and self._pools.get(self._group(row)) == pool]
        if same:
            holder = max(same, key=lambda row: c["end_s"][row])
            return "device", f"{self._what(holder)} has the devices of the pool"
        return "rows", f"{next_node} waits for {self._what(last)}"

    def _node(self, row: int) -> str:
        return self._nodes[int(self._columns["node"][row])]

    def _group(self, row: int) -> str:
        return self._groups[int(self._columns["group"][row])]

    def _last_rank(self, call: int) -> int | None:
        """Return the rank that finished much later than the others of a call, if any."""
        of = self.log.ranks
        first, beyond = np.searchsorted(of["call"], [call, call + 1]).tolist()
        if beyond - first < 2:  # ranks of a call are in the order of their replies
            return None
        late_s = of["end_s"][beyond - 1] - of["end_s"][beyond - 2]
        return int(of["rank"][beyond - 1]) if late_s > LATE * of["worker_s"][beyond - 1] else None

    def _what(self, row: int) -> str:
        node, group, rows = self._node(row), self._group(row), int(self._columns["rows"][row])
        of = node if node.startswith(f"{group}.") else f"{node} on {group}"
        notes = [f"{rows} rows"] if rows else []
        last = self._last_rank(row)
        notes += [] if last is None else [f"{group}[{last}] was the last"]
        return f"{of} ({', '.join(notes)})" if notes else of

    def critical(self, step: int) -> list[dict[str, Any]]:
        """Return the critical path of a step."""
        return [
            _part(
                part.start_s,
                part.end_s,
                lane=part.group,
                node=part.node,
                **({} if part.node else {"text": part.text}),
            )
            for part in self._paths.of_step(step)
        ]


def _bins(lane: Lane, number: int) -> dict[str, Any]:
    nodes = np.unique(lane.nodes).tolist()
    shares = np.round(lane.shares(nodes, number).T, 3).tolist()
    timeline = lane.timeline
    return {"t0": timeline.start_s, "dt": timeline.seconds / number, "nodes": nodes, "shares": shares}


def _part(start: float, end: float, **rest: Any) -> dict[str, Any]:
    return {"start_s": round(start, 6), "end_s": round(end, 6), **rest}


def _method(node: str) -> str:
    return node.rpartition(".")[2]
