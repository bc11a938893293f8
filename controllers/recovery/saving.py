"""Saving: writes the checkpoints of a run, one at a time, while the run goes on.

    IDLE ──begin──> COPYING ──every group has copied its state──> WRITING ──every part is on the disk──> NAMING ──> IDLE
      ^                └──────────────── the disk is full ───────────┴──────────────────────────────────────┤
      └──────────────────────────────────────── given up ───────────────────────────────────────────────────┘

- A group does not train while it copies its state. It writes the copy in the background.
- NAMING happens in a thread, which reads large files again for the manifest and removes old checkpoints.
- Beside the state, a checkpoint may be `due`. It is begun in IDLE, and until then the run issues no rows and makes no calls for nodes.
- A checkpoint that was given up is due again when the next step is over, and at once when the run is at its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from ...dataflow.errors import DeadlineError, RunError
from ...dataflow.runs.files import is_full
from ...dataflow.runs.log import Position
from ..backends.backend import Event
from ..group import Call, WorkerGroup
from ..ranks.tasks import FailureKind
from ..request import CallRequest
from .checkpoints import CheckpointConfig, CheckpointFolder, RunState, Values

ASK_S = 0.5
"""Seconds between two questions to a group whether its part is on the disk."""
LOOK_S = 5.0
"""Seconds between two looks at how far a checkpoint is."""


class Phase(Enum):
    """The state of the checkpoint that is being written."""

    IDLE = auto()
    """No checkpoint is being written."""
    COPYING = auto()
    """Groups copy their state."""
    WRITING = auto()
    """Groups write what they have copied."""
    NAMING = auto()
    """A thread completes it."""


@dataclass(frozen=True)
class GivenUp:
    """A checkpoint that could not be written."""

    position: Position
    """Its position in the buffer's log, which no longer has to be kept."""
    why: str
    """The write that found the disk full."""


@dataclass(frozen=True)
class Progressed:
    """The actions that follow from a turn of saving."""

    requests: Sequence[CallRequest] = ()
    given_up: GivenUp | None = None


class Saving:
    """Decides when a checkpoint is written, and sees it through.

    Args:
        folder: of the checkpoints.
        config: when a checkpoint is due.
        groups: the worker groups that have a state.
        patience_s: how long a checkpoint may not grow.
        clock: seconds, which only grow.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        config: CheckpointConfig,
        groups: Iterable[WorkerGroup],
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self._config = config
        self._begun = clock()
        """Start of the latest checkpoint, or of the run if there is none yet."""
        self._groups = list(groups)
        self._patience_s = patience_s
        self._clock = clock
        self._state = RunState(-1, 0, 0.0, {}, Position())
        """State of the driver when the latest checkpoint was begun."""
        self.phase = Phase.IDLE
        self.due = False
        """Whether a checkpoint starts as soon as none is being written."""
        self._last: int | None = None
        """The step that must be in a checkpoint, since the run is at its end."""
        self._saved_step = -1
        """Step of the latest that was begun and not given up."""
        self._full_disk = ""
        """Why the latest could not be written; empty when it could."""
        self._copying: set[str] = set()
        """Groups that have not copied their state."""
        self._writing: dict[str, WorkerGroup] = {}
        """Groups that have not reported their part as written."""
        self._asked = 0.0
        self._naming: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._growth = _Growth(patience_s)
        self._hashed = 0
        """Pieces of files that were read for the manifest."""
        self._pause_s = 0.0
        """Longest time for which a group was kept from training by the latest one."""

    # When

    def resume(self, step: int) -> list[Path]:
        """Resume after this step. Moves later checkpoints to `checkpoints.later`; returns their new paths."""
        self._saved_step = step
        return self.folder.forget_after(step)

    def step_over(self, step: int, *, last: bool, for_best: bool = False) -> None:
        """A step is over. A checkpoint of it may be due.

        Args:
            step: its number.
            last: no step comes after it.
            for_best: its weights are evaluated by what the best checkpoint is chosen by.
        """
        if self._config.writes and step > 0:
            self.due |= last or for_best or bool(self._full_disk) or self._is_time(step)

    def _is_time(self, step: int) -> bool:
        every, every_s = self._config.every, self._config.every_s
        by_steps = bool(every) and step % every == 0
        return by_steps or (every_s is not None and self._clock() - self._begun >= every_s)

    def finish(self, step: int, *, anew: bool = False) -> None:
        """The run is at its end: this step must be in a checkpoint.

        Args:
            step: the latest that is over.
            anew: also if there is one of that step.
        """
        self._last = step
        self.due |= anew or self._saved_step < step

    def require(self) -> None:
        """A checkpoint of the present step is due."""
        self.due = True

    @property
    def under_way(self) -> bool:
        """Whether a checkpoint is being written."""
        return self.phase is not Phase.IDLE

    @property
    def may_begin(self) -> bool:
        """Whether a checkpoint starts now."""
        return self.due and not self.under_way

    @property
    def holds_up(self) -> bool:
        """Whether the run waits for a checkpoint: for one that is due, or, at its end, for one that is being written."""
        return self.due or (self._last is not None and self.under_way)

    # How

    def begin(self, state: RunState) -> list[CallRequest]:
        """Begin a checkpoint.

        Args:
            state: what the driver knows. No update is under way.

        Returns:
            Requests that each group copy its state.

        Raises:
            OSError: the disk is full, say. To begin again is allowed.
        """
        assert not self.under_way
        path = self.folder.begin(state)
        self._state, self._saved_step = state, state.step
        self.due, self._full_disk = False, ""
        self._begun = self._clock()
        self._pause_s, self._asked = 0.0, self._begun - ASK_S
        self._growth.begin(self._begun)
        self._copying = {group.name for group in self._groups}
        self._writing = {group.name: group for group in self._groups}
        self.phase = Phase.COPYING if self._copying else Phase.WRITING
        return [
            CallRequest(group, "save_checkpoint", {"path": path / group.name}, then=self._copied)
            for group in self._groups
        ]

    def _copied(self, call: Call) -> Iterable[CallRequest]:
        self._pause_s = max([self._pause_s, *call.results])
        self._copying.discard(call.group.name)
        if not self._copying:
            self.phase = Phase.WRITING
        return ()

    def take_pause_s(self) -> float:
        """Seconds for which the latest checkpoint kept a group from training, at most; 0 when that was taken before."""
        pause_s, self._pause_s = self._pause_s, 0.0
        return pause_s

    def advance(self, values: Values) -> Progressed:
        """Take the checkpoint that is being written a turn further.

        Args:
            values: metric -> step -> its value; called in another thread.

        Returns:
            Requests that ask idle groups, every ASK_S, whether their part is on the disk; and the checkpoint, if it was given up.

        Raises:
            DeadlineError: it has not grown for too long; the message says who was waited for.
            RunError: it could not be completed.
        """
        if self.phase is Phase.IDLE:
            return Progressed()
        self._check_growth()
        if self.phase is Phase.WRITING and not self._writing:
            if self._full_disk:
                return Progressed(given_up=self._give_up())
            self._naming = self._thread.submit(
                self.folder.complete, self._state.step, values, self._count_hashed
            )
            self.phase = Phase.NAMING
        if self.phase is Phase.NAMING:
            return self._named()
        return Progressed(self._questions())

    def _questions(self) -> list[CallRequest]:
        now = self._clock()
        if self.phase is not Phase.WRITING or now - self._asked < ASK_S:
            return []
        self._asked = now
        return [
            CallRequest(g, "checkpoint_written", then=self._answered)
            for g in self._writing.values()
            if not g.busy
        ]

    def _answered(self, call: Call) -> Iterable[CallRequest]:
        if all(call.results):
            self._writing.pop(call.group.name, None)
        return ()

    def _named(self) -> Progressed:
        """See whether the thread is done."""
        assert self._naming is not None
        if not self._naming.done():
            return Progressed()
        error, self._naming = self._naming.exception(), None
        if error is None:
            self.phase = Phase.IDLE
            return Progressed()
        if isinstance(error, RunError):  # another driver has taken the run over
            raise error
        if not is_full(error):
            path = self.folder.path_of(self._state.step)
            raise RunError(f"checkpoint {path} could not be completed: {error}") from error
        self._full_disk = str(error)
        return Progressed(given_up=self._give_up())

    def _give_up(self) -> GivenUp:
        self.folder.discard(self._state.step)
        self._saved_step = -1
        self.due |= self._last is not None
        self.phase = Phase.IDLE
        return GivenUp(self._state.position, self._full_disk)

    def failed(self, event: Event) -> bool:
        """Note a rank that found the disk full when it copied or wrote its part; False: the event is something else."""
        call, failure = event.call, event.reply.failure
        own = (
            call.method in ("save_checkpoint", "checkpoint_written") and call.group.name in self._writing
        )
        if failure is None or failure.kind is not FailureKind.DISK_FULL or not own:
            return False
        self._full_disk = f"{call.describe(event.rank)}: {failure.message}"
        call.lose(event.rank)
        return True

    # Until when

    def _check_growth(self) -> None:
        now = self._clock()
        if self.phase is Phase.COPYING:  # these calls have a deadline of their own
            self._growth.begin(now)
        if not self._growth.is_due(now):
            return
        extent = (self.folder.sizes(self._state.step), self._hashed, {*self._writing})
        if self._growth.has_stopped(now, extent):
            who = [f"{name}, which has not said that its part is on the disk" for name in self._writing]
            who = who or [
                "the driver's own thread, which reads the files again, names the checkpoint and removes old ones"
            ]
            raise DeadlineError(
                f"checkpoint {self.folder.path_of(self._state.step)}: nothing more was written for {self._patience_s:g} s "
                f"(call_timeout_s). Waited for: {'; '.join(who)}"
            )

    def _count_hashed(self) -> None:
        self._hashed += 1

    def close(self) -> None:
        """Wait, for at most `patience_s`, until the checkpoint that is being named has its name."""
        if self._naming is not None:
            wait([self._naming], timeout=self._patience_s)
        self._thread.shutdown(wait=False, cancel_futures=True)


class _Growth:
    """Watches whether a checkpoint grows.

    Args:
        patience_s: how long it may not grow.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._looked = self._grew = 0.0
        self._extent: object = None

    def begin(self, now: float) -> None:
        """A checkpoint is begun."""
        self._looked = self._grew = now
        self._extent = None

    def is_due(self, now: float) -> bool:
        """Whether it is time for a look."""
        return now - self._looked >= min(LOOK_S, self._patience_s / 2)

    def has_stopped(self, now: float, extent: object) -> bool:
        """Whether nothing has changed for too long. If nobody has looked for so long, the driver itself was waiting.

        Args:
            now: seconds.
            extent: how far the checkpoint is; larger or not, it changes when the checkpoint grows.
        """
        driver_waited, self._looked = now - self._looked > self._patience_s, now
        if extent != self._extent or driver_waited:
            self._extent, self._grew = extent, now
        return now - self._grew > self._patience_s
