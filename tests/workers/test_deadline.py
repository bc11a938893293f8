import bdb
import signal
import threading
import time

import pytest

from weft.workers.rewards.calls import deadline


def test_code_that_takes_too_long_is_interrupted_and_named():
    before = signal.getsignal(signal.SIGALRM)
    with (
        pytest.raises(TimeoutError, match=r"the judge took longer than 0\.02 s"),
        deadline(0.02, "the judge"),
    ):
        time.sleep(10)
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (
        0.0,
        0.0,
    )


def test_code_that_swallows_the_first_interruption_is_interrupted_again():
    times = 0
    with pytest.raises(TimeoutError), deadline(0.02, "the judge"):
        while times < 3:
            try:
                time.sleep(10)
            except TimeoutError:
                times += 1
        time.sleep(10)
    assert times == 3


def test_code_in_time_and_code_without_a_deadline_complete():
    with deadline(10, "the judge"), deadline(None, "the judge"):
        pass


def test_a_debugger_suspends_deadlines():
    debugger = bdb.Bdb()
    with deadline(0.02, "the judge"):
        debugger.runcall(time.sleep, 0.1)


def test_outside_the_main_thread_a_missing_deadline_is_warned_of():
    said: list[str] = []

    def work() -> None:
        with pytest.warns(UserWarning) as caught, deadline(0.01, "the judge"):
            pass
        said.extend(str(one.message) for one in caught)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert said == ["the judge runs without a deadline: deadlines work only on the main thread"]
