"""Saving: writes the checkpoints of a run in the background, one at a time.

    IDLE ──begin──> COPYING ──all groups copied──> WRITING ──all parts on disk──> NAMING ──> IDLE
      ^                └─────────────── disk full ────┴──────────────────────────────┤
      └──────────────────────────────── given up ─────────────────────────────────────┘

- A group pauses its training to copy its state. It writes the copy in the background.
- In NAMING, a thread reads the files for the manifest, renames the checkpoint and removes old ones.
- In any phase, a checkpoint may be `due`. It begins when the phase is IDLE. Until then, the run
  issues no rows and makes no calls for nodes.
- After Weft gives up a checkpoint, another is due at the end of the next step, or at once if the
  run is ending.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple

from ...dataflow.errors import DeadlineError, RunError
from ...dataflow.runs.files import is_full
from ...dataflow.runs.log import Position
from ..backends.backend import Event
from ..group import Call, CallRequest, WorkerGroup
from ..ranks.tasks import FailureKind
from .checkpoints import CheckpointConfig, CheckpointFolder, RunState, Values

ASK_S = 0.5
"""[s] Interval between calls that ask a group whether its part is on the disk."""
LOOK_S = 5.0
"""[s] Interval between checks of a checkpoint's progress."""


class _Phase(Enum):
    IDLE = auto()
    COPYING = auto()
    WRITING = auto()
    NAMING = auto()


class _Progressed(NamedTuple):
    requests: Sequence[CallRequest] = ()
    given_up: tuple[Position, str] | None = None
    """Position of the checkpoint in the log and the error, if the disk had no room for it."""


class Saving:
    """Decides when to write a checkpoint, and writes it.

    Args:
        groups: The worker groups with state.
        patience_s: [s] Longest time without growth of a checkpoint.
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
        """Start of the latest checkpoint, or of the run."""
        self._groups = list(groups)
        self._patience_s = patience_s
        self._clock = clock
        self._state = RunState(-1, 0, 0.0, {}, Position())
        self.phase = _Phase.IDLE
        self.due = False
        """Whether a checkpoint starts as soon as none is being written."""
        self._last: int | None = None
        """The step that must be in a checkpoint, because the run is ending."""
        self._saved_step = -1
        """Step of the latest checkpoint, unless it was given up."""
        self._full_disk = ""
        """Error of the latest write on a full disk, or empty."""
        self._copying: set[str] = set()
        self._writing: dict[str, WorkerGroup] = {}
        self._asked = 0.0
        self._naming: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._looked = self._grew = 0.0
        """[s] Times of the last check of the checkpoint's size, and of its last growth."""
        self._extent: object = None
        self._hashed = 0
        self._pause_s = 0.0

    # When to save

    def resume(self, step: int) -> list[Path]:
        """Continue after this step. Move later checkpoints aside, and return their new paths."""
        self._saved_step = step
        return self.folder.forget_after(step)

    def step_over(self, step: int, *, last: bool, for_best: bool = False) -> None:
        """Record a finished step, and decide whether a checkpoint is due. With `for_best`, one is
        due because the step's evaluation may make it the best."""
        if not self._config.writes or step <= 0:
            return
        every, every_s = self._config.every, self._config.every_s
        by_steps = bool(every) and step % every == 0
        by_time = every_s is not None and self._clock() - self._begun >= every_s
        self.due |= last or for_best or by_steps or by_time or bool(self._full_disk)

    def require(self, step: int, *, again: bool = False) -> None:
        """Require a checkpoint of the run's last step; with `again`, even if it already has one."""
        self._last = step
        self.due |= again or self._saved_step < step

    @property
    def under_way(self) -> bool:
        return self.phase is not _Phase.IDLE

    @property
    def may_begin(self) -> bool:
        return self.due and not self.under_way

    @property
    def holds_up(self) -> bool:
        """Whether the run waits for a checkpoint: a due one or, at its end, one being written."""
        return self.due or (self._last is not None and self.under_way)

    # How to save

    def begin_checkpoint(
        self, state: RunState, write: Callable[[Path], None] = lambda _: None
    ) -> list[CallRequest]:
        """Begin a checkpoint; `write` adds files to its folder. Return requests that make the groups
        copy their state. No update may be running. Raises OSError if a write failed, for example on a
        full disk; the caller may try again."""
        assert not self.under_way
        path = self.folder.make_unfinished(state, write)
        self._state, self._saved_step = state, state.step
        self.due, self._full_disk = False, ""
        self._begun = self._clock()
        self._pause_s, self._asked = 0.0, self._begun - ASK_S
        self._looked = self._grew = self._begun
        self._extent = None
        self._copying = {group.name for group in self._groups}
        self._writing = {group.name: group for group in self._groups}
        self.phase = _Phase.COPYING if self._copying else _Phase.WRITING
        return [
            CallRequest(group, "save_checkpoint", {"path": path / group.name}, then=self._copied)
            for group in self._groups
        ]

    def _copied(self, call: Call) -> Iterable[CallRequest]:
        self._pause_s = max([self._pause_s, *call.results])
        self._copying.discard(call.group.name)
        if not self._copying:
            self.phase = _Phase.WRITING
        return ()

    def take_pause_s(self) -> float:
        """[s] Return the longest pause of a group's training, and reset it to 0."""
        pause_s, self._pause_s = self._pause_s, 0.0
        return pause_s

    def advance(self, values: Values) -> _Progressed:
        """Continue the current checkpoint. Calls `values` on another thread.

        Returns:
            Every ASK_S, requests that ask idle groups whether their parts are on the disk. If the
            checkpoint was given up, its position and the error.

        Raises:
            DeadlineError: The checkpoint has not grown for too long. The message names the groups
                that have not confirmed their parts.
            RunError: The checkpoint could not be completed.
        """
        if self.phase is _Phase.IDLE:
            return _Progressed()
        self._check_growth()
        if self.phase is _Phase.WRITING and not self._writing:
            if self._full_disk:
                return _Progressed(given_up=self._give_up())
            self._naming = self._thread.submit(
                self.folder.complete, self._state.step, values, self._count_hashed
            )
            self.phase = _Phase.NAMING
        if self.phase is _Phase.NAMING:
            return self._named()
        now = self._clock()
        if self.phase is not _Phase.WRITING or now - self._asked < ASK_S:
            return _Progressed()
        self._asked = now
        idle = [group for group in self._writing.values() if not group.busy]
        return _Progressed([CallRequest(g, "checkpoint_written", then=self._answered) for g in idle])

    def _answered(self, call: Call) -> Iterable[CallRequest]:
        if all(call.results):
            self._writing.pop(call.group.name, None)
        return ()

    def _named(self) -> _Progressed:
        assert self._naming is not None
        if not self._naming.done():
            return _Progressed()
        error, self._naming = self._naming.exception(), None
        if error is None:
            self.phase = _Phase.IDLE
            return _Progressed()
        if isinstance(error, RunError):  # another driver has taken over
            raise error
        if not is_full(error):
            path = self.folder.path_of(self._state.step)
            raise RunError(f"checkpoint {path} could not be completed: {error}") from error
        self._full_disk = str(error)
        return _Progressed(given_up=self._give_up())

    def _give_up(self) -> tuple[Position, str]:
        self.folder.discard(self._state.step)
        self._saved_step = -1
        self.due |= self._last is not None
        self.phase = _Phase.IDLE
        return self._state.position, self._full_disk

    def failed(self, event: Event) -> bool:
        """Handle a full disk of a rank while saving; return False for any other event."""
        call, failure = event.call, event.reply.failure
        own = (
            call.method in ("save_checkpoint", "checkpoint_written") and call.group.name in self._writing
        )
        if failure is None or failure.kind is not FailureKind.DISK_FULL or not own:
            return False
        self._full_disk = f"{call.describe(event.rank)}: {failure.message}"
        call.lose(event.rank)
        return True

    def _check_growth(self) -> None:
        now = self._clock()
        if self.phase is _Phase.COPYING:  # these calls have their own deadlines
            self._looked = self._grew = now
        if now - self._looked < min(LOOK_S, self._patience_s / 2):
            return
        # If the driver itself was paused, a checkpoint without growth proves nothing.
        driver_waited, self._looked = now - self._looked > self._patience_s, now
        # A group's confirmation counts as progress, even if no file grows.
        extent = (self.folder.sizes(self._state.step), self._hashed, {*self._writing})
        if extent != self._extent or driver_waited:
            self._extent, self._grew = extent, now
        if now - self._grew > self._patience_s:
            who = [
                f"{name}, which has not confirmed that its part is on the disk" for name in self._writing
            ]
            who = who or [
                "the driver's thread that reads the files for the manifest, names the checkpoint and removes old ones"
            ]
            raise DeadlineError(
                f"checkpoint {self.folder.path_of(self._state.step)}: nothing more was written for {self._patience_s:g} s "
                f"(call_timeout_s). Waited for: {'; '.join(who)}"
            )

    def _count_hashed(self) -> None:
        self._hashed += 1

    def close(self) -> None:
        """Wait up to `patience_s` for a checkpoint that is being named."""
        if self._naming is not None:
            wait([self._naming], timeout=self._patience_s)
        self._thread.shutdown(wait=False, cancel_futures=True)
