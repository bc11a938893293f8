"""LiveState: writes a run's current state to `live.json` in its directory, for the dashboard.

    {"at": 1763851200.2, "time_s": 812.4, "step": 12,
     "graphs": {"train": {"nodes": {"rollout.generate": {"todo": 96, ...}}}}, ...}

The loop copies counters at most once a second, in tens of microseconds. A thread serializes them,
reads the memory use of processes, and replaces the file. A full disk only stops these updates.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...dataflow.buffer.ledger import Ledger
from ...dataflow.runs.files import LIVE, PARTIAL, PROCESSES, STACKS, STREAM, make_file
from ...dataflow.runs.requests import RunRequests
from ...dataflow.runs.tables import READINGS, TableStream, batches, begin_again
from ..backends.backend import Backend
from ..backends.process_diagnostics import Memory
from ..graph_run import GraphRun, GraphRuns
from ..group import WorkerGroup

EVERY_S = 1.0
"""[s] Time between two updates."""
READ_EVERY_S = 10.0
"""[s] Time between two stored readings of memory use."""
RATE_S = 10.0
"""[s] Averaging period of rates."""
MOST_LEASES, MOST_GROUPS = 100, 12
"""Maximum number of listed leases and groups in flight, oldest first."""
LEAVE_S = 2.0
"""[s] Longest wait for the thread's last write."""


class LiveState:
    def __init__(
        self,
        run: Path,
        backend: Backend,
        graph_runs: GraphRuns,
        groups: Mapping[str, WorkerGroup],
        started: float,
        epoch: int,
    ) -> None:
        self._path, self._backend, self._started = run / LIVE, backend, started
        self._graph_runs = graph_runs
        self._groups = groups
        self._requests = RunRequests(run, epoch)
        self._looked = -EVERY_S
        self._seen: dict[str, dict[int, float]] = {}
        """Kind of object, such as a graph's leases -> number -> time when first seen."""
        self._past: defaultdict[str, deque[tuple[float, dict[str, tuple[float, float]]]]]
        self._past = defaultdict(deque)
        """Graph -> list of (past time, node -> (rows that had arrived, rows that had left))."""
        self._stacks: dict[str, dict[str, Any]] = {}
        """Worker -> its last requested stack trace. Only the thread uses it."""
        self._given: dict[str, Any] | None = None
        self._wanted, self._over = threading.Event(), False
        self._readings = TableStream(run / f"{PROCESSES}{STREAM}", READINGS)
        self._read_at = -READ_EVERY_S
        self._thread = threading.Thread(target=self._write_all, name="live state", daemon=True)

    def note(self) -> None:
        """Copy the run's state if the last copy is old enough."""
        now = time.monotonic()
        if now - self._looked < EVERY_S:
            return
        self._looked = now
        # A new dict, because the thread may be reading the old one.
        self._given = self._state()
        if self._thread.ident is None:
            with suppress(OSError):  # continue the readings of an earlier start, without a cut end
                path = self._readings.path
                if path.is_file():
                    begin_again(path.parent, PROCESSES, pa.Table.from_batches(batches(path), READINGS))
            self._thread.start()
        self._wanted.set()

    def close(self) -> None:
        if self._thread.is_alive():
            self._given, self._over = {**self._state(), "over": True}, True
            self._wanted.set()
            self._thread.join(LEAVE_S)
        # A hanging thread may still use the file.
        if not self._thread.is_alive():
            self._readings.close()

    # On the loop

    def _state(self) -> dict[str, Any]:
        now = self._backend.clock()
        return {
            "at": time.time(),
            "time_s": now - self._started,
            "step": self._graph_runs.train.step_under_way,
            "over": False,
            "graphs": {run.name: self._graph(run) for run in self._graph_runs},
            "groups": {name: _group(group, now) for name, group in self._groups.items()},
            "segment_bytes": sum(run.ledger.parts.num_bytes for run in self._graph_runs),
        }

    def _graph(self, run: GraphRun) -> dict[str, Any]:
        ledger = run.ledger
        live, readiness = ledger.live, ledger.readiness
        held: dict[str, int] = {}
        for lease in ledger.leases:
            held[lease.node.name] = held.get(lease.node.name, 0) + (len(lease.open) or lease.num_rows)
        nodes: dict[str, dict[str, float]] = {
            node.name: {
                "todo": readiness.todo[i],
                "ready": readiness.num_rows[i],
                "leased": held.get(node.name, 0),
                "done": live.finished[i],
                "held": len(readiness.too_old_groups[i]),
            }
            for i, node in enumerate(ledger.graph.nodes)
        }
        for name, rates in self._rates(run.name, nodes).items():
            nodes[name] |= rates
        update = next(iter(live.wiring.updates), None)
        versions = {} if update is None else readiness.unclaimed_of[update]
        at_work = islice((id for id, group in live.groups.items() if not group.rested), MOST_GROUPS)
        ages = self._ages(f"steps of {run.name}", live.groups_of_step)
        return {
            "nodes": nodes,
            "issued": live.issued,
            "in_flight": len(live.rows),
            "done": live.done,
            "dropped": dict(live.dropped),
            "stale": dict(ledger.stale),
            "groups": len(live.groups),
            "groups_behind": live.groups_behind,
            "steps": {str(step): [groups, ages[step]] for step, groups in live.groups_of_step.items()},
            "versions": {str(version): groups for version, groups in versions.items()},
            "leases": self._leases(ledger),
            "oldest": [
                {
                    "group": id,
                    "step": live.groups[id].issued_in,
                    "waits": live.waits_for(id).splitlines(),
                }
                for id in at_work
            ],
        }

    def _ages(self, what: str, numbers: Iterable[int]) -> dict[int, float]:
        """Return number -> seconds since the object was first seen."""
        now, before = time.time(), self._seen.get(what, {})
        self._seen[what] = {number: before.get(number, now) for number in numbers}
        return {number: now - at for number, at in self._seen[what].items()}

    def _rates(
        self, graph: str, nodes: Mapping[str, Mapping[str, float]]
    ) -> dict[str, dict[str, float]]:
        now, past = time.monotonic(), self._past[graph]
        counts = {name: (node["todo"] + node["done"], node["done"]) for name, node in nodes.items()}
        past.append((now, counts))
        while now - past[0][0] > RATE_S:
            past.popleft()
        seconds, before = now - past[0][0], past[0][1]
        rates: dict[str, dict[str, float]] = {}
        for name, (came, left) in counts.items() if seconds else ():
            came_before, left_before = before[name]
            rate_in, rate_out = (
                max(0, came - came_before) / seconds,
                max(0, left - left_before) / seconds,
            )
            rates[name] = {"rate_in": rate_in, "rate_out": rate_out}
        return rates

    def _leases(self, ledger: Ledger) -> list[dict[str, Any]]:
        ages = self._ages(f"leases of {ledger.name}", [lease.token for lease in ledger.leases])
        return [
            {
                "lease": lease.token,
                "node": lease.node.name,
                "holder": lease.holder,
                "rows": lease.num_rows,
                "left": len(lease.open),
                "age_s": ages[lease.token],
            }
            for lease in islice(ledger.leases, MOST_LEASES)
        ]

    # In the thread

    def _write_all(self) -> None:
        while not self._over:
            self._wanted.wait()
            self._wanted.clear()
            # OSError: the disk is full. RuntimeError: the loop changed a dict during the read.
            with suppress(OSError, RuntimeError):
                self._write()

    def _write(self) -> None:
        given = dict(self._given or {})
        memory = self._backend.memory()
        given["hosts"] = {name: _host(one) for name, one in memory.items()}
        if "worker" in (asked := self._requests.new(STACKS)):
            worker = str(asked["worker"])
            self._stacks[worker] = {"at": time.time(), "text": self._stack(worker)}
        given["stacks"] = self._stacks
        # Readers must never see half a file.
        partial = self._path.with_name(f"{LIVE}{PARTIAL}")
        make_file(partial)
        partial.write_text(json.dumps(given, default=str))
        partial.replace(self._path)
        self._read_memory(given["time_s"], memory)

    def _stack(self, worker: str) -> str:
        """Return the stack trace of a worker. Only this thread waits for it."""
        if self._backend.in_process:
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            return "".join(traceback.format_stack(frame)) if frame else ""
        name, _, rank = worker.removesuffix("]").rpartition("[")
        group = self._groups.get(name)
        if group is None or not rank.isdecimal() or int(rank) >= len(group.mesh):
            return "there is no such rank"
        return self._backend.stacks(group, [int(rank)]).get(int(rank)) or "the worker did not answer"

    def _read_memory(self, time_s: float, memory: Mapping[str, Memory]) -> None:
        now = time.monotonic()
        if now - self._read_at < READ_EVERY_S:
            return
        self._read_at = now
        for name, one in memory.items():
            for who, own in one.processes.items():
                sizes = {"resident_bytes": own.resident_bytes, "shared_bytes": own.shared_bytes}
                self._readings.add(time_s=time_s, host=name, worker=who, **sizes)
        self._readings.flush()


def _group(group: WorkerGroup, now: float) -> dict[str, Any]:
    return {
        "version": group.version,
        "versions": dict(group.versions),
        "ranks": len(group.mesh),
        "absent": sorted(group.absent),
        "starting": sorted(group.starting),
        "lacking": sorted(group.lacking),
        "calls": [
            {
                "what": call.node.name if call.node else call.method,
                "rows": call.lease.num_rows if call.lease else 0,
                "waits_for": sorted(call.waiting),
                "since_s": now - call.started,
            }
            for call in group.calls
        ],
    }


def _host(memory: Memory) -> dict[str, Any]:
    node, processes = memory.node, memory.processes.items()
    return {
        "used_bytes": node.used_bytes if node else None,
        "limit_bytes": node.limit_bytes if node else None,
        "object_store_bytes": memory.object_store_bytes,
        "processes": {who: [one.resident_bytes, one.shared_bytes] for who, one in processes},
    }
