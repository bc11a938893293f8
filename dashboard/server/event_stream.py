"""EventStream: tells pages which parts of which run have changed, as server-sent events. One watcher looks for all pages.

    event: hello      data: {"runs": ["a", "b"]}
    event: changed    data: {"run": "a", "parts": ["metrics", "live"]}
    event: runs       data: {"runs": ["a", "b", "c"]}        a run has come, or is gone
    : beat                                                   every BEAT_S, so that a proxy keeps the connection

The wire format is three lines, which are written here: a package for it would come with handlers of signals of its own.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Collection
from typing import Any

from ..reading.catalogue import Catalogue
from ..reading.follow import changed, state_of

LOOK_S = 0.25
"""Seconds between two looks at the files."""
REST_FACTOR = 10
"""The watcher sleeps this many times the CPU time of its last look, between LOOK_S and MOST_REST_S: looking takes about a tenth of a core,
even with thousands of runs."""
MOST_REST_S = 1.0
BEAT_S = 15.0
MAX_WAITING = 100
"""Events that a page may be behind; one that does not read is told to look at everything anew."""


def event(kind: str, data: Any) -> bytes:
    """
    >>> event("changed", {"run": "a"})
    b'event: changed\\ndata: {"run": "a"}\\n\\n'
    """
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


class EventStream:
    """Watches the runs that pages have asked about, while there are any.

    Args:
        catalogue: of the runs.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._pages: dict[asyncio.Queue[bytes], Collection[str]] = {}
        """Queue of a page -> the runs that it asks about; none: all."""
        self._states: dict[str, dict[str, object]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self.over = asyncio.Event()
        """The server ends: streams end, too."""

    async def events(self, runs: Collection[str]) -> AsyncIterator[bytes]:
        """What a page is told, until it goes away.

        Args:
            runs: names; none: all.
        """
        queue: asyncio.Queue[bytes] = asyncio.Queue(MAX_WAITING)
        self._pages[queue] = frozenset(runs)
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())
        try:
            yield b"retry: 1000\n" + event("hello", {"runs": list(self._catalogue.readers)})
            while not self.over.is_set():
                try:
                    yield await asyncio.wait_for(queue.get(), BEAT_S)
                except TimeoutError:
                    yield b": beat\n\n"
        finally:
            del self._pages[queue]

    async def _watch(self) -> None:
        while self._pages:
            news, took_s = await asyncio.to_thread(self._timed_look)
            for message, run in news:
                for queue, asked in self._pages.items():
                    if run is None or not asked or run in asked:
                        self._put(queue, message)
            await asyncio.sleep(max(LOOK_S, min(MOST_REST_S, REST_FACTOR * took_s)))
        self._states.clear()

    def _put(self, queue: asyncio.Queue[bytes], message: bytes) -> None:
        if queue.full():
            while not queue.empty():
                queue.get_nowait()
            message = event("reload", {})
        queue.put_nowait(message)

    def _timed_look(self) -> tuple[list[tuple[bytes, str | None]], float]:
        """What has changed, and the seconds of the processor that it took to find out."""
        began = time.thread_time()
        return self._look(), time.thread_time() - began

    def _look(self) -> list[tuple[bytes, str | None]]:
        """What has changed since the last look, each with its run; None: it is of all pages."""
        found: list[tuple[bytes, str | None]] = []
        readers = self._catalogue.readers
        if self._states and readers.keys() != self._states.keys():
            found.append((event("runs", {"runs": list(readers)}), None))
        asked = set[str]().union(*self._pages.values()) if all(self._pages.values()) else readers.keys()
        states = {}
        for name, reader in readers.items():
            before = self._states.get(name)
            states[name] = state_of(reader.path) if name in asked or before is None else before
            if before is not None and (parts := changed(before, states[name])):
                found.append((event("changed", {"run": name, "parts": parts}), name))
        self._states = states
        return found
