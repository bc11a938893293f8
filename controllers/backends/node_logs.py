"""NodeLogs: brings the logs of ranks on machines that do not see the run's directory into it.

Such a rank writes its log beside the segments of its node. The node's server of segments is asked for what is new: every LOG_S, when a rank
has died, and at the end. A log that grows faster than MAX_BYTES between two questions loses the middle, which a line says.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...dataflow.buffer.disk import make_folder

logger = logging.getLogger(__name__)
LOG_S = 10.0
"""Seconds between two questions for what is new."""
MAX_BYTES = 256 << 10
"""Most bytes of a log in one answer."""
BRING_S = 5.0
"""Longest wait for the last of the logs, of all nodes together."""

NewText = Mapping[str, tuple[int, bytes]]
"""Name of a log -> byte at which the text begins, and the text."""


def new_text(folder: Path, known: Mapping[str, int]) -> NewText:
    """What stands in the logs of a folder behind what is known of them.

    Args:
        folder: it need not exist.
        known: name of a log -> bytes that were seen.

    Returns:
        Of each log that is new or has grown; the last MAX_BYTES at most.
    """
    found: dict[str, tuple[int, bytes]] = {}
    for path in sorted(folder.glob("*.log")):
        size, seen = path.stat().st_size, known.get(path.name, 0)
        begin = max(seen if seen <= size else 0, size - MAX_BYTES)
        if size > begin or path.name not in known:
            with path.open("rb") as file:
                file.seek(begin)
                found[path.name] = begin, file.read(size - begin)
    return found


class NodeLogs:
    """The logs of other machines, in the run's directory.

    Args:
        folder: of the logs in the run's directory.
        clock: seconds.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._asked_at = clock()
        self._asked: dict[Any, str] = {}
        """Promise of new text -> its node."""
        self._seen: dict[str, dict[str, int]] = {}
        """Node -> log -> bytes that were brought."""
        self.silent: set[str] = set()
        """Nodes that did not answer in time. Nobody waits for them again before they have answered."""

    def look(self, hosts: Mapping[str, Any]) -> None:
        """Take what has come, and ask again when it is time. Waits for nobody.

        Args:
            hosts: node -> the actor that reads its logs.
        """
        self._take_ready(0.0, list(self._asked))
        if self._clock() - self._asked_at >= LOG_S:
            self._ask(hosts)

    def bring(self, hosts: Mapping[str, Any]) -> None:
        """Bring what is there now, waiting no longer than BRING_S for all nodes together."""
        # What was asked for before may be older; the new answer has its text, too.
        self._asked = {promise: node for promise, node in self._asked.items() if node in self.silent}
        self._ask(hosts)
        self._take_ready(0.0, [promise for promise, node in self._asked.items() if node in self.silent])
        late = self._take_ready(BRING_S, [promise for promise, node in self._asked.items() if node not in self.silent])
        self.silent |= {self._asked[promise] for promise in late}

    def _ask(self, hosts: Mapping[str, Any]) -> None:
        """Ask the nodes that have answered what they were asked before."""
        self._asked_at = self._clock()
        for node in hosts.keys() - {*self._asked.values()}:
            self._asked[hosts[node].new_text.remote(self._seen.get(node, {}))] = node

    def _take_ready(self, wait_s: float, promises: list[Any]) -> list[Any]:
        """Take what has come of some promises; returns the others."""
        import ray

        if not promises:
            return []
        ready, late = ray.wait(promises, num_returns=len(promises), timeout=wait_s)
        self._take(ready)
        return late

    def _take(self, ready: list[Any]) -> None:
        import ray
        from ray.exceptions import RayError

        for promise in ready:
            node = self._asked.pop(promise)
            self.silent.discard(node)
            try:
                self.add(node, ray.get(promise))
            except RayError:  # its server has ended, and is started again
                continue
            except OSError as error:  # the disk is full, say: no reason to end a run
                logger.warning("the logs of node %s cannot be written for now: %s", node, error)

    def add(self, node: str, found: NewText) -> None:
        """Append new text of a node to the logs in the run's directory.

        Raises:
            OSError: the disk is full, say. What is missing comes with a later answer.
        """
        seen = self._seen.setdefault(node, {})
        for name, (begin, text) in found.items():
            if Path(name).name != name:
                continue
            make_folder(self._folder)
            path, known = self._folder / name, seen.get(name, 0)
            end = begin + len(text)
            if begin < known <= end:  # two answers hold it
                text = text[known - begin :]
            elif begin > known:
                text = f"... {begin - known} bytes are left out here; they are on node {node} ...\n".encode() + text
            if not path.exists():
                path.touch(mode=0o600)
            with path.open("ab") as file:
                file.write(text)
            seen[name] = end
