"""Peers: how a process reaches the segments of other nodes. A node fetches each message at most once."""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ..errors import UserError, nearest
from .disk import make_folder
from .flight import SegmentClient
from .segment_files import full_disk_named, write_all
from .segments import Segment

VERIFIED_AT_ONCE = 64
"""Segments that a server is asked for in one call."""


@dataclass(frozen=True)
class Peers:
    """The segment servers of a run. `Peers.fetch` is what a `SegmentReader` takes as its `fetch`."""

    locations: Mapping[str, str]
    """Name of a node -> where its server listens."""
    token: str
    """The secret that all of them ask for."""
    certificates: Mapping[str, bytes] = field(default_factory=dict)
    """Location -> the server's certificate, as PEM. A location without one is not encrypted."""
    timeout_s: float = 60.0
    """The longest that a fetch may take."""

    def client(self, location: str, timeout_s: float) -> SegmentClient:
        """A channel to one of the servers."""
        return SegmentClient(location, self.token, self.certificates.get(location), timeout_s=timeout_s)

    def unreadable(self, segments: Iterable[Segment]) -> dict[Segment, str]:
        """Those of the segments that cannot be read on their nodes, and why. Nodes that are no peers are passed over."""
        found: dict[Segment, str] = {}
        for node, own in itertools.groupby(sorted(segments, key=_place), key=lambda segment: segment.node):
            if (location := self.locations.get(node)) is None:
                continue
            left = list(own)
            with self.client(location, self.timeout_s) as client:
                while left:
                    some, left = left[:VERIFIED_AT_ONCE], left[VERIFIED_AT_ONCE:]
                    try:
                        problems = client.verify(some)
                    except TimeoutError as error:  # it is asked no more: each question may take as long
                        some, left = [*some, *left], []
                        problems = [str(error)] * len(some)
                    found |= {segment: problem for segment, problem in zip(some, problems, strict=True) if problem}
        return found

    def fetch(self, segment: Segment, path: Path) -> None:
        """Fetch a message to a file, unless it exists: of the processes of a node that want a message, one fetches it.

        Args:
            segment: of another node.
            path: the file, which then holds an Arrow IPC stream.

        Raises:
            UserError: the node is none of these.
            TimeoutError: the message did not arrive in time.
            DamagedSegment: the other node found the message damaged.
        """
        if (location := self.locations.get(segment.node)) is None:
            hint = nearest(segment.node, self.locations) or f"; there are {', '.join(self.locations)}"
            raise UserError(f"segment {segment.file} lies on node {segment.node!r}, which is not a peer{hint}")
        make_folder(path.parent)
        deadline = time.monotonic() + self.timeout_s
        with open(f"{path}.lock", "wb") as lock:
            self._wait_for(lock, deadline, f"fetching file {segment.file} of node {segment.node!r} from {location}")
            if path.exists():
                return
            with self.client(location, max(deadline - time.monotonic(), 1e-3)) as client:
                stream = client.fetch(segment)
            part = path.with_name(f"{path.name}.part")
            who = f"the copy of a message of node {segment.node!r}"
            with full_disk_named(path.parent, who, len(stream)), open(part, "wb") as file:
                write_all(file.fileno(), [stream], 0)
            os.rename(part, path)

    def _wait_for(self, lock: BinaryIO, deadline: float, what: str) -> None:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if (left := deadline - time.monotonic()) <= 0:
                    raise TimeoutError(
                        f"{what}: another process of this node has been fetching it for {self.timeout_s} s"
                    ) from None
                time.sleep(min(0.002, left))


def _place(segment: Segment) -> tuple[str, str, int]:
    return segment.node, segment.file, segment.offset
