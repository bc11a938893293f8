"""Run: one life of a run, made anew at each start. It walks the graphs over the worker groups until the schedule is done.

    admit      issue prompts, as many as the schedule wants and the buffer has capacity for
    dispatch   give idle groups the rows that are ready for their nodes
    settle     take replies: publish rows, and queue what follows
    close      end the step, or the evaluation, that is over, and save it when that is due

The driver moves row ids and references; no token passes through it. Nothing re-enters the loop: what follows from a reply (to publish
weights, to change who has a device, to save) is a `Request` in a queue, made on a later turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NoReturn

from ..dataflow.buffer.ledger_view import why
from ..dataflow.buffer.log import Position
from ..dataflow.buffer.sample_buffer import SampleBuffer
from ..dataflow.buffer.samples import FOLDER as SAMPLES
from ..dataflow.errors import StalledError
from .admission import Admission
from .calls import Calls
from .closing import Closing
from .device_turns import offload_shared
from .dispatcher import Dispatcher
from .graph_run import GraphRuns
from .group import Call, WorkerGroup
from .recording import Recording
from .recovery.checkpoints import POLL_S, Checkpoints, has_state
from .recovery.ending import asked_to_end
from .recovery.failures import Failures
from .recovery.full_disk import FullDisk
from .recovery.resume import ResumePoint
from .recovery.run_state import RunState
from .request import Request
from .run_directory import RunDirectory
from .run_parts import RunParts
from .run_spec import RunHistory, RunSpec
from .schedule import Asynchronous
from .weight_sync import WeightSync


class Run:
    """One life of a run: its buffer is open, its worker groups are up.

    Args:
        spec: what is run.
        history: of all lives of the run.
        directory: of the run.
        point: the checkpoint that it goes on from; None: it begins.
        buffer: its rows.
        groups: its worker groups, by name.
        graph_runs: its graphs.
    """

    def __init__(
        self,
        spec: RunSpec,
        history: RunHistory,
        directory: RunDirectory,
        point: ResumePoint | None,
        buffer: SampleBuffer,
        groups: dict[str, WorkerGroup],
        graph_runs: GraphRuns,
    ) -> None:
        self._spec = spec
        self._history = history
        self._directory = directory
        self._point = point
        self._backend = spec.backend
        self.buffer = buffer
        self.groups = groups
        self.graph_runs = graph_runs
        self._train = graph_runs.train
        self._started = self._backend.clock() - (point.state.time_s if point else 0.0)
        schedule, samples = spec.schedule, directory.path / SAMPLES
        partial = schedule.partial_rollouts if isinstance(schedule, Asynchronous) else "continue"
        weights = WeightSync(spec.follows, groups, partial, spec.backend.cancel)
        failures = Failures(self._backend, weights, history.progress, history.failures, spec.call_timeout_s)
        disk = FullDisk(directory.path, history.progress, failures.forgive)
        checkpoints = Checkpoints(directory, spec.checkpoint, spec.call_timeout_s)
        recording = Recording(spec.record_every, schedule.prompts_per_step, samples, spec.buffer.lease_deadline_s)
        calls = Calls(self._backend, buffer, groups, graph_runs, failures, checkpoints, disk, directory, self._started)
        self._weights, self._disk, self._checkpoints, self._calls = weights, disk, checkpoints, calls
        parts = RunParts(schedule, buffer, groups, graph_runs, weights, recording, calls)
        self._admission, self._dispatcher = Admission(parts), Dispatcher(parts)
        self._closing = Closing(spec, history, directory, parts, checkpoints, self._started)
        self._save_waits = False
        """A checkpoint is due, and waits for the one that is being written."""
        self._position = Position()
        """Position in the buffer's log of the checkpoint that was begun last."""
        self.failed = False
        """A reply ended the run."""
        self.ended = False
        """The run came to the end of its schedule."""
        self.closed = False

    # Before the first step

    def prepare(self) -> None:
        """Load the checkpoint, if the run goes on from one, and give every follower its leader's weights."""
        for request in offload_shared(self.groups.values()):
            self._calls.queue([request])
            self._until_idle()
        if self._point is not None:
            self._load(self._point)
        self._calls.queue(self._weights.publish_all())
        self._until_idle()

    def _load(self, point: ResumePoint) -> None:
        self._checkpoints.resume_after(point.state.step)
        for name, group in self.groups.items():
            if has_state(group.handle):
                self.call(group, "load_checkpoint", path=point.path / name)
            group.version = point.state.versions.get(name, 0)

    # The loop

    def to_the_end(self) -> None:
        """Run until the schedule is done.

        Raises:
            SystemExit: the run was asked to end, and has saved itself.
        """
        self._begin()
        while not self._finished:
            if asked_to_end() and self._can_be_saved:
                self._leave()
            self._admit()
            self._dispatch()
            self._settle()
            self._close()
        if self._spec.checkpoint.every:
            self._save_to_the_end()
        self._history.progress.ended()
        self._disk.write(self._directory.flush)
        self.ended = True

    def _begin(self) -> None:
        if self._point is None:
            self._closing.close_step({})
            return
        self._closing.resume()
        if not self._point.with_rows and self._spec.checkpoint.every:
            self._checkpoints.saved_step = -1  # that of this step has its position in a log that is no more
            self._save()

    def _admit(self) -> None:
        if not self._save_waits:
            self._admission.admit()

    def _dispatch(self) -> None:
        """Make the calls that follow from earlier replies, then those of nodes that are ready."""
        self._calls.queue(self._weights.receive_when_idle())
        self._calls.queue(self._checkpoints.poll())
        self._calls.submit()
        if not self._save_waits:
            self._dispatcher.dispatch()

    def _settle(self) -> None:
        """Take what came back. What follows from it is queued."""
        self._calls.submit()
        self._disk.write(self.buffer.commit)
        self._calls.give_up_rows()
        self._calls.cancel_expired()
        if self._calls.under_way:
            try:
                self._calls.take_replies(self._patience_s)
            except BaseException:
                self.failed = True
                raise
        elif self._save_waits:
            time.sleep(POLL_S / 10)
        elif not self._finished and not self._can_move:
            raise StalledError(self._why_stalled())

    def _close(self) -> None:
        self._complete_checkpoint()
        self._disk.write(lambda: self._directory.flush(when_due=True))
        if self._closing.close_training() and self._checkpoints.is_due(self._train.step, self._train.over):
            self._save_waits = True
        if self._save_waits and not self._checkpoints.under_way:
            self._save()
        self._closing.close_evaluations()

    @property
    def _finished(self) -> bool:
        train, graph_runs = self._train, self.graph_runs
        at_rest = train.over and not self._save_waits and self._calls.idle and not graph_runs.evaluating
        if not at_rest or any(run.ledger.groups_behind for run in graph_runs):
            return False
        unseen = any(train.observes(n) and train.ledger.ready(n) for n in train.graph.nodes)
        # Where generation runs ahead, what it has left over at the end of training stays as it is in the log.
        left = graph_runs.evaluations.values() if self._spec.schedule.overlaps else graph_runs
        return not unseen and not any(run.ledger.groups_in_flight for run in left)

    @property
    def _can_move(self) -> bool:
        """Whether the next turn of the loop will find something to do."""
        over = self._spec.schedule.over(self._train) or any(e.ended for e in self.graph_runs.evaluations.values())
        return over or self._admission.possible or self._dispatcher.possible

    @property
    def _patience_s(self) -> float:
        """Seconds until the driver looks up: when a lease or a quorum is due, or a second."""
        due = (ledger.next_deadline for ledger in self.buffer.ledgers.values())
        now = self._backend.clock()
        return max(0.0, min([1.0, *(d - now for d in due if d is not None)]))

    def _why_stalled(self) -> str:
        lines = ["rows are in flight, nothing is under way, and no node can start:"]
        for run in self.graph_runs:
            for group in run.ledger.group_ids[:3]:
                lines += [f"graph {run.graph.name!r}, group {group}:"]
                lines += [f"  {line}" for line in why(run.ledger, group).splitlines()]
        return "\n".join(lines)

    # Checkpoints

    def _save(self) -> None:
        """Begin a checkpoint of the step that is over: no update is under way. Groups go on when their state is copied."""
        self._save_waits = False
        self._disk.write(self._directory.flush)
        state = RunState(
            self._train.step,
            self._spec.seed,
            time_s=self._backend.clock() - self._started,
            versions={name: group.version for name, group in self.groups.items()},
            position=self._disk.write(self.buffer.checkpoint),
            schedule=type(self._spec.schedule).__name__,
            evaluated={name: run.closed_at for name, run in self.graph_runs.evaluations.items()},
            stopped=self._train.stopped,
            cursor=self._train.cursor,
            next_id=self.buffer.ids.next_id,
            next_group=self.buffer.ids.next_group,
        )
        self._position = state.position
        saved = [g for g in self.groups.values() if has_state(g.handle)]
        self._calls.queue(self._disk.write(lambda: self._checkpoints.begin(state, saved)))

    def _complete_checkpoint(self) -> None:
        if self._checkpoints.complete(self._directory.values):
            self.buffer.drop_checkpoint(self._position)
            self._disk.wait_for_more(self._checkpoints.full_disk)

    def _save_to_the_end(self) -> None:
        """Have the present step in a checkpoint that is on the disk."""
        self._save_waits = True
        self._until(self._checkpoint_is_complete)
        while self._checkpoints.saved_step < self._train.step:
            self._save()
            self._save_waits = True
            self._until(self._checkpoint_is_complete)
        self._save_waits = False

    def _checkpoint_is_complete(self) -> bool:
        """Poll the checkpoint that is being written; returns whether none is any more."""
        self._calls.queue(self._checkpoints.poll())
        self._complete_checkpoint()
        return not self._checkpoints.under_way

    @property
    def _can_be_saved(self) -> bool:
        """Whether everything is in the buffer, or can be made again: no update is under way or has half of its batch, and training
        waits for no evaluation."""
        evaluating = any(e.under_way for e in self.graph_runs.evaluations.values())
        return not (evaluating and not self._spec.schedule.overlaps) and not any(self._train.taken.values())

    def _leave(self) -> NoReturn:
        """Save the run, record what it is through with, and end the process."""
        self._checkpoints.saved_step = -1  # there may be one of this step, with fewer rows in the buffer
        self._save_to_the_end()
        self._until(self._all_recorded)
        self._disk.write(self._directory.flush)
        self._history.progress.left(self._checkpoints.folder)
        raise SystemExit(0)

    def _all_recorded(self) -> bool:
        """Have the recorder write what is left; returns whether nothing is."""
        self._dispatcher.record(hurry=True)
        return not any(run.ledger.groups_behind for run in self.graph_runs)

    # From outside the loop

    def call(self, group: WorkerGroup, method: str, **arguments: Any) -> list[Any]:
        """Call a method of a group and wait; returns each rank's result. Not from within the loop."""
        ended: list[Call] = []

        def end(call: Call) -> list[Request]:
            ended.append(call)
            return []

        self._calls.queue([Request(group, method, arguments, then=end, on_device=True)])
        self._until(lambda: bool(ended))
        return ended[0].results

    def _until_idle(self) -> None:
        self._until(lambda: self._calls.idle)

    def _until(self, condition: Callable[[], bool]) -> None:
        """Make calls and take replies until a condition holds. Nothing is issued or dispatched meanwhile."""
        while not condition():
            self._settle()

    def close(self) -> None:
        """End every process of the run, and close its buffer."""
        self.closed = True
        try:
            self._checkpoints.close()
        finally:
            try:
                self._backend.close()
            finally:
                self.buffer.close(going_on=not self.ended)
