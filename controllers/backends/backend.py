"""The interface of backends, which run worker groups.

- `Local` (`local.py`) runs every group in the driver's process, so breakpoints work.
- `RayBackend` (`ray_backend.py`) runs each rank in a separate process.
- `Simulated` (`../simulation/backend.py`) simulates the groups and runs no workers.
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
from ...workers.rendezvous import GatewayAddress
from ..group import Call, WorkerGroup
from ..node_layout import machine_gpus
from ..placement import Place
from ..ranks.row_io import DataAccess
from ..ranks.tasks import Reply
from .process_diagnostics import Memory

START_TIMEOUT_S = 300.0
"""[s] Longest wait for workers to start, including vLLM's imports and loading a large model."""
FILE_BYTES = 16 << 20
"""[bytes] Size of a segment file. Weft reuses a file when none of its rows are in flight."""
RETRY_S = 20.0
"""[s] How long a rank keeps trying to read from a node whose server may be restarting."""


@dataclass(frozen=True)
class Files:
    """Where a run's processes store row data."""

    folder: Path
    """Has a subfolder for each node. Unused if `scratch` is set."""
    file_bytes: int = FILE_BYTES
    memory_bytes: int | None = None
    """[bytes] Most bytes of segments to keep in a node's memory; None: the kernel decides."""
    scratch: Scratch | None = None
    """A local folder on each machine; None if all machines share `folder`."""
    start: int = 0
    """Number of restarts of the run. It makes the names of writers unique."""

    def of_node(self, node: str) -> Path:
        """Folder of a node's segment files, as processes on that node see it."""
        return (self.folder if self.scratch is None else self.scratch.hold()) / node

    def are_beside(self, run: Path) -> bool:
        return self.scratch is None or self.scratch.is_noted_in(run / BUFFER)

    def logs_of_node(self, node: str, run: Path) -> Path:
        """Folder for the logs of a node's processes: in `run`, or else the node's own."""
        return (run if self.are_beside(run) else self.of_node(node)) / LOGS

    def access(self, node: str, name: str) -> DataAccess:
        """Open the segment files for a process. The result cannot read from other nodes yet."""
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
    """[s] Longest time without progress of a rank's call."""
    writers: Collection[str] = ()
    """Groups that write checkpoints or samples into the run's directory."""
    gateway: GatewayAddress | None = None
    """Where the gateway of the run's agents listens."""
    tell: Callable[[str], None] = lambda line: None


def plain_name(name: str) -> str:
    """Return a file name: `_` replaces all characters but letters, digits, `_` and `-`."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name) or "_"


def this_node() -> str:
    """Name of this process's node, as used in references to segments."""
    return plain_name(platform.node())


@dataclass(frozen=True)
class Event:
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
    """[s] Interval, on the backend's clock, between syncs of the run's log to disk. A power loss
    can lose this much of the log."""

    def check(self, placement: Mapping[str, Place], handles: Mapping[str, Handle] = {}) -> None:
        """Check that the placement fits, before anything starts.

        Raises:
            UserError: The placement does not fit. The message names the group or pool, and the
                available devices.
        """
        ...

    def start(self, setup: Setup) -> dict[str, WorkerGroup]:
        """Start every rank of every group, wait until all are up, and return the groups by name.

        Groups that share GPUs start in turn, and each moves its model to host memory. Ranks of
        elastic groups are absent if the cluster has no room for them.

        Raises:
            UserError: A worker cannot start because of an error that the user can fix.
            WorkerError: A rank failed, or did not start in time.
        """
        ...

    def wait(self, timeout_s: float) -> Sequence[Event]:
        """Wait until replies arrive, and return all of them; empty after the timeout."""
        ...

    def rest(self, seconds: float) -> None:
        """Sleep, so that the next `wait` returns more replies. Does nothing in a single process."""

    def clock(self) -> float:
        """[s] Monotonic time, for deadlines and timelines."""
        return time.monotonic()

    def cancel(self, call: Call) -> None:
        """Cancel an interruptible call on all of its ranks. It still sends its last reply."""
        ...

    def give_up(self, call: Call, sample_ids: Sequence[int]) -> None:
        """Tell the ranks of a call that the driver no longer needs some of its rows."""
        ...

    def close(self) -> None:
        """End every process, and clean up all nodes. Can be called more than once."""
        ...

    @property
    def own_address(self) -> str | None:
        """Address of the driver's node for processes on other nodes; empty without other nodes, None
        without workers."""
        return ""

    @property
    def nodes(self) -> Collection[str]:
        """Names of the nodes whose segments can be read."""
        return (this_node(),)

    def node_of(self, group: WorkerGroup, rank: int) -> str:
        """Name of the node where a rank runs, or ran until its process ended."""
        return next(iter(self.nodes))

    def stacks(self, group: WorkerGroup, ranks: Sequence[int]) -> Mapping[int, str]:
        """Return rank -> stack description, for ranks that answer within seconds."""
        return {}

    @property
    def hanging(self) -> Collection[str]:
        """Groups known to hang. Other groups may only be waiting for them."""
        return ()

    def memory(self) -> Mapping[str, Memory]:
        """Return node -> last known memory of the node and of the run's processes there."""
        return {}

    @property
    def cluster(self) -> Cluster | None:
        """Operations of a cluster, whose ranks can fail one by one; None for a single process."""
        return None


class Cluster(Protocol):
    address: str | None
    """Address of the cluster that the run joins; None for a local one."""
    wait_s: float
    """[s] Longest wait for room for the ranks that a run needs."""

    def replace(self, group: WorkerGroup, rank: int) -> None:
        """End a rank's process and start a new one, without waiting. Calls to the new one wait
        until it is up; calls to the old one get no reply."""
        ...

    def release(self, group: WorkerGroup, rank: int) -> None:
        """End the process of an elastic group's rank, without waiting."""
        ...

    def vacant(self, group: WorkerGroup) -> Collection[int]:
        """Absent ranks of an elastic group that would fit on the cluster."""
        ...

    def sample_at(self, group: WorkerGroup, rank: int) -> int | None:
        """Id of the last sample that a rank recorded with `Context.at`, even if dead, or None."""
        ...

    def lost_nodes(self, *, look: bool) -> Collection[str]:
        """Names of lost nodes. With `look`, checks the nodes first, which can take seconds."""
        ...

    def unreadable(self, segments: Collection[Segment]) -> Mapping[Segment, str]:
        """Return segment -> reason, for segments that their nodes cannot read."""
        ...

    def delete(self, node: str, file: str) -> None:
        """Ask all nodes to delete a segment file that a process on `node` wrote."""
        ...

    def report(self, run: str, metrics: Mapping[str, float]) -> None:
        """Publish metrics of a step at the cluster's Prometheus endpoint."""
        ...


def check_machine(handles: Mapping[str, Handle], placement: Mapping[str, Place]) -> None:
    """Raise a `UserError` if this machine has too little memory for the workers. On GPU machines,
    the workers check it."""
    if machine_gpus():
        return
    for name, handle in handles.items():
        ranks = placement[name].ranks if name in placement else 1
        handle.worker_class.check_machine(handle.config, ranks)
