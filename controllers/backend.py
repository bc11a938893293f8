"""Backends: what runs worker groups. `Local` keeps every group in this process, so that breakpoints work; `RayBackend`
(`ray_backend.py`) gives each rank a process of its own. The driver knows only this protocol."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..dataflow.batch import Batch
from ..dataflow.handle import Handle
from ..dataflow.ledger import Ids, Segment
from ..workers.worker import Context, Worker
from .group import Call, WorkerGroup
from .placement import Place
from .shell import Reply, Task, run


@dataclass(frozen=True)
class Setup:
    """What a backend needs to start the groups of a run."""

    handles: Mapping[str, Handle]
    placement: Mapping[str, Place]
    run_dir: Path
    seed: int
    ids: Ids


@dataclass(frozen=True)
class Event:
    """A reply has come: from which rank of which call, and where the batch that it published lies."""

    call: Call
    rank: int
    reply: Reply
    segment: Segment | None = None


class Backend(Protocol):
    """Starts worker groups, carries calls to them and replies back, and leaves nothing behind."""

    def check(self, placement: Mapping[str, Place]) -> None:
        """Refuse, before anything is started, what can be known to be impossible (UserError)."""
        ...

    def start(self, setup: Setup) -> dict[str, WorkerGroup]: ...

    def store(self, batch: Batch) -> Segment:
        """Put rows where workers can fetch them (the rows of a source)."""
        ...

    def wait(self, timeout_s: float) -> Sequence[Event]:
        """Replies that have come since, at least one; empty when none came in time."""
        ...

    def close(self) -> None: ...


class Local:
    """Every group in this process, one rank each, without Ray. A call runs to its end where it is made."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._events: deque[Event] = deque()

    def __repr__(self) -> str:
        return "Local()"

    def check(self, placement: Mapping[str, Place]) -> None:
        """Nothing is refused: whatever a placement asks for, one process does the work here."""

    def start(self, setup: Setup) -> dict[str, WorkerGroup]:
        groups: dict[str, WorkerGroup] = {}
        for name, handle in setup.handles.items():
            place = Place(setup.placement[name].pool)  # world size 1, whatever the placement says
            worker = handle.worker_class(handle.config, Context(name=name, run_dir=setup.run_dir, seed=setup.seed))
            self._workers[name] = worker
            groups[name] = WorkerGroup(name, handle, place, [worker.coordinates], self._submit, setup.ids)
        return groups

    def store(self, batch: Batch) -> Segment:
        return Segment(batch, batch.num_bytes)

    def _submit(self, rank: int, task: Task, call: Call) -> None:
        for reply, batch in run(self._workers[call.group.name], task, _themselves):
            segment = Segment(batch, batch.num_bytes) if batch is not None else None
            self._events.append(Event(call, rank, reply, segment))

    def wait(self, timeout_s: float) -> Sequence[Event]:
        events, self._events = list(self._events), deque()
        return events

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # each is closed, also when another's close() raises
            for worker in self._workers.values():
                closing.callback(worker.close)
            self._workers.clear()


def _themselves(references: Sequence[Batch]) -> Sequence[Batch]:
    """In one process a reference is the batch itself."""
    return references
