"""GraphRun: one graph of a run while it runs. The training graph is a `TrainingRun`, each evaluation an `EvaluationRun`."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..algorithms.evaluation import interval
from ..algorithms.policy_loss import length_bias
from ..dataflow.buffer.leases import Lease, Published
from ..dataflow.buffer.ledger import Ledger
from ..dataflow.graph import TRAIN, Graph, Node
from ..dataflow.metrics import Estimate, Metric, merge
from ..dataflow.operation import Shape
from ..dataflow.source import Cursor


def values_of(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The numbers that a run writes of metrics: their values, and `NAME_low` and `NAME_high` of estimates, the ends of 95 % intervals.

    >>> {name: round(value, 3) for name, value in values_of({"pass@1": Estimate.of([1.0, 0.0, 1.0, 1.0])}).items()}
    {'pass@1': 0.75, 'pass@1_low': 0.301, 'pass@1_high': 0.954}
    """
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        values[name] = metric.value
        if isinstance(metric, Estimate) and (ends := interval(metric.mean, metric.std, metric.number)):
            values |= {f"{name}_low": ends[0], f"{name}_high": ends[1]}
    return values


@dataclass
class GraphRun(ABC):
    """A graph, its ledger and its place in the source."""

    name: str
    graph: Graph
    ledger: Ledger
    positions: Iterator[int]
    """Rows of the source still to be issued, in order."""
    num_tokens: np.ndarray
    """[source rows] tokens of each."""

    @cached_property
    def updates(self) -> tuple[Node, ...]:
        """Nodes that make new versions of weights."""
        return tuple(n for n in self.graph.nodes if n.operation.updates)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Nodes that the run waits for."""
        return tuple(n for n in self.graph.nodes if not n.operation.behind)

    @cached_property
    def recorders(self) -> tuple[Node, ...]:
        """Nodes that follow behind the run and record samples."""
        return tuple(n for n in self.graph.nodes if n.operation.behind)

    def observes(self, node: Node) -> bool:
        """Whether a node only looks at rows: it writes no column, drops no row and updates nothing, and the run waits for it."""
        if node.operation.behind:
            return False
        return (
            not node.writes
            and not node.operation.updates
            and node.operation.shape in (Shape.MAP, Shape.GROUP)
        )

    def issue(self, number: int, step: int) -> int:
        """Issue the next rows of the source; returns how many there were."""
        chosen = list(itertools.islice(self.positions, number))
        self.ledger.issue(chosen, self.num_tokens[chosen].tolist(), step=step)
        return len(chosen)

    def finish(self, lease: Lease, step: int | None = None) -> None:
        """A node is done with the rows of a lease. Where it writes no column of theirs, they are published with nothing.

        Args:
            lease: of the node.
            step: the step that trained on the rows; None: the node is no update.
        """
        node = lease.node
        if not node.writes and node.operation.shape in (Shape.MAP, Shape.GROUP):
            self.ledger.publish(lease, Published(lease.ids, np.zeros(lease.num_rows, np.int64)), None)
        self.ledger.finish(lease, step=step)

    @abstractmethod
    def take(self, lease: Lease, measured: Mapping[str, Metric]) -> None:
        """Note what a call has measured on the rows of a lease."""

    @abstractmethod
    def generates(self, lease: Lease, published: Published) -> None:
        """Note responses that are finished."""


@dataclass
class TrainingRun(GraphRun):
    """The training graph, how far its step has come, and what was measured in it."""

    steps: int = 0
    """Steps that the schedule wants."""
    start: Cursor = field(default_factory=Cursor)
    """Where its log began in the data."""
    step: int = 0
    """Steps that are closed; each made an update."""
    begun: bool = False
    """Step 0, the start of the run, is closed."""
    stopped: bool = False
    """The run is over, whatever its schedule says."""
    open: bool = False
    """Rows were issued for a step that is not closed yet."""
    taken: Counter[str] = field(default_factory=Counter)
    """Update -> groups that it has claimed for the step under way."""
    trained: Counter[str] = field(default_factory=Counter)
    """Update -> groups among these that it has finished."""
    samples: Counter[str] = field(default_factory=Counter)
    """Update -> rows that it has trained on in this step."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Update -> tokens of these rows, prompts included."""
    lengths: defaultdict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    """Update -> tokens of the responses that it has trained on in this step, call by call."""
    generated: list[np.ndarray] = field(default_factory=list)
    """Tokens of the responses that were finished in this step."""
    issued: int = 0
    """Groups issued since the last step was closed."""
    refills: int = 0
    """How often the step under way issued more prompts."""
    short_size: int | None = None
    """Groups of the batch of the step under way, or None if filters left as many as the schedule wants."""
    metrics: list[Mapping[str, Metric]] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """No further step will come."""
        return self.stopped or self.step >= self.steps

    @property
    def step_under_way(self) -> int:
        """A step lasts from the end of the one before until its update is made and published; the start of the run is step 0."""
        return self.step + 1 if self.begun and not self.over else self.step

    @property
    def cursor(self) -> Cursor:
        """The place in the data from which the run could go on without its rows in flight."""
        return self.start.after(
            self.ledger.prompts_issued, self.ledger.live.positions_before(self.updates)
        )

    def issue(self, number: int, step: int) -> int:
        issued = super().issue(number, step)
        self.open = True
        self.issued += issued
        return issued

    @property
    def measured(self) -> dict[str, float]:
        """The metrics of the step so far."""
        return values_of(merge(self.metrics))

    def take(self, lease: Lease, measured: Mapping[str, Metric]) -> None:
        self.metrics.append(measured)

    def generates(self, lease: Lease, published: Published) -> None:
        self.generated.append(published.num_tokens)

    def finish(self, lease: Lease, step: int | None = None) -> None:
        if lease.node.operation.updates:
            self.trains(lease)  # before its rows, once they are finished, are forgotten
            step = self.step_under_way
        super().finish(lease, step)

    def trains(self, lease: Lease) -> None:
        """Note rows that an update has trained on."""
        name = lease.node.name
        self.samples[name] += lease.num_rows
        tokens = lease.num_tokens
        self.tokens[name] += int(tokens.sum())
        self.trained[name] += lease.num_groups
        self.lengths[name].append(tokens - lease.of_groups([group.tokens for group in lease.groups]))

    def close(self, *, overlaps: bool) -> dict[str, float]:
        """The step is over; returns what was measured in it.

        Args:
            overlaps: generation goes on while weights are trained, so that responses of this step may be trained on in later ones.
        """
        if overlaps and self.updates and self.generated:  # else both are the same rows
            trained = self.lengths[self.updates[-1].name]
            self.metrics.append(
                length_bias(
                    np.concatenate([np.empty(0, np.int64), *trained]), np.concatenate(self.generated)
                )
            )
        merged = values_of(merge(self.metrics))
        merged |= {f"stale/{fate}": float(groups) for fate, groups in self.ledger.claims.stale.items()}
        for noted in (self.metrics, self.generated, self.lengths, self.taken, self.trained):
            noted.clear()
        self.open = False
        self.refills = self.issued = 0
        self.short_size = None
        self.step += 1
        return merged


@dataclass
class EvaluationUnderWay:
    """What the calls of the evaluation of one step have measured so far, and the versions of its tokens."""

    metrics: list[Mapping[str, Metric]] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)
    asked: int = 0
    """Prompts that were issued."""
    answered: set[int] = field(default_factory=set)
    """Groups that have come to the end of the graph."""


@dataclass
class EvaluationRun(GraphRun):
    """An evaluation graph. It goes over its whole source once for each step that is evaluated."""

    due: dict[int, Mapping[str, int]] = field(default_factory=dict)
    """Step whose evaluation has not begun -> group -> version that the group must hold before."""
    under_way: dict[int, EvaluationUnderWay] = field(default_factory=dict)
    """Step -> its evaluation."""
    closed_at: int = -1
    """Latest step whose evaluation is closed."""

    @property
    def pending(self) -> bool:
        """Whether an evaluation is due or under way."""
        return bool(self.due or self.under_way)

    @property
    def ended(self) -> list[int]:
        """Steps under way whose rows are all finished."""
        return [step for step in self.under_way if not self.ledger.live.groups_of_step[step]]

    def needs_weights(self, group: str, version: int) -> bool:
        """Whether a group has to keep the version of the weights that it has until the evaluation that is due or under way is over."""
        if group not in self.graph.handles:
            return False
        return bool(self.under_way) or any(
            version >= wanted.get(group, 0) for wanted in self.due.values()
        )

    def mark(self, step: int, versions: Mapping[str, int]) -> None:
        """Queue a step for evaluation as soon as groups hold these versions, unless it has been evaluated."""
        if self.closed_at != step and step not in self.under_way:
            self.due[step] = versions

    def begin(self, step: int) -> None:
        """Issue the complete source for the evaluation of a step."""
        del self.due[step]
        self.under_way[step] = EvaluationUnderWay()
        self.under_way[step].asked = self.issue(len(self.num_tokens), step)

    def take(self, lease: Lease, measured: Mapping[str, Metric]) -> None:
        self.under_way[lease.step].metrics.append(measured)

    def finish(self, lease: Lease, step: int | None = None) -> None:
        if lease.node is self.nodes[-1]:
            self.under_way[lease.step].answered.update(group.id for group in lease.groups)
        super().finish(lease, step)

    def generates(self, lease: Lease, published: Published) -> None:
        if published.versions is not None and len(published.versions):
            self.under_way[lease.step].versions |= {int(published.versions.min()), published.newest}

    def close(self, step: int, *, overlaps: bool) -> dict[str, float]:
        """The evaluation of a step is over; returns its metrics.

        Args:
            overlaps: weights may change while it is made, so its metrics name the oldest and newest version of its tokens. (Otherwise only
                where they did, because a rank was replaced that could not get the old ones any more.)
        """
        ended = self.under_way.pop(step)
        self.closed_at = max(self.closed_at, step)
        metrics = values_of(merge(ended.metrics))
        if (overlaps and ended.versions) or len(ended.versions) > 1:
            metrics |= {
                "oldest_version": float(min(ended.versions)),
                "newest_version": float(max(ended.versions)),
            }
        metrics |= {
            "prompts_lost": float(ended.asked - len(ended.answered)),
            "prompts_asked": float(ended.asked),
        }
        return {f"{self.name}/{name}": value for name, value in metrics.items()}


@dataclass(frozen=True)
class GraphRuns:
    """All graphs of a run."""

    train: TrainingRun
    evaluations: Mapping[str, EvaluationRun]

    def __iter__(self) -> Iterator[GraphRun]:
        yield self.train
        yield from self.evaluations.values()

    def __getitem__(self, name: str) -> GraphRun:
        return self.train if name == TRAIN else self.evaluations[name]

    @property
    def evaluating(self) -> bool:
        """Whether an evaluation is due or under way."""
        return any(evaluation.pending for evaluation in self.evaluations.values())

    def needs_weights(self, group: str, version: int) -> bool:
        """Whether an evaluation needs the weights of this version that a group has."""
        return any(evaluation.needs_weights(group, version) for evaluation in self.evaluations.values())
