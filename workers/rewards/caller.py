"""Caller: calls the plain reward functions of a worker, each where it can run."""

from __future__ import annotations

import inspect
import itertools
import threading
from bdb import BdbQuit
from collections.abc import Mapping, Sequence
from typing import Any

from ...dataflow.errors import Cancelled, Ended, NeedsMainThread, Planned, Silent
from .calls import AsyncCalls
from .function import Reward, as_failure
from .main_thread import Child, portable_result, signals_noticed

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
