"""Backend: interface of the things that run worker groups.

- `Local` (`local.py`) runs every group in this process, so that breakpoints work.
- `RayBackend` (`ray_backend.py`) runs each rank in a separate process.
- `Simulated` (`../prechecks/simulated.py`) runs no workers.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from ...dataflow.buffer.scratch import Scratch
from ...dataflow.buffer.segments import Segment, SegmentReader, SegmentWriter
from ...dataflow.graph import Handle, ParameterEdge
from ...dataflow.runs.files import BUFFER, LOGS
from ..group import Call, WorkerGroup
from ..node_layout import machine_gpus
from ..placement import Place
from ..ranks.row_io import DataAccess
from ..ranks.tasks import Reply
from .witness import Memory

START_TIMEOUT_S = 300.0
"""[s] Longest wait for workers to start, including vLLM's imports and the loading of a large
model."""
FILE_BYTES = 16 << 20
"""[bytes] Size of a segment file. A file is recycled when none of its rows are in flight, so larger
files are recycled later and smaller ones are more numerous."""
RETRY_S = 20.0
"""[s] How long a rank retries to read rows from a node whose segment server does not answer,
because it may be restarting."""


@dataclass(frozen=True)
class Files:
    """Where the processes of a run keep the columns of rows."""

    folder: Path
    """Has a folder for each node, unless `scratch` is used."""
    file_bytes: int = FILE_BYTES
    """[bytes] File size at most, before a writer begins another file."""
    memory_bytes: int | None = None
    """[bytes] Segments of a node that stay in memory; None leaves that to the kernel."""
    scratch: Scratch | None = None
    """A local folder on each machine, with a folder per node; None if all machines see `folder`."""
    start: int = 0
    """How often the run was restarted. It is part of writers' names, which are never reused."""

    def of_node(self, node: str) -> Path:
        """The folder of a node's files, for a process on its machine."""
        return (self.folder if self.scratch is None else self.scratch.hold()) / node

    def are_beside(self, run: Path) -> bool:
        """Whether this machine sees the run's directory."""
        return self.scratch is None or self.scratch.is_noted_in(run / BUFFER)

    def logs_of_node(self, node: str, run: Path) -> Path:
        """Folder for logs of a node's processes: in the run's directory, or next to the segments if
        the machine does not see it."""
        return (run if self.are_beside(run) else self.of_node(node)) / LOGS

    def access(self, node: str, name: str) -> DataAccess:
        """Open the files of a process.

        Args:
            node: Node that it runs on.
            name: Its name, unique in the run.

        Returns:
            A reader of its node's files, not connected to other nodes yet, and a writer.
        """
        return DataAccess(
            SegmentReader(self.of_node(node), node, retry_s=RETRY_S), self.writer(node, name)
        )

    def writer(self, node: str, name: str) -> SegmentWriter:
        """Return only the writer of a process; arguments as for `access`."""
        return SegmentWriter(
            self.of_node(node),
            node,
            f"{plain_name(name)}-{self.start}",
            file_bytes=self.file_bytes,
            memory_bytes=self.memory_bytes,
        )


@dataclass(frozen=True)
class Setup:
    """Settings for the start of a run's groups."""

    handles: Mapping[str, Handle]
    """Worker groups, by name."""
    placement: Mapping[str, Place]
    run_dir: Path
    """Directory of the run, with a log for each rank."""
    seed: int
    files: Files
    follows: Sequence[ParameterEdge] = ()
    """Groups that load weights from others."""
    start_timeout_s: float = START_TIMEOUT_S
    """[s] Longest time for the workers of a group to start."""
    call_timeout_s: float = math.inf
    """[s] Longest time without progress in a call of a rank."""
    writers: Collection[str] = ()
    """Groups that write checkpoints or samples into the run's directory."""
    tell: Callable[[str], None] = lambda line: None


def plain_name(name: str) -> str:
    """The name with all characters replaced but letters, digits, `_` and `-`, for use in file
    names."""
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
    """Starts worker groups, carries calls and replies, and cleans up."""

    def check(
        self,
        placement: Mapping[str, Place],
        handles: Mapping[str, Handle] = MappingProxyType({}),
    ) -> None:
        """Reject a placement that cannot be started, before anything is.

        Args:
            placement: Group -> its pool and ranks.
            handles: Known groups, by name.

        Raises:
            UserError: The placement does not fit; the message names the group or pool, and what is
                available.
        """
        ...

    def start(self, setup: Setup) -> dict[str, WorkerGroup]:
        """Start every rank of every group, and wait until all are up.

        Groups on the same GPUs start one after the other; afterwards all their models are in host
        memory.

        Args:
            setup: What to start.

        Returns:
            Worker groups, by name. Ranks of elastic groups are absent if the cluster has no room.

        Raises:
            UserError: A worker cannot be made, and the user can fix it.
            WorkerError: A rank did not start, or not in time.
        """
        ...

    def delete(self, node: str, file: str) -> None:
        """Ask other nodes to delete a segment file, without waiting.

        Args:
            node: Node of the process that wrote the file; others may have copies.
            file: Name of a file without rows in flight.
        """
        ...

    def wait(self, timeout_s: float) -> Sequence[Event]:
        """Wait for replies and return all that have arrived, or none after the timeout."""
        ...

    def rest(self, seconds: float) -> None:
        """Sleep, so that the next `wait` returns more replies. Return at once if nothing runs in
        the meantime."""
        ...

    def clock(self) -> float:
        """[s] Monotonic time, for deadlines and timelines."""
        ...

    def cancel(self, call: Call) -> None:
        """Cancel an interruptible call on all of its ranks. Its last reply still arrives."""
        ...

    def give_up(self, call: Call, sample_ids: Sequence[int]) -> None:
        """Tell the ranks of a call that some of its rows are no longer needed."""
        ...

    @property
    def has_processes(self) -> bool:
        """Whether each rank has a process that can die or hang alone. Otherwise groups take turns
        in one process."""
        ...

    @property
    def in_process(self) -> bool:
        """Whether workers run, and allocate memory, in the driver's process."""
        ...

    @property
    def spans_machines(self) -> bool:
        """Whether processes may be on other machines."""
        ...

    @property
    def sync_interval_s(self) -> float:
        """[s] How much of the run's log, on the backend's clock, a power loss may cost."""
        ...

    @property
    def nodes(self) -> Collection[str]:
        """Names of the nodes whose segments can be read."""
        ...

    def unreadable(self, segments: Collection[Segment]) -> Mapping[Segment, str]:
        """Segments that cannot be read on their nodes, and why."""
        ...

    def lost_nodes(self, *, look: bool) -> Collection[str]:
        """Names of lost nodes, whose processes and rows are gone.

        Args:
            look: Check the nodes first, which may take seconds.
        """
        ...

    def node_of(self, group: WorkerGroup, rank: int) -> str:
        """Name of the node that a rank is on, or was on until its process ended."""
        ...

    def replace(self, group: WorkerGroup, rank: int) -> None:
        """End a rank's process, if it is alive, and start another, without waiting.

        Calls that the old process had not answered are never answered. Calls to the new one wait
        until it is up.
        """
        ...

    def release(self, group: WorkerGroup, rank: int) -> None:
        """End the process of an elastic group's rank, if it is alive, without replacing it or
        waiting."""
        ...

    def vacant(self, group: WorkerGroup) -> Collection[int]:
        """Absent ranks of an elastic group that the cluster has room for."""
        ...

    @property
    def wait_s(self) -> float:
        """[s] How long to wait for room for ranks that a run needs."""
        ...

    def sample_at(self, group: WorkerGroup, rank: int) -> int | None:
        """Id of the last sample that a rank recorded (`Context.at`), also after its process has
        died, or None."""
        ...

    def stacks(self, group: WorkerGroup, ranks: Sequence[int]) -> Mapping[int, str]:
        """Stack traces of ranks, in words, within seconds; unknown ones are left out."""
        ...

    @property
    def hanging(self) -> Collection[str]:
        """Groups that are known to hang and make the others silent. Empty if ranks have
        processes."""
        ...

    def memory(self) -> Mapping[str, Memory]:
        """Node -> last known memory of the node and the run's processes on it, without waiting."""
        ...

    @property
    def has_endpoint(self) -> bool:
        """Whether Prometheus can read metrics from its cluster."""
        ...

    def report(self, run: str, metrics: Mapping[str, float]) -> None:
        """Show metrics of a step at the endpoint."""
        ...

    def close(self) -> None:
        """End every process, and clean up all nodes. It may be called several times."""
        ...


def check_machine(handles: Mapping[str, Handle], placement: Mapping[str, Place]) -> None:
    """Check that this machine has enough memory for the groups. On GPUs, the workers check it.

    Raises:
        UserError: There is too little memory; the message names the setting.
    """
    if machine_gpus():
        return
    for name, handle in handles.items():
        handle.worker_class.check_machine(
            handle.config, placement[name].ranks if name in placement else 1
        )
