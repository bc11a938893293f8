"""Closing: ends steps and evaluations that are over, and records their metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from ...dataflow.errors import nearest
from ...dataflow.runs.directory import RunDirectory
from ...dataflow.runs.files import CHECKPOINTS, METRICS, PARQUET, SAMPLES
from ...dataflow.runs.requests import RunRequests
from ..backends.process_diagnostics import Memory, memory_metrics
from ..graph_run import EvaluationRun, GraphRuns
from ..group import WorkerGroup
from ..own_groups import RESERVED
from ..planner.devices import Device, device_named
from ..recovery.checkpoints import complete_checkpoints
from ..recovery.saving import Saving
from ..reports.step_line import Ending, ending_of
from ..reports.symptoms import Seen
from ..run_spec import RunHistory, RunSpec
from ..weight_sync import WeightSync
from .calls import Calls

READ_S = 1.0
"""[s] Shortest time between readings of memory use."""


class Closing:
    def __init__(
        self,
        spec: RunSpec,
        history: RunHistory,
        directory: RunDirectory,
        graph_runs: GraphRuns,
        weights: WeightSync,
        calls: Calls,
        saving: Saving,
        started: float,
        requests: RunRequests,
    ) -> None:
        self._spec = spec
        self._history = history
        self._directory = directory
        self._graph_runs, self._train = graph_runs, graph_runs.train
        self._weights = weights
        self._calls = calls
        self._saving = saving
        self._started = started
        self._requests = requests
        self._memory_read_at = float("-inf")
        self._memory: Mapping[str, Memory] = {}
        self._closed_at = spec.backend.clock()
        self._best_is_checked = False
        self.ended_by: Seen | None = None
        """The symptom that ends the run, or None."""

    def resume(self) -> None:
        self._closed_at = self._spec.backend.clock()
        self._history.watch.remember(self._directory.metrics)
        if best := self._saving.folder.best(self._directory.values):
            self._history.progress.say(f"the best checkpoint so far is {best}")
        self._mark_evaluations()

    # Steps

    @property
    def step_is_over(self) -> bool:
        # On-policy, wait for weights and evaluations, so checkpoints hold no running evaluation.
        if not self._spec.schedule.overlaps and (
            self._calls.beside_the_graph or self._weights.under_way or self._graph_runs.evaluating
        ):
            return False
        return self._spec.schedule.over(self._train)

    def close_step(self, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step (0 is the start), and mark due evaluations."""
        train, now = self._train, self._spec.backend.clock()
        row = {"step": float(train.step), "time_s": now - self._started, **metrics}
        if train.step:
            seconds = now - self._closed_at
            tokens = train.total(train.tokens)
            row["samples"] = float(train.total(train.samples))
            row["step_s"] = seconds
            row["tokens_per_s"] = tokens / seconds if seconds else 0.0
        if time.monotonic() - self._memory_read_at >= READ_S:
            self._memory_read_at, self._memory = time.monotonic(), self._spec.backend.memory()
        if train.step:
            row |= self._usage(self._closed_at, now)
        if self._memory:
            row |= memory_metrics(self._memory, sum(r.ledger.parts.num_bytes for r in self._graph_runs))
        row |= self._history.failures.metrics()
        elastic = [group for group in self._calls.groups.values() if group.place.is_elastic]
        row |= {f"{group.name}/ranks": float(len(group.up)) for group in elastic}
        row |= self._weights.take_metrics()
        if pause_s := self._saving.take_pause_s():
            row["checkpoint_pause_s"] = pause_s
        self._closed_at, train.begun = now, True
        train.samples.clear()
        train.tokens.clear()
        self._directory.add_metrics(row)
        self._history.progress.stepped(row)
        self._history.trackers.stepped(row)
        # The first symptom in `stop_on` ends the run.
        for seen in self._history.watch.see(row):
            ends = seen.symptom.name in self._spec.stop_on and self.ended_by is None
            self._history.progress.alert(seen.symptom.name, seen.text, ends=ends)
            self.ended_by = seen if ends else self.ended_by
        self._ask_to_stop(row)
        self._mark_evaluations()

    def _usage(self, since: float, now: float) -> dict[str, float]:
        """Return how much groups worked in a step, and how well they used their devices."""
        busy = self._calls.take_busy_s(since, now)
        row = {
            f"{name}/idle_share": max(0.0, 1 - any_call_s / (now - since))
            for name, (any_call_s, _) in busy.items()
            if name not in RESERVED and now > since
        }
        groups = self._calls.groups
        working_s = {name: on_rows_s for name, (_, on_rows_s) in busy.items()}
        devices = {name: own for name, group in groups.items() if (own := self._device(group))}
        return row | self._calls.throughput.take(groups, working_s, devices)

    def _device(self, group: WorkerGroup) -> Device | None:
        """Return the GPUs of a group, or None if it has none, or unknown ones."""
        if not group.place.gpus or not group.up:
            return None
        memory = self._memory.get(self._spec.backend.node_of(group, group.up[0]))
        return None if memory is None else device_named(memory.gpu)

    def _ask_to_stop(self, row: Mapping[str, float]) -> None:
        """End the run after this step if `stop` returns True or, without checkpoints, a user has
        asked for it. With checkpoints, the loop ends the run sooner."""
        if self._train.stopped:
            return
        wanted = self._spec.stop is not None and self._spec.stop(row)
        if wanted or (self._requests.stop_asked and not self._spec.checkpoint.writes):
            self._train.stopped = True
            self._mark_evaluations()  # the evaluations after the last step

    # Evaluations

    def close_evaluations(self) -> None:
        for evaluation in self._graph_runs.evaluations.values():
            for step in evaluation.ended:
                self._close_evaluation(evaluation, step)

    def _close_evaluation(self, evaluation: EvaluationRun, step: int) -> None:
        """Record the metrics of an evaluation once its calls are over."""
        calls = (c for c in self._calls.under_way if c.ledger is evaluation.ledger and not c.behind)
        # The last calls may still return metrics.
        if any(call.lease is not None and call.lease.step == step for call in calls):
            return
        metrics = evaluation.close(step, overlaps=self._spec.schedule.overlaps)
        row = self._directory.add_metrics(
            {"step": float(step), **metrics, **self._history.failures.metrics()}
        )
        self._history.progress.evaluated(evaluation.name, step, metrics)
        self._check_best(evaluation.name, metrics)
        self._history.trackers.stepped(metrics)
        # `stop` may read metrics of the evaluation.
        self._ask_to_stop(row)

    def _check_best(self, evaluation: str, metrics: Mapping[str, float]) -> None:
        """Warn once if the evaluation lacks the metric that selects the best checkpoint."""
        name = (self._spec.checkpoint.best or "").removeprefix("-")
        if self._best_is_checked or not name.startswith(f"{evaluation}/"):
            return
        self._best_is_checked = True
        if name not in metrics:
            near = nearest(name, metrics)
            self._history.progress.alert(
                "mistake",
                f"CheckpointConfig(best={name!r}): that evaluation has no such metric{near}, so no checkpoint is marked as best",
            )

    def _mark_evaluations(self) -> None:
        for name, evaluation in self._spec.evaluations.items():
            if evaluation.is_due(self._train.step, over=self._train.over):
                run = self._graph_runs.evaluations[name]
                run.mark(self._train.step, self._weights.coming(run.graph.handles))

    # The end

    def ending(self, seconds: float) -> Ending:
        path = self._directory.path
        latest = next(iter(complete_checkpoints(path / CHECKPOINTS)), path / CHECKPOINTS)
        places = {"run": path, "metrics": path / f"{METRICS}{PARQUET}"}
        for what, where in (("samples", path / SAMPLES), ("checkpoint", latest)):
            if where.exists():
                places[what] = where
        best = self._saving.folder.best(self._directory.values)
        places |= {"best checkpoint": best.path} if best else {}
        ending = ending_of(path.name, self._directory.metrics, self._spec.evaluations, seconds, places)
        return replace(ending, best_checkpoint=str(best)) if best else ending
