"""Start a run: its buffer, its worker groups, and each graph's ledger and place in the data."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from ...dataflow.batch import Batch
from ...dataflow.buffer.rows import Ids
from ...dataflow.buffer.sample_buffer import BufferConfig, SampleBuffer
from ...dataflow.buffer.scratch import Scratch, notes
from ...dataflow.column import PROMPT_IDS
from ...dataflow.graph import SOURCE, TRAIN, Graph
from ...dataflow.prompts.curriculum import curriculum_of
from ...dataflow.prompts.prompt_queue import PromptQueue, read_state
from ...dataflow.runs.directory import RunDirectory
from ...dataflow.runs.files import BUFFER
from ...dataflow.source import CURSOR, Cursor, positions
from ..backends.backend import FILE_BYTES, Backend, Files, Setup, this_node
from ..forecast import read_forecasts
from ..gateway_process import GatewayProcess
from ..graph_run import EvaluationRun, GraphRuns, TrainingRun
from ..own_groups import RECORDER
from ..ranks.row_io import num_tokens
from ..recovery.checkpoints import has_state
from ..recovery.resume import ResumePoint
from ..reports.progress import Progress
from ..run_spec import RunHistory, RunSpec
from ..schedule import Synchronous
from .recording import with_recording
from .run import Run


def start(spec: RunSpec, history: RunHistory, directory: RunDirectory, point: ResumePoint | None) -> Run:
    """Start or resume a run. On return, followers have their leaders' weights.

    Raises:
        UserError: A worker cannot start, or the buffer belongs to other graphs.
    """
    progress, backend = history.progress, spec.backend
    _tell(spec, progress, directory, in_full=point is None)
    graphs = {name: with_recording(graph) for name, graph in spec.graphs.items()}
    with ExitStack() as undo:
        undo.callback(backend.close)
        # Opening the buffer copies a part of the log, which needs room on the disk.
        buffer = history.disk.write(
            lambda: open_buffer(
                directory,
                point,
                graphs,
                config=spec.buffer,
                backend=backend,
                keep_checkpoints=spec.checkpoint.keep,
            )
        )
        undo.callback(partial(buffer.close, going_on=True))
        continued = {name: buffer.ledgers[name].graph for name in graphs}
        if point is not None:
            ledgers = buffer.ledgers
            # Rows of void leases are recorded again, and would appear twice.
            directory.forget_samples(
                lambda graph, lease: graph in ledgers and ledgers[graph].leases.is_void(lease)
            )
            progress.resumed(point.path, point.state.step, [*point.damage, *buffer.damage])
            for name, graph in graphs.items():
                own = [node.name for node in continued[name].nodes]
                if new := [node.name for node in graph.nodes if node.name not in own]:
                    progress.say(
                        f"the evaluation {name!r} continues without {', '.join(new)}, which an earlier version of Weft did not have; "
                        "resume='weights' would add it"
                    )
        buffer.note("record_every", spec.record_every)
        buffer.store.delete_remote = backend.cluster.delete if backend.cluster else None
        files = _files(spec, directory, buffer, progress)
        gateway = _gateway(spec, directory)
        if gateway is not None:
            undo.callback(gateway.close)
        address = None if gateway is None else gateway.address
        groups = backend.start(replace(_setup(spec, directory, files, progress), gateway=address))
        _drop_lost_rows(buffer, backend, progress)
        graph_runs = _graph_runs(spec, history, continued, buffer, files, point)
        run = Run(spec, history, directory, point, buffer, groups, graph_runs, gateway)
        # From here on, the run closes the backend and the buffer.
        undo.pop_all()
        undo.callback(run.close)
        run.prepare()
        undo.pop_all()
    progress.started(spec.graphs, groups, spec.placement)
    return run


def _tell(spec: RunSpec, progress: Progress, directory: RunDirectory, *, in_full: bool) -> None:
    for note in directory.notes:
        progress.say(note)
    progress.say(
        f"run {directory.path.name}: starting {', '.join(spec.handles)} with {spec.backend!r}; files in {directory.path}"
    )
    configs = [handle.config for handle in spec.handles.values()]
    for note in dict.fromkeys(n for config in configs for n in getattr(config, "notes", ())):
        progress.say(note)
    progress.data([graph.source for graph in spec.graphs.values()], in_full=in_full)


# The buffer


THRESHOLDS = (500_000, 1_000, 1_000)
"""Thresholds of Python's garbage collector. With the defaults, collection takes a third of the
driver's time, although objects of rows form no cycles."""


@contextmanager
def collected_seldom(seldom: bool) -> Iterator[None]:
    """Collect garbage less often in the block. Pass False if workers share the process, because
    their garbage may hold tensors."""
    before = gc.get_threshold()
    if seldom:
        gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def open_buffer(
    run: RunDirectory,
    point: ResumePoint | None,
    graphs: Mapping[str, Graph],
    *,
    config: BufferConfig,
    backend: Backend,
    keep_checkpoints: int,
) -> SampleBuffer:
    """Return a run's sample buffer, new or restored from a checkpoint.

    To resume without the rows in flight, a new buffer begins at the checkpoint's place in the data.

    Args:
        backend: If it joins a cluster, each machine keeps segments on its own disk.
        keep_checkpoints: Number of checkpoints whose rows in flight the buffer keeps, besides the
            one being written.
    """
    folder = run.path / BUFFER
    spans_machines = backend.cluster is not None and backend.cluster.address is not None
    scratch = Scratch.of(folder, config.scratch) if spans_machines or config.scratch else None
    if scratch is not None:
        scratch.remove_earlier(run.path)
    kept: Any = {
        "config": config,
        "node": this_node(),
        "clock": backend.clock,
        "fence": run.lock,
        "scratch": scratch,
        "sync_interval_s": backend.sync_interval_s,
        "keep_checkpoints": keep_checkpoints + 1,
    }
    if point is not None and point.with_rows:
        with collected_seldom(True):  # all objects of the rows stay alive
            return SampleBuffer.recover(folder, graphs, at=point.state.position, **kept)
    # Ids in the run's files must stay unique.
    ids = None if point is None else Ids(point.state.next_id, point.state.next_group)
    buffer = SampleBuffer.create(folder, graphs, ids=ids, **kept)
    if point is not None:
        buffer.note(CURSOR, asdict(point.state.cursor))
        buffer.note("step", point.state.step)
    return buffer


def _drop_lost_rows(buffer: SampleBuffer, backend: Backend, progress: Progress) -> None:
    """Issue groups again if their rows are unreadable or on lost nodes."""
    for graph, group in buffer.drop_unreachable(backend.nodes, live=False):
        progress.say(f"group {group} of graph {graph!r} is issued again, because its node is gone")
    if backend.cluster is not None:
        for said in buffer.drop_lost(backend.cluster.unreadable(buffer.elsewhere())):
            progress.say(said)


# The worker groups


def _files(spec: RunSpec, directory: RunDirectory, buffer: SampleBuffer, progress: Progress) -> Files:
    segments, config = buffer.segments.parent, spec.buffer
    for note in notes(segments, config.max_bytes):
        progress.alert("little_room", note)
    return Files(segments, FILE_BYTES, config.memory_bytes, buffer.scratch, directory.starts)


def _setup(spec: RunSpec, directory: RunDirectory, files: Files, progress: Progress) -> Setup:
    writers = [
        name
        for name, h in spec.handles.items()
        if name == RECORDER or (has_state(h) and spec.checkpoint.writes)
    ]
    return Setup(
        spec.handles,
        spec.placement,
        directory.path,
        spec.seed,
        files,
        spec.follows,
        spec.start_timeout_s,
        spec.call_timeout_s,
        writers=writers,
        tell=progress.say,
    )


def _gateway(spec: RunSpec, directory: RunDirectory) -> GatewayProcess | None:
    """Start the gateway of the run's agents, if it has any."""
    address = spec.backend.own_address
    if address is None:
        return None
    nodes = [node for graph in spec.graphs.values() for node in graph.nodes]
    for name, handle in spec.handles.items():
        if handle.worker_class.needs_gateway([node for node in nodes if node.group == name]):
            return GatewayProcess(directory.path, address)
    return None


# The graphs


def _graph_runs(
    spec: RunSpec,
    history: RunHistory,
    graphs: Mapping[str, Graph],
    buffer: SampleBuffer,
    files: Files,
    point: ResumePoint | None,
) -> GraphRuns:
    writer = files.writer(this_node(), "sources")
    sources = {name: Batch.of_table(graph.source.table) for name, graph in graphs.items()}
    for name, source in sources.items():
        buffer.set_source(name, writer.append(source))
    writer.close()
    evaluations: dict[str, EvaluationRun] = {}
    for name in spec.evaluations:
        graph, ledger, source = graphs[name], buffer.ledgers[name], sources[name]
        rest = Cursor().rest(positions(len(source), 0, shuffle=False), ledger.prompts_issued)
        run = EvaluationRun(
            name,
            graph,
            ledger,
            rest,
            _num_tokens(graph, source),
            longest_first=not spec.schedule.overlaps,
        )
        if point is not None:
            _give_up(run, history)
            run.closed_at = point.state.evaluated.get(name, -1)
        evaluations[name] = run
    train = _training_run(spec, graphs[TRAIN], buffer, sources[TRAIN], point)
    found = GraphRuns(train, evaluations)
    if point is not None and not point.from_first_row:
        found.restore_forecasts(read_forecasts(point.path))
    return found


def _training_run(
    spec: RunSpec, graph: Graph, buffer: SampleBuffer, source: Batch, point: ResumePoint | None
) -> TrainingRun:
    ledger, noted = buffer.ledgers[TRAIN], buffer.notes.get(CURSOR)
    cursor = Cursor(noted["issued"], tuple(noted["again"])) if noted else Cursor()
    schedule, issued = spec.schedule, ledger.prompts_issued
    pending = point.state.pending if point is not None and point.with_rows else ()
    if (prompts := _prompt_queue(spec, graph, point)) is not None:
        prompts.draw_again([*cursor.again[issued:], *pending])
        rest = prompts
    else:
        order = positions(len(source), spec.seed, shuffle=schedule.shuffle)
        rest = cursor.rest(order, issued + len(pending))
        if point is not None and not point.with_rows:  # the cursor has the pending rows, in their order
            pending = tuple(itertools.islice(rest, len(cursor.again)))
    train = TrainingRun(
        TRAIN,
        graph,
        ledger,
        rest,
        _num_tokens(graph, source),
        longest_first=schedule.longest_first,
        steps=schedule.steps,
        start=cursor,
        prompts=prompts,
    )
    if prompts is None:
        rounds = schedule.rounds if isinstance(schedule, Synchronous) else 1
        train.sort_rounds(rounds * schedule.prompts_per_step if rounds > 1 else 1, pending)
    if point is not None:
        train.step, train.begun = point.state.step, True
        train.stopped, train.open = point.state.stopped, ledger.live.groups_at_work > 0
    return train


def _prompt_queue(spec: RunSpec, graph: Graph, point: ResumePoint | None) -> PromptQueue | None:
    """Return the state of the source's curriculum, as in the checkpoint, or None without one."""
    source = graph.source
    if (curriculum := curriculum_of(source)) is None:
        return None
    shuffle = spec.schedule.shuffle
    prompts = PromptQueue(curriculum, source.table, name=source.name, seed=spec.seed, shuffle=shuffle)
    state = None if point is None or point.from_first_row else read_state(point.path)
    if state is not None:
        prompts.restore(state)
    return prompts


def _give_up(run: EvaluationRun, history: RunHistory) -> None:
    """Give up evaluations that were running at the checkpoint, because their weights are gone. The
    evaluation of the current step starts again."""
    for step in sorted(run.ledger.live.groups_of_step):
        history.progress.say(
            f"the evaluation {run.name!r} of step {step} was still running, and is discarded"
        )
    for group in run.ledger.live.ids_at_work:
        run.ledger.lose(
            group, "the run was started again, and its evaluation is given up", issue_again=False
        )


def _num_tokens(graph: Graph, source: Batch) -> np.ndarray:
    """[source rows] Count the tokens of each row; only prompt tokens if a node makes new rows."""
    makes_rows = any(node.level == SOURCE and node.makes_level is not None for node in graph.nodes)
    return num_tokens(source, {str(PROMPT_IDS)}.intersection(source.columns) if makes_rows else None)
