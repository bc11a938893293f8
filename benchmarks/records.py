"""Readers of a run's records: the calls of its timeline, and its log of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.dashboard.timeline import CallLog, Lane, Timeline
from weft.dataflow.runs.log import LogReader

Rows = Sequence[Mapping[str, Any]]
"""Calls of a run's timeline, or steps with their calls."""
Window = tuple[float, float]
"""[s] Start and end, in time of the run."""


def lane(calls: Rows, window: Window, *, group: str | None = None, node: str | None = None) -> Lane:
    """Return the calls of a group, of a node, or all calls, in a window.

    >>> calls = [{"group": "actor", "node": n, "start_s": a, "end_s": b} for n, a, b in (("u", 0, 2), ("p", 3, 4))]
    >>> idle(lane(calls, (0, 5), group="actor"))
    {'idle_s': 2.0, 'before': {'p': 1.0, 'end': 1.0}}
    """
    log = CallLog.of_rows(
        {"worker_s": 0.0, "group": "", **call}
        for call in calls
        if group in (None, call.get("group")) and node in (None, call["node"])
    )
    timeline = Timeline(log, *window)
    return timeline.lane(group or "", timeline.rows)


def busy_s(lane: Lane) -> float:
    """Return the seconds of the window with an open call."""
    return lane.timeline.seconds - lane.idle_s


def idle(lane: Lane) -> dict[str, Any]:
    """Return the seconds of the window without a call, and the node whose call ended each gap."""
    before: dict[str, float] = {}
    for gap in lane.gaps():
        after = lane.node_at(gap.after) if gap.after >= 0 else "end"
        before[after] = before.get(after, 0.0) + gap.seconds
    return {"idle_s": lane.idle_s, "before": before}


def shares(steps: Rows, parts: Mapping[str, str]) -> dict[str, float]:
    """Return a mapping from each part to its share of the time of all steps, with `driver` for time
    without a call. The shares add up to 1.

    Args:
        steps: steps with their `calls`.
        parts: maps nodes to parts. Overlapping time counts once, for the first node in this
            mapping.

    >>> generate = {"node": "rollout.generate", "start_s": 10.0, "end_s": 11.0}
    >>> update = {"node": "actor.update", "start_s": 11.5, "end_s": 12.0}
    >>> record = {"node": "recorder.record", "start_s": 11.25, "end_s": 11.75}
    >>> parts = {"actor.update": "update", "rollout.generate": "generate", "recorder.record": "record"}
    >>> shares([{"step_s": 2.0, "calls": [generate, update, record]}], parts)
    {'update': 0.25, 'generate': 0.5, 'record': 0.125, 'driver': 0.125}
    """
    total = sum(step["step_s"] for step in steps)
    seconds = dict.fromkeys(parts.values(), 0.0)
    order = list(parts)
    for step in steps:
        end = max(call["end_s"] for call in step["calls"])  # a step ends with its last call
        start = end - step["step_s"]
        calls = lane(step["calls"], (start, end))
        names = calls.timeline.log.words("node")
        for left, right, nodes in calls.stretches:
            first = min((names[node] for node in nodes), key=order.index)
            seconds[parts[first]] += max(0.0, right - max(left, start))
    seconds["driver"] = total - sum(seconds.values())
    return {part: round(value / total, 4) for part, value in seconds.items()}


def outside_workers(steps: Rows) -> float:
    """Return the share of the time that calls spent between driver and workers."""
    calls = [call for step in steps for call in step["calls"]]
    way = sum(max(0.0, c["end_s"] - c["start_s"] - c["worker_s"]) for c in calls)
    return round(way / sum(step["step_s"] for step in steps), 4)


def response_lengths(log: LogReader) -> list[int]:
    """Return the number of tokens of each response published since the last call."""
    published = (record for record in log if record["do"] == "publish" and "parents" in record)
    return [tokens for record in published for tokens in record["tokens"]]
