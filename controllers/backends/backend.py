"""Backends: what runs worker groups. `Local` keeps every group in this process, so that breakpoints work; `RayBackend`
(`ray_backend.py`) gives each rank a process of its own. The driver knows only this protocol."""

from __future__ import annotations

import contextlib
import platform
import re
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...dataflow.buffer.segments import SegmentReader, SegmentWriter
from ...dataflow.graph import ParameterEdge
from ...dataflow.handle import Handle
from ...workers.worker import Context, Worker
from ..executor import Executor
from ..group import Call, WorkerGroup
from ..placement import Place
from ..row_io import DataAccess
from ..tasks import Reply, Task

START_TIMEOUT_S = 300.0
"""Longest wait for workers to be up: vLLM's imports and a large model's loading are in it."""


@dataclass(frozen=True)
class Files:
    """Where the processes of a run keep the columns of rows."""

    folder: Path
    """It has a folder for each node."""
    file_bytes: int = 16 << 20
    memory_bytes: int | None = None
    start: int = 0
    """How often the run was started again: a writer's name is never used twice."""

    def access(
        self, node: str, name: str, *, peers: Mapping[str, str] | None = None, token: str | None = None
    ) -> DataAccess:
        """The files of a process on this node; `name` is its own in the run."""
        reader = SegmentReader(self.folder / node, node, peers=peers, token=token)
        return DataAccess(reader, self.writer(node, name))

    def writer(self, node: str, name: str) -> SegmentWriter:
        return SegmentWriter(
            self.folder / node,
            node,
            f"{plain_name(name)}-{self.start}",
            file_bytes=self.file_bytes,
            memory_bytes=self.memory_bytes,
        )


@dataclass(frozen=True)
class Setup:
    """What a backend needs to start the groups of a run."""

    handles: Mapping[str, Handle]
    placement: Mapping[str, Place]
    run_dir: Path
    seed: int
    files: Files
    follows: Sequence[ParameterEdge] = ()


def plain_name(name: str) -> str:
    """A name that files can bear: of the letters, digits, `_` and `-`."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name) or "_"


def this_node() -> str:
    """What the node of this process is called in references."""
    return plain_name(platform.node())


@dataclass(frozen=True)
class Event:
    """A reply has come: from which rank of which call."""

    call: Call
    rank: int
    reply: Reply


class Backend(Protocol):
    """Starts worker groups, carries calls to them and replies back, and leaves nothing behind."""

    def check(self, placement: Mapping[str, Place]) -> None:
        """Refuse, before anything is started, what can be known to be impossible (UserError)."""
        ...

    def start(self, setup: Setup) -> dict[str, WorkerGroup]: ...

    def delete(self, node: str, file: str) -> None:
        """No row lies in this file any more: other nodes let go of it, or of what they fetched of it; returns at once."""
        ...

    def wait(self, timeout_s: float) -> Sequence[Event]:
        """Replies that have come since, at least one; empty when none came in time."""
        ...

    def clock(self) -> float:
        """Seconds, from any beginning: what deadlines and timelines go by."""
        ...

    def cancel(self, call: Call) -> None:
        """End a call that gives way, on all of its ranks; its last reply comes all the same."""
        ...

    @property
    def has_processes(self) -> bool:
        """Each rank has a process of its own, which can end, or be silent, by itself. Otherwise the groups take turns: while one
        works the others say nothing."""
        ...

    @property
    def nodes(self) -> Collection[str]:
        """Names of the nodes on which segments can be read."""
        ...

    def has_lost_node(self) -> bool:
        """Whether one of them is gone, with its processes and rows."""
        ...

    def replace(self, group: WorkerGroup, rank: int) -> None:
        """End what is left of a rank's process, and start another in its place; returns at once. What the old one had not
        answered is never answered; calls on the new one wait until it is up."""
        ...

    def sample_at(self, group: WorkerGroup, rank: int) -> int | None:
        """The sample that a rank said it was working on (`Context.at`), also when its process is gone."""
        ...

    def close(self) -> None: ...


class Local:
    """Every group in this process, one rank each, without Ray, on one thread: the groups work in turns, while the driver waits."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._executors: dict[str, Executor] = {}
        self._events: deque[Event] = deque()
        self._data: DataAccess | None = None

    def __repr__(self) -> str:
        return "Local()"

    def check(self, placement: Mapping[str, Place]) -> None:
        """Nothing is refused: whatever a placement asks for, one process does the work here."""

    def start(self, setup: Setup) -> dict[str, WorkerGroup]:
        groups: dict[str, WorkerGroup] = {}
        self._data = setup.files.access(this_node(), "local")
        for name, handle in setup.handles.items():
            place = Place(setup.placement[name].pool)  # world size 1, whatever the placement says
            worker = handle.worker_class(handle.config, Context(name=name, run_dir=setup.run_dir, seed=setup.seed))
            self._workers[name] = worker
            self._executors[name] = Executor(worker, self._data)
            groups[name] = WorkerGroup(name, handle, place, [worker.coordinates], self._submit)
        return groups

    def delete(self, node: str, file: str) -> None:
        """There is one node, and the buffer keeps its files itself."""

    def _submit(self, rank: int, task: Task, call: Call) -> None:
        def begin() -> None:
            call.started = self.clock()  # until then it waited for this thread, not for the worker

        executor = self._executors[call.group.name]
        executor.add(task, lambda reply: self._events.append(Event(call, rank, reply)), begin)

    def clock(self) -> float:
        return time.monotonic()

    def cancel(self, call: Call) -> None:
        self._executors[call.group.name].cancel(call.number)

    def wait(self, timeout_s: float) -> Sequence[Event]:
        while not self._events and any(executor.busy for executor in self._executors.values()):
            for executor in self._executors.values():
                if executor.busy:
                    executor.take_turn()
        events, self._events = list(self._events), deque()
        return events

    has_processes = False

    @property
    def nodes(self) -> Collection[str]:
        return (this_node(),)

    def has_lost_node(self) -> bool:
        return False

    def replace(self, group: WorkerGroup, rank: int) -> None:
        raise RuntimeError(f"{group.name}[{rank}] has no process that could end")

    def sample_at(self, group: WorkerGroup, rank: int) -> None:
        """Nobody asks: an exception names its samples itself."""

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # each is closed, also when another's close() raises
            for worker in self._workers.values():
                closing.callback(worker.close)
            if self._data is not None:
                closing.callback(self._data.close)
                self._data = None
            self._workers.clear()
            self._executors.clear()
