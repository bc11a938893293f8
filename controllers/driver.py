"""Driver: walks the graphs of a run over its worker groups, until the schedule says that it is done.

    admit      issue prompts, as many as the schedule allows now
    dispatch   give every idle group the rows that are ready for its nodes
    settle     take what came back: publish rows, pass weights on
    close      end the step, or the evaluation, of which nothing is left to do

The driver moves row ids and references; no token passes through it.
"""

from __future__ import annotations

import platform
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ..dataflow.arguments import names_arguments
from ..dataflow.batch import Batch
from ..dataflow.buffer.disk import is_full
from ..dataflow.buffer.log import Position
from ..dataflow.buffer.rows import Lease, Published, Staleness
from ..dataflow.buffer.sample_buffer import BufferConfig, Room, SampleBuffer
from ..dataflow.buffer.samples import FOLDER as SAMPLES
from ..dataflow.buffer.segments import SegmentWriter
from ..dataflow.column import PROMPT_IDS, RESPONSE_VERSIONS
from ..dataflow.errors import RunError, StalenessError, StalledError, UserError, WorkerDied
from ..dataflow.graph import SOURCE, Graph, Node
from ..dataflow.operation import Shape
from .backends.backend import Backend, Event, Files, Setup, this_node
from .backends.local import Local
from .checks import all_handles, check_apart, check_followed, check_kinds, check_room, with_prompts_that_fit
from .graph_run import CURSOR, Cursor, GraphRun, positions
from .group import Call, UnderWay, WorkerGroup, publishes_as_it_goes
from .placement import Placement, resolve
from .progress import Progress
from .recording import FUNCTIONS, RECORDER, RESERVED, RecordingSchedule, own_groups, with_recording
from .recovery.checkpoints import (
    FOLDER,
    POLL_S,
    WITHOUT_ROWS,
    CheckpointConfig,
    Checkpoints,
    Found,
    RunState,
    can_be_ended,
    check_saved,
    checkpoints,
    has_state,
    latest_sound,
    open_buffer,
    open_run,
)
from .recovery.failures import Failures
from .recovery.full_disk import FullDisk
from .row_io import num_tokens
from .run_directory import check_name
from .schedule import Asynchronous, OnePass, Share, Training
from .symptoms import Watch, mistakes
from .weight_sync import WeightSync

MAX_RESTARTS = 3
"""How often a run goes on from the same checkpoint by itself."""


@names_arguments
@dataclass(frozen=True)
class Evaluation:
    """A graph over held-out rows, run before the first step, after each `every`-th, and after the last.

    Training waits for it, unless its schedule overlaps generation and training (`Asynchronous`): then its rows take their place
    among the others when the weights of its step have arrived, responses that are unfinished when the next weights come are treated as
    those of training are (`partial_rollouts`), and its metrics `oldest_version` and `newest_version` say of which weights its tokens
    are. They stand beside the metrics of the step that it is of, whenever it is over.
    """

    graph: Graph
    every: int = 10
    name: str = "eval"

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UserError(f"Evaluation(every={self.every}): every must be at least 1")


@names_arguments
class Driver:
    """One run: graphs, a schedule, a placement and a backend.

    Use it as a context manager: leaving it ends every process that it started, whatever happened inside.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        schedule: Training,
        evaluations: Sequence[Evaluation] = (),
        placement: Placement | None = None,
        backend: Backend | None = None,
        name: str | None = None,
        root: str | Path = "runs",
        seed: int = 0,
        record_every: int = 1,
        call_timeout_s: float = 600.0,
        buffer: BufferConfig = BufferConfig(),
        checkpoint: CheckpointConfig = CheckpointConfig(),
        resume: str | Path = "none",
        progress: bool = True,
        stop: Callable[[Mapping[str, float]], bool] | None = None,
        settings: object = None,
    ) -> None:
        """Check everything that can be checked before a process is started.

        Args:
            record_every: samples of each `record_every`-th step are kept in the run directory; 0 keeps none.
            call_timeout_s: how long a rank that was called may do nothing that shows (an answer, a microbatch, a step of an engine, a
                scored sample; `Context.advance`): then it is replaced, if it can be, or the run is taken back to its last
                checkpoint, or ends. So long, too, a checkpoint may not grow.
            buffer: how much the sample buffer may hold, and how it keeps it.
            checkpoint: when the run saves what it needs to go on.
            name: of the run's directory below `root`; default: the time. A run has one driver: while it lives, another is refused.
            resume: "none" for a new run; "latest" to go on from the last sound checkpoint of the run `name` (of the newest that has
                any, without a name), or to begin where there is none; "weights" for the same without the rows in flight, where the
                log is lost or the graph was changed; or the folder of a run or of one of its checkpoints.
            stop: ends the run early when it says so of a step's metrics.
            settings: the script's own settings, kept with the run.

        Raises:
            UserError: naming the place, the rule, the value and the nearest right name.
        """
        check_kinds(
            graph=graph, schedule=schedule, buffer=buffer, checkpoint=checkpoint, placement=placement, backend=backend
        )
        names = ["train", *(e.name for e in evaluations)]
        for taken in names:
            check_name(taken, "Evaluation(..., name")
            if names.count(taken) > 1:
                raise UserError(
                    f"two graphs of the run are called {taken!r}; give each Evaluation(..., name=...) its own"
                )
        graphs = [with_prompts_that_fit(one) for one in (graph, *(e.graph for e in evaluations))]
        graph = graphs[0]
        for one in graphs:
            one.validate(also=graphs)
        handles = all_handles(graphs)
        for called in handles:
            check_name(called, "weft.group(..., name")
        self._handles = {**handles, **own_groups(graphs, handles, record_every)}
        places = resolve(placement, {**handles, **RESERVED})
        self._placement = {name: places[name] for name in self._handles}
        self._backend = backend or Local()
        self._backend.check(self._placement)
        for one in graphs:
            if not len(one.source.table):
                raise UserError(f"source {one.source.name!r} of graph {one.name!r} has no rows")
            for group, handle in one.handles.items():
                handle.worker_class.check(handle.config, [n for n in one.nodes if n.group == group], one.source)
        check_followed(graph, schedule)
        check_room(graph, schedule, buffer)
        check_apart(graph, schedule, self._placement, graphs[1:])
        self._schedule = schedule
        self._evaluations = {e.name: e for e in evaluations}
        self._seed = seed
        self._recording = RecordingSchedule(record_every, schedule.prompts_per_step)
        self._stop = stop
        self._follows = tuple(dict.fromkeys(edge for g in graphs for edge in g.follows))
        self._graphs = dict(zip(names, graphs, strict=True))

        def accept(found: Found | None) -> None:
            self._check_found(found)
            check_saved(checkpoint, graphs, handles, found)

        self.directory, self._resumed = open_run(resume, Path(root), name, accept)
        self._progress = Progress(schedule.steps, self.directory.path, enabled=progress)
        self._described = {
            "seed": seed,
            "settings": settings,
            "backend": repr(self._backend),
            "schedule": {"kind": type(schedule).__name__, **dict(schedule)},
            "buffer": dict(buffer),
            "checkpoint": dict(checkpoint),
            "placement": self._placement,
            "groups": {n: {"class": h.worker_class, **dict(h.config)} for n, h in handles.items()},
            "graphs": {n: str(g).splitlines() for n, g in self._graphs.items()},
            "python": platform.python_version(),
        }
        self._checkpoint_config = checkpoint
        self._call_timeout_s = call_timeout_s
        self._restarts: Counter[str] = Counter()
        """Checkpoint -> how often the run has gone on from it by itself."""
        # Rows in flight are kept for as many as the models are, and for one that is being written.
        keep = max(buffer.keep_checkpoints, checkpoint.keep + 1)
        self._buffer_config = buffer.model_copy(update={"keep_checkpoints": keep})
        self._failures = Failures(self._backend, self, self._progress, call_timeout_s)
        self._watch = Watch()
        self._asked_to_end: Callable[[], bool] = lambda: False
        self._disk = FullDisk(self.directory.path, self._progress, lambda: self._asked_to_end(), self._failures.forgive)
        self._begin()

    def _begin(self) -> None:
        """What each start of the run begins with: the first, and those from a checkpoint."""
        self._disk.write(lambda: self.directory.write_config(self._described, self._graphs["train"].mermaid()))
        self._checkpoints = Checkpoints(self.directory, self._checkpoint_config, self, self._call_timeout_s)
        self.buffer: SampleBuffer | None = None
        """The rows of the run, while it lives."""
        self.groups: dict[str, WorkerGroup] = {}
        self._flows: dict[str, GraphRun] = {}
        self._under_way = UnderWay()
        self._events: deque[Event] = deque()
        """Replies that have come and are not taken yet."""
        self._then: dict[Call, Callable[[Call], None]] = {}
        self._turn_of: dict[str, str] = {}
        self._stopped = self._failed = self._ended = False
        self._samples: Counter[str] = Counter()
        """Rows that each updating node has trained on in this step."""
        self._tokens: Counter[str] = Counter()
        """Their tokens, prompts included."""
        self._saving = Position()
        """Of the checkpoint that was begun last, in the buffer's log."""
        self._closed_at = 0.0
        self._closed_first = False
        """Whether step 0, the start of the run, is closed."""
        self._failures.start_again()
        self._started = self._backend.clock()

    @property
    def step(self) -> int:
        """Updates made."""
        return self._flows["train"].step if self._flows else 0

    # Life

    def __enter__(self) -> Driver:
        """Start the worker groups and give every follower its leader's weights."""
        for mistake in mistakes(self._graphs["train"], self._handles):
            self._progress.warn(mistake)
        try:
            self._start_groups()
        except BaseException:
            self.close()
            raise
        return self

    def _start_groups(self) -> None:
        for note in self.directory.notes:
            self._progress.say(note)
        self._progress.starting(self._handles, repr(self._backend))
        self._progress.left_out([graph.source for graph in self._graphs.values()])
        graphs = {name: with_recording(graph) for name, graph in self._graphs.items()}
        config = self._buffer_config
        resumed = self._resumed
        self.buffer = self._disk.write(  # what is kept of the log is copied
            lambda: open_buffer(self.directory, resumed, graphs, config=config, clock=self._backend.clock)
        )
        if resumed is not None:
            self._checkpoints.go_on_from(resumed)
            ledgers = self.buffer.ledgers
            self.directory.forget_samples(lambda graph, lease: graph in ledgers and ledgers[graph].is_void(lease))
            self._progress.resumed(resumed.path, resumed.state.step, [*resumed.damage, *self.buffer.damage])
        self.buffer.note("record_every", self._recording.every)
        self.buffer.store.delete_remote = self._backend.delete
        starts = self.directory.starts
        files = Files(self.buffer.folder / "segments", config.file_bytes, config.memory_bytes, starts)
        try:
            self.groups = self._backend.start(
                Setup(self._handles, self._placement, self.directory.path, self._seed, files, self._follows)
            )
            for graph, group in self.buffer.drop_unreachable(self._backend.nodes):
                self._progress.say(f"group {group} of graph {graph!r} is issued again: the node that it lay on is gone")
            sources = files.writer(this_node(), "sources")
            for name, graph in graphs.items():
                self._flows[name] = self._flow(name, graph, self.buffer, sources)
            sources.close()
            self._started = self._backend.clock()
            partial = self._schedule.partial_rollouts if isinstance(self._schedule, Asynchronous) else "continue"
            self._weights = WeightSync(self._follows, self.groups, self, partial)
            self._clear_devices()
            if resumed is not None:
                self._load(resumed)
            for leader in dict.fromkeys(e.leader for e in self._follows):
                self._weights.pass_on(leader)
            self._wait_for_all()
            self._progress.started(self._graphs, self.groups, self._placement)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the run; what was measured is on disk, and others may go on with it."""
        try:
            self._stop_groups()
        finally:
            if self.directory.lock is not None:
                self.directory.lock.release()

    def _stop_groups(self) -> None:
        try:
            try:
                self.directory.close()
            except OSError as error:
                if not is_full(error):  # a disk without room has been said
                    raise
            self._checkpoints.close()
        finally:
            try:
                self._backend.close()
            finally:
                if self.buffer is not None:
                    self.buffer.close(going_on=not self._ended)
                    self.buffer = None

    def _flow(self, name: str, graph: Graph, buffer: SampleBuffer, sources: SegmentWriter) -> GraphRun:
        source = Batch.of_table(graph.source.table)
        schedule = self._schedule if name == "train" else OnePass(overlaps=self._schedule.overlaps)
        buffer.set_source(name, sources.append(source))
        ledger = buffer.ledgers[name]
        order = positions(len(source), self._seed, shuffle=schedule.shuffle)
        noted = buffer.notes.get(CURSOR) if name == "train" else None
        start = Cursor(noted["issued"], tuple(noted["again"])) if noted else Cursor()
        rest = start.rest(order, ledger.prompts_issued)
        # Rows that are made of the source's have a part of their tokens: the prompt, and what they say themselves.
        makes_rows = any(node.level == SOURCE and node.makes_level is not None for node in graph.nodes)
        tokens = num_tokens(source, {str(PROMPT_IDS)}.intersection(source.columns) if makes_rows else None)
        flow = GraphRun(name, graph, schedule, ledger, rest, tokens, start)
        if self._resumed is not None and flow.evaluates:
            self._give_up_evaluations(flow)
        elif self._resumed is not None:
            flow.step = self._resumed.state.step
            flow.open = ledger.groups_at_work > 0
        return flow

    def _give_up_evaluations(self, flow: GraphRun) -> None:
        """Those that were under way at a checkpoint would be of the weights of another step: that of the present one is made again."""
        for step in sorted(flow.ledger.rounds):
            self._progress.given_up(flow.name, step)
        for group in flow.ledger.ids_at_work:
            flow.ledger.lose(group, "the run was started again, and its evaluation is given up", issue_again=False)

    def _check_found(self, found: Found | None) -> None:
        if found is not None and found.state.seed != self._seed:
            raise UserError(f"{found.path} is of a run with seed={found.state.seed}, not {self._seed}")
        kind = type(self._schedule).__name__
        if found is not None and found.with_rows and found.state.schedule != kind:
            raise UserError(
                f"{found.path} is of a run under {found.state.schedule}, not {kind}: its rows are of another age. {WITHOUT_ROWS}"
            )

    def _load(self, found: Found) -> None:
        """Give every group that has a state the one of the checkpoint."""
        self._started = self._backend.clock() - found.state.time_s
        self._stopped = found.state.stopped
        for name, group in self.groups.items():
            if has_state(group.handle):
                self._call_and_wait(group, "load_checkpoint", path=found.path / name)
            group.version = found.state.versions.get(name, 0)
        for name in self._evaluations:
            self._flows[name].closed_at = found.state.evaluated.get(name, -1)

    # The loop

    def run(self) -> list[dict[str, float]]:
        """Run to the end of the schedule; returns the metrics of every step.

        When a worker's process ends that cannot be replaced by itself, all groups are started again, and the run goes on from its last
        checkpoint.
        """
        self._refuse_when_failed()
        with can_be_ended(bool(self._checkpoints.config.every)) as asked:
            self._asked_to_end = asked
            died: WorkerDied | None = None
            while True:
                try:
                    if died is not None:
                        self._start_again(died)
                    return self._run()
                except WorkerDied as error:
                    if asked() or not self._can_start_again:
                        raise
                    died = error

    @property
    def _can_start_again(self) -> bool:
        """There is a checkpoint, and no more than MAX_RESTARTS in a row went on from the same one."""
        latest = next(iter(checkpoints(self.directory.path / FOLDER)), None)
        return latest is not None and self._restarts[latest.name] < MAX_RESTARTS

    def _start_again(self, error: WorkerDied) -> None:
        self._stop_groups()
        lock = self.directory.lock
        assert lock is not None
        lock.renew()
        try:
            found = latest_sound(self.directory.path)
        except UserError as damaged:
            raise UserError(f"{damaged}\nThe run was to go on from there after this: {error}") from error
        assert found is not None
        self._restarts[found.path.name] += 1
        self._resumed = found
        self.directory = found.reopen(lock)
        self._progress.died(str(error))
        self._begin()
        self._start_groups()

    def _run(self) -> list[dict[str, float]]:
        if self._resumed is None:
            self._close_step({})
        else:
            self._closed_at = self._backend.clock()
            self._mark_evaluations()
            if not self._resumed.with_rows and self._checkpoints.config.every:
                self._checkpoints.saved_step = -1  # that of this step has its place in a log that is no more
                self._save()
        while not self._finished:
            if self._asked_to_end() and self._can_be_saved:
                self._save_and_leave()
            self._admit()
            self._dispatch()
            self._settle()
            self._close()
        if self._checkpoints.config.every:
            self._save_to_the_end()
        self._progress.ended()
        self._disk.write(self.directory.flush)
        self._ended = True
        return self.directory.metrics

    @property
    def _step_under_way(self) -> int:
        """A step lasts from the end of the one before until its update is made and passed on; the start of the run is step 0."""
        begun = self._resumed is not None or self._closed_first
        return self.step + 1 if begun and not self._over else self.step

    @property
    def _over(self) -> bool:
        """No step is to come any more."""
        return self._stopped or self.step >= self._schedule.steps

    @property
    def _finished(self) -> bool:
        # What generation that ran ahead has left over at the end of training stays as it is in the log.
        left = (f for f in self._flows.values() if f.evaluates or not self._schedule.overlaps)
        due = any(f.due or f.rounds for f in self._flows.values())
        train = self._flows["train"]
        unseen = any(train.observes(n) and train.ledger.ready(n) for n in train.graph.nodes)
        unrecorded = any(f.ledger.groups_behind for f in self._flows.values())
        at_rest = self._over and not self._at_work and not due and not unseen and not unrecorded
        return at_rest and not any(f.ledger.groups_in_flight for f in left)

    def _admit(self) -> None:
        for flow in self._flows.values():
            for step, versions in list(flow.due.items()):
                if self._may_evaluate(versions) and not self._recording.is_full(flow):
                    del flow.due[step]
                    flow.evaluate(step)
        train = self._flows["train"]
        evaluating = any(f.due or f.rounds for f in self._flows.values())
        if self._over or (not self._schedule.overlaps and (evaluating or self._passing_weights)):
            return
        number = self._schedule.admit(train)
        room = self._room(train)
        if self._schedule.overlaps:
            number = min(number, room.groups)
            ahead = 1 + self._schedule.max_staleness + self._schedule.max_refills
            if number and train.issued > ahead * self._schedule.prompts_per_step:
                raise StalledError(
                    f"{train.issued} prompts were issued since step {self.step}, and none is over; {self._dropped(train)}"
                )
        elif number > room.groups:
            if not train.ledger.groups_in_flight:
                raise StalledError(
                    f"step {self.step + 1} needs {number} groups at once; the buffer is full: {room.reason}"
                )
            return  # until some are finished; whoever works on them has a deadline
        if number and train.open and not self._schedule.overlaps:
            train.refills += 1
            if train.refills > self._schedule.max_refills:
                raise StalledError(
                    f"step {self.step + 1} issued more prompts {self._schedule.max_refills} times and still lacks {number} groups; "
                    f"{self._dropped(train)}"
                )
        if number:
            train.issue(number, self.step + 1)

    def _may_evaluate(self, versions: Mapping[str, int]) -> bool:
        """Whether the weights that an evaluation is of have arrived; it is made among all else, or when nothing else is under way."""
        if not self._schedule.overlaps:
            return all(call.behind for call in self._at_work) and not self._weights.under_way
        return all(self.groups[name].version >= version for name, version in versions.items())

    def _dropped(self, flow: GraphRun) -> str:
        dropped = ", ".join(f"{rows} by {name!r}" for name, rows in flow.ledger.dropped.items())
        return f"rows dropped so far: {dropped or 'none'}"

    def _room(self, flow: GraphRun) -> Room:
        each = self._schedule.prompts_per_step
        if not self._schedule.overlaps:
            return self._live_buffer.room(flow.name, groups_per_update=each)
        generating = [n.group for n in flow.graph.nodes if n.group and str(RESPONSE_VERSIONS) in n.writes]
        return self._live_buffer.room(
            flow.name,
            groups_per_update=each,
            staleness=self._schedule.max_staleness,
            lag=self._weights.lag(generating),
            taken=max((flow.taken[n.name] for n in flow.updates), default=0),
        )

    @property
    def _live_buffer(self) -> SampleBuffer:
        if self.buffer is None:
            raise RunError("the run is over: its buffer is closed")
        return self.buffer

    @property
    def _passing_weights(self) -> bool:
        return self._at_work.beside_the_graph > 0

    @property
    def _at_work(self) -> UnderWay:
        """Calls under way, but those on ranks that get no rows meanwhile: nobody waits for a process that is not up."""
        groups = self.groups.values()
        return UnderWay(c for g in groups for c in g.at_work) if any(g.out for g in groups) else self._under_way

    def _dispatch(self) -> None:
        self._weights.settle()
        self._checkpoints.poll()
        self._record(hurry=self._over)
        # Evaluations come first: they have few rows, which must not stand at the end of a queue.
        for flow in sorted(self._flows.values(), key=lambda flow: not flow.evaluates):
            for node in flow.nodes:
                group = self.groups[node.group or FUNCTIONS]
                share = self._share(flow, node, group)
                if share is None:
                    continue
                if node.operation.interruptible and flow.schedule.overlaps:
                    self._start_by_load(flow, node, group, share)
                else:
                    self._start(flow, node, group, share)

    def _share(self, flow: GraphRun, node: Node, group: WorkerGroup) -> Share | None:
        """What a node may begin with now: nothing while its group is at something else, or another one on its pool is."""
        joins = node.operation.interruptible and flow.schedule.overlaps
        if not group.is_free(to_join=joins) or self._weights.holds_back(group) or not self._may_take_turn(group):
            return None
        if not group.replicas:
            return None
        if not flow.evaluates and self._over:  # what was trained on is still recorded
            return Share() if flow.observes(node) and flow.ledger.ready(node) else None
        if node.operation.updates and any(self._waits_for(f, group) for f in self._flows.values()):
            return None
        if node.operation.updates and self._recording.is_full(flow):
            return None
        return flow.schedule.share(flow, node, group.version)

    def _waits_for(self, flow: GraphRun, group: WorkerGroup) -> bool:
        """Whether an update of this group would change the weights that an evaluation is of. Where weights change while
        responses are written, only the group's own work on the evaluation is in the way."""
        return bool(flow.due or flow.rounds) and (not self._schedule.overlaps or group.name in flow.graph.handles)

    def _start_by_load(self, flow: GraphRun, node: Node, group: WorkerGroup, share: Share) -> None:
        """Rows that are ready go to the replicas that have least left to do."""
        rows = flow.ledger.ready(node) if share.max_rows is None else share.max_rows
        for replica, number in group.least_loaded(rows).items():
            self._start(flow, node, group, replace(share, max_rows=number), replica=replica)

    def _may_take_turn(self, group: WorkerGroup) -> bool:
        """Groups on one pool take turns."""
        pool = group.place.pool.name
        return not any(g is not group and g.busy and g.place.pool.name == pool for g in self.groups.values())

    def _start(
        self,
        flow: GraphRun,
        node: Node,
        group: WorkerGroup,
        share: Share,
        *,
        replica: int | None = None,
    ) -> None:
        lease = flow.ledger.claim(
            node,
            max_rows=share.max_rows,
            max_groups=share.max_groups,
            holder=group.name,
            # An update that was begun cannot be taken back: its group's own deadline ends the run.
            deadline_s=None if node.operation.updates else self._buffer_config.lease_deadline_s,
            staleness=self._staleness(flow, node, group),
            version=group.version if str(RESPONSE_VERSIONS) in node.writes else None,
        )
        self._refuse_stale(flow, node, group)
        if lease is None:
            return
        extra: dict[str, Any] = {}
        if node.operation.updates:
            flow.taken[node.name] += lease.num_groups
            if node.operation.accumulates:
                extra["last"] = share.last
        self._disk.write(self._live_buffer.commit)  # the log is ahead of the work
        self.take_device(group)
        call = group.call_node(flow.ledger, lease, replica=replica, **extra)
        call.last = share.last
        self.watch(call, lambda call: self._node_done(flow, call))

    def _record(self, *, hurry: bool) -> None:
        """Have the recorder write what is over, where it has nothing else to do."""
        recorder = self.groups.get(RECORDER)
        for flow in self._flows.values():
            for node in flow.recorders:
                busy = recorder is not None and (recorder.busy or not self._may_take_turn(recorder))
                if busy or not self._recording.is_due(flow, node, hurry=hurry):
                    continue
                lease = flow.ledger.claim(
                    node, holder=RECORDER, deadline_s=self._buffer_config.lease_deadline_s if recorder else None
                )
                if lease is None:
                    continue
                steps = self._recording.steps(flow, lease)
                if recorder is None or not steps:
                    self._publish_all(flow, lease.ids, lease)
                    flow.ledger.finish(lease)
                    continue
                self._disk.write(self._live_buffer.commit)
                self.take_device(recorder)
                folder = self.directory.path / SAMPLES
                where = {"folder": folder, "graph": flow.name, "token": lease.token, "steps": steps}
                call = recorder.call_node(flow.ledger, lease, **where)
                self.watch(call, lambda call, flow=flow: self._node_done(flow, call))

    def _record_the_rest(self) -> None:
        """Wait until all that the run is through with is recorded."""
        while any(f.ledger.groups_behind for f in self._flows.values()):
            self._record(hurry=True)
            self._settle()

    def _staleness(self, flow: GraphRun, node: Node, group: WorkerGroup) -> Staleness | None:
        """The bound of the schedule, on every row that an update claims."""
        bound = flow.schedule.max_staleness
        if not node.operation.updates or bound is None or not self._weights.followers(group.name):
            return None  # the versions in the rows, if any, count some other group's updates
        return Staleness(group.version, bound, self._buffer_config.on_stale if bound else "wait")

    def _refuse_stale(self, flow: GraphRun, node: Node, group: WorkerGroup) -> None:
        """Rows of an on-policy schedule that are too old end the run: nothing that they could wait for would help."""
        if flow.schedule.max_staleness == 0 and flow.ledger.held(node):
            raise StalenessError(
                f"{group.name!r} is at version {group.version}, but rows ready for its update were generated by "
                f"version {flow.ledger.oldest_held(node)}; the schedule allows a staleness of 0. "
                f"Was a weight update skipped? Followers: {self._weights.followers(group.name)}"
            )

    def take_device(self, group: WorkerGroup) -> None:
        """On a shared pool with GPUs, the group whose turn it was makes room for the one whose turn it is."""
        pool = group.place.pool
        if not pool.gpus or self._turn_of.get(pool.name) == group.name:
            return
        before = self._turn_of.get(pool.name)
        self._turn_of[pool.name] = group.name
        if before is not None:
            self._call_and_wait(self.groups[before], "offload", on_device=False)
        self._call_and_wait(group, "onload", on_device=False)

    def _clear_devices(self) -> None:
        """Groups that share a pool with GPUs begin with their models in host memory."""
        for group in self.groups.values():
            sharing = [g for g in self.groups.values() if g.place.pool.name == group.place.pool.name]
            if group.place.pool.gpus and len(sharing) > 1:
                self._call_and_wait(group, "offload", on_device=False)

    def watch(self, call: Call, then: Callable[[Call], None]) -> None:
        self._failures.asked(call)
        call.started = self._backend.clock()
        call.group.watch(call)
        self._under_way.add(call)
        self._then[call] = then
        if call.done:  # no rank had anything to do
            self.complete(call)

    def _settle(self) -> None:
        buffer = self._live_buffer
        self._disk.write(buffer.commit)
        self._give_up_rows()
        for ledger in buffer.ledgers.values():
            if expired := {lease.token for lease in ledger.expire()}:
                for call in [
                    c for c in self._under_way if c.interruptible and c.ledger is ledger and c.lease is not None
                ]:
                    if call.lease is not None and call.lease.token in expired:
                        self._backend.cancel(call)
        if self._under_way:
            try:
                if not self._events:
                    self._events.extend(self._backend.wait(timeout_s=self._patience))
                    self._failures.listen(self._events, self._under_way)
                # One after the other, also when what follows from one of them waits for a later one.
                while self._events:
                    self._take(self._events.popleft())
            except BaseException:
                self._failed = True
                raise
        elif not self._finished and not self._can_move:
            raise StalledError(self._why_stalled())

    @property
    def _patience(self) -> float:
        """Seconds until the driver looks up: when a lease or a quorum is due, or a second."""
        due = (ledger.next_deadline for ledger in self._live_buffer.ledgers.values())
        now = self._backend.clock()
        return max(0.0, min([1.0, *(d - now for d in due if d is not None)]))

    @property
    def _can_move(self) -> bool:
        """Whether the next turn of the loop will find something to do."""
        waiting = any(self._may_evaluate(versions) for f in self._flows.values() for versions in f.due.values())
        flows = self._flows.values()
        claimable = any(self._share(f, n, self.groups[n.group or FUNCTIONS]) for f in flows for n in f.nodes)
        claimable |= any(self._recording.is_due(f, n, hurry=self._over) for f in flows for n in f.recorders)
        train = self._flows["train"]
        admissible = not self._over and self._schedule.admit(train) > 0 and self._room(train).groups > 0
        over = any(f.schedule.over(f) for f in flows)  # its last rows were finished without a call
        return waiting or claimable or admissible or over

    def _take(self, event: Event) -> None:
        call, failure = event.call, event.reply.failure
        if event.rank in call.lost:
            return
        void = call.ledger is not None and call.lease is not None and not call.ledger.holds(call.lease)
        if failure is not None and self._checkpoints.failed(event):
            return
        if failure is not None and (failure.died or not void) and self._failures.take(event):
            return
        if event.reply.paused:
            self._disk.say(f"{call.describe(event.rank)}: {event.reply.paused}")
        if void:  # too late: what it says, and measured, is of rows that are somebody else's
            done = event.reply.done or failure is not None
            event = replace(event, reply=replace(event.reply, done=done, failure=None, metrics={}, published=None))
        call.take(event.rank, event.reply)
        published, ledger, lease = event.reply.published, call.ledger, call.lease
        if published is not None and ledger is not None and lease is not None:
            self._live_buffer.publish(ledger, lease, published, event.reply.segment)
            call.group.weigh(call)
            if published.versions is not None:
                self._flows[ledger.name].generates(lease, published)
        if call.done:
            self.complete(call)

    def complete(self, call: Call) -> None:
        call.group.forget(call)
        self._under_way.remove(call)
        self._failures.answered(call)
        now = self._backend.clock()
        self.directory.add_call(
            step=self._step_under_way,
            graph=call.ledger.name if call.ledger else "",
            group=call.group.name,
            node=call.node.name if call.node else call.method,
            start_s=call.started - self._started,
            end_s=now - self._started,
            worker_s=max(call.seconds.values(), default=0.0),
            rows=len(call.lease.rows) if call.lease else 0,
            tokens=int(call.lease.num_tokens.sum()) if call.lease else 0,
            last=call.last,
        )
        self._then.pop(call)(call)

    def _why_stalled(self) -> str:
        lines = ["rows are in flight, nothing is under way, and no node can start:"]
        for flow in self._flows.values():
            for group in flow.ledger.group_ids[:3]:
                lines += [
                    f"graph {flow.graph.name!r}, group {group}:",
                    *("  " + line for line in flow.ledger.why(group).splitlines()),
                ]
        return "\n".join(lines)

    # What follows a call

    def wait_for_room(self, why: str) -> None:
        self._disk.wait_for_more(why)

    def give_weights(self, group: WorkerGroup, rank: int) -> None:
        self._weights.give(group, rank)

    def _node_done(self, flow: GraphRun, call: Call) -> None:
        node, lease = call.node, call.lease
        assert node is not None and lease is not None
        held = flow.ledger.holds(lease)
        # Of a call that lost its rows, what it had published stays: then its metrics do, too. Else all is asked, and measured, again.
        if not node.operation.behind and (held or publishes_as_it_goes(node)):
            flow.take(lease, {f"{call.group.name}/{name}": metric for name, metric in call.merged_metrics().items()})
        if not held:
            return  # its deadline passed, or it was given up: what it had not published is somebody else's
        if not node.writes and node.operation.shape in (Shape.MAP, Shape.GROUP):
            self._publish_all(flow, lease.ids, lease)
        if node.operation.updates:  # before finish(): a finished row may be forgotten
            self._samples[node.name] += len(lease.rows)
            self._tokens[node.name] += int(lease.num_tokens.sum())
            flow.trained[node.name] += lease.num_groups
            flow.consumed[node.name] += [r.tokens - r.group.tokens for r in lease.rows]
        flow.ledger.finish(lease, step=self._step_under_way if node.operation.updates else None)
        if node.operation.updates and call.last:
            call.group.version += 1
            self._live_buffer.note(f"version/{call.group.name}", call.group.version)
            self._weights.pass_on(call.group.name)

    def give_up(self, call: Call) -> None:
        """End a call that gives way; the rows that it has not finished go back."""
        assert call.ledger is not None and call.lease is not None
        if call.ledger.holds(call.lease):
            call.ledger.release(call.lease, "new weights came, and what was unfinished is requeued")
            self._backend.cancel(call)

    def _give_up_rows(self) -> None:
        """Tell those who still make rows that a quorum does without."""
        for ledger in self._live_buffer.ledgers.values():
            parents: dict[int, list[int]] = {}
            for token, parent in ledger.take_given_up():
                parents.setdefault(token, []).append(parent)
            for call in [c for c in self._under_way if c.ledger is ledger] if parents else ():
                if call.lease is not None and call.lease.token in parents:
                    self._backend.give_up(call, parents[call.lease.token])
                    call.group.weigh(call)

    def _publish_all(self, flow: GraphRun, ids: np.ndarray, lease: Lease) -> None:
        flow.ledger.publish(lease, Published(ids, np.zeros(len(ids), np.int64)), None)

    def _close(self) -> None:
        """End the step, or the evaluation, of which nothing is left to do."""
        self._complete_checkpoint()
        self._disk.write(lambda: self.directory.flush(when_due=True))
        for flow in self._flows.values():
            if self._passing_weights and not flow.schedule.overlaps:
                continue
            if flow.evaluates:
                for step in list(flow.rounds):
                    self._close_evaluation(flow, step)
            elif flow.schedule.over(flow):
                metrics = flow.take_metrics()
                flow.close()
                self._live_buffer.note("step", self.step)
                self._close_step(metrics)

    def _close_evaluation(self, flow: GraphRun, step: int) -> None:
        """Note the metrics of an evaluation beside those of the step that it is of, when it is over."""
        leases = (call.lease for call in self._under_way if call.ledger is flow.ledger and not call.behind)
        if flow.ledger.rounds[step] or any(lease is not None and lease.round == step for lease in leases):
            return
        metrics = flow.close_round(step)
        row = self.directory.add_metrics({"step": float(step), **metrics, **self._failures.metrics()})
        self._progress.evaluated(flow.name, step, metrics)
        self._ask_to_stop(row)

    def _close_step(self, metrics: dict[str, float]) -> None:
        """Note the metrics of a step (the start of the run counts as step 0) and mark the evaluations that are due."""
        now = self._backend.clock()
        seconds = now - (self._closed_at or now)
        row = {"step": float(self.step), "time_s": now - self._started, **metrics}
        if self.step:
            tokens = max(self._tokens.values(), default=0)
            row |= {
                "samples": float(max(self._samples.values(), default=0)),
                "step_s": seconds,
                "tokens_per_s": tokens / seconds if seconds else 0.0,
            }
        row |= self._failures.metrics()
        if self._checkpoints.pause_s:
            row["checkpoint_pause_s"], self._checkpoints.pause_s = self._checkpoints.pause_s, 0.0
        self._closed_at, self._closed_first = now, True
        self._samples.clear()
        self._tokens.clear()
        self.directory.add_metrics(row)
        self._progress.stepped(row)
        for symptom in self._watch.see(row):
            self._progress.warn(symptom)
        self._ask_to_stop(row)
        self._mark_evaluations()
        if self._checkpoints.is_due(self.step, self._over):
            self._save()

    def _mark_evaluations(self) -> None:
        for name, evaluation in self._evaluations.items():
            if self.step % evaluation.every == 0 or self._over:
                self._mark_evaluation(self._flows[name])

    def _mark_evaluation(self, flow: GraphRun) -> None:
        """The present step is to be evaluated, if it is not yet."""
        if flow.closed_at != self.step and self.step not in flow.rounds:
            flow.due[self.step] = self._weights.coming(flow.graph.handles)

    def _save(self) -> None:
        """Begin a checkpoint of the step that is over: no update is under way. Groups go on when their state is copied."""
        self._finish_checkpoint()
        self._disk.write(self.directory.flush)
        state = RunState(
            self.step,
            self._seed,
            time_s=self._backend.clock() - self._started,
            versions={name: group.version for name, group in self.groups.items()},
            position=self._disk.write(self._live_buffer.checkpoint),
            schedule=type(self._schedule).__name__,
            evaluated={name: self._flows[name].closed_at for name in self._evaluations},
            stopped=self._stopped,
            cursor=self._flows["train"].cursor,
            next_id=self._live_buffer.ids.next_id,
            next_group=self._live_buffer.ids.next_group,
        )
        self._saving = state.position
        saved = [g for g in self.groups.values() if has_state(g.handle)]
        self._disk.write(lambda: self._checkpoints.begin(state, saved))

    def _save_to_the_end(self) -> None:
        """Have the present step in a checkpoint that is on the disk."""
        self._finish_checkpoint()
        while self._checkpoints.saved_step < self.step:
            self._save()
            self._finish_checkpoint()

    @property
    def _can_be_saved(self) -> bool:
        """No update is under way, nor half a batch in the gradients, nor an evaluation that training waits for: all else is in the
        buffer, or made again."""
        train = self._flows["train"]
        evaluating = any(f.rounds for f in self._flows.values()) and not self._schedule.overlaps
        return not evaluating and not any(train.taken.values())

    def _save_and_leave(self) -> NoReturn:
        self._checkpoints.saved_step = -1  # of this step there may be one, with less in the buffer
        self._save_to_the_end()
        self._record_the_rest()
        self._disk.write(self.directory.flush)
        self._progress.left(self._checkpoints.folder)
        raise SystemExit(0)

    def _finish_checkpoint(self) -> None:
        """Wait until the one that is being written is on the disk, or given up because there is no room."""
        while self._checkpoints.under_way:
            self._checkpoints.poll()
            if self._under_way:
                self._settle()
            else:
                time.sleep(POLL_S / 10)
            self._complete_checkpoint()

    def _complete_checkpoint(self) -> None:
        was_under_way = self._checkpoints.under_way
        self._checkpoints.complete(self.directory.values)
        if was_under_way and not self._checkpoints.under_way and self._checkpoints.no_room:
            self._live_buffer.drop_checkpoint(self._saving)
            self._disk.wait_for_more(self._checkpoints.no_room)

    def _ask_to_stop(self, row: Mapping[str, float]) -> None:
        if self._stop is not None and not self._stopped and self._stop(row):
            self._stopped = True
            for name in self._evaluations:  # a run ends with all of its evaluations
                self._mark_evaluation(self._flows[name])

    # Beside the loop

    def call(self, handle: object, method: str, **arguments: Any) -> list[Any]:
        """Call a method of a group between runs (to save a model, say) and wait; returns each rank's result."""
        group = next((g for g in self.groups.values() if g.handle is handle), None)
        if group is None:
            raise UserError(f"{handle!r} is no group of this run; its groups: {', '.join(self._handles)}")
        return self._call_and_wait(group, method, **arguments)

    def _call_and_wait(self, group: WorkerGroup, method: str, *, on_device: bool = True, **arguments: Any) -> list[Any]:
        self._refuse_when_failed()
        finished: list[Call] = []
        if on_device:
            self.take_device(group)
        self.watch(group.call(method, **arguments), finished.append)
        while not finished:
            self._settle()
        return finished[0].results

    def _refuse_when_failed(self) -> None:
        if self._failed:
            raise RunError("this run has failed; leave the driver's `with` block and start another")

    def _wait_for_all(self) -> None:
        while self._under_way:
            self._settle()
