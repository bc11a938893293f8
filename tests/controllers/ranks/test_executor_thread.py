"""A worker on its thread: calls from other threads, failed starts, and progress against silence."""

import queue
import threading
from pathlib import Path

from toy import ToyConfig

from weft.controllers.backends.backend import Files
from weft.controllers.ranks.executor import ExecutorThread, replies_of
from weft.controllers.ranks.tasks import Failure, Reply, Task
from weft.workers.worker import Worker


class Threads(Worker):
    """Reports the threads that create, call and close it."""

    Config = ToyConfig

    def __init__(self) -> None:
        super().__init__(ToyConfig())
        self.seen = [threading.current_thread()]

    def threads(self) -> list[threading.Thread]:
        self.seen.append(threading.current_thread())
        return self.seen

    def close(self) -> None:
        self.seen.append(threading.current_thread())


def test_a_worker_is_made_called_and_closed_on_one_thread(tmp_path: Path):
    thread = ExecutorThread(Files(tmp_path).access("here", "thread"))
    thread.begin(Threads)
    thread.between_turns(lambda executor: executor.cancel_call(2))
    (reply,) = thread.replies_to(Task("threads", number=1))
    seen = reply.value
    assert list(thread.replies_to(Task("threads", number=2))) == [Reply(done=True)], (
        "it was cancelled before it came"
    )
    thread.close()
    assert len(seen) == 3 and len(set(seen)) == 1 and seen[0] is not threading.current_thread()


def test_a_worker_that_cannot_be_constructed_fails_every_call_with_the_reason(tmp_path: Path):
    def broken() -> Worker:
        raise SystemExit(3)

    thread = ExecutorThread(Files(tmp_path).access("here", "thread"))
    failure = thread.begin(broken)
    assert isinstance(failure, Failure) and "it called sys.exit(3)" in failure.message
    assert list(thread.replies_to(Task("threads"))) == [Reply(failure=failure)]
    thread.between_turns(lambda executor: executor.cancel_call(1))
    thread.close()


def test_a_working_worker_reports_progress_and_a_silent_one_does_not(tmp_path: Path):
    thread, replies = ExecutorThread(Files(tmp_path).access("here", "thread")), queue.SimpleQueue()
    coming = replies_of(replies, thread.has_advanced, poll_s=0.001)
    for _ in range(3):
        thread.advance()
        assert next(coming) == Reply(), "it has nothing to say, but it did something"
    done = Reply(done=True)
    threading.Timer(0.05, lambda: replies.put(done)).start()
    assert list(coming) == [done], "it did nothing, and nobody says otherwise"
