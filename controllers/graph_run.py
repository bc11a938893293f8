"""GraphRun: the state of a training or evaluation graph while it runs."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from ..algorithms.evaluation import interval
from ..algorithms.grpo import length_bias
from ..algorithms.solve_rates import solve_rates
from ..dataflow.buffer.leases import Lease, Published
from ..dataflow.buffer.ledger import Ledger
from ..dataflow.column import EXPECTED_TOKENS, PROMPT_IDS
from ..dataflow.graph import TRAIN, Graph, Node, ParameterEdge
from ..dataflow.metrics import Estimate, GroupCounts, Mean, Metric, merge
from ..dataflow.operation import Shape
from ..dataflow.prompts.prompt_queue import PromptQueue, write_state
from ..dataflow.source import Cursor
from .forecast import LengthForecast, Rounds, write_forecasts


def values_of(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the values of metrics. Estimates add `NAME_low` and `NAME_high`, a 95 % interval.

    >>> {name: round(value, 3) for name, value in values_of({"pass@1": Estimate.of([1.0, 0.0, 1.0, 1.0])}).items()}
    {'pass@1': 0.75, 'pass@1_low': 0.301, 'pass@1_high': 0.954}
    """
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        values[name] = metric.value
        if isinstance(metric, Estimate) and (ends := interval(metric.mean, metric.std, metric.number)):
            values |= {f"{name}_low": ends[0], f"{name}_high": ends[1]}
    return values


def _writes_nothing(node: Node) -> bool:
    return not node.writes and node.operation.shape in (Shape.MAP, Shape.GROUP)


@dataclass
class GraphRun(ABC):
    """A graph, its ledger and its position in the source."""

    name: str
    graph: Graph
    ledger: Ledger
    positions: Iterator[int]
    num_tokens: np.ndarray
    """[source rows] Number of tokens of each row."""
    longest_first: bool = False
    """Whether generation starts the longest expected responses first."""

    @cached_property
    def forecasts(self) -> Mapping[str, LengthForecast]:
        """Generating node -> forecast of the lengths of its responses."""
        if not self.longest_first:
            return {}
        asked = (n for n in self.graph.nodes if str(EXPECTED_TOKENS) in n.operation.may_read)
        # Rows of agents also have tokens that the harness wrote.
        nodes = [n.name for n in asked if str(PROMPT_IDS) in n.operation.reads]
        return {name: LengthForecast(len(self.num_tokens)) for name in nodes}

    @cached_property
    def updates(self) -> tuple[Node, ...]:
        return tuple(n for n in self.graph.nodes if n.operation.updates)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Nodes that the run waits for."""
        return tuple(n for n in self.graph.nodes if not n.operation.behind)

    @cached_property
    def recorders(self) -> tuple[Node, ...]:
        """Nodes that record samples in the background."""
        return tuple(n for n in self.graph.nodes if n.operation.behind)

    def observes(self, node: Node) -> bool:
        """Whether a node only reads rows, to compute metrics."""
        operation = node.operation
        return _writes_nothing(node) and not operation.updates and not operation.behind

    def issue(self, number: int, step: int) -> list[int]:
        """Issue the next rows of the source, and return their positions."""
        chosen = list(itertools.islice(self.positions, number))
        self.ledger.issue(chosen, self.num_tokens[chosen].tolist(), step=step)
        return chosen

    def finish_rows(self, lease: Lease, step: int | None = None) -> None:
        """Finish the rows of a lease. For nodes without columns, first publish empty results."""
        if _writes_nothing(lease.node):
            self.ledger.publish(lease, Published(lease.ids, np.zeros(lease.num_rows, np.int64)), None)
        self.ledger.finish(lease, step=step)

    def forecast(self, lease: Lease) -> None:
        """Add the forecast of response lengths to a lease of a generating node."""
        if own := self.forecasts.get(lease.node.name):
            lease.forecast = own.expect(lease.positions, lease.num_tokens)

    @abstractmethod
    def add_metrics(self, lease: Lease, measured: Mapping[str, Metric]) -> None:
        """Record the metrics of a call."""

    def generates(self, lease: Lease, published: Published) -> None:
        """Record finished responses."""
        if lease.forecast is None or published.parents is None:
            return
        places = [lease.place_of[parent] for parent in published.parents.tolist()]
        expected, lengths = lease.forecast.tokens[places], published.num_tokens
        self.forecasts[lease.node.name].observe(
            lease.group_ids[places], lease.positions[places], lease.num_tokens[places], lengths
        )
        if not lease.forecast.is_empty:
            # The order of arrival does not change sums of whole tokens.
            error = Mean(float(np.abs(expected - lengths).sum()), float(lengths.sum()))
            self.add_metrics(lease, {f"{lease.node.group}/forecast_error": error})


@dataclass
class TrainingRun(GraphRun):
    steps: int = 0
    """Total number of steps of the schedule."""
    start: Cursor = field(default_factory=Cursor)
    """Position in the data at the beginning of the log."""
    rounds: Rounds | None = None
    """Sorts the prompts of several steps, as `positions`; None keeps their order."""
    step: int = 0
    """Number of closed steps."""
    begun: bool = False
    """Whether step 0, the start of the run, is closed."""
    stopped: bool = False
    open: bool = False
    taken: Counter[str] = field(default_factory=Counter)
    """Update node -> number of groups claimed for the current step."""
    trained: Counter[str] = field(default_factory=Counter)
    """Update node -> number of groups finished in the current step."""
    samples: Counter[str] = field(default_factory=Counter)
    """Update node -> number of rows trained on in the current step."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Update node -> number of tokens of these rows, including prompts."""
    lengths: defaultdict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    """Update node -> lengths of responses trained on in the current step, one array per call."""
    generated: list[np.ndarray] = field(default_factory=list)
    """Lengths of the responses generated in the current step."""
    issued: int = 0
    """Number of groups issued since the last step was closed."""
    refills: int = 0
    """Number of times that the current step issued more prompts."""
    short_size: int | None = None
    """[groups] Reduced batch size of the current step if filters left too few groups, or None."""
    metrics: list[Mapping[str, Metric]] = field(default_factory=list)
    prompts: PromptQueue | None = None
    """Order of the prompts by a curriculum, if the source has one."""

    @property
    def outcomes_are_known(self) -> bool:
        """Whether no prompt in flight lacks an outcome that decides which prompts come next."""
        if self.prompts is None:
            return True
        measuring = (node for node in self.graph.nodes if node.function is solve_rates)
        return all(self.ledger.readiness.exhausted(node) for node in measuring)

    @property
    def over(self) -> bool:
        return self.stopped or self.step >= self.steps

    @property
    def step_under_way(self) -> int:
        """Step in progress, or the last step if the run is over. 0 is the start of the run."""
        return self.step + 1 if self.begun and not self.over else self.step

    @property
    def cursor(self) -> Cursor:
        """Position in the data from which to resume without the rows in flight."""
        pending, before = self.pending, self.ledger.live.positions_before(self.updates)
        return self.start.after(self.ledger.prompts_issued + len(pending), [*before, *pending])

    @property
    def pending(self) -> tuple[int, ...]:
        """Source rows that `rounds` has sorted, and that are not issued yet."""
        return () if self.rounds is None else tuple(self.rounds.pending)

    def sort_rounds(self, size: int, pending: Sequence[int] = ()) -> None:
        """Issue the `pending` rows next, and then sort the rest of the source, `size` rows at a
        time."""
        nodes = list(self.forecasts)
        if size > 1 and nodes:
            forecast = self.forecasts[nodes[0]]
            expect = lambda rows: forecast.expect(rows, self.num_tokens[rows]).tokens  # noqa: E731
        else:
            expect, size = lambda rows: np.zeros(len(rows)), 1
        self.positions = self.rounds = Rounds(self.positions, size, expect, pending)

    def issue(self, number: int, step: int) -> list[int]:
        if self.prompts is not None:
            self.prompts.begin(step, [group.position for group in self.ledger.live.groups.values()])
        chosen = super().issue(number, step)
        self.open = True
        self.issued += len(chosen)
        return chosen

    def total(self, counts: Mapping[str, int]) -> int:
        """Return the sum of counts of rows or tokens, by update. Several updates of the same rows count
        once."""
        of_level: Counter[int] = Counter()
        for node in self.updates:
            of_level[node.level] = max(of_level[node.level], counts.get(node.name, 0))
        return of_level.total()

    @property
    def measured(self) -> dict[str, float]:
        return values_of(merge(self.metrics))

    def add_metrics(self, lease: Lease, measured: Mapping[str, Metric]) -> None:
        counted = [one for one in measured.values() if isinstance(one, GroupCounts)]
        for outcomes in counted if self.prompts is not None else ():
            for group in lease.groups:
                solved, votes = outcomes.counts.get(group.id, (0, 0))
                self.prompts.record(group.position, solved, votes, self.step_under_way)  # pyright: ignore[reportOptionalMemberAccess]
        self.metrics.append({n: m for n, m in measured.items() if not isinstance(m, GroupCounts)})

    def generates(self, lease: Lease, published: Published) -> None:
        super().generates(lease, published)
        self.generated.append(published.num_tokens)

    def finish_rows(self, lease: Lease, step: int | None = None) -> None:
        if lease.node.operation.updates:
            self.trains(lease)  # before the ledger forgets the rows
            step = self.step_under_way
        super().finish_rows(lease, step)

    def trains(self, lease: Lease) -> None:
        name = lease.node.name
        self.samples[name] += lease.num_rows
        tokens = lease.num_tokens
        self.tokens[name] += int(tokens.sum())
        self.trained[name] += lease.num_groups
        # A row's tokens include its prompt.
        self.lengths[name].append(tokens - lease.of_groups([group.tokens for group in lease.groups]))

    def close(self, *, overlaps: bool) -> dict[str, float]:
        """Close the step and return its metrics. If generation `overlaps` training, the metrics
        compare the lengths of trained and generated responses."""
        if overlaps and self.updates and self.generated:  # otherwise both are the same rows
            # Several updates of the same rows count once.
            of_level = {node.level: self.lengths[node.name] for node in self.updates}
            trained = [lengths for own in of_level.values() for lengths in own]
            self.metrics.append(
                length_bias(
                    np.concatenate([np.empty(0, np.int64), *trained]), np.concatenate(self.generated)
                )
            )
        merged = values_of(merge(self.metrics))
        if self.prompts is not None:
            merged |= self.prompts.metrics()
        merged |= {f"stale/{fate}": float(groups) for fate, groups in self.ledger.stale.items()}
        for noted in (self.metrics, self.generated, self.lengths, self.taken, self.trained):
            noted.clear()
        self.open = False
        self.refills = self.issued = 0
        self.short_size = None
        self.step += 1
        return merged


@dataclass
class _EvaluationUnderWay:
    metrics: list[Mapping[str, Metric]] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)
    asked: int = 0
    answered: set[int] = field(default_factory=set)
    """Groups that reached the end of the graph."""


@dataclass
class EvaluationRun(GraphRun):
    """An evaluation graph, which reads its whole source once for each evaluated step."""

    due: dict[int, Mapping[ParameterEdge, int]] = field(default_factory=dict)
    """Step whose evaluation has not begun -> versions that the followers must have."""
    under_way: dict[int, _EvaluationUnderWay] = field(default_factory=dict)
    closed_at: int = -1

    @property
    def pending(self) -> bool:
        return bool(self.due or self.under_way)

    @property
    def ended(self) -> list[int]:
        """Steps whose evaluation has finished all rows."""
        return [step for step in self.under_way if not self.ledger.live.groups_of_step[step]]

    def needs_weights(self, edge: ParameterEdge, version: int) -> bool:
        """Whether a follower must keep its version for an evaluation that is due or running."""
        due = any(version >= wanted.get(edge, 0) for wanted in self.due.values())
        return edge.follower in self.graph.handles and (bool(self.under_way) or due)

    def mark(self, step: int, versions: Mapping[ParameterEdge, int]) -> None:
        """Queue a step for evaluation, unless its evaluation has begun or is over. `versions` are
        the followers' required versions."""
        if self.closed_at != step and step not in self.under_way:
            self.due[step] = versions

    def begin_evaluation(self, step: int) -> None:
        del self.due[step]
        self.under_way[step] = _EvaluationUnderWay()
        self.under_way[step].asked = len(self.issue(len(self.num_tokens), step))

    def add_metrics(self, lease: Lease, measured: Mapping[str, Metric]) -> None:
        self.under_way[lease.step].metrics.append(measured)

    def finish_rows(self, lease: Lease, step: int | None = None) -> None:
        if lease.node is self.nodes[-1]:
            self.under_way[lease.step].answered.update(group.id for group in lease.groups)
        super().finish_rows(lease, step)

    def generates(self, lease: Lease, published: Published) -> None:
        super().generates(lease, published)
        if published.versions is not None and len(published.versions):
            self.under_way[lease.step].versions |= {int(published.versions.min()), published.newest}

    def close(self, step: int, *, overlaps: bool) -> dict[str, float]:
        """Close the evaluation of a step and return its metrics. With `overlaps`, or if a replaced
        rank could not get the old weights, they include the oldest and newest version."""
        ended = self.under_way.pop(step)
        self.closed_at = max(self.closed_at, step)
        metrics = values_of(merge(ended.metrics))
        if (overlaps and ended.versions) or len(ended.versions) > 1:
            metrics["oldest_version"] = float(min(ended.versions))
            metrics["newest_version"] = float(max(ended.versions))
        metrics["prompts_lost"] = float(ended.asked - len(ended.answered))
        metrics["prompts_asked"] = float(ended.asked)
        return {f"{self.name}/{name}": value for name, value in metrics.items()}


@dataclass(frozen=True)
class GraphRuns:
    train: TrainingRun
    evaluations: Mapping[str, EvaluationRun]

    def __iter__(self) -> Iterator[GraphRun]:
        yield self.train
        yield from self.evaluations.values()

    def __getitem__(self, name: str) -> GraphRun:
        return self.train if name == TRAIN else self.evaluations[name]

    @property
    def forecasts(self) -> dict[str, np.ndarray]:
        """State of all forecasts, for checkpoints: `GRAPH/NODE/ARRAY` -> array."""
        return {
            f"{run.name}/{node}/{name}": array
            for run in self
            for node, forecast in run.forecasts.items()
            for name, array in forecast.state.items()
        }

    def state_files(self) -> Callable[[Path], None]:
        """Return a function that writes the present forecasts and curriculum into the folder of a
        checkpoint."""
        forecasts, queue = self.forecasts, self.train.prompts
        prompts = None if queue is None else queue.table()

        def write(folder: Path) -> None:
            write_forecasts(folder, forecasts)
            if prompts is not None:
                write_state(folder, prompts)

        return write

    def restore_forecasts(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the forecasts of a checkpoint; nodes that it lacks keep theirs."""
        for run in self:
            for node, forecast in run.forecasts.items():
                prefix = f"{run.name}/{node}/"
                own = {n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)}
                if own:
                    forecast.restore(own)

    @property
    def evaluating(self) -> bool:
        return any(evaluation.pending for evaluation in self.evaluations.values())

    def needs_weights(self, edge: ParameterEdge, version: int) -> bool:
        return any(evaluation.needs_weights(edge, version) for evaluation in self.evaluations.values())
