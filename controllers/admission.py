"""Admission: how many prompts are issued now, and when an evaluation begins."""

from __future__ import annotations

from collections.abc import Mapping

from ..dataflow.buffer.sample_buffer import Capacity, SampleBuffer
from ..dataflow.column import RESPONSE_VERSIONS
from ..dataflow.errors import StalledError
from .calls import Calls
from .graph_run import GraphRuns
from .group import WorkerGroup
from .recording import Recording
from .schedule import Training
from .weight_sync import WeightSync


class Admission:
    """Issues rows as the schedule wants them and the buffer has capacity for them."""

    def __init__(
        self,
        schedule: Training,
        buffer: SampleBuffer,
        groups: Mapping[str, WorkerGroup],
        graph_runs: GraphRuns,
        weights: WeightSync,
        recording: Recording,
        calls: Calls,
    ) -> None:
        self._schedule = schedule
        self._buffer = buffer
        self._groups = groups
        self._graph_runs = graph_runs
        self._train = graph_runs.train
        self._weights = weights
        self._recording = recording
        self._calls = calls

    @property
    def possible(self) -> bool:
        """Whether rows could be issued now."""
        if any(self._may_begin(v) for e in self._graph_runs.evaluations.values() for v in e.due.values()):
            return True
        return not self._train.over and self._schedule.admit(self._train) > 0 and self._capacity().groups > 0

    def admit(self) -> None:
        """Begin evaluations that are due, and issue prompts for training.

        Raises:
            StalledError: filters drop so many rows, or the buffer is so small, that no step would ever be over.
        """
        for evaluation in self._graph_runs.evaluations.values():
            for step, versions in list(evaluation.due.items()):
                if self._may_begin(versions) and not self._recording.is_full(evaluation):
                    evaluation.begin(step)
        if self._train.over:
            return
        if self._schedule.overlaps:
            self._admit_ahead()
        elif not (self._graph_runs.evaluating or self._calls.beside_the_graph):
            self._admit_step()

    def _admit_ahead(self) -> None:
        train, schedule = self._train, self._schedule
        wanted = schedule.admit(train)
        number = min(wanted, self._capacity().groups) if wanted else 0
        ahead = 1 + (schedule.max_staleness or 0) + schedule.max_refills
        if number and train.issued > ahead * schedule.prompts_per_step:
            raise StalledError(
                f"{train.issued} prompts were issued since step {train.step}, and none is over; {self._dropped}"
            )
        if number:
            train.issue(number, train.step + 1)

    def _admit_step(self) -> None:
        train, step = self._train, self._train.step + 1
        number = self._schedule.admit(train)
        if not number:
            return
        capacity = self._capacity()
        if number > capacity.groups:
            if not train.ledger.groups_in_flight:
                raise StalledError(f"step {step} needs {number} groups at once; the buffer is full: {capacity.reason}")
            return  # until some are finished; the calls that work on them have deadlines
        if train.open:
            train.refills += 1
            if train.refills > self._schedule.max_refills:
                raise StalledError(
                    f"step {step} issued more prompts {self._schedule.max_refills} times and still lacks {number} groups; "
                    f"{self._dropped}"
                )
        train.issue(number, step)

    def _may_begin(self, versions: Mapping[str, int]) -> bool:
        """Whether an evaluation that wants groups to hold these versions may begin: among other work where generation and training
        overlap, else when nothing else is under way."""
        if not self._schedule.overlaps:
            idle = all(call.behind for call in self._calls.at_work) and not self._calls.beside_the_graph
            return idle and not self._weights.under_way
        return all(self._groups[name].version >= version for name, version in versions.items())

    def _capacity(self) -> Capacity:
        each, train = self._schedule.prompts_per_step, self._train
        if not self._schedule.overlaps:
            return self._buffer.capacity(train.name, groups_per_update=each)
        generating = [n.group for n in train.graph.nodes if n.group and str(RESPONSE_VERSIONS) in n.writes]
        return self._buffer.capacity(
            train.name,
            groups_per_update=each,
            staleness=self._schedule.max_staleness,
            lag=self._weights.lag(generating),
            taken=max((train.taken[n.name] for n in train.updates), default=0),
        )

    @property
    def _dropped(self) -> str:
        dropped = ", ".join(f"{rows} by {name!r}" for name, rows in self._train.ledger.dropped.items())
        return f"rows dropped so far: {dropped or 'none'}"
