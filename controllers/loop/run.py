"""Run: the loop that moves rows through the graphs until the schedule is done.

       ┌───────────────────────────── next turn ─────────────────────────────┐
       v                                                                     │
     admit ───────> dispatch ───────> settle ────────> close ────────> save ─┘
     issue          claim rows        take replies,    end steps and   continue or
     prompts        that are ready,   publish rows,    evaluations     begin a
                    call idle groups  queue requests   that are over   checkpoint
                       │                 ^
                       │ tasks           │ replies
                       v                 │
                     ranks of the worker groups

- admit waits for room in the buffer. On-policy schedules also wait for the previous step and the
  transfer of its weights.
- dispatch runs a node when it has rows and its group and pool are free. An update also waits until
  followers have read the previous weights, evaluations of these weights are over, and recording has
  caught up.
- settle waits for replies, at most until a deadline or for a second.
- close waits for the step's update. On-policy schedules also wait for the transfer of the weights
  and for evaluations.
- save begins a checkpoint between updates. While one is due, the loop admits and dispatches
  nothing.

The driver handles row ids and references, never tokens. A reply never starts a call directly: the
loop queues the requests that follow from it (publish weights, hand over devices, save) for a later
turn.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

from ...dataflow.buffer.sample_buffer import SampleBuffer
from ...dataflow.errors import NoSignalError, StalledError, SymptomError, WorkerError
from ...dataflow.runs.directory import RunDirectory
from ...dataflow.runs.files import SAMPLES
from ...dataflow.runs.log import Position
from ...dataflow.runs.requests import RunRequests
from ..gateway_process import GatewayProcess
from ..graph_run import GraphRuns
from ..group import Call, CallRequest, WorkerGroup
from ..recovery.checkpoints import CheckpointFolder, RunState, has_state
from ..recovery.copies import END_S, LEAVE_S, Copies
from ..recovery.failures import Failures
from ..recovery.resume import ResumePoint
from ..recovery.saving import ASK_S, Saving
from ..reports.symptoms import GOES_ON, NO_SIGNAL, Seen
from ..run_spec import RunHistory, RunSpec
from ..schedule import Asynchronous
from ..signals import asked_to_end
from ..weight_sync import WeightSync
from .admission import Admission
from .calls import Calls
from .closing import Closing
from .dispatcher import Dispatcher
from .live_state import LiveState

DEBUGGER = "To step through it under a debugger, run the same script with backend=weft.Local()."


class Run:
    """One start of a run. A restart makes a new `Run`."""

    def __init__(
        self,
        spec: RunSpec,
        history: RunHistory,
        directory: RunDirectory,
        point: ResumePoint | None,
        buffer: SampleBuffer,
        groups: dict[str, WorkerGroup],
        graph_runs: GraphRuns,
        gateway: GatewayProcess | None,
    ) -> None:
        self._spec, self._backend = spec, spec.backend
        self._gateway = gateway
        self._progress, self._disk = history.progress, history.disk
        self._directory = directory
        self._point = point
        self.buffer = buffer
        self.groups = groups
        self.graph_runs = graph_runs
        self._train = graph_runs.train
        # The time of a run includes its earlier starts.
        self._started = started = self._backend.clock() - (point.state.time_s if point else 0.0)
        path, epoch = directory.path, directory.starts + 1
        # If generation overlaps training, evaluations may use several versions.
        keeps = None if spec.schedule.overlaps else graph_runs.needs_weights
        schedule = spec.schedule
        partial = schedule.partial_rollouts if isinstance(schedule, Asynchronous) else "continue"
        self._train.ledger.version_of = schedule.version_of
        self._weights = weights = WeightSync(spec.follows, groups, partial, self._backend.cancel, keeps)
        timeouts_s = spec.start_timeout_s, spec.call_timeout_s
        shared = self._progress, self._disk, history.failures
        self._failures = Failures(self._backend, buffer, groups, weights, *shared, *timeouts_s)
        self._copies = Copies.of(path, spec.checkpoint)
        folder = CheckpointFolder(directory, spec.checkpoint, self._copies.queue)
        saved = [group for group in groups.values() if has_state(group.handle)]
        self._saving = saving = Saving(folder, spec.checkpoint, saved, spec.call_timeout_s)
        self._calls = calls = Calls(
            spec,
            history,
            directory,
            buffer,
            groups,
            graph_runs,
            self._failures,
            saving,
            weights,
            started,
        )
        parts = spec, history, buffer, graph_runs, weights, calls
        self._admission = Admission(*parts)
        self._dispatcher = Dispatcher(*parts, path / SAMPLES)
        self._requests = RunRequests(path, epoch)
        self._closing = Closing(
            spec, history, directory, graph_runs, weights, calls, saving, started, self._requests
        )
        self._live = LiveState(path, self._backend, graph_runs, groups, started, epoch)
        self.failed = False
        self.ended = False
        """Whether the run has reached the end of its schedule."""
        self.closed = False

    # Before the first step

    def prepare(self) -> None:
        if self._point is not None:
            self._load(self._point)
        for group in self.groups.values():
            if has_state(group.handle):
                self._weights.keep_own(group)
        self._calls.queue(self._weights.publish_all())
        self._until(lambda: self._calls.idle)

    def _load(self, point: ResumePoint) -> None:
        if later := self._saving.resume(point.state.step):
            names = ", ".join(sorted(path.name for path in later))
            self._progress.say(
                f"later checkpoints ({names}) are kept in {later[0].parent} until the run has new ones for these steps"
            )
        self._copies.resume()
        for name, group in self.groups.items():
            if has_state(group.handle):
                self.call_group(group, "load_checkpoint", path=point.path / name)
            group.version = point.state.versions.get(name, 0)

    # The loop

    def to_the_end(self) -> None:
        """Run until the schedule is done.

        Raises:
            SystemExit: The run was asked to end, and has saved itself.
        """
        self._begin()
        while not self._finished:
            # A checkpoint cannot hold half an update.
            if self._asked_to_leave and self._can_be_saved:
                self._leave()
            if self._closing.ended_by is not None and self._can_be_saved:
                self._refuse(self._closing.ended_by)
            self._admit()
            self._dispatch()
            self._settle()
            self._close()
            self._save()
        # The last step may have shown a symptom.
        if self._closing.ended_by is not None:
            self._refuse(self._closing.ended_by)
        if self._spec.checkpoint.writes:
            self._save_to_the_end()
            # Evaluations of the last steps have ended, so the best checkpoint is known.
            self._saving.folder.prune(self._directory.values)
        self._calls.commit()  # the log must not be behind the metrics
        self._disk.write(self._directory.flush)
        self._end_copies(END_S)
        self._progress.ended(self._closing.ending)
        self.ended = True

    def _begin(self) -> None:
        if self._point is None:
            self._closing.close_step({})
            return
        self._closing.resume()
        if not self._point.with_rows and self._spec.checkpoint.writes:
            self._saving.due = True  # the old checkpoint of this step points into a log that is gone
            self._save()

    def _admit(self) -> None:
        if not self._saving.holds_up:
            self._admission.admit()

    def _dispatch(self) -> None:
        self._calls.queue(self._weights.receive_when_idle())
        self._calls.queue(self._questions())
        self._calls.make_calls()
        if not self._saving.holds_up:
            self._dispatcher.dispatch()

    def _questions(self) -> list[CallRequest]:
        """Return a call to each rank that plays episodes and may have died. Nodes call only the ranks
        that sample."""
        asked = () if self._gateway is None else self._gateway.take_asked()
        groups = [group for name, group in self.groups.items() if name in asked]
        return [CallRequest(group, "answer", ranks=(rank,)) for group in groups for rank in group.up]

    def _settle(self) -> None:
        self._calls.make_calls()
        self._calls.commit()
        self._calls.withdraw_rows()
        if self._calls.under_way or self._failures.waits_for_ranks:
            try:
                self._take_replies()
            except BaseException as error:
                self.failed = True
                if type(error) is WorkerError and self._backend.cluster is not None:
                    error.add_note(DEBUGGER)
                raise
        # No replies are due, but a checkpoint is being written.
        elif self._saving.holds_up:
            time.sleep(ASK_S / 10)
        elif not self._finished and not self._can_move:
            raise StalledError(self._why_stalled())

    def _take_replies(self) -> None:
        """Take replies until a node can start, something is due, or none come."""
        self._live.note()
        # After a call begins or ends, other nodes may be able to start.
        settled = not self._calls.take_changed() and not self._saving.holds_up
        patience_s = self._patience_s
        while came := self._calls.take_replies(patience_s):
            can_wait = all(self._dispatcher.can_wait(self.graph_runs[name]) for name in came)
            patience_s = self._patience_s  # shorter if rows have begun to wait for a fuller batch
            if not (settled and can_wait and patience_s):
                return
            self._disk.write(lambda: self.buffer.log.commit(fenced=False))
            # With many ranks, a pause lets more replies arrive at once.
            if rest_s := min(patience_s, self._calls.rest_s):
                self._backend.rest(rest_s)

    def _close(self) -> None:
        train = self._train
        self._closing.close_evaluations()
        if self._closing.step_is_over:
            metrics = train.close(overlaps=self._spec.schedule.overlaps)
            self.buffer.note("step", train.step)
            self._closing.close_step(metrics)
            for_best = self._spec.is_evaluated_for_best(train.step, over=train.over)
            self._saving.step_over(train.step, last=train.over, for_best=for_best)
            # Without checkpoints, nothing reads old log entries.
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
        # If generation runs ahead, its surplus rows stay in the log.
        left = graph_runs.evaluations.values() if self._spec.schedule.overlaps else graph_runs
        return not unseen and not any(run.ledger.live.groups for run in left)

    @property
    def _can_move(self) -> bool:
        ended = any(evaluation.ended for evaluation in self.graph_runs.evaluations.values())
        over = self._spec.schedule.over(self._train)
        return ended or over or self._admission.possible or self._dispatcher.possible

    @property
    def _patience_s(self) -> float:
        """[s] Longest wait for replies: until a lease, quorum or delay ends, at most a second."""
        due = [ledger.next_deadline for ledger in self.buffer.ledgers.values()]
        due.append(self._dispatcher.next_due_s)
        now = self._backend.clock()
        return max(0.0, min([1.0, *(d - now for d in due if d is not None)]))

    def _why_stalled(self) -> str:
        lines = [
            "the run cannot continue: rows are in flight, but no call is running and no node can start:"
        ]
        for run in self.graph_runs:
            for group in list(run.ledger.live.groups)[:3]:
                lines += [f"graph {run.graph.name!r}, group {group}:"]
                lines += [f"  {line}" for line in run.ledger.live.waits_for(group).splitlines()]
        return "\n".join(lines)

    # Checkpoints

    def _save(self) -> None:
        """Continue the checkpoint that is being written, and begin one that is due."""
        self._tell_notes()
        progressed = self._saving.advance(self._directory.values)
        self._calls.queue(progressed.requests)
        if given_up := progressed.given_up:
            position, why = given_up
            self.buffer.drop_checkpoint(position)
            self._disk.wait_for_more(why)
        if self._saving.may_begin:
            self._disk.write(self._directory.flush)
            kept = self._saving.folder.positions
            state = self._state(self._disk.write(lambda: self.buffer.checkpoint(kept)))
            write = self.graph_runs.state_files()
            begin = self._saving.begin_checkpoint
            self._calls.queue(self._disk.write(lambda: begin(state, write)))

    def _state(self, position: Position) -> RunState:
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
            pending=self._train.pending,
            next_id=self.buffer.ids.next_id,
            next_group=self.buffer.ids.next_group,
            settings=self._spec.recorded[0],
        )

    def _save_to_the_end(self, *, again: bool = False) -> None:
        """Save the current step and wait; with `again`, even if the step has a checkpoint."""

        def is_saved() -> bool:
            self._save()
            return not self._saving.holds_up

        self._saving.require(self._train.step, again=again)
        self._until(is_saved)

    def _tell_notes(self) -> None:
        notes = [] if self._gateway is None else self._gateway.take_notes()
        for note in (*notes, *self._copies.take_notes()):
            self._progress.say(note)

    def _end_copies(self, timeout_s: float) -> None:
        self._copies.close(timeout_s, say=self._progress.say)
        self._tell_notes()

    # Ending early

    @property
    def _asked_to_leave(self) -> bool:
        """Whether the run should save itself and end."""
        return bool(asked_to_end()) or (self._spec.checkpoint.writes and self._requests.stop_asked)

    @property
    def _can_be_saved(self) -> bool:
        """Whether no update has claimed part of a batch, and training waits for no evaluation."""
        evaluating = any(e.under_way for e in self.graph_runs.evaluations.values())
        waits = evaluating and self._spec.evaluations_hold_training
        return not waits and not any(self._train.taken.values())

    def _leave(self) -> NoReturn:
        number = asked_to_end()
        self._save_as_it_stands()
        self._end_copies(LEAVE_S)
        text = (
            f"ended early, and saved in {self._saving.folder.path}; resume='latest' continues from there"
        )
        self._progress.alert("ended_early", text, warning=False)
        raise SystemExit(128 + number if number == signal.SIGINT else 0)

    def _refuse(self, seen: Seen) -> NoReturn:
        """End the run because of a symptom; save it first unless the symptom spoils its weights."""
        if seen.symptom.spoils:
            self._record_all()
        else:
            self._save_as_it_stands()
        kind = NoSignalError if seen.symptom.name == NO_SIGNAL else SymptomError
        raise kind(f"{seen.text}. {GOES_ON}", self._progress.latest_sample)

    def _save_as_it_stands(self) -> None:
        if self._spec.checkpoint.writes:
            # A checkpoint of this step may lack rows that are in the buffer now.
            self._save_to_the_end(again=True)
        self._record_all()

    def _record_all(self) -> None:
        def all_recorded() -> bool:
            self._dispatcher.record(hurry=True)
            return not any(run.ledger.live.groups_behind for run in self.graph_runs)

        self._until(all_recorded)
        self._disk.write(self._directory.flush)

    # From outside the loop

    def call_group(self, group: WorkerGroup, method: str, **arguments: Any) -> list[Any]:
        """Call a method of a group, and return the result of each rank."""
        ended: list[Call] = []

        def end(call: Call) -> list[CallRequest]:
            ended.append(call)
            return []

        self._calls.queue([CallRequest(group, method, arguments, then=end, on_device=True)])
        self._until(lambda: bool(ended))
        return ended[0].results

    def _until(self, condition: Callable[[], bool]) -> None:
        """Make calls and take replies until a condition holds, without admitting or dispatching."""
        while not condition():
            self._settle()

    def close(self) -> None:
        self.closed = True
        try:
            self._live.close()
            self._saving.close()
            self._end_copies(0.0)
        finally:
            try:
                self._backend.close()
            finally:
                if self._gateway is not None:
                    self._gateway.close()
                self.buffer.close(going_on=not self.ended)
