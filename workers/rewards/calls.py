"""Concurrent calls of asynchronous reward functions on a rank, with retries and a rate limit.

The calls run on an event loop in a separate thread. So a function can keep sessions open between
calls, and calls work in programs with a running loop, such as notebooks.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import math
import signal
import threading
import time
import warnings
from bdb import BdbQuit
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from ...dataflow.errors import Cancelled, Ended, NeedsMainThread, Planned, Silent
from .function import Reward, as_failure
from .main_thread import ForkedCaller, portable_result, signals_noticed

CLOSE_S = 10.0
"""[s] Maximum wait for the thread to end."""
PAUSE_S = 0.5
"""[s] Pause before the first retry of an asynchronous call. It doubles, up to LONGEST_PAUSE_S."""
LONGEST_PAUSE_S = 30.0


@dataclass
class _Limits:
    """Concurrency and rate limits of a function. Only the loop's thread uses them."""

    places: asyncio.Semaphore
    begins_s: float = 0.0
    """Earliest start of the next call, by the loop's clock."""


@dataclass
class _AsyncCalls:
    _loop: asyncio.AbstractEventLoop | None = None
    _beat: Future[None] | None = None
    """A no-op coroutine, scheduled by the last call of `is_alive`."""
    _thread: threading.Thread | None = None
    _functions: dict[int, Callable[..., Any]] = field(default_factory=dict[int, Callable[..., Any]])
    """Functions that were called, and may need to be closed."""
    _limits: dict[int, _Limits] = field(default_factory=dict[int, _Limits])

    def start(
        self, reward: Reward, call: Callable[[], Awaitable[Any]], deadline_s: float | None
    ) -> Future[Any]:
        """Start a call as soon as its function's limits allow. Return a future with the result or
        the last try's exception. `call` creates an awaitable for each try. A try may take
        `deadline_s` seconds."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            turning = (self._loop,)
            self._thread = threading.Thread(target=_turn, args=turning, name="reward calls", daemon=True)
            self._thread.start()
        self._functions[id(reward.function)] = reward.function
        return asyncio.run_coroutine_threadsafe(self._carry_out(reward, call, deadline_s), self._loop)

    @property
    def is_started(self) -> bool:
        return self._loop is not None

    def is_alive(self) -> bool:
        """Return whether the loop responds. While a function blocks it, all others wait too."""
        is_alive = self._beat is None or self._beat.done()
        if is_alive and self._loop is not None:
            self._beat = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        return is_alive

    def close(self) -> None:
        """Cancel calls in flight, close functions (`aclose`), and end the thread."""
        if self._loop is not None and self._thread is not None:
            loop, self._loop = self._loop, None
            ended = asyncio.run_coroutine_threadsafe(self._end(), loop)
            ended.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
            self._thread.join(CLOSE_S)

    async def _carry_out(
        self, reward: Reward, call: Callable[[], Awaitable[Any]], deadline_s: float | None
    ) -> Any:
        limits = self._limits.setdefault(id(reward), _Limits(asyncio.Semaphore(reward.concurrency)))
        async with limits.places:
            for attempt in range(reward.retries + 1):
                if reward.per_second is not None:
                    now = asyncio.get_running_loop().time()
                    begins_s = max(now, limits.begins_s)
                    # Reserve the time slot before other calls reserve theirs.
                    limits.begins_s = begins_s + 1 / reward.per_second
                    await asyncio.sleep(begins_s - now)
                try:
                    return await asyncio.wait_for(_awaited(call()), deadline_s)
                except TimeoutError as error:
                    if attempt == reward.retries:
                        # Only the function's own TimeoutError has a text.
                        why = str(error) or f"{reward.title} took longer than {deadline_s:g} s"
                        raise TimeoutError(why) from None
                except Exception:
                    if attempt == reward.retries:
                        raise
                await asyncio.sleep(min(PAUSE_S * 2**attempt, LONGEST_PAUSE_S))
        raise AssertionError("a last attempt returns or raises")

    async def _end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        closes = [getattr(function, "aclose", None) for function in self._functions.values()]
        await asyncio.gather(*(close() for close in closes if close is not None), return_exceptions=True)


async def _awaited(call: Awaitable[Any]) -> Any:
    """Return a call's result. A `SystemExit` fails only this call, instead of ending the loop."""
    try:
        return await call
    except NeedsMainThread:
        raise RuntimeError(
            "an asynchronous function cannot set a signal handler, as signal.alarm and "
            "math-verify's timeouts do: write it as a plain function, which runs on a main "
            "thread, or switch the timeout off"
        ) from None
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():  # the deadline has passed, or Weft has cancelled the call
            raise
        raise as_failure(error) from error
    except GeneratorExit:  # the loop is closing unfinished calls
        raise
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        raise as_failure(error) from error


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    with signals_noticed():
        try:
            loop.run_forever()
        finally:
            loop.close()


Logged = list[tuple[str, float]]
"""Metrics that functions log."""


class Caller:
    """Calls plain functions in this thread. If a function returns an awaitable, `calls` awaits it.
    Functions that set signal handlers outside the main thread move to a child process."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self.rewards = rewards
        self.calls = _AsyncCalls()
        self._apart: set[int] = set()
        """Indexes of functions that need a main thread."""
        self._child: ForkedCaller | None = None

    def call_reward(self, f: int, arguments: Mapping[str, Any]) -> tuple[Any, Logged]:
        """Return the result of function number `f`, and the metrics that it logged. Raises the
        function's exceptions; a `BaseException` becomes a RuntimeError."""
        if f not in self._apart:
            try:
                with signals_noticed():
                    return _called(self.rewards[f], arguments, self.calls)
            except NeedsMainThread:
                self._apart.add(f)
        if self._child is None:
            self._child = ForkedCaller(self._call_in_child)
        try:
            return self._child.call_function(f, arguments)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._child = None  # the child was closed
            raise

    def close(self) -> None:
        self.calls.close()
        if self._child is not None:
            self._child.close()

    def _call_in_child(self, f: int, arguments: Mapping[str, Any]) -> tuple[Any, Logged]:
        if self.calls.is_started:
            self.calls = _AsyncCalls()  # a fork has no threads
        result, logged = _called(self.rewards[f], arguments, self.calls)
        return portable_result(result), logged


def _called(reward: Reward, arguments: Mapping[str, Any], calls: _AsyncCalls) -> tuple[Any, Logged]:
    logged: Logged = []
    log = {
        "log_extra": lambda name, values: None,
        "log_metric": lambda name, value: logged.append((name, float(value))),
    }
    try:
        result = reward.call_function(arguments, log)
        if inspect.isawaitable(result):  # a wrapper hid that the function is asynchronous
            # Each retry calls the function again, because an awaitable can be awaited only once.
            tries = itertools.chain([result], iter(lambda: reward.call_function(arguments, log), None))
            future = calls.start(reward, lambda: next(tries), None)
            try:
                result = future.result()
            finally:
                # The deadline may interrupt `result()` and leave the call in flight.
                future.cancel()
    # Errors that control Weft or the debugger pass unchanged, like any `Exception`.
    except (Exception, NeedsMainThread, BdbQuit, Ended, Silent, Cancelled, Planned):
        raise
    except KeyboardInterrupt as error:
        if threading.current_thread() is threading.main_thread():  # Ctrl-C
            raise
        raise as_failure(error) from error
    except BaseException as error:
        raise as_failure(error) from error
    return result, logged


# Time limits on user code in this process


SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGVTALRM)
"""Signal that interrupts the main thread. `SIGALRM` and its timer belong to user code: graders such
as math-verify set and clear them."""


class _Watch:
    """A thread that signals the main thread at a deadline, and repeatedly after it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due_s = math.inf
        self._wakes_s = math.inf
        """Time of the thread's next check."""
        self._thread: threading.Thread | None = None

    def set(self, due_s: float) -> None:
        """Set when to send the signal, by the monotonic clock; infinity disables it."""
        self._due_s = due_s
        if due_s >= self._wakes_s and self._thread is not None and self._thread.is_alive():
            return  # the thread checks earlier, so calls that end in time need no thread switch
        with self._changed:
            if self._thread is None or not self._thread.is_alive():  # a fork has no threads
                self._thread = threading.Thread(target=self._work, name="deadline", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _work(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while True:
            with self._changed:
                self._wakes_s = due_s = self._due_s
                left_s = due_s - time.monotonic()
                if left_s > 0:
                    self._changed.wait(
                        None if left_s == math.inf else min(left_s, threading.TIMEOUT_MAX)
                    )
                    continue
                self._due_s = math.inf
            signal.pthread_kill(main, SIGNAL)


_watch = _Watch()


@contextlib.contextmanager
def deadline(seconds: float | None, what: str) -> Iterator[None]:
    """Raise TimeoutError in the `with` block after this many seconds (None: never), and repeatedly
    until the block ends. `what` names the block in messages.

    Code that catches the error still fails at the end of the block. The block may call
    `signal.alarm`, because the deadline does not use `SIGALRM`; a handler or timer that it leaves
    behind is removed. Deadlines work only on the main thread; other threads warn. They interrupt
    neither C functions nor a program that is stopped in a debugger.
    """
    if threading.current_thread() is not threading.main_thread():
        if seconds is not None:
            warnings.warn(
                f"{what} runs without a deadline: deadlines work only on the main thread", stacklevel=3
            )
        yield
        return
    with _own_alarm():
        if seconds is None:
            yield
            return
        too_late = f"{what} took longer than {seconds:g} s"
        armed, rung = True, False

        def ring(number: int, frame: FrameType | None) -> None:
            nonlocal rung
            if not armed:
                return
            _watch.set(time.monotonic() + seconds)
            if not _in_debugger(frame):
                rung = True
                raise TimeoutError(too_late)

        before = signal.signal(SIGNAL, ring)
        _watch.set(time.monotonic() + seconds)
        try:
            yield
        finally:
            armed = False
            _watch.set(math.inf)
            # A signal may arrive after a block that ended in time.
            is_set = before is not None and before != signal.SIG_DFL
            signal.signal(SIGNAL, before if is_set else lambda number, frame: None)
        if rung:
            raise TimeoutError(too_late)


@contextlib.contextmanager
def _own_alarm() -> Iterator[None]:
    """Restore the handler and timer of `SIGALRM` after the block."""
    handler, since_s = signal.getsignal(signal.SIGALRM), time.monotonic()
    left_s, each_s = signal.getitimer(signal.ITIMER_REAL)
    try:
        yield
    finally:
        if left_s:
            passed_s = time.monotonic() - since_s
            # 0 would disable the timer.
            signal.setitimer(signal.ITIMER_REAL, max(left_s - passed_s, 1e-3), each_s)
        elif signal.getitimer(signal.ITIMER_REAL)[0]:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if handler is not None and signal.getsignal(signal.SIGALRM) is not handler:
            signal.signal(signal.SIGALRM, handler)


def _in_debugger(frame: FrameType | None) -> bool:
    debuggers = ("bdb", "pdb", "pydevd", "_pydevd_bundle")  # those of Python, IPython and editors
    while frame is not None:
        if str(frame.f_globals.get("__name__")).split(".")[0] in debuggers:
            return True
        frame = frame.f_back
    return False
