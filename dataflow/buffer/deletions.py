"""Deletions: tells the other nodes which files have no live rows any more."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress

from .flight import SegmentClient
from .peers import Peers

MAX_FILES = 10_000
"""Files that are remembered for a peer which does not answer; beyond, the oldest are forgotten."""
MAX_PAUSE_S = 60.0
"""Longest pause between two attempts to tell a peer that failed."""

logger = logging.getLogger(__name__)


class Deletions:
    """Deletes files, and the copies of their messages, on all peers. A `SegmentStore` takes it as `delete_remote`.

    Nobody waits for it: its own thread tells each peer, over one channel, of all files that have gathered. A peer that does not
    answer is tried again, with longer and longer pauses, and does not keep the others from being told. What it still holds costs
    space on its own disk, no more.

    Args:
        peers: the servers to tell.
        timeout_s: the longest that a peer may take.
        pause_s: time in which files gather. After a failure, the pause before the next attempt doubles, up to `MAX_PAUSE_S`.
    """

    def __init__(self, peers: Peers, *, timeout_s: float = 5.0, pause_s: float = 0.2) -> None:
        self._pause_s = pause_s
        self._peers = [_PeerToTell(peers, location, timeout_s, pause_s) for location in peers.locations.values()]
        self._files: list[tuple[str, str]] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="deletions", daemon=True)
        self._thread.start()

    def __call__(self, node: str, file: str) -> None:
        with self._changed:
            self._files.append((node, file))
            self._changed.notify()

    def close(self, timeout_s: float = 2.0) -> None:
        """Tell the peers that answer what is left, for no longer than this."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._files or self._closing, self._until_next_attempt())
                files, self._files, closing = self._files, [], self._closing
            for peer in self._peers:
                peer.files += files
                del peer.files[:-MAX_FILES]
                if peer.files and (closing or peer.next_attempt <= time.monotonic()):
                    peer.tell()
            if closing:
                for peer in self._peers:
                    peer.hang_up()
                return
            time.sleep(self._pause_s)

    def _until_next_attempt(self) -> float | None:
        """Seconds until a peer that failed is tried again."""
        due = [peer.next_attempt for peer in self._peers if peer.files]
        return max(0.0, min(due) - time.monotonic()) if due else None


class _PeerToTell:
    """A peer, and the files that it has not deleted yet."""

    def __init__(self, peers: Peers, location: str, timeout_s: float, pause_s: float) -> None:
        self._peers, self._location, self._timeout_s = peers, location, timeout_s
        self.files: list[tuple[str, str]] = []
        self.next_attempt = 0.0
        self._first_pause_s, self._pause_s = pause_s, pause_s
        self._client: SegmentClient | None = None

    def tell(self) -> None:
        try:
            if self._client is None:
                self._client = self._peers.client(self._location, self._timeout_s)
            self._client.delete(self.files)
        except Exception as error:  # no failure of a deletion is a reason to end a run
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            self.next_attempt = time.monotonic() + self._pause_s
            logger.warning("%s; tried again in %.3g s", str(error).partition("\n")[0], self._pause_s)
            self.hang_up()
        else:
            self.files, self._pause_s = [], self._first_pause_s

    def hang_up(self) -> None:
        if self._client is not None:
            with suppress(Exception):
                self._client.close()
            self._client = None
