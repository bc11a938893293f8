"""Backend: interface of the things that run worker groups.

- `Local` (`local.py`) runs every group in this process, so that breakpoints work.
- `RayBackend` (`ray_backend.py`) runs each rank in a separate process.
- `Simulated` (`../simulation/backend.py`) runs no workers.
"""

from __future__ import annotations

import math
import platform
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...dataflow.buffer.scratch import Scratch
from ...dataflow.buffer.segments import Segment, SegmentReader, SegmentWriter
from ...dataflow.graph import Handle, ParameterEdge
from ...dataflow.runs.files import BUFFER, LOGS
from ...dataflow.runs.log import SYNC_INTERVAL_S
from ..group import Call, WorkerGroup
from ..node_layout import machine_gpus
from ..placement import Place
from ..ranks.row_io import DataAccess
from ..ranks.tasks import Reply
from .process_diagnostics import Memory

START_TIMEOUT_S = 300.0
"""[s] Longest wait for workers to start, with vLLM's imports and the loading of a large model."""
FILE_BYTES = 16 << 20
"""[bytes] Size of a segment file. A file is recycled when none of its rows are in flight."""
RETRY_S = 20.0
"""[s] How long a rank retries to read from a node whose server may be restarting."""


@dataclass(frozen=True)
class Files:
    """Where the processes of a run keep the columns of rows."""

    folder: Path
    """Has a folder for each node, unless `scratch` is used."""
    file_bytes: int = FILE_BYTES
    """[bytes] Largest file of a writer."""
    memory_bytes: int | None = None
    """[bytes] Segments of a node that stay in memory; None leaves that to the kernel."""
    scratch: Scratch | None = None
    """A local folder on each machine; None if all machines see `folder`."""
    start: int = 0
    """Number of restarts of the run. It makes the names of writers unique."""

    def of_node(self, node: str) -> Path:
        """Folder of a node's files, for a process on its machine."""
        return (self.folder if self.scratch is None else self.scratch.hold()) / node

    def are_beside(self, run: Path) -> bool:
        return self.scratch is None or self.scratch.is_noted_in(run / BUFFER)

    def logs_of_node(self, node: str, run: Path) -> Path:
        """Folder for logs of a node's processes: next to the segments if it does not see `run`."""
        return (run if self.are_beside(run) else self.of_node(node)) / LOGS

    def access(self, node: str, name: str) -> DataAccess:
        """Open the files of a process, not yet connected to other nodes."""
        reader = SegmentReader(self.of_node(node), node, retry_s=RETRY_S)
        return DataAccess(reader, self.writer(node, name))

    def writer(self, node: str, name: str) -> SegmentWriter:
        return SegmentWriter(
            self.of_node(node),
            node,
            f"{plain_name(name)}-{self.start}",
            file_bytes=self.file_bytes,
            memory_bytes=self.memory_bytes,
        )


@dataclass(frozen=True)
class Setup:
    handles: Mapping[str, Handle]
    placement: Mapping[str, Place]
    run_dir: Path
    seed: int
    files: Files
    follows: Sequence[ParameterEdge] = ()
    start_timeout_s: float = START_TIMEOUT_S
    """[s] Longest time for the workers of a group to start."""
    call_timeout_s: float = math.inf
    """[s] Longest time without progress in a call of a rank."""
    writers: Collection[str] = ()
    """Groups that write checkpoints or samples into the run's directory."""
    tell: Callable[[str], None] = lambda line: None


def plain_name(name: str) -> str:
    """A name for files: letters, digits, `_` and `-` stay, and `_` replaces all others."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name) or "_"


def this_node() -> str:
    """Name of this process's node in references."""
    return plain_name(platform.node())


@dataclass(frozen=True)
class Event:
    """A reply of one rank to a call."""

    call: Call
    rank: int
    reply: Reply


class Backend(Protocol):
    """Starts worker groups, carries calls and replies, and cleans up.

    Methods with a body are defaults for backends without separate processes.
    """

    in_process: bool = False
    """Whether workers run, and allocate memory, in the driver's process."""
    sync_interval_s: float = SYNC_INTERVAL_S
    """[s] How much of the run's log, on the backend's clock, a power loss may cost."""

    def check(self, placement: Mapping[str, Place], handles: Mapping[str, Handle] = {}) -> None:
        """Reject a placement that does not fit, before anything is started.

        Raises:
            UserError: Names the group or pool, and the available devices.
        """
        ...

    def start(self, setup: Setup) -> dict[str, WorkerGroup]:
        """Start every rank of every group, wait until all are up, and return the groups by name.

        Groups on the same GPUs start one after the other; afterwards all their models are in host
        memory. Ranks of elastic groups are absent if the cluster has no room.

        Raises:
            UserError: A worker cannot be made, and the user can fix it.
            WorkerError: A rank did not start, or not in time.
        """
        ...

    def wait(self, timeout_s: float) -> Sequence[Event]:
        """Wait for replies and return all that have arrived, or none after the timeout."""
        ...

    def rest(self, seconds: float) -> None:
        """Sleep, so that the next `wait` returns more replies, unless nothing runs in the
        meantime."""

    def clock(self) -> float:
        """[s] Monotonic time, for deadlines and timelines."""
        return time.monotonic()

    def cancel(self, call: Call) -> None:
        """Cancel an interruptible call on all of its ranks. Its last reply still arrives."""
        ...

    def give_up(self, call: Call, sample_ids: Sequence[int]) -> None:
        """Tell the ranks of a call that some of its rows are no longer needed."""
        ...

    def close(self) -> None:
        """End every process, and clean up all nodes. It may be called several times."""
        ...

    @property
    def nodes(self) -> Collection[str]:
        """Names of the nodes whose segments can be read."""
        return (this_node(),)

    def node_of(self, group: WorkerGroup, rank: int) -> str:
        """Name of the node that a rank is on, or was on until its process ended."""
        return next(iter(self.nodes))

    def stacks(self, group: WorkerGroup, ranks: Sequence[int]) -> Mapping[int, str]:
        """Stack traces of ranks, in words, within seconds, if known."""
        return {}

    @property
    def hanging(self) -> Collection[str]:
        """Groups that are known to hang and make the others silent."""
        return ()

    def memory(self) -> Mapping[str, Memory]:
        """Node -> last known memory of the node and the run's processes on it, without waiting."""
        return {}

    @property
    def cluster(self) -> Cluster | None:
        """The operations of a cluster, whose ranks can die or hang alone; None for a single
        process."""
        return None


class Cluster(Protocol):
    address: str | None
    """Address of the cluster that the run joins; None for a local one."""
    wait_s: float
    """[s] Longest wait for room for ranks that a run needs."""

    def replace(self, group: WorkerGroup, rank: int) -> None:
        """End a rank's process and start another, without waiting. Calls to the new one wait until
        it is up; calls to the old one are never answered."""
        ...

    def release(self, group: WorkerGroup, rank: int) -> None:
        """End the process of an elastic group's rank, without waiting or replacing it."""
        ...

    def vacant(self, group: WorkerGroup) -> Collection[int]:
        """Absent ranks of an elastic group that the cluster has room for."""
        ...

    def sample_at(self, group: WorkerGroup, rank: int) -> int | None:
        """Id of the last sample that a rank recorded (`Context.at`), also after its death, or
        None."""
        ...

    def lost_nodes(self, *, look: bool) -> Collection[str]:
        """Names of lost nodes. A `look` checks the nodes first, which may take seconds."""
        ...

    def unreadable(self, segments: Collection[Segment]) -> Mapping[Segment, str]:
        """Segments that cannot be read on their nodes, and why."""
        ...

    def delete(self, node: str, file: str) -> None:
        """Ask all nodes to delete a segment file that a process on `node` wrote."""
        ...

    def report(self, run: str, metrics: Mapping[str, float]) -> None:
        """Show metrics of a step at the cluster's endpoint for Prometheus."""
        ...


def check_machine(handles: Mapping[str, Handle], placement: Mapping[str, Place]) -> None:
    """Raise a `UserError` if this machine has too little memory. On GPUs, the workers check it."""
    if machine_gpus():
        return
    for name, handle in handles.items():
        ranks = placement[name].ranks if name in placement else 1
        handle.worker_class.check_machine(handle.config, ranks)
