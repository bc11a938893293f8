"""AsyncCalls: many calls of asynchronous reward functions in flight on one rank, with retries and a rate limit.

They run on an event loop of their own, in a thread of their own: sessions that a function keeps stay usable from call to call, and a
program that has a loop already, such as a notebook, is not in the way.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ...dataflow.errors import NeedsMainThread
from .function import Reward, as_failure
from .main_thread import signals_noticed

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

    def start(self, reward: Reward, call: Callable[[], Awaitable[Any]], deadline_s: float | None) -> Future[Any]:
        """Begin a call as soon as the limits of its function allow.

        Args:
            call: makes the awaitable, anew for each try.
            deadline_s: seconds that a try may take; then it is cancelled, and has failed.

        Returns:
            Its result, or what the last try raised.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_turn, args=(self._loop,), name="reward calls", daemon=True)
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

    async def _carry_out(self, reward: Reward, call: Callable[[], Awaitable[Any]], deadline_s: float | None) -> Any:
        limits = self._limits.setdefault(id(reward), _Limits(asyncio.Semaphore(reward.concurrency)))
        async with limits.places:
            for attempt in range(reward.retries + 1):
                await self._wait_for_turn(reward, limits)
                try:
                    return await asyncio.wait_for(_awaited(call()), deadline_s)
                except TimeoutError as error:
                    if attempt == reward.retries:
                        raise TimeoutError(str(error) or f"{reward.title} took longer than {deadline_s:g} s") from None
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
