"""Takes what a rollout worker yields, as the executor of a rank does."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any


class AsRank:
    """Context of a worker, and the parts of its calls."""

    def __init__(self, address: Any) -> None:
        from weft.workers.worker import Context

        self._came = threading.Event()
        self.context = Context(name="rollout", gateway=address, wake=self._came.set)

    def parts_of(self, steps: Iterable[Any]) -> Iterator[Any]:
        """Yield the parts of a call. While the call is idle, sleep until something comes."""
        from weft.workers.worker import IDLE

        for made in steps:
            if made is IDLE:
                self._came.wait(1.0)  # a rank gives an idle call a turn at least this often
                self._came.clear()
            elif made is not None:
                yield made
