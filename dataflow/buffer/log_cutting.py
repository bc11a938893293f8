"""LogCutting: moves what no checkpoint needs any more from a run's log to its archive, in a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for

from .log import Log, Position, PreparedCut
from .log_history import HISTORY

Work = Callable[[], PreparedCut]

logger = logging.getLogger(__name__)


class LogCutting:
    """Cuts a log when enough of it lies before the oldest checkpoint that is kept.

        IDLE ──begin──> ARCHIVING, in a thread ──finish──> IDLE

    The driver appends to the log meanwhile. A failure costs disk space alone: it is reported, and the next checkpoint tries again.

    Args:
        log: the log.
        min_bytes: how much must lie before the checkpoint.
        run: begins work and returns its future; None: in a thread.
        timeout_s: how long `finish(wait=True)` and `close` wait for the archive at most.
    """

    def __init__(
        self,
        log: Log,
        min_bytes: int,
        run: Callable[[Work], Future[PreparedCut]] | None = None,
        *,
        timeout_s: float = 60.0,
    ) -> None:
        self._log = log
        self._min_bytes = min_bytes
        self._run = run or _in_thread
        self._timeout_s = timeout_s
        self._work: Future[PreparedCut] | None = None

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
            wait: until it is ready, or the time is over. Then a warning says so, and the log stays as it is.

        Raises:
            TakenOverError: another process has taken the log over.
        """
        if self._work is None or not (wait or self._work.done()):
            return
        work, self._work = self._work, None
        if not self._ends_in_time(work):
            work.add_done_callback(_drop)
            return
        try:
            self._log.cut(work.result())
        except OSError as error:
            logger.warning("the log %s cannot be cut for now: %s", self._log.path, error)

    def close(self) -> None:
        """Wait until nothing is being archived, or the time is over. A file that the log has not gone on in is dropped."""
        work, self._work = self._work, None
        if work is not None:
            self._ends_in_time(work)
            work.add_done_callback(_drop)

    def _ends_in_time(self, work: Future[PreparedCut]) -> bool:
        if wait_for([work], self._timeout_s).done:
            return True
        logger.warning(
            "the log %s is not cut: the thread that archives it in %s was waited for, and did not end in %g s",
            self._log.path,
            self._log.path.parent / HISTORY,
            self._timeout_s,
        )
        return False


def _drop(work: Future[PreparedCut]) -> None:
    if work.exception() is None:
        work.result().drop()


def _in_thread(work: Work) -> Future[PreparedCut]:
    """Begin work in a thread that does not keep the process from ending."""
    future: Future[PreparedCut] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="log-cutting", daemon=True).start()
    return future
