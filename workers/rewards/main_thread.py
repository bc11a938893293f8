"""Run reward functions that set signal handlers.

Python can set signal handlers only on a process's main thread, which Ray occupies. Graders with
timeouts need handlers, such as math-verify, which TRL's accuracy reward calls. If a function tries
to set a signal handler on another thread, Weft abandons the call. From then on, Weft calls the
function on the main thread of a child process. Other functions stay in the rank's process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any, NoReturn

from ...dataflow.errors import NeedsMainThread

_set_handler = signal.signal
_here = threading.local()


@contextlib.contextmanager
def signals_noticed() -> Iterator[None]:
    """Inside the context, raise `NeedsMainThread` if code in this thread sets a signal handler.
    Does nothing on the main thread."""
    if threading.current_thread() is threading.main_thread():
        yield
        return
    _here.noticed = getattr(_here, "noticed", 0) + 1
    try:
        yield
    finally:
        _here.noticed -= 1


@functools.wraps(signal.signal)
def _signal(number: Any, handler: Any) -> Any:
    if getattr(_here, "noticed", 0):
        raise NeedsMainThread
    return _set_handler(number, handler)


# Graders catch Python's own ValueError and return 0, hence the special exception. The hook stays
# installed, because several threads may call rewards at the same time, and libraries may keep a
# reference to it. It affects only threads that call rewards.
signal.signal = _signal


class ForkedCaller:
    """A fork of this process that calls `function` on its main thread. Results must be picklable.

    A new interpreter could not get closures, objects with loaded models, or functions of the user's
    script, because none can be pickled. If another thread holds a lock during the fork, a function
    that needs the lock waits until the rank's deadline. The child ends with the thread that created
    it, so use it only there.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        parent = os.getpid()
        self._connection, theirs = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # it warns about locks of other threads
            self._pid = os.fork()
        if self._pid == 0:
            _serve(function, theirs, self._connection, parent)
        theirs.close()

    def call_function(self, *arguments: Any) -> Any:
        """Call the function. A note on its errors has the child's traceback."""
        try:
            self._connection.send(arguments)
            returned, value, trace = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            self._end_as_child_did()
        except BaseException:  # abandon the child: the next call must not get this reply
            self.close()
            raise
        if returned:
            return value
        value.add_note(f"in the child process:\n{trace}")
        raise value

    def close(self) -> None:
        self._connection.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def _end_as_child_did(self) -> NoReturn:
        """End this process as the function would have without a child."""
        _, status = os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(status)
        print(f"a reward function ended its process ({code})", file=sys.stderr, flush=True)
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(max(code, 1))


def _serve(function: Callable[..., Any], requests: Any, other_end: Any, parent: int) -> NoReturn:
    """Run the child's main loop. Never returns to the parent's code."""
    code = 1
    try:
        gc.freeze()  # the child must not finalise the parent's objects
        # End with the thread that created this process.
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
        # The parent may have ended already.
        if os.getppid() != parent:
            os._exit(1)
        other_end.close()
        # In the child, this thread is the main thread.
        _here.noticed = 0
        _set_handler(signal.SIGINT, signal.SIG_IGN)
        _set_handler(signal.SIGTERM, signal.SIG_DFL)
        while True:
            try:
                arguments = requests.recv()
            except (EOFError, OSError):
                break
            try:
                # A result that cannot be pickled must fail only this call.
                sent = pickle.dumps((True, function(*arguments), ""))
            except BaseException as error:
                trace = "".join(traceback.format_exception(error))
                sent = pickle.dumps((False, _portable(error), trace))
            requests.send_bytes(sent)
        code = 0
    finally:
        # `os._exit` does not flush.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _portable(error: BaseException) -> BaseException:
    """Return an exception that can be pickled and restored."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = None
    if type(copy) is type(error) and str(copy) == str(error):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def portable_result(value: Any) -> Any:
    """Convert a result to types that any process can unpickle, such as arrays to lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): portable_result(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [portable_result(inner) for inner in value]
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return _AsText(repr(value))


@dataclass(frozen=True)
class _AsText:
    """Text of an invalid reward, for the error message."""

    text: str

    def __repr__(self) -> str:
        return self.text
