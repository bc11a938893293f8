"""Backend: what runs worker groups, as the driver knows it. `Local` (`local.py`) keeps every group in this process, so that breakpoints
work; `RayBackend` (`ray_backend.py`) gives each rank a process of its own; `Simulated` (`../simulation/`) has neither."""

from __future__ import annotations

import platform
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...dataflow.buffer.segments import SegmentReader, SegmentWriter
from ...dataflow.handle import Handle
from ...dataflow.node import ParameterEdge
from ..group import Call, WorkerGroup
from ..placement import Place
from ..row_io import DataAccess
from ..tasks import Reply

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
    """How often the run was started again; it is part of the writers' names, which are never used twice."""

    def access(
        self, node: str, name: str, *, peers: Mapping[str, str] | None = None, token: str | None = None
    ) -> DataAccess:
        """Open the files of a process.

        Args:
            node: the process's own.
            name: of the process, unique in the run.
            peers: name of another node -> where its server of segments listens.
            token: that lets one in there.
        """
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

    def check(self, placement: Mapping[str, Place]) -> None:
        """Refuse, before anything is started, what can be known to be impossible (UserError)."""
        ...

    def start(self, setup: Setup) -> dict[str, WorkerGroup]: ...

    def delete(self, node: str, file: str) -> None:
        """Have the other nodes delete a file that no row lies in any more, or their copies of it; returns at once."""
        ...

    def wait(self, timeout_s: float) -> Sequence[Event]:
        """The replies that have come; waits for one, and returns none when none came in time."""
        ...

    def clock(self) -> float:
        """Seconds since any moment, by which deadlines and timelines go."""
        ...

    def cancel(self, call: Call) -> None:
        """End an interruptible call on all of its ranks; its last reply comes all the same."""
        ...

    def give_up(self, call: Call, sample_ids: Sequence[int]) -> None:
        """Tell the ranks of a call that nobody wants these of its rows any more, so that they need not be worked on."""
        ...

    @property
    def has_processes(self) -> bool:
        """Whether each rank has a process of its own, which can end or fall silent. Otherwise the groups take turns, and while one works
        the others are silent."""
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
