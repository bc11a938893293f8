"""SegmentStore: find segment files that are no longer needed, in the driver."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

from .segments import FETCHED, FILE, FREE, MAX_FREE_BYTES, NEW, Segment, recycle

logger = logging.getLogger(__name__)


class SegmentStore:
    """Counts the live segments of each file, and recycles or deletes complete files without any.

    Replies of a writer arrive in order, so a segment in file k + 1 of a stream shows that file k is
    complete.

    Args:
        folder: the folder of this process's node.
        node: the name of that node.
        delete_remote: called as `(node, file)` for each dropped file, because other nodes may have
            copies of its messages (see `Deletions`). None if there is one node.
        max_free_bytes: bytes of free files to keep for writers to overwrite; the oldest are deleted
            first.
    """

    def __init__(
        self,
        folder: Path,
        node: str,
        delete_remote: Callable[[str, str], None] | None = None,
        *,
        max_free_bytes: int = MAX_FREE_BYTES,
    ) -> None:
        self.folder, self.node, self.delete_remote, self.max_free_bytes = (
            folder,
            node,
            delete_remote,
            max_free_bytes,
        )
        self._live: dict[tuple[str, str, int], _LiveFiles] = {}  # by node, writer and stream number
        self._ended: set[tuple[str, str]] = set()

    def published(self, segment: Segment) -> None:
        stream, sequence = _stream_of(segment)
        files = self._live.get(stream)
        if files is None:
            files = self._live[stream] = _LiveFiles()
        before = files.latest
        if sequence == before and sequence in files.offsets:
            files.offsets[sequence].add(segment.offset)
            return
        files.latest = max(before, sequence)
        files.offsets.setdefault(sequence, set()).add(segment.offset)
        if before < files.latest and not files.offsets.get(before, {0}):  # complete, and empty
            self._delete(stream, before)

    def freed(self, segments: Iterable[Segment]) -> None:
        """Note that no live row refers to these segments.

        Raises:
            ValueError: a segment was never published, or was freed before.
        """
        for segment in segments:
            stream, sequence = _stream_of(segment)
            files = self._live.get(stream)
            offsets = files.offsets.get(sequence) if files is not None else None
            if files is None or offsets is None or segment.offset not in offsets:
                raise ValueError(f"{segment} is freed, but is not live: never published, or freed before")
            offsets.remove(segment.offset)
            if not offsets and (sequence < files.latest or stream[:2] in self._ended):
                self._delete(stream, sequence)

    def writer_ended(self, writer_name: str, node: str) -> None:
        """Mark all files of a writer as complete, once all its replies have arrived."""
        self._ended.add((node, writer_name))
        streams = [s for s in self._live if s[:2] == (node, writer_name)]
        for stream in streams:
            for sequence in [k for k, offsets in self._live[stream].offsets.items() if not offsets]:
                self._delete(stream, sequence)
        if node == self.node:  # also recycle files without published segments
            self._sweep(f"{writer_name}.*.arrows")

    def sweep(self) -> int:
        """Recycle all files of this node without live segments. Call it at recovery, before any
        writer starts.

        Returns:
            The number of files.
        """
        for unfinished in (self.folder / FREE).glob(f"*{NEW}"):  # its writer died while creating it
            unfinished.unlink()
        return self._sweep("*.arrows")

    def _sweep(self, pattern: str) -> int:
        live = {
            _file_name(s, k)
            for s, files in self._live.items()
            if s[0] == self.node
            for k in files.offsets
        }
        dead = [
            p.name for p in self.folder.glob(pattern) if FILE.fullmatch(p.name) and p.name not in live
        ]
        for file in dead:
            self._recycle(self.node, file)
        return len(dead)

    def _delete(self, stream: tuple[str, str, int], sequence: int) -> None:
        del self._live[stream].offsets[sequence]
        if not self._live[stream].offsets:
            del self._live[stream]
        self._recycle(stream[0], _file_name(stream, sequence))

    def _recycle(self, node: str, file: str) -> None:
        try:
            delete_local(self.folder, self.node, node, file, self.max_free_bytes)
        except OSError as error:  # the file only costs disk space
            logger.warning("file %s of node %r cannot be recycled: %s", file, node, error)
        if self.delete_remote is not None:
            self.delete_remote(node, file)


class _LiveFiles:
    def __init__(self) -> None:
        self.offsets: dict[int, set[int]] = {}
        """Sequence number of a file -> offsets of its live segments."""
        self.latest = -1
        """The file that may still grow; only this one can be empty."""


def delete_local(
    folder: Path, here: str, node: str, file: str, max_free_bytes: int = MAX_FREE_BYTES
) -> None:
    """Drop a segment file: recycle it on its own node, or delete fetched copies of its messages on
    another node.

    Args:
        folder: the folder of this process's node.
        here: the name of that node.
        node: the node of the file.
        file: its name; the file need not exist.
        max_free_bytes: bytes of free files to keep for writers to overwrite.
    """
    if node != here:
        shutil.rmtree(folder / FETCHED / node / file, ignore_errors=True)
        return
    recycle(folder / file, max_free_bytes)


def _stream_of(segment: Segment) -> tuple[tuple[str, str, int], int]:
    return _stream(segment.node, segment.file)


@lru_cache(maxsize=1 << 14)  # the driver gets segments for each row, in few files
def _stream(node: str, file: str) -> tuple[tuple[str, str, int], int]:
    match = FILE.fullmatch(file)
    if match is None:
        raise ValueError(f"a segment's file is named writer.stream.sequence.arrows, not {file!r}")
    return (node, match[1], int(match[2])), int(match[3])


def _file_name(stream: tuple[str, str, int], sequence: int) -> str:
    return f"{stream[1]}.{stream[2]}.{sequence:06d}.arrows"


# Pins


class Pins:
    """Keeps segments that ledger checkpoints refer to, after their rows are finished.

    The ledgers free segments through it, and it passes them on to the store.
    """

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._of: dict[str, set[Segment]] = {}
        self._freed: list[Segment] = []
        """Segments that no row needs, to free once no checkpoint needs them."""
        self.segments: set[Segment] = set()

    def add(self, checkpoint: str, segments: Iterable[Segment]) -> None:
        self._of[checkpoint] = set(segments)
        self.segments |= self._of[checkpoint]

    def drop(self, *checkpoints: str) -> None:
        """Remove checkpoints, and free segments that only they pinned. Names without pins are
        ignored."""
        for checkpoint in checkpoints:
            self._of.pop(checkpoint, None)
        self.segments = set().union(*self._of.values())
        freed, self._freed = self._freed, []
        self.free(freed)

    def free(self, segments: Iterable[Segment]) -> None:
        """Free segments that no row needs, once no checkpoint needs them."""
        free_now: list[Segment] = []
        for segment in segments:
            (self._freed if segment in self.segments else free_now).append(segment)
        self._store.freed(free_now)

    def free_later(self, segment: Segment) -> None:
        """Free a segment after the next checkpoint, when the current log is on disk."""
        self._freed.append(segment)
