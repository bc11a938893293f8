"""Run: one life of a run, made anew at each start. It walks the graphs over the worker groups until the schedule is done.

    admit      issue prompts, as many as the schedule wants and the buffer has capacity for
    dispatch   give idle groups the rows that are ready for their nodes
    settle     take replies: publish rows, and queue what follows
    close      end the step, or the evaluation, that is over
    save       take the checkpoint that is being written further, and begin the one that is due

The driver moves row ids and references; no token passes through it. Nothing re-enters the loop: what follows from a reply (to publish
weights, to change who has a device, to save) is a `CallRequest` in a queue, made on a later turn.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

from ...dataflow.buffer.history import waits_for
from ...dataflow.buffer.sample_buffer import SampleBuffer
from ...dataflow.errors import NoSignalError, StalledError, SymptomError, WorkerError
from ...dataflow.runs.directory import RunDirectory
from ...dataflow.runs.files import SAMPLES
from ...dataflow.runs.log import Position
from ...dataflow.runs.requests import StopRequests
from ..graph_run import GraphRuns
from ..group import Call, WorkerGroup
from ..recovery.checkpoints import CheckpointFolder, RunState, has_state
from ..recovery.copies import END_S, LEAVE_S, copies_of
from ..recovery.elastic import Elastic, LostNodes
from ..recovery.failures import Failures
from ..recovery.resume import ResumePoint, collected_seldom
from ..recovery.saving import ASK_S, Saving
from ..reports.symptoms import GOES_ON, NO_SIGNAL, Seen
from ..request import CallRequest
from ..run_spec import RunHistory, RunSpec
from ..schedule import Asynchronous
from ..signals import asked_to_end
from ..weight_sync import WeightSync
from .admission import Admission
from .calls import Calls, CallTimes, RunParts
from .closing import Closing
from .dispatcher import Dispatcher
from .live_state import LiveState
from .recording import Recording
from .replies import Remedies, Replies

DEBUGGER = "To step through it under a debugger, run the same script with backend=weft.Local()."
"""Advice where a call on a process has failed."""


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
        self._history, self._disk = history, history.disk
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
        rules = spec.evaluation_rules
        keeps = graph_runs.needs_weights if rules.keeps_weights else None
        weights = WeightSync(spec.follows, groups, partial, spec.backend.cancel, keeps)
        deadlines = spec.start_timeout_s, spec.call_timeout_s
        failures = Failures(
            self._backend, weights, history.progress, self._disk, history.failures, *deadlines
        )
        saved = [group for group in groups.values() if has_state(group.handle)]
        self._copies = copies_of(directory.path, spec.checkpoint)
        folder = CheckpointFolder(
            directory, spec.checkpoint, self._copies.add if self._copies else lambda step: None
        )
        self._saving = Saving(folder, spec.checkpoint, saved, spec.call_timeout_s)
        told, lease_s = history.progress.recorded, spec.buffer.lease_deadline_s
        recording = Recording(spec.record_every, schedule.prompts_per_step, samples, lease_s, told)
        times = CallTimes(directory, graph_runs.train, self._backend.clock, self._started)
        calls = Calls(groups, failures, times, self._commit)
        lost_nodes = LostNodes(self._backend, buffer, groups, failures, history.progress)
        self._elastic = Elastic(
            self._backend, groups, failures, history.progress.say, spec.start_timeout_s
        )
        remedies = Remedies(self._backend, failures, lost_nodes, self._elastic, self._saving, self._disk)
        self._replies = Replies(self._backend, buffer, graph_runs, calls, remedies)
        self._weights, self._calls = weights, calls
        parts = RunParts(schedule, buffer, groups, graph_runs, weights, recording, calls, rules)
        self._admission = Admission(
            parts, history.progress.alert, stop_without_signal=NO_SIGNAL in spec.stop_on
        )
        self._dispatcher = Dispatcher(parts, self._backend.clock, history.progress.say)
        self._stop = StopRequests(directory.path, directory.starts + 1)
        self._live = LiveState(directory.path, parts, self._backend, self._started, directory.starts + 1)
        self._closing = Closing(spec, history, directory, parts, self._saving, self._started, self._stop)
        self.failed = False
        """A reply ended the run."""
        self.ended = False
        """The run came to the end of its schedule."""
        self.closed = False

    # Before the first step

    def prepare(self) -> None:
        """Load the checkpoint, if the run goes on from one, and give every follower its leader's weights."""
        if self._point is not None:
            self._load(self._point)
        self._calls.queue(self._weights.publish_all())
        self._until_idle()

    def _load(self, point: ResumePoint) -> None:
        if later := self._saving.resume(point.state.step):
            names = ", ".join(sorted(path.name for path in later))
            self._history.progress.say(
                f"later checkpoints ({names}) lie in {later[0].parent} until the run has checkpoints of these steps again"
            )
        if self._copies is not None:
            self._copies.resume()
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
        with collected_seldom(not self._backend.in_process):
            self._walk()
        if self._closing.ended_by is not None:
            self._refuse(self._closing.ended_by)
        if self._spec.checkpoint.writes:
            self._save_to_the_end()
            self._saving.folder.prune(self._directory.values)
        self._commit()  # the log is ahead of the metrics
        self._disk.write(self._directory.flush)
        self._end_copies(END_S)
        self._history.progress.ended(self._closing.ending)
        self.ended = True

    def _walk(self) -> None:
        """Take turns until nothing is left to do."""
        self._begin()
        while not self._finished:
            if self._asked_to_leave and self._can_be_saved:
                self._leave()
            if self._closing.ended_by is not None and self._can_be_saved:
                self._refuse(self._closing.ended_by)
            self._admit()
            self._dispatch()
            self._settle()
            self._close()
            self._save()

    @property
    def _asked_to_leave(self) -> bool:
        """Whether the run is to save itself and end now. One that makes no checkpoints ends after its step (`Closing`)."""
        return bool(asked_to_end()) or (self._spec.checkpoint.writes and self._stop.asked)

    def _begin(self) -> None:
        if self._point is None:
            self._closing.close_step({})
            return
        self._closing.resume()
        if not self._point.with_rows and self._spec.checkpoint.writes:
            self._saving.require()  # that of this step has its position in a log that is no more
            self._save()

    def _admit(self) -> None:
        if not self._saving.holds_up:
            self._admission.admit()

    def _dispatch(self) -> None:
        """Make the calls that follow from earlier replies, then those of nodes that are ready."""
        self._calls.queue(self._weights.receive_when_idle())
        self._calls.make()
        if not self._saving.holds_up:
            self._dispatcher.dispatch()

    def _settle(self) -> None:
        """Take what came back. What follows from it is queued."""
        self._calls.make()
        self._commit()
        self._replies.give_up_rows()
        self._replies.cancel_expired()
        if self._calls.under_way or self._elastic.waits:
            try:
                self._take()
            except BaseException as error:
                self.failed = True
                if type(error) is WorkerError and self._backend.has_processes:
                    error.add_note(DEBUGGER)
                raise
        elif self._saving.holds_up:
            time.sleep(ASK_S / 10)
        elif not self._finished and not self._can_move:
            raise StalledError(self._why_stalled())

    def _take(self) -> None:
        """Take replies until something can follow from them, something is due, or none come."""
        self._live.note()
        settled = not self._calls.take_changed() and not self._saving.holds_up
        patience_s = self._patience_s
        while came := self._replies.take(patience_s):
            can_wait = all(self._dispatcher.can_wait(self.graph_runs[name]) for name in came)
            patience_s = (
                self._patience_s
            )  # rows that have begun to wait for others have brought it forward
            if not (settled and can_wait and patience_s):
                return
            self._disk.write(lambda: self.buffer.log.commit(fenced=False))
            if rest_s := min(patience_s, self._calls.rest_s):
                self._backend.rest(rest_s)

    def _close(self) -> None:
        self._closing.close_evaluations()
        if self._closing.close_training():
            step, over = self._train.step, self._train.over
            self._saving.step_over(
                step, last=over, for_best=self._spec.is_evaluated_for_best(step, over=over)
            )
            if not self._spec.checkpoint.writes:
                self._disk.write(self.buffer.shorten_log)
        self._disk.write(lambda: self._directory.flush(when_due=True))

    @property
    def _finished(self) -> bool:
        train, graph_runs = self._train, self.graph_runs
        at_rest = (
            train.over and not self._saving.holds_up and self._calls.idle and not graph_runs.evaluating
        )
        if not at_rest or any(run.ledger.live.groups_behind for run in graph_runs):
            return False
        unseen = any(train.observes(n) and train.ledger.readiness.ready(n) for n in train.graph.nodes)
        # Where generation runs ahead, what it has left over at the end of training stays as it is in the log.
        left = graph_runs.evaluations.values() if self._spec.schedule.overlaps else graph_runs
        return not unseen and not any(run.ledger.live.groups for run in left)

    @property
    def _can_move(self) -> bool:
        """Whether the next turn of the loop will find something to do."""
        over = self._spec.schedule.over(self._train) or any(
            e.ended for e in self.graph_runs.evaluations.values()
        )
        return over or self._admission.possible or self._dispatcher.possible

    @property
    def _patience_s(self) -> float:
        """Seconds until the driver looks up: when a lease, a quorum, or a node that gathers rows is due, or a second."""
        due = [ledger.next_deadline for ledger in self.buffer.ledgers.values()]
        now = self._backend.clock()
        return max(
            0.0, min([1.0, *(d - now for d in (*due, self._dispatcher.next_due_s) if d is not None)])
        )

    def _why_stalled(self) -> str:
        lines = ["rows are in flight, nothing is under way, and no node can start:"]
        for run in self.graph_runs:
            for group in list(run.ledger.live.groups)[:3]:
                lines += [f"graph {run.graph.name!r}, group {group}:"]
                lines += [f"  {line}" for line in waits_for(run.ledger, group).splitlines()]
        return "\n".join(lines)

    def _commit(self) -> None:
        """Write what happened to the rows to the log."""
        self._disk.write(self.buffer.commit)

    # Checkpoints

    def _save(self) -> None:
        """Take the checkpoint that is being written further, and begin the one that is due: no update is under way then."""
        self._tell_of_copies()
        progressed = self._saving.advance(self._directory.values)
        self._calls.queue(progressed.requests)
        if given_up := progressed.given_up:
            self.buffer.drop_checkpoint(given_up.position)
            self._disk.wait_for_more(given_up.why)
        if self._saving.may_begin:
            self._disk.write(self._directory.flush)
            kept = self._saving.folder.positions
            state = self._state(self._disk.write(lambda: self.buffer.checkpoint(kept)))
            self._calls.queue(self._disk.write(lambda: self._saving.begin(state)))

    def _state(self, position: Position) -> RunState:
        """The state of the driver, with the rows as they are at a position in the log."""
        return RunState(
            self._train.step,
            self._spec.seed,
            time_s=self._backend.clock() - self._started,
            versions={name: group.version for name, group in self.groups.items()},
            position=position,
            schedule=type(self._spec.schedule).__name__,
            evaluated={name: run.closed_at for name, run in self.graph_runs.evaluations.items()},
            stopped=self._train.stopped,
            cursor=self._train.cursor,
            next_id=self.buffer.ids.next_id,
            next_group=self.buffer.ids.next_group,
            settings=self._spec.recorded[0],
        )

    def _save_to_the_end(self, *, anew: bool = False) -> None:
        """Have the present step in a checkpoint that is on the disk; `anew`: in one that is made from here on."""
        self._saving.finish(self._train.step, anew=anew)
        self._until(self._is_saved)

    def _tell_of_copies(self) -> None:
        for note in self._copies.take_notes() if self._copies is not None else ():
            self._history.progress.say(note)

    def _end_copies(self, timeout_s: float) -> None:
        if self._copies is not None:
            self._copies.close(timeout_s, say=self._history.progress.say)
            self._tell_of_copies()

    def _is_saved(self) -> bool:
        """Take a turn of saving; returns whether nothing is left to save."""
        self._save()
        return not self._saving.holds_up

    @property
    def _can_be_saved(self) -> bool:
        """Whether everything is in the buffer, or can be made again: no update is under way or has half of its batch, and training
        waits for no evaluation."""
        evaluating = any(e.under_way for e in self.graph_runs.evaluations.values())
        return not (evaluating and self._spec.evaluation_rules.holds_training) and not any(
            self._train.taken.values()
        )

    def _leave(self) -> NoReturn:
        """Save the run, record what it is through with, and end the process."""
        number = asked_to_end()
        self._save_as_it_stands()
        self._end_copies(LEAVE_S)
        self._history.progress.left(self._saving.folder.path)
        raise SystemExit(128 + number if number == signal.SIGINT else 0)

    def _refuse(self, seen: Seen) -> NoReturn:
        """End the run because of a symptom. It saves itself first, if it makes checkpoints and its weights have not suffered."""
        if seen.symptom.spoils:
            self._record_all()
        else:
            self._save_as_it_stands()
        kind = NoSignalError if seen.symptom.name == NO_SIGNAL else SymptomError
        raise kind(f"{seen.text}. {GOES_ON}", self._history.progress.latest_sample)

    def _save_as_it_stands(self) -> None:
        if self._spec.checkpoint.writes:
            self._save_to_the_end(
                anew=True
            )  # there may be one of this step, with fewer rows in the buffer
        self._record_all()

    def _record_all(self) -> None:
        """Have everything on the disk that people look at."""
        self._until(self._all_recorded)
        self._disk.write(self._directory.flush)

    def _all_recorded(self) -> bool:
        """Have the recorder write the remaining samples; returns whether none remain."""
        self._dispatcher.record(hurry=True)
        return not any(run.ledger.live.groups_behind for run in self.graph_runs)

    # From outside the loop

    def call(self, group: WorkerGroup, method: str, **arguments: Any) -> list[Any]:
        """Call a method of a group and wait; returns each rank's result. Not from within the loop."""
        ended: list[Call] = []

        def end(call: Call) -> list[CallRequest]:
            ended.append(call)
            return []

        self._calls.queue([CallRequest(group, method, arguments, then=end, on_device=True)])
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
            self._live.close()
            self._saving.close()
            self._end_copies(0.0)
        finally:
            try:
                self._backend.close()
            finally:
                self.buffer.close(going_on=not self.ended)
