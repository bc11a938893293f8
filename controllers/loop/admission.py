"""Admission: decide how many prompts to issue, and when an evaluation begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...dataflow.buffer.sample_buffer import Capacity
from ...dataflow.column import RESPONSE_VERSIONS
from ...dataflow.errors import NoSignalError, StalledError
from ..graph_run import EvaluationRun
from ..reports.symptoms import FIRST_WITHOUT_SIGNAL, all_filtered, rewards_of
from ..schedule import MAX_REFILLS
from .calls import RunParts

FEW_PASS = (
    "Try easier prompts if the rewards are low, harder ones if they are high, more responses per prompt (n), a higher temperature, "
    "or the graph without drop_zero_variance"
)


class Admission:
    """Issue rows, as the schedule wants and the buffer allows."""

    def __init__(
        self, parts: RunParts, alert: Callable[[str, str], None], *, stop_without_signal: bool
    ) -> None:
        """
        Args:
            alert: Receives the name and the text of a warning.
            stop_without_signal: End the run if a filter drops all groups of the first prompts
                because their rewards are equal.
        """
        self._parts = parts
        self._alert = alert
        self._has_alerted = False
        self._stop_without_signal = stop_without_signal

    @property
    def possible(self) -> bool:
        if any(
            self._may_begin(e, v)
            for e in self._parts.graph_runs.evaluations.values()
            for v in e.due.values()
        ):
            return True
        return (
            not self._parts.train.over
            and self._parts.schedule.admit(self._parts.train) > 0
            and self._capacity().groups > 0
        )

    def admit(self) -> None:
        """Begin evaluations that are due, and issue prompts for training.

        Raises:
            StalledError: No step could ever end, because filters drop too many rows or the buffer
                is too small.
            NoSignalError: In the first two steps, no group passed a filter of equal rewards.
        """
        for evaluation in self._parts.graph_runs.evaluations.values():
            for step, versions in list(evaluation.due.items()):
                if self._may_begin(evaluation, versions) and not self._parts.recording.is_full(
                    evaluation
                ):
                    evaluation.begin(step)
        if self._parts.train.over:
            return
        if self._parts.schedule.overlaps:
            self._admit_ahead()
        elif not (self._waits or self._parts.calls.beside_the_graph or self._parts.weights.under_way):
            self._admit_step()

    @property
    def _waits(self) -> bool:
        return self._parts.evaluation_rules.holds_training and self._parts.graph_runs.evaluating

    def _admit_ahead(self) -> None:
        train, schedule = self._parts.train, self._parts.schedule
        wanted = schedule.admit(train)
        number = min(wanted, self._capacity().groups) if wanted else 0
        # More prompts than this without a full batch means that filters drop nearly all groups.
        ahead = 1 + (schedule.max_staleness or 0) + MAX_REFILLS
        if number and schedule.lacks(train) and train.issued > ahead * schedule.prompts_per_step:
            self._shorten(2 * ahead * schedule.prompts_per_step)
        if number:
            self._check_signal()
            train.issue(number, train.step + 1)

    def _admit_step(self) -> None:
        train, step = self._parts.train, self._parts.train.step + 1
        number = self._parts.schedule.admit(train)
        if not number:
            return
        capacity = self._capacity()
        if number > capacity.groups:
            if not train.ledger.live.groups:
                raise StalledError(
                    f"step {step} needs {number} groups at once; the buffer is full: {capacity.reason}"
                )
            return  # wait until groups are finished; calls on them have deadlines
        if train.open:
            self._check_signal()
            train.refills += 1
            if train.refills > MAX_REFILLS:
                self._shorten(2 * MAX_REFILLS * self._parts.schedule.prompts_per_step)
                number = self._parts.schedule.lacks(train)
        if number:
            train.issue(number, step)

    def _shorten(self, most: int) -> None:
        """End the current step with the groups that have passed the filters, if the schedule allows
        it.

        Args:
            most: Maximum number of prompts to issue for one last group, if updates have begun with
                all that passed.

        Raises:
            StalledError: The schedule does not allow it, no group has passed, or `most` prompts
                were not enough.
        """
        train, schedule = self._parts.train, self._parts.schedule
        exhausted = train.issued > most
        if train.short_size is not None and not exhausted:
            return
        each, passed = schedule.prompts_per_step, schedule.passed(train)
        found = (
            f"step {train.step + 1} lacks {each - passed} of its {each} groups: {passed} of the {train.issued} prompts issued for it "
            f"have passed the filters{rewards_of(train.measured)}; {self._dropped}"
        )
        if schedule.short_steps == "stop" or exhausted or not schedule.shorten(train):
            fewer = ". short_steps='train' in the schedule trains on the groups that pass" * (
                schedule.short_steps == "stop"
            )
            raise StalledError(f"{found}. {FEW_PASS}{fewer}")
        if schedule.size(train) < each and not self._has_alerted:  # warn once
            self._has_alerted = True
            self._alert("short_step", f"{found}. It is trained on {train.short_size}. {FEW_PASS}")

    def _may_begin(self, evaluation: EvaluationRun, versions: Mapping[str, int]) -> bool:
        """Whether an evaluation may begin: the groups must have these versions."""
        # Training waits for the evaluation, and the evaluation for everything that runs.
        if self._parts.evaluation_rules.holds_training:
            idle = (
                all(call.behind for call in self._parts.calls.at_work)
                and not self._parts.calls.beside_the_graph
            )
            return idle and not self._parts.weights.under_way
        # Groups keep the weights of the previous evaluation until it is over.
        if evaluation.under_way and self._parts.evaluation_rules.keeps_weights:
            return False
        return all(self._parts.groups[name].version >= version for name, version in versions.items())

    def _capacity(self) -> Capacity:
        each, train = self._parts.schedule.prompts_per_step, self._parts.train
        if not self._parts.schedule.overlaps:
            return self._parts.buffer.capacity(train.name, groups_per_update=each)
        generating = [
            n.group for n in train.graph.nodes if n.group and str(RESPONSE_VERSIONS) in n.writes
        ]
        return self._parts.buffer.capacity(
            train.name,
            groups_per_update=each,
            staleness=self._parts.schedule.max_staleness,
            lag=self._parts.weights.lag(generating),
            taken=max((train.taken[n.name] for n in train.updates), default=0),
        )

    def _check_signal(self) -> None:
        """Before issuing more prompts in the first step, check that some group passed the
        filters."""
        train, each = self._parts.train, self._parts.schedule.prompts_per_step
        first = (
            self._stop_without_signal and not train.step and train.issued >= FIRST_WITHOUT_SIGNAL * each
        )
        if first and self._parts.schedule.lacks(train) == each:
            seen = all_filtered(train.measured, FIRST_WITHOUT_SIGNAL * each)
            if seen:
                raise NoSignalError(seen)

    @property
    def _dropped(self) -> str:
        dropped = ", ".join(
            f"{rows} by {name!r}" for name, rows in self._parts.train.ledger.live.dropped.items()
        )
        return f"rows dropped in the run: {dropped or 'none'}"
