"""Local: run every worker group in this process, without Ray."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import itertools
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from ...dataflow.errors import DeadlineError, Silent, UserError
from ...dataflow.graph import Handle
from ...dataflow.metric_names import DRIVER
from ...workers.cuda_driver import gpu_model
from ...workers.node_memory import node_memory
from ...workers.worker import Context, Worker
from ..group import Call, WorkerGroup
from ..node_layout import shares_gpus, start_turns
from ..placement import Place
from ..ranks.executor import Executor
from ..ranks.row_io import DataAccess
from ..ranks.tasks import Task
from .backend import Backend, Event, Setup, check_machine, this_node
from .process_diagnostics import SIGNAL, Memory, memory_of, shown

# _SilenceWatch: interrupts a call in this process that makes no progress. The driver waits for the
# call in the same thread, so a second thread checks it every second. Time in a debugger does not
# count.
#
#     limit_s over ──> `Silent` is raised in the thread that executes the call
#     2 * limit_s  ──> the call hangs outside of Python: write all stacks to stderr, and exit


LOOK_S = 1.0
"""[s] Longest time between checks."""
ASLEEP_S = 5.0
"""[s] If a check is this late, the process or machine was suspended."""
DEBUGGERS = {"pdb.py", "bdb.py", "pydevd.py", "pydevd_bundle"}


class _SilenceWatch:
    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._limit_s = math.inf
        self._spoke = math.inf
        """[s] Time of the last progress; infinity while no call runs."""
        self._closed = threading.Event()
        self._armed = False
        self._interrupts = threading.current_thread() is threading.main_thread()
        """Whether a signal can interrupt the thread, even in a system call."""
        self._before = signal.signal(SIGNAL, self._interrupted) if self._interrupts else None
        self._looker: threading.Thread | None = None

    @contextmanager
    def over(self, limit_s: float) -> Iterator[None]:
        """Raise `Silent` if the block makes no progress for longer than `limit_s`."""
        self._limit_s, self._spoke = limit_s, time.monotonic()
        if self._looker is None and limit_s < math.inf:
            self._looker = threading.Thread(target=self._look, name="silence", daemon=True)
            self._looker.start()
        try:
            yield
        finally:
            self._spoke = math.inf

    def advance(self) -> None:
        if self._spoke < math.inf:
            self._spoke = time.monotonic()

    def close(self) -> None:
        self._closed.set()
        self._disarm()
        if self._interrupts and signal.getsignal(SIGNAL) == self._interrupted:
            signal.signal(SIGNAL, self._before)

    @property
    def _silent_s(self) -> float:
        return time.monotonic() - self._spoke

    def _look(self) -> None:
        looked = time.monotonic()
        while not self._closed.wait(each_s := min(LOOK_S, self._limit_s / 4)):
            late_s, looked = time.monotonic() - looked - each_s, time.monotonic()
            if late_s > ASLEEP_S or self._is_debugged():
                self.advance()
            silent_s = self._silent_s
            if silent_s < self._limit_s / 2:
                self._disarm()
            elif not self._armed:
                self._arm(max(self._limit_s / 2, 2 * self._limit_s - silent_s))
            if silent_s > self._limit_s:
                self._interrupt()

    def _interrupt(self) -> None:
        if self._interrupts:
            signal.pthread_kill(self._thread, SIGNAL)
        else:
            # Python runs signal handlers only in the main thread. In other threads, the error waits
            # for the next bytecode.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread), ctypes.py_object(Silent)
            )

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        # The call may have advanced since the signal.
        if self._silent_s > self._limit_s:
            raise Silent(_where(frame))

    def _is_debugged(self) -> bool:
        frame = sys._current_frames().get(self._thread)
        while frame is not None:
            if DEBUGGERS.intersection(Path(frame.f_code.co_filename).parts):
                return True
            frame = frame.f_back
        return False

    def _arm(self, seconds: float) -> None:
        """End the process after this time, even if Python cannot run. `_disarm` prevents it."""
        self._armed = True
        # Do not end an interactive session (with sys.ps1), whose variables would be lost.
        faulthandler.dump_traceback_later(
            seconds, exit=not hasattr(sys, "ps1"), file=sys.__stderr__ or 2
        )

    def _disarm(self) -> None:
        if self._armed:
            self._armed = False
            faulthandler.cancel_dump_traceback_later()


def _where(frame: FrameType | None) -> str:
    stack = traceback.extract_stack(frame) if frame is not None else []
    return shown([(each.filename, str(each.lineno), each.name) for each in reversed(stack)])


# Local

REST_S = 0.05


class Local(Backend):
    """Runs every group in this process, with one rank each. The groups take turns on one thread.

    `Local` ignores ranks and devices in the placement, so a script for Ray also runs under a
    debugger. It interrupts a call that makes no progress for too long, and the run ends.
    """

    in_process = True

    def __init__(self) -> None:
        self._executors: dict[str, Executor] = {}
        self._events: deque[Event] = deque()
        self._data: DataAccess | None = None
        self._watch: _SilenceWatch | None = None
        self._limits: dict[str, float] = {}
        """[s] Group -> longest time without progress."""
        self._silent: dict[str, str] = {}
        """Group that exceeded its limit -> its stack."""
        self._awake = threading.Event()

    def __repr__(self) -> str:
        return "Local()"

    def check(self, placement: Mapping[str, Place], handles: Mapping[str, Handle] = {}) -> None:
        """Raise a `UserError` if memory is too small, or a weight transport needs processes."""
        check_machine(handles, {})
        for leader in (leader for handle in handles.values() for leader in handle.leaders):
            if leader.vllm_backend:
                raise UserError(
                    f'Local(): transport="{leader.transport}" of {leader.called!r} needs processes that work at the same time; '
                    'use weft.RayBackend(), or transport="auto"'
                )

    def start(self, setup: Setup) -> dict[str, WorkerGroup]:
        groups: dict[str, WorkerGroup] = {}
        if unused := _unused(setup.placement):
            setup.tell(
                f"Local() runs one rank of each group in this process, without the devices of the placement ({unused}); "
                "use weft.RayBackend() to use them"
            )
        self._data = setup.files.access(this_node(), "local")
        self._watch, self._silent = _SilenceWatch(), {}
        for name in itertools.chain.from_iterable(start_turns(setup.placement, setup.follows)):
            handle, pool = setup.handles[name], setup.placement[name].pool
            place = Place(replace(pool, nodes=None))  # one rank, whatever the placement says
            worker = self._made(name, handle, setup, self._watch)
            self._executors[name] = Executor(worker, self._data)
            own = getattr(handle.config, "silence_s", None)
            self._limits[name] = max(setup.call_timeout_s, own or 0.0)
            if shares_gpus(setup.placement, name):
                worker.offload()
            groups[name] = WorkerGroup(name, handle, place, [worker.coordinates], self._submit)
        # Groups take turns in this order.
        self._executors = {name: self._executors[name] for name in setup.handles}
        return {name: groups[name] for name in setup.handles}

    def _made(self, name: str, handle: Handle, setup: Setup, watch: _SilenceWatch) -> Worker:
        context = Context(
            name=name,
            run_dir=setup.run_dir,
            seed=setup.seed,
            gateway=setup.gateway,
            advance=watch.advance,
            wake=self._awake.set,
        )
        try:
            with watch.over(setup.start_timeout_s):
                return handle.worker_class(handle.config, context)
        except Silent as silent:
            limit = f"{setup.start_timeout_s:g} s (a larger call_timeout_s allows more)"
            said = f"worker {name} is not up after {limit}\n{name}: {silent.stack}"
            raise DeadlineError(said) from None

    def _submit(self, rank: int, task: Task, call: Call) -> None:
        def begin() -> None:
            call.started = self.clock()  # do not count the wait for this thread

        executor = self._executors[call.group.name]
        executor.add_task(task, lambda reply: self._events.append(Event(call, rank, reply)), begin)

    def cancel(self, call: Call) -> None:
        self._executors[call.group.name].cancel_call(call.number)

    def give_up(self, call: Call, sample_ids: Sequence[int]) -> None:
        self._executors[call.group.name].give_up_rows(call.number, sample_ids)

    def wait(self, timeout_s: float) -> Sequence[Event]:
        assert self._watch is not None
        while not (self._events or self._silent) and (
            busy := {name: each for name, each in self._executors.items() if each.busy}
        ):
            if idle_s := min(executor.idle_s for executor in busy.values()):
                self._awake.wait(idle_s)
                self._awake.clear()
                for executor in busy.values():
                    executor.rouse()
            for name, executor in busy.items():
                if executor.busy:
                    self._take_turn(name, executor, self._watch)
        if self._silent:  # the caller ends the run within a second
            time.sleep(min(timeout_s, REST_S))
            return []
        events, self._events = list(self._events), deque()
        return events

    def _take_turn(self, name: str, executor: Executor, watch: _SilenceWatch) -> None:
        try:
            with watch.over(self._limits[name]):
                executor.take_turn()
        except Silent as silent:
            self._silent[name] = silent.stack

    def stacks(self, group: WorkerGroup, ranks: Sequence[int]) -> Mapping[int, str]:
        return {0: self._silent[group.name]} if group.name in self._silent else {}

    @property
    def hanging(self) -> Collection[str]:
        return self._silent

    def memory(self) -> Mapping[str, Memory]:
        own = memory_of(os.getpid())
        return {this_node(): Memory({DRIVER: own} if own else {}, node_memory(), gpu=gpu_model())}

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # close all, even if one raises
            for executor in self._executors.values():
                closing.callback(executor.worker.close)
            if self._watch is not None:
                closing.callback(self._watch.close)
                self._watch = None
            if self._data is not None:
                closing.callback(self._data.close)
                self._data = None
            self._executors.clear()


def _unused(placement: Mapping[str, Place]) -> str:
    """Describe a placement's ranks and GPUs that one process cannot use; may be empty.

    >>> from weft.controllers.placement import ResourcePool
    >>> _unused({"actor": Place(ResourcePool("p", gpus=4), ranks=2), "reward": Place(ResourcePool("q"))})
    'actor: 2 ranks, 4 GPUs'
    """
    asked: list[str] = []
    for name, place in placement.items():
        counts = {"rank": place.ranks if place.ranks > 1 else 0, "GPU": place.pool.gpus}
        said = [f"{number} {what}{'s' * (number > 1)}" for what, number in counts.items() if number]
        asked += [f"{name}: {', '.join(said)}"] if said else []
    return "; ".join(asked)
