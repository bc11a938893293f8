"""AsyncCalls: many calls of asynchronous reward functions in flight on one rank, with retries and a rate limit.

They run on an event loop of their own, in a thread of their own: sessions that a function keeps stay usable from call to call, and a
program that has a loop already, such as a notebook, is not in the way.
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
from .main_thread import Child, portable_result, signals_noticed

CLOSE_S = 10.0
"""Longest time that the end of the thread is waited for."""
PAUSE_S = 0.5
"""Before the first repetition of an asynchronous call; each one waits twice as long as the one before."""
LONGEST_PAUSE_S = 30.0
"""Longest pause before a call is repeated."""


@dataclass
class _Limits:
    """Who may call a function now. Used on the loop's thread alone."""

    places: asyncio.Semaphore
    begins_s: float = 0.0
    """When the next call may begin, by the loop's clock."""


@dataclass
class AsyncCalls:
    """Calls in flight."""

    _loop: asyncio.AbstractEventLoop | None = None
    _beat: Future[None] | None = None
    """A coroutine that does nothing, begun when `is_alive` was asked last."""
    _thread: threading.Thread | None = None
    _functions: dict[int, Callable[..., Any]] = field(default_factory=dict[int, Callable[..., Any]])
    """Those that were called, which may keep something open."""
    _limits: dict[int, _Limits] = field(default_factory=dict[int, _Limits])

    def start(
        self, reward: Reward, call: Callable[[], Awaitable[Any]], deadline_s: float | None
    ) -> Future[Any]:
        """Begin a call as soon as the limits of its function allow.

        Args:
            call: makes the awaitable, anew for each try.
            deadline_s: seconds that a try may take; then it is cancelled, and has failed.

        Returns:
            Its result, or what the last try raised.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_turn, args=(self._loop,), name="reward calls", daemon=True
            )
            self._thread.start()
        self._functions[id(reward.function)] = reward.function
        return asyncio.run_coroutine_threadsafe(self._carry_out(reward, call, deadline_s), self._loop)

    @property
    def is_started(self) -> bool:
        """Whether there is a thread."""
        return self._loop is not None

    def is_alive(self) -> bool:
        """Whether the loop turns; a function that blocks it stops all others."""
        if self._beat is None or self._beat.done():
            was_alive, self._beat = True, None
        else:
            was_alive = False
        if self._loop is not None and self._beat is None:
            self._beat = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        return was_alive

    def close(self) -> None:
        """Cancel what is in flight, close what functions keep open (`aclose`), and end the thread."""
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
                await self._wait_for_turn(reward, limits)
                try:
                    return await asyncio.wait_for(_awaited(call()), deadline_s)
                except TimeoutError as error:
                    if attempt == reward.retries:
                        raise TimeoutError(
                            str(error) or f"{reward.title} took longer than {deadline_s:g} s"
                        ) from None
                except Exception:
                    if attempt == reward.retries:
                        raise
                await asyncio.sleep(min(PAUSE_S * 2**attempt, LONGEST_PAUSE_S))
        raise AssertionError("a last attempt returns or raises")

    async def _wait_for_turn(self, reward: Reward, limits: _Limits) -> None:
        if reward.per_second is not None:
            now = asyncio.get_running_loop().time()
            begins = max(now, limits.begins_s)
            limits.begins_s = begins + 1 / reward.per_second
            await asyncio.sleep(begins - now)

    async def _end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        closes = [getattr(function, "aclose", None) for function in self._functions.values()]
        await asyncio.gather(*(close() for close in closes if close is not None), return_exceptions=True)


async def _awaited(call: Awaitable[Any]) -> Any:
    """The result of a call. Whatever it raises is a failure of this call alone: a `SystemExit` would end the loop, and all other calls."""
    try:
        return await call
    except NeedsMainThread:
        raise RuntimeError(
            "an asynchronous function cannot set a signal handler, as signal.alarm and math-verify's timeouts do: write it as a plain "
            "function, which runs on a main thread, or switch the timeout off"
        ) from None
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():  # the deadline passed, or Weft gave the call up
            raise
        raise as_failure(error) from error
    except GeneratorExit:  # the loop closes what was never finished
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


# Caller
#
# Caller: calls the plain reward functions of a worker, each where it can run.


Logged = list[tuple[str, float]]
"""Metrics that functions logged."""


class Caller:
    """Calls functions in this thread, or, once one has asked for a signal here and this is not the main thread, in a child process.

    Args:
        calls: awaits what a plain function returns instead of a result.
    """

    def __init__(self, rewards: Sequence[Reward], calls: AsyncCalls) -> None:
        self._rewards = rewards
        self._calls = calls
        self._apart: set[int] = set()
        """Functions that need a main thread."""
        self._child: Child | None = None

    def call(self, f: int, arguments: Mapping[str, Any]) -> tuple[Any, Logged]:
        """The result of function number `f`, and the metrics that it logged.

        Raises:
            Exception: from the function. A `BaseException` becomes a RuntimeError.
        """
        if f not in self._apart:
            try:
                with signals_noticed():
                    return _called(self._rewards[f], arguments, self._calls)
            except NeedsMainThread:
                self._apart.add(f)
        if self._child is None:
            self._child = Child(self._call_in_child)
        try:
            return self._child.call(f, arguments)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._child = None  # it was closed
            raise

    def close(self) -> None:
        """End the child process."""
        if self._child is not None:
            self._child.close()

    def _call_in_child(self, f: int, arguments: Mapping[str, Any]) -> tuple[Any, Logged]:
        if self._calls.is_started:
            self._calls = AsyncCalls()  # a fork has no threads
        result, logged = _called(self._rewards[f], arguments, self._calls)
        return portable_result(result), logged


def _called(reward: Reward, arguments: Mapping[str, Any], calls: AsyncCalls) -> tuple[Any, Logged]:
    logged: Logged = []
    log = {
        "log_extra": lambda name, values: None,
        "log_metric": lambda name, value: logged.append((name, float(value))),
    }
    try:
        result = reward.call(arguments, log)
        if inspect.isawaitable(result):  # a wrapper that does not say that it is asynchronous
            tries = itertools.chain([result], iter(lambda: reward.call(arguments, log), None))
            future = calls.start(reward, lambda: next(tries), None)
            try:
                result = future.result()
            finally:
                future.cancel()
    except (Exception, NeedsMainThread, BdbQuit, Ended, Silent, Cancelled, Planned):
        raise
    except KeyboardInterrupt as error:
        if threading.current_thread() is threading.main_thread():  # Ctrl-C
            raise
        raise as_failure(error) from error
    except BaseException as error:
        raise as_failure(error) from error
    return result, logged


# Deadline
#
# deadline: a time limit on user code that runs in this process.


SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGVTALRM)
"""Interrupts the main thread. `SIGALRM` and its timer belong to user code: graders such as math-verify set and clear them."""
_DEBUGGERS = ("bdb", "pdb", "pydevd", "_pydevd_bundle")
"""Modules of debuggers: Python's own (and IPython's), and those of editors."""


class _Watch:
    """A thread that sends the main thread a signal when a deadline is over, and again each time the same number of seconds later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due_s = math.inf
        self._wakes_s = math.inf
        """When the thread looks again by itself."""
        self._thread: threading.Thread | None = None

    def set(self, due_s: float) -> None:
        """Set when the signal is due, by the monotonic clock; infinite: never."""
        self._due_s = due_s
        if due_s >= self._wakes_s and self._thread is not None and self._thread.is_alive():
            return  # it looks before that, so a call in time costs no switch of threads
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
                    self._changed.wait(None if left_s == math.inf else min(left_s, threading.TIMEOUT_MAX))
                    continue
                self._due_s = math.inf  # until the handler sets the next one
            signal.pthread_kill(main, SIGNAL)


_watch = _Watch()


@contextlib.contextmanager
def deadline(seconds: float | None, what: str) -> Iterator[None]:
    """Raise TimeoutError in the code of the `with` block after this many seconds, and again while it goes on; None: never.

    Code that catches the error still fails when it is done. The deadline uses another signal than `SIGALRM`, so the block may use
    `signal.alarm`; a handler and a timer that it leaves behind are removed. Deadlines work on the main thread only (other threads log a
    warning), and not inside a C function that does not return. A program stopped in a debugger is not interrupted.

    Args:
        what: name of the block, for the error.
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
            signal.signal(SIGNAL, before if before is not None and before != signal.SIG_DFL else _ignore)
        if rung:  # the code has caught it
            raise TimeoutError(too_late)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The signal of a deadline that was met at the last moment."""


@contextlib.contextmanager
def _own_alarm() -> Iterator[None]:
    """Restore the handler and the timer of `SIGALRM` after the block."""
    handler, since_s = signal.getsignal(signal.SIGALRM), time.monotonic()
    left_s, each_s = signal.getitimer(signal.ITIMER_REAL)
    try:
        yield
    finally:
        if left_s:
            passed_s = time.monotonic() - since_s
            signal.setitimer(signal.ITIMER_REAL, max(left_s - passed_s, 1e-3), each_s)
        elif signal.getitimer(signal.ITIMER_REAL)[0]:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if handler is not None and signal.getsignal(signal.SIGALRM) is not handler:
            signal.signal(signal.SIGALRM, handler)


def _in_debugger(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).split(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False
