"""StoredParts: the segments that rows in flight lie in, their bytes, and those that no row needs any more."""

from __future__ import annotations

from collections import Counter

from .rows import Group, Part
from .segments import Segment


class StoredParts:
    """Counts the rows in flight of each part. A segment is freed with the last of them."""

    def __init__(self) -> None:
        self._parts: dict[Part, None] = {}
        self._freed: list[Segment] = []
        self.num_bytes = 0
        """Bytes of the segments that rows in flight lie in."""
        self.published_bytes = 0
        """Bytes published so far."""
        self.finished_bytes = 0.0
        """Those of finished groups: of a segment that several groups share, each has its rows' part."""
        self.largest_group_bytes = 0
        """Most bytes that a finished group had."""

    @property
    def segments(self) -> list[Segment]:
        """Segments that rows in flight refer to."""
        return [part.segment for part in self._parts]

    def add(self, segment: Segment, rows: int) -> Part:
        """A call wrote so many rows into a segment."""
        self.published_bytes += segment.num_bytes
        part = Part(segment, rows, rows)
        self.put(part)
        if not rows:  # a call may write a segment without rows: nobody will ever need it
            self.finished_bytes += segment.num_bytes
            self._free(part)
        return part

    def put(self, part: Part) -> None:
        """Rows in flight lie in this part."""
        self._parts[part] = None
        self.num_bytes += part.segment.num_bytes

    def discard(self, segment: Segment) -> None:
        """Note that no node will read a segment any more."""
        self._freed.append(segment)

    def finish(self, group: Group) -> None:
        """All rows of a group are finished."""
        num_bytes = 0.0
        columns = [column for rows in group.levels for _, column in sorted(rows.parts.items()) if column]
        for column in columns:  # in an order that does not depend on who was through first: a copy frees in the same
            for part, rows in _counted(column):
                num_bytes += part.row_bytes * rows
                part.in_flight -= rows
                if not part.in_flight:
                    self._free(part)
        self.finished_bytes += num_bytes
        self.largest_group_bytes = max(self.largest_group_bytes, round(num_bytes))

    def _free(self, part: Part) -> None:
        del self._parts[part]
        self.num_bytes -= part.segment.num_bytes
        self._freed.append(part.segment)

    def take_freed(self) -> list[Segment]:
        """Segments that no row in flight refers to any more, each given once."""
        freed, self._freed = self._freed, []
        return freed


def _counted(column: list[Part | None]) -> list[tuple[Part, int]]:
    """Each part in a column, and how often it is there."""
    first = column[0]
    if first is not None and column.count(first) == len(column):
        return [(first, len(column))]
    return [(part, number) for part, number in Counter(column).items() if part is not None]
