"""Pins: segments that checkpoints of the ledgers refer to, which outlive their rows as long as the checkpoint is kept."""

from __future__ import annotations

from collections.abc import Iterable

from .segment_store import SegmentStore
from .segments import Segment


class Pins:
    """Stands between the ledgers, which free segments, and the store, which recycles their files."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._of: dict[str, set[Segment]] = {}
        self._freed: list[Segment] = []
        """Segments that no row needs any more, to be freed when no checkpoint needs them either."""
        self.segments: set[Segment] = set()
        """All segments that a checkpoint refers to."""

    def add(self, checkpoint: str, segments: Iterable[Segment]) -> None:
        """A checkpoint of this name refers to these segments."""
        self._of[checkpoint] = set(segments)
        self.segments |= self._of[checkpoint]

    def drop(self, *checkpoints: str) -> None:
        """These checkpoints are gone: free what only they referred to. Names that have no pins are ignored."""
        for checkpoint in checkpoints:
            self._of.pop(checkpoint, None)
        self.segments = set().union(*self._of.values())
        freed, self._freed = self._freed, []
        self.free(freed)

    def free(self, segments: Iterable[Segment]) -> None:
        """No row needs these segments any more: free them now, or when the last checkpoint that refers to them goes."""
        free_now: list[Segment] = []
        for segment in segments:
            (self._freed if segment in self.segments else free_now).append(segment)
        self._store.freed(free_now)

    def free_later(self, segment: Segment) -> None:
        """No row needs this segment once the log is on disk as far as it stands: free it after the next checkpoint."""
        self._freed.append(segment)
