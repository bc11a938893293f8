"""LogCutting: moves what no checkpoint needs any more from a run's log to its archive, in a thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from .log import Log, Position

logger = logging.getLogger(__name__)


class LogCutting:
    """Cuts a log when enough of it lies before the oldest checkpoint that is kept.

        IDLE ──begin──> ARCHIVING, in a thread ──finish──> IDLE

    The driver appends to the log meanwhile. A failure costs disk space alone: it is reported, and the next checkpoint tries again.

    Args:
        log: the log.
        min_bytes: how much must lie before the checkpoint.
        run: begins work and returns its future; None: in a thread.
    """

    def __init__(
        self, log: Log, min_bytes: int, run: Callable[[Callable[[], None]], Future[None]] | None = None
    ) -> None:
        self._log = log
        self._min_bytes = min_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="log-cutting")
        self._run = run or self._thread.submit
        self._work: Future[None] | None = None

    def begin(self, needed: Position) -> None:
        """Archive what lies before a position, if that is enough and nothing is being archived.

        Args:
            needed: of the oldest checkpoint that is kept. The log is committed up to its end.
        """
        if self._work is None and needed.offset - self._log.start.offset >= self._min_bytes:
            self._work = self._run(self._log.prepare_cut(needed))

    def finish(self, *, wait: bool = False) -> None:
        """Have the log go on in its shorter file, if that is ready. The log is committed up to its end.

        Args:
            wait: until it is ready.

        Raises:
            TakenOverError: another process has taken the log over.
        """
        if self._work is None or not (wait or self._work.done()):
            return
        work, self._work = self._work, None
        try:
            work.result()
            self._log.cut()
        except OSError as error:
            logger.warning("the log %s cannot be cut for now: %s", self._log.path, error)

    def close(self) -> None:
        """Wait until nothing is being archived."""
        self._thread.shutdown()
