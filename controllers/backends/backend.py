"""Backend: what runs worker groups, as the driver knows it. `Local` (`local.py`) keeps every group in this process, so that breakpoints
work; `RayBackend` (`ray_backend.py`) gives each rank a process of its own; `Simulated` (`../simulation/`) has neither."""

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
from ..placement import Place, machine_gpus
from ..ranks.row_io import DataAccess
from ..ranks.tasks import Reply
from .witness import Memory

START_TIMEOUT_S = 300.0
"""Longest wait for workers to be up: vLLM's imports and a large model's loading are in it."""
FILE_BYTES = 16 << 20
"""Bytes of a segment file, which is recycled when no row in flight lies in it any more. Larger ones are recycled later, smaller ones cost
more files."""
RETRY_S = 20.0
"""Seconds for which a rank asks for rows of a node whose server of segments does not answer; it may be started again."""


@dataclass(frozen=True)
class Files:
    """Where the processes of a run keep the columns of rows."""

    folder: Path
    """It has a folder for each node, unless they lie in `scratch`."""
    file_bytes: int = FILE_BYTES
    """Bytes after which a writer begins another file."""
    memory_bytes: int | None = None
    """Bytes of the segments of a node that stay in memory; None leaves that to the kernel."""
    scratch: Scratch | None = None
    """The folder of each machine that has one for each node on it; None: they all see `folder`."""
    start: int = 0
    """How often the run was started again; it is part of the writers' names, which are never used twice."""

    def of_node(self, node: str) -> Path:
        """The folder of a node's files, for a process on its machine, which then holds it."""
        return (self.folder if self.scratch is None else self.scratch.hold()) / node

    def are_beside(self, run: Path) -> bool:
        """Whether this machine sees the directory of the run."""
        return self.scratch is None or self.scratch.is_noted_in(run / BUFFER)

    def logs_of_node(self, node: str, run: Path) -> Path:
        """Where processes of a node write their logs: into the run's directory, or, on a machine that does not see it, beside the
        segments."""
        return (run if self.are_beside(run) else self.of_node(node)) / LOGS

    def access(self, node: str, name: str) -> DataAccess:
        """Open the files of a process.

        Args:
            node: the node that it runs on.
            name: its name, unique in the run.

        Returns:
            A reader of its node's files, which knows no other nodes yet, and a writer.
        """
        return DataAccess(
            SegmentReader(self.of_node(node), node, retry_s=RETRY_S), self.writer(node, name)
        )

    def writer(self, node: str, name: str) -> SegmentWriter:
        """The writer of a process alone; arguments as for `access`."""
        return SegmentWriter(
            self.of_node(node),
            node,
            f"{plain_name(name)}-{self.start}",
            file_bytes=self.file_bytes,
            memory_bytes=self.memory_bytes,
        )


@dataclass(frozen=True)
class Setup:
    """Settings from which a backend starts the groups of a run."""

    handles: Mapping[str, Handle]
    """Worker groups by name."""
    placement: Mapping[str, Place]
    """Group -> its pool and ranks."""
    run_dir: Path
    """The directory of the run, in which each rank has its log."""
    seed: int
    files: Files
    follows: Sequence[ParameterEdge] = ()
    """Which groups load the weights of others."""
    start_timeout_s: float = START_TIMEOUT_S
    """Longest wait for the workers of a group to be up."""
    call_timeout_s: float = math.inf
    """Longest silence of a rank that was called."""
    writers: Collection[str] = ()
    """Groups that write into the run's directory: checkpoints, or samples."""
    tell: Callable[[str], None] = lambda line: None
    """Tells the user what the start waits for."""


def plain_name(name: str) -> str:
    """The name with every character but letters, digits, `_` and `-` replaced, so that files can have it."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name) or "_"


def this_node() -> str:
    """The name of this process's node in references."""
    return plain_name(platform.node())


@dataclass(frozen=True)
class Event:
    """A reply of one rank to a call."""

    call: Call
    rank: int
    reply: Reply


class Backend(Protocol):
    """Starts worker groups, carries calls to them and replies back, and leaves nothing behind."""

    def check(
        self,
        placement: Mapping[str, Place],
        handles: Mapping[str, Handle] = MappingProxyType({}),
    ) -> None:
        """Refuse a placement that cannot be started here, before anything is.

        Args:
            placement: group -> its pool and ranks.
            handles: the groups, by name, as far as they are known.

        Raises:
            UserError: naming the group or the pool, and what there is.
        """
        ...

    def start(self, setup: Setup) -> dict[str, WorkerGroup]:
        """Start every rank of every group, and wait until all are up. Groups that share a pool with GPUs are made one after the other,
        and the models of all of them are in host memory when this returns.

        Args:
            setup: what is to be started.

        Returns:
            The worker groups, by name. Ranks of elastic groups for which there is no room are absent.

        Raises:
            UserError: a worker cannot be made, and the user can mend it.
            WorkerError: a rank did not start, or not in time.
        """
        ...

    def delete(self, node: str, file: str) -> None:
        """Have the other nodes delete a segment file; returns at once.

        Args:
            node: of the process that wrote the file; others may have copies.
            file: its name. No row lies in it any more.
        """
        ...

    def wait(self, timeout_s: float) -> Sequence[Event]:
        """Wait for replies.

        Args:
            timeout_s: seconds to wait for the first.

        Returns:
            All replies that have come; none if none came in time.
        """
        ...

    def rest(self, seconds: float) -> None:
        """Let replies gather for so long, so that the next `wait` returns more of them at once; at once where nothing goes on meanwhile."""
        ...

    def clock(self) -> float:
        """Seconds since some moment. Deadlines and timelines are by this clock."""
        ...

    def cancel(self, call: Call) -> None:
        """End an interruptible call on all of its ranks; its last reply still comes.

        Args:
            call: one that is under way.
        """
        ...

    def give_up(self, call: Call, sample_ids: Sequence[int]) -> None:
        """Tell the ranks of a call that some of its rows are no longer wanted.

        Args:
            call: one that is under way.
            sample_ids: of these rows.
        """
        ...

    @property
    def has_processes(self) -> bool:
        """Whether each rank has a process of its own, which can end or fall silent. Otherwise the groups take turns, and while one works
        the others are silent."""
        ...

    @property
    def in_process(self) -> bool:
        """Whether workers run in the driver's process, and with them what they allocate."""
        ...

    @property
    def spans_machines(self) -> bool:
        """Whether its processes may stand on other machines than this one."""
        ...

    @property
    def sync_interval_s(self) -> float:
        """Seconds of a run's log, on the clock of the backend, that a loss of power may cost."""
        ...

    @property
    def nodes(self) -> Collection[str]:
        """Names of the nodes on which segments can be read."""
        ...

    def unreadable(self, segments: Collection[Segment]) -> Mapping[Segment, str]:
        """Those of the segments on other nodes that cannot be read there, and why."""
        ...

    def lost_nodes(self, *, look: bool) -> Collection[str]:
        """Names of the nodes that are gone, with their processes and rows.

        Args:
            look: ask the nodes whether they are there, which may take seconds; else those that are known to be gone.
        """
        ...

    def node_of(self, group: WorkerGroup, rank: int) -> str:
        """Name of the node on which a rank stands, or stood until its process ended."""
        ...

    def replace(self, group: WorkerGroup, rank: int) -> None:
        """End a rank's process, if it has one that still lives, and start another in its place; returns at once. What the old one had
        not answered is never answered; calls on the new one wait until it is up.

        Args:
            group: of the rank.
            rank: in the group.
        """
        ...

    def release(self, group: WorkerGroup, rank: int) -> None:
        """End the process of a rank of an elastic group, if it still lives, and start no other; returns at once.

        Args:
            group: of the rank.
            rank: in the group.
        """
        ...

    def vacant(self, group: WorkerGroup) -> Collection[int]:
        """The absent ranks of an elastic group for which there is room now."""
        ...

    @property
    def wait_s(self) -> float:
        """How long room for the ranks that a run needs is waited for."""
        ...

    def sample_at(self, group: WorkerGroup, rank: int) -> int | None:
        """The id of the sample that a rank noted last (`Context.at`), also when its process is gone; None: it noted none."""
        ...

    def stacks(self, group: WorkerGroup, ranks: Sequence[int]) -> Mapping[int, str]:
        """Where the processes of ranks stand, in words, within seconds; those of which that is not known are left out.

        Args:
            group: of the ranks.
            ranks: in the group.
        """
        ...

    @property
    def hanging(self) -> Collection[str]:
        """Groups that are known to hang, where others are silent because of them; empty: each rank answers for itself."""
        ...

    def memory(self) -> Mapping[str, Memory]:
        """Node -> the memory of it and of the run's processes on it, as read last; waits for nobody."""
        ...

    @property
    def has_endpoint(self) -> bool:
        """Whether Prometheus can read metrics of its cluster."""
        ...

    def report(self, run: str, metrics: Mapping[str, float]) -> None:
        """Have the endpoint show metrics of a step.

        Args:
            run: its name.
            metrics: as the run writes them.
        """
        ...

    def close(self) -> None:
        """End every process, and remove what the backend left on any node. To close again is allowed."""
        ...


def check_machine(handles: Mapping[str, Handle], placement: Mapping[str, Place]) -> None:
    """Check that this machine has enough memory for the groups that run on it. On GPUs, the workers check the memory.

    Args:
        handles: group name -> its handle.
        placement: group -> its place; a group that is not in it has one rank.

    Raises:
        UserError: naming the setting, and what there is.
    """
    if machine_gpus():
        return
    for name, handle in handles.items():
        handle.worker_class.check_machine(
            handle.config, placement[name].ranks if name in placement else 1
        )
