"""Admission: decides how many prompts to issue, and when evaluations begin."""

from __future__ import annotations

from collections.abc import Mapping

from ...dataflow.buffer.sample_buffer import SampleBuffer
from ...dataflow.column import RESPONSE_VERSIONS
from ...dataflow.errors import NoSignalError, StalledError
from ...dataflow.graph import ParameterEdge
from ..graph_run import EvaluationRun, GraphRuns
from ..reports.symptoms import FIRST_WITHOUT_SIGNAL, NO_SIGNAL, SHORT_STEP, all_filtered, rewards_of
from ..run_spec import RunHistory, RunSpec
from ..schedule import MAX_REFILLS
from ..weight_sync import WeightSync
from .calls import Calls

FEW_PASS = (
    "Try easier prompts if the rewards are low, harder ones if they are high, more responses per prompt (n), a higher temperature, "
    "or the graph without drop_zero_variance"
)


class Admission:
    def __init__(
        self,
        spec: RunSpec,
        history: RunHistory,
        buffer: SampleBuffer,
        graph_runs: GraphRuns,
        weights: WeightSync,
        calls: Calls,
    ) -> None:
        self._schedule = spec.schedule
        self._holds_training = spec.evaluations_hold_training
        self._stop_without_signal = NO_SIGNAL in spec.stop_on
        self._stop_short_steps = SHORT_STEP in spec.stop_on
        self._buffer = buffer
        self._train, self._evaluations = graph_runs.train, graph_runs.evaluations.values()
        self._graph_runs = graph_runs
        self._weights = weights
        self._calls = calls
        self._alert = history.progress.alert
        self._has_alerted = False

    @property
    def possible(self) -> bool:
        if any(self._may_begin(e, v) for e in self._evaluations for v in e.due.values()):
            return True
        return not self._train.over and self._schedule.admit(self._train) > 0 and self._capacity()[0] > 0

    def admit(self) -> None:
        """Begin evaluations that are due, and issue prompts for training.

        Raises:
            StalledError: The step cannot end: filters drop too many rows, or the buffer is too
                small.
            NoSignalError: In the first step, filters dropped all groups of two batches for their
                equal rewards.
        """
        for evaluation in self._evaluations:
            for step, versions in list(evaluation.due.items()):
                behind = evaluation.ledger.live.groups_behind
                if self._may_begin(evaluation, versions) and not behind:
                    evaluation.begin_evaluation(step)
        if self._train.over:
            return
        waits = self._holds_training and self._graph_runs.evaluating
        if self._schedule.overlaps:
            self._admit_ahead()
        # On-policy rows need the weights of the last step.
        elif not (waits or self._calls.beside_the_graph or self._weights.under_way):
            self._admit_step()

    def _admit_ahead(self) -> None:
        train, schedule = self._train, self._schedule
        wanted = schedule.admit(train)
        number = min(wanted, self._capacity()[0]) if wanted else 0
        if not number:
            return
        # If this many batches of prompts do not fill one batch, filters drop nearly all groups.
        ahead = 1 + (schedule.max_staleness or 0) + MAX_REFILLS
        if schedule.lacks(train) and train.issued > ahead * schedule.prompts_per_step:
            self._shorten(2 * ahead * schedule.prompts_per_step)
        self._check_signal()
        train.issue(number, train.step + 1)

    def _admit_step(self) -> None:
        train, step = self._train, self._train.step + 1
        number = self._schedule.admit(train)
        if not number:
            return
        room, reason = self._capacity()
        if number > room:
            if not train.ledger.live.groups:
                raise StalledError(
                    f"step {step} needs {number} groups at once; the buffer is full: {reason}"
                )
            return  # wait until groups are finished; calls on them have deadlines
        # In an open step, prompts replace groups that filters dropped.
        if train.open:
            self._check_signal()
            train.refills += 1
            if train.refills > MAX_REFILLS:
                self._shorten(2 * MAX_REFILLS * self._schedule.prompts_per_step)
                number = self._schedule.lacks(train)
        if number:
            train.issue(number, step)

    def _shorten(self, most: int) -> None:
        """Shorten the current step to the groups that passed, or raise StalledError."""
        train, schedule = self._train, self._schedule
        exhausted = train.issued > most
        if train.short_size is not None and not exhausted:
            return
        each, passed = schedule.prompts_per_step, schedule.passed(train)
        dropped = ", ".join(f"{rows} by {name!r}" for name, rows in train.ledger.live.dropped.items())
        found = (
            f"step {train.step + 1} lacks {each - passed} of its {each} groups: {passed} of the {train.issued} prompts issued for it "
            f"have passed the filters{rewards_of(train.measured)}; rows dropped in the run: {dropped or 'none'}"
        )
        stops = self._stop_short_steps
        if stops or exhausted or not schedule.shorten(train):
            fewer = (
                f". Without {SHORT_STEP!r} in Driver(stop_on=...), it is trained on the groups that pass"
            )
            raise StalledError(f"{found}. {FEW_PASS}{fewer if stops else ''}")
        if schedule.size(train) < each and not self._has_alerted:  # warn once
            self._has_alerted = True
            self._alert(SHORT_STEP, f"{found}. It is trained on {train.short_size}. {FEW_PASS}")

    def _may_begin(self, evaluation: EvaluationRun, versions: Mapping[ParameterEdge, int]) -> bool:
        """Whether an evaluation may begin. `versions` are the followers' required versions."""
        # Training waits for the evaluation, and the evaluation waits for all running calls.
        if self._holds_training:
            idle = all(call.behind for call in self._calls.at_work) and not self._calls.beside_the_graph
            return idle and not self._weights.under_way
        # Groups keep the weights of the previous evaluation until it is over.
        if evaluation.under_way and not self._schedule.overlaps:
            return False
        return all(self._weights.held(edge) >= version for edge, version in versions.items())

    def _capacity(self) -> tuple[int, str]:
        each, train = self._schedule.prompts_per_step, self._train
        if not self._schedule.overlaps:
            return self._buffer.capacity(train.name, groups_per_update=each)
        nodes = train.graph.nodes
        generating = [n.group for n in nodes if n.group and str(RESPONSE_VERSIONS) in n.writes]
        return self._buffer.capacity(
            train.name,
            groups_per_update=each,
            staleness=self._schedule.max_staleness,
            lag=self._weights.lag(generating),
            taken=max((train.taken[n.name] for n in train.updates), default=0),
        )

    def _check_signal(self) -> None:
        train, each = self._train, self._schedule.prompts_per_step
        if not self._stop_without_signal or train.step or train.issued < FIRST_WITHOUT_SIGNAL * each:
            return
        if self._schedule.lacks(train) == each:
            seen = all_filtered(train.measured, FIRST_WITHOUT_SIGNAL * each)
            if seen:
                raise NoSignalError(seen)
