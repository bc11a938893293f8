"""LiveState: write the current state of a run to `live.json` in its directory, for the dashboard
and other viewers.

    {"at": 1763851200.2, "time_s": 812.4, "step": 12,
     "graphs": {"train": {"nodes": {"rollout.generate": {"todo": 96, ...}}}}, ...}

The file is replaced at most once a second. The loop only copies existing counters, which takes tens
of microseconds. A thread serializes them, reads the memory of processes, and writes the file. The
run does not need the file, so a full disk only stops the updates.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...dataflow.buffer.ledger import Ledger
from ...dataflow.runs.files import LIVE, PARTIAL, PROCESSES, STREAM, make_file
from ...dataflow.runs.requests import StacksRequests
from ...dataflow.runs.tables import READINGS, TableStream, batches, begin_again
from ..backends.backend import Backend
from ..backends.witness import Memory
from ..graph_run import GraphRun
from ..group import WorkerGroup
from .calls import RunParts

EVERY_S = 1.0
"""[s] Time between two updates."""
READ_EVERY_S = 10.0
"""[s] Time between two stored readings of memory."""
RATE_S = 10.0
"""[s] Averaging period of rates."""
MOST_LEASES, MOST_GROUPS = 100, 12
"""Maximum number of listed leases, and of listed groups in flight, oldest first."""
LEAVE_S = 2.0
"""[s] Time for the thread to write the last state."""


class LiveState:
    """Writes the state of the run.

    Args:
        run: Directory of the run.
        parts: Parts of the run.
        backend: Provides processes and their memory.
        started: Start of the run on the backend's clock.
        epoch: Number of the driver's start.
    """

    def __init__(self, run: Path, parts: RunParts, backend: Backend, started: float, epoch: int) -> None:
        self._path, self._parts, self._backend, self._started = run / LIVE, parts, backend, started
        self._requests = StacksRequests(run, epoch)
        self._looked = -EVERY_S
        self._begun: dict[tuple[str, int], float] = {}
        """Graph and number of a lease -> wall-clock time when it was first seen."""
        self._issued: dict[tuple[str, int], float] = {}
        """Graph and step -> time when its groups were first seen."""
        self._past: deque[tuple[float, dict[str, tuple[float, float]]]] = deque()
        """Past times, each with the number of rows that had arrived at and left each node."""
        self._stacks: dict[str, dict[str, Any]] = {}
        """Worker -> its last requested stack trace. Only the thread uses it."""
        self._given: dict[str, Any] | None = None
        self._wanted, self._over = threading.Event(), False
        self._readings = TableStream(run / f"{PROCESSES}{STREAM}", READINGS)
        self._read_at = -READ_EVERY_S
        self._thread = threading.Thread(target=self._write_all, name="live state", daemon=True)

    def note(self) -> None:
        """Copy the state of the run if the last copy is old enough. Called at each turn of the
        loop."""
        now = time.monotonic()
        if now - self._looked < EVERY_S:
            return
        self._looked = now
        # Replace the whole dict: the thread may be reading the old one.
        self._given = self._state()
        if self._thread.ident is None:
            self._keep_readings()
            self._thread.start()
        self._wanted.set()

    def close(self) -> None:
        if self._thread.is_alive():
            self._given, self._over = {**self._state(), "over": True}, True
            self._wanted.set()
            self._thread.join(LEAVE_S)
        if not self._thread.is_alive():
            self._readings.close()

    # On the loop

    def _state(self) -> dict[str, Any]:
        parts = self._parts
        now = self._backend.clock()
        graphs = {run.name: self._graph(run) for run in parts.graph_runs}
        return {
            "at": time.time(),
            "time_s": now - self._started,
            "step": parts.train.step_under_way,
            "over": False,
            "graphs": graphs,
            "groups": {name: self._group(group, now) for name, group in parts.groups.items()},
            "segment_bytes": sum(ledger.parts.num_bytes for ledger in parts.buffer.ledgers.values()),
        }

    def _graph(self, run: GraphRun) -> dict[str, Any]:
        ledger = run.ledger
        live, readiness, wiring = ledger.live, ledger.readiness, ledger.live.wiring
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
        update = next(iter(wiring.updates), None)
        return {
            "nodes": nodes,
            "issued": live.issued,
            "in_flight": len(live.rows),
            "done": live.done,
            "dropped": dict(live.dropped),
            "stale": dict(ledger.stale),
            "groups": len(live.groups),
            "groups_behind": live.groups_behind,
            "steps": self._ages(run.name, live.groups_of_step),
            "versions": {}
            if update is None
            else {str(v): n for v, n in readiness.unclaimed_of[update].items()},
            "leases": self._leases(ledger),
            "oldest": [
                {
                    "group": id,
                    "step": live.groups[id].issued_in,
                    "waits": live.waits_for(id).splitlines(),
                }
                for id in islice(
                    (id for id, group in live.groups.items() if not group.rested), MOST_GROUPS
                )
            ],
        }

    def _ages(self, graph: str, groups_of_step: Mapping[int, int]) -> dict[str, list[float]]:
        """Step -> its groups in flight, and seconds since the first was issued."""
        now = time.time()
        for key in [key for key in self._issued if key[0] == graph and key[1] not in groups_of_step]:
            del self._issued[key]
        return {
            str(step): [number, now - self._issued.setdefault((graph, step), now)]
            for step, number in groups_of_step.items()
        }

    def _rates(self, graph: str, nodes: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
        """Rows per second that arrive at each node and leave it."""
        now = time.monotonic()
        counts = {
            f"{graph} {name}": (node["todo"] + node["done"], node["done"]) for name, node in nodes.items()
        }
        self._past.append((now, counts))
        while now - self._past[0][0] > RATE_S:
            self._past.popleft()
        for then, before in self._past:
            if now > then and before.keys() >= counts.keys():
                break
        else:
            return {}
        seconds = now - then
        return {
            name: {
                "rate_in": max(0, counts[f"{graph} {name}"][0] - before[f"{graph} {name}"][0]) / seconds,
                "rate_out": max(0, counts[f"{graph} {name}"][1] - before[f"{graph} {name}"][1]) / seconds,
            }
            for name in nodes
        }

    def _leases(self, ledger: Ledger) -> list[dict[str, Any]]:
        now, known = time.time(), set[tuple[str, int]]()
        found: list[dict[str, Any]] = []
        for lease in ledger.leases:
            key = ledger.name, lease.token
            known.add(key)
            begun = self._begun.setdefault(key, now)
            if len(found) < MOST_LEASES:
                left = len(lease.open)
                found.append(
                    {
                        "lease": lease.token,
                        "node": lease.node.name,
                        "holder": lease.holder,
                        "rows": lease.num_rows,
                        "left": left,
                        "age_s": now - begun,
                    }
                )
        for key in [key for key in self._begun if key[0] == ledger.name and key not in known]:
            del self._begun[key]
        return found

    def _group(self, group: WorkerGroup, now: float) -> dict[str, Any]:
        return {
            "version": group.version,
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

    # In the thread

    def _write_all(self) -> None:
        while not self._over:
            self._wanted.wait()
            self._wanted.clear()
            with suppress(
                OSError, RuntimeError
            ):  # a full disk; a dict that the loop changed while it was read
                self._write()

    def _write(self) -> None:
        given = dict(self._given or {})
        memory = self._backend.memory()
        given["hosts"] = {name: _host(one) for name, one in memory.items()}
        for worker in self._requests.new():
            self._stacks[worker] = {"at": time.time(), "text": self._stack(worker)}
        given["stacks"] = self._stacks
        # Write to another name first, so that readers never see half a file.
        partial = self._path.with_name(f"{LIVE}{PARTIAL}")
        make_file(partial)
        partial.write_text(json.dumps(given, default=str))
        partial.replace(self._path)
        self._read_memory(given["time_s"], memory)

    def _stack(self, worker: str) -> str:
        """Stack trace of a worker. Another process must answer, so this thread waits and not the
        loop."""
        if self._backend.in_process:
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            return "".join(traceback.format_stack(frame)) if frame else ""
        name, _, rank = worker.removesuffix("]").rpartition("[")
        group = self._parts.groups.get(name)
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
                self._readings.add(
                    time_s=time_s,
                    host=name,
                    worker=who,
                    resident_bytes=own.resident_bytes,
                    shared_bytes=own.shared_bytes,
                )
        self._readings.flush()

    def _keep_readings(self) -> None:
        """Continue the readings of an earlier start, without a torn end."""
        with suppress(OSError):
            path = self._readings.path
            if path.is_file():
                begin_again(path.parent, PROCESSES, pa.Table.from_batches(batches(path), READINGS))


def _host(memory: Memory) -> dict[str, Any]:
    node = memory.node
    return {
        "used_bytes": node.used_bytes if node else None,
        "limit_bytes": node.limit_bytes if node else None,
        "object_store_bytes": memory.object_store_bytes,
        "processes": {
            who: [one.resident_bytes, one.shared_bytes] for who, one in memory.processes.items()
        },
    }
