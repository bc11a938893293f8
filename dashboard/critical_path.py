"""The critical path of a step: the chain of calls that it waited for.

paths = CriticalPaths(log, read_graphs(run))
paths.of_step(3)            # [Part(start_s, end_s, group, node, ...), ...]: back to back
paths.limits([3, 4, 5])     # [Limit(group, node, cause, seconds), ...]: most seconds first
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from ..controllers.own_groups import RECORDER
from .timeline import CallLog

TOUCHING_S = 0.05
"""[s] A call may have waited for another that ended at most this long before it began."""
WEIGHTS = (
    "publish_weights", "send_weights", "receive_weights", "finish_publishing", "canary", "compare_canaries", "register",
)  # fmt: skip
SAVE, WRITTEN = "save_checkpoint", "checkpoint_written"
CHECKPOINTS = (SAVE, "load_checkpoint", WRITTEN, "save")

Cause = Literal["compute", "tail", "host", "weights", "checkpoint", "devices", "driver"]
CAUSE_OF: Mapping[str, Cause] = {
    **dict.fromkeys(WEIGHTS, "weights"),
    **dict.fromkeys(CHECKPOINTS, "checkpoint"),
    **dict.fromkeys(("onload", "offload"), "devices"),
}
"""Maps methods that compute nothing to their cause."""
CAUSES: Mapping[Cause, str] = {
    "compute": "the ranks compute",
    "tail": "ranks that have finished wait for the slowest one",
    "host": "the driver and the transport, before and after the ranks compute",
    "weights": "weights move to followers",
    "checkpoint": "a checkpoint is saved",
    "devices": "groups take turns on their devices",
    "driver": "no call is under way",
}


class Part(NamedTuple):
    """A part of a critical path."""

    start_s: float
    end_s: float
    call: int
    """Index of the call in the log; -1 for a time between calls."""
    group: str | None
    node: str | None
    text: str
    """Reason for a time between calls."""


@dataclass(frozen=True)
class Limit:
    """The time that steps waited for one thing."""

    graph: str
    group: str
    node: str
    """Empty for a time between calls, as `graph` and `group`."""
    cause: Cause
    seconds: float


class CriticalPaths:
    """Critical paths of the steps of a run.

    Args:
        graphs: the content of the run's `graph.json`.
    """

    def __init__(self, log: CallLog, graphs: Mapping[str, Any]) -> None:
        self.log = log
        self._columns, self._nodes, self._groups = log.columns, log.words("node"), log.words("group")
        self.upstream: dict[str, set[str]] = {}
        """Maps each node to the nodes that it waits for."""
        for graph in graphs.values():
            for node in graph.get("nodes", ()) if isinstance(graph, dict) else ():
                self.upstream.setdefault(node["name"], set()).update(node.get("after", ()))

    def of_step(self, step: int) -> list[Part]:
        """Return the calls that a step waited for and the times between them, in order.

        Follows the chain back from the end of the step. The predecessor of a call is the upstream
        call that still streams rows to it, or else the call that ended last before it began.
        """
        c, timeline = self._columns, self.log.of_steps(step, step)
        if timeline is None:
            return []
        begin, at, row = timeline.start_s, timeline.end_s, None
        own = np.flatnonzero((c["end_s"] > begin) & (c["start_s"] < at))
        if RECORDER in self._groups:  # no call waits for it
            own = own[c["group"][own] != self._groups.index(RECORDER)]
        path: list[Part] = []
        while at > begin and len(own):
            before = own[(c["end_s"][own] <= at + 1e-9) & (own != row)]
            ended = float(c["end_s"][before].max(initial=-np.inf))
            # Rows may stream from an upstream call that has not ended yet.
            feeding = None if row is None else self._feeding(own, row, at)
            if feeding is not None:
                row, end = feeding, at
            elif ended > begin:
                row, end = (
                    int(before[np.lexsort((-c["start_s"][before], c["end_s"][before]))[-1]]),
                    ended,
                )
            else:
                break
            start = max(begin, float(c["start_s"][row]))
            path += self._unexplained(end, at)
            path.append(Part(start, end, row, self._group(row), self._node(row), ""))
            own = own[(c["start_s"][own] < start) | (c["end_s"][own] <= start + 1e-9)]
            own = own[own != row]  # a call may take no time
            at = start
        return [*path, *self._unexplained(begin, at)][::-1]

    def _feeding(self, own: np.ndarray, row: int, at: float) -> int | None:
        """Return the latest upstream call that was streaming rows at time `at`; None without one,
        or if another upstream call had just ended."""
        c, upstream = self._columns, self.upstream.get(self._node(row), ())
        near = own[(c["start_s"][own] < at) & (c["end_s"][own] > at - TOUCHING_S)]
        near = [other for other in near.tolist() if self._node(other) in upstream]
        if any(c["end_s"][other] <= at + 1e-9 for other in near):
            return None
        return max(near, key=lambda other: c["start_s"][other], default=None)

    def _unexplained(self, start: float, end: float) -> list[Part]:
        """Return the time between calls, unless it is negligible."""
        if end - start <= 1e-4:
            return []
        _, begun, written = self.checkpoints
        on_disk = (np.minimum(end, written) - np.maximum(start, begun)).clip(min=0).sum()
        text = "a checkpoint on its way to the disk" if on_disk > 0.5 * (end - start) else "the driver"
        return [Part(start, end, -1, None, None, text)]

    @cached_property
    def checkpoints(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[checkpoints] first call, start and end of each checkpoint, from copying the state to its
        last write to disk."""
        c = self._columns
        begun = np.flatnonzero(np.isin(c["node"], self.numbers_of(SAVE)))
        begun = begun[np.argsort(c["start_s"][begun], kind="stable")]
        first = begun[np.diff(c["step"][begun], prepend=-1) != 0]
        starts = c["start_s"][first]
        rows = np.flatnonzero(np.isin(c["node"], self.numbers_of(SAVE, WRITTEN)))
        of = np.searchsorted(starts, c["start_s"][rows], side="right") - 1
        ends = starts.copy()
        np.maximum.at(ends, of[of >= 0], c["end_s"][rows[of >= 0]])
        return first, starts, ends

    def numbers_of(self, *methods: str) -> list[int]:
        return [number for number, name in enumerate(self._nodes) if name in methods]

    def _node(self, row: int) -> str:
        return self._nodes[int(self._columns["node"][row])]

    def _group(self, row: int) -> str:
        return self._groups[int(self._columns["group"][row])]

    # Causes

    def limits(self, steps: Iterable[int]) -> list[Limit]:
        """Return the seconds that these steps waited, by call and cause, most first. Their sum is
        the time of the steps."""
        graphs = self.log.words("graph")
        found: Counter[tuple[str, str, str, Cause]] = Counter()
        for part in (part for step in steps for part in self.of_step(step)):
            if part.call < 0:
                cause: Cause = "driver" if part.text == "the driver" else "checkpoint"
                found["", "", "", cause] += part.end_s - part.start_s  # pyright: ignore[reportArgumentType]
                continue
            graph = graphs[int(self._columns["graph"][part.call])]
            for cause, seconds in self._causes(part).items():
                found[graph, part.group or "", part.node or "", cause] += seconds  # pyright: ignore[reportArgumentType]
        return [Limit(*key, seconds) for key, seconds in found.most_common() if seconds > 0]

    def _causes(self, part: Part) -> dict[Cause, float]:
        """Divide the time of a call among its causes."""
        c, seconds, method = (
            self._columns,
            part.end_s - part.start_s,
            (part.node or "").rpartition(".")[2],
        )
        if method in CAUSE_OF:
            return {CAUSE_OF[method]: seconds}
        whole = float(c["end_s"][part.call] - c["start_s"][part.call])
        worker = min(whole, float(c["worker_s"][part.call]))
        tail = min(worker, self._tail_s(part.call))
        # If rows streamed from the call, the path has only its beginning, which has no tail.
        if part.end_s < c["end_s"][part.call] - 1e-9:
            tail = 0.0
        shares: dict[Cause, float] = {"host": whole - worker, "tail": tail, "compute": worker - tail}
        total = sum(shares.values()) or 1.0
        return {cause: seconds * share / total for cause, share in shares.items()}

    def _tail_s(self, call: int) -> float:
        """[s] Return how long the ranks of a call waited for the slowest one, on average."""
        of = self.log.ranks
        first, beyond = np.searchsorted(of["call"], [call, call + 1]).tolist()
        ends = of["end_s"][first:beyond]
        return float((ends.max() - ends).mean()) if len(ends) > 1 else 0.0
