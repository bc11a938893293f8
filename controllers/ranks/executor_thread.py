"""ExecutorThread: a worker and its executor on a thread of their own, for a process that takes calls on other threads."""

from __future__ import annotations

import os
import queue
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence

from ...workers.worker import Worker
from .executor import Executor, failure_of
from .row_io import DataAccess
from .tasks import Failure, Reply, Task

POLL_S = 1.0
"""Longest wait for a reply before the worker's activity is looked at."""


class Activity:
    """Counts what a worker does, as it says itself (`Context.advance`), so that work can be told from silence. A thread that merely
    said that the process lives could not tell them apart."""

    def __init__(self) -> None:
        self._count = self._seen = 0

    def __call__(self) -> None:
        self._count += 1

    def is_new(self) -> bool:
        """Whether the worker has done anything since this was asked last."""
        before, self._seen = self._seen, self._count
        return self._seen != before


def replies_of(coming: queue.SimpleQueue[Reply], activity: Activity, poll_s: float = POLL_S) -> Iterator[Reply]:
    """Yield the replies of a call to the last, and an empty one whenever none came for a while but the worker did something."""
    while True:
        try:
            reply = coming.get(timeout=poll_s)
        except queue.Empty:
            if activity.is_new():
                yield Reply()
            continue
        yield reply
        if reply.is_last:
            return


class ExecutorThread:
    """The thread makes the worker, carries out its calls, and closes it.

        starting ──the worker is made──> up ──────close──> closed
            └────────an exception──────> failed ──close──> closed

    Args:
        make_worker: called on the thread.
        activity: what the worker counts.
    """

    def __init__(self, make_worker: Callable[[], Worker], data: DataAccess, activity: Activity) -> None:
        self._data = data
        self._activity = activity
        self._requests: queue.SimpleQueue[Callable[[Executor], None] | None] = queue.SimpleQueue()
        """What other threads want done between two turns; None: the end."""
        self._up = threading.Event()
        self._worker: Worker | None = None
        self._failure: Failure | None = None
        self._thread = threading.Thread(target=self._work, args=(make_worker,), daemon=True)
        self._thread.start()

    def worker(self) -> Worker | Failure:
        """The worker, or why it could not be made; waits for it."""
        self._up.wait()
        if self._failure is not None:
            return self._failure
        assert self._worker is not None
        return self._worker

    def call(self, task: Task) -> Iterator[Reply]:
        """Yield the replies to a task; the last has `done` or `failure`. While the worker is being made, and does something (it fetches a
        model, say), empty ones say so."""
        while not self._up.wait(POLL_S):
            if self._activity.is_new():
                yield Reply()
        worker = self.worker()
        if isinstance(worker, Failure):
            yield Reply(failure=worker)
            return
        replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._requests.put(lambda executor: executor.add(task, replies.put))
        yield from replies_of(replies, self._activity)

    def cancel(self, number: int) -> None:
        """End a call, also one that has not come yet; returns at once."""
        self._requests.put(lambda executor: executor.cancel(number))

    def give_up(self, number: int, sample_ids: Sequence[int]) -> None:
        """Tell a call that these of its rows are no longer wanted; returns at once."""
        self._requests.put(lambda executor: executor.give_up(number, sample_ids))

    def close(self) -> None:
        """Close the worker after the turn that it has, and end the thread."""
        self._requests.put(None)
        self._thread.join()

    def _work(self, make_worker: Callable[[], Worker]) -> None:
        executor = None
        try:
            self._worker = make_worker()
            executor = Executor(self._worker, self._data)
        except BaseException as error:  # told as text: not every exception survives a pickle
            self._failure = failure_of(error)
        self._up.set()
        try:
            self._serve(executor)
        except BaseException:  # a worker that ends its thread ends its process: nobody waits for it in vain
            traceback.print_exc()
            os._exit(1)
        if self._worker is not None:
            self._worker.close()

    def _serve(self, executor: Executor | None) -> None:
        while True:
            while executor is not None and executor.busy and self._requests.empty():
                executor.take_turn()
            request = self._requests.get()
            if request is None:
                return
            if executor is not None:
                request(executor)
