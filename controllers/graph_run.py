"""GraphRun: one graph while it runs."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..algorithms.diagnostics import length_bias
from ..dataflow.buffer.ledger import Ledger
from ..dataflow.buffer.rows import Lease, Published
from ..dataflow.graph import Graph, Node
from ..dataflow.metrics import Metric, merge
from ..dataflow.operation import Shape

if TYPE_CHECKING:
    from .schedule import Schedule


CURSOR = "cursor"
"""The note in a log that does not begin with the data: it says where in the data it begins."""


def positions(size: int, seed: int, *, shuffle: bool) -> Iterator[int]:
    """Rows of a source in the order in which they are issued, without end: each epoch in an order of its own."""
    for epoch in itertools.count():
        yield from np.random.default_rng((seed, epoch)).permutation(size).tolist() if shuffle else range(size)


@dataclass
class Round:
    """An evaluation that is under way: what its calls have measured, and versions that its tokens are of."""

    metrics: list[Mapping[str, Metric]] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Cursor:
    """How far a run has come in its data."""

    issued: int = 0
    """Rows of the source that were issued, in the order of the run."""
    again: tuple[int, ...] = ()
    """Those of them that are issued once more, before all others: no update was made with what was generated for them."""

    def rest(self, order: Iterator[int], issued: int) -> Iterator[int]:
        """What is still to issue, when so many were issued from this cursor on."""
        return itertools.islice(itertools.chain(self.again, itertools.islice(order, self.issued, None)), issued, None)

    def after(self, issued: int, untrained: Iterable[int]) -> Cursor:
        """The cursor when so many were issued from this one on, and these rows would have to be issued once more."""
        return Cursor(self.issued + max(0, issued - len(self.again)), (*untrained, *self.again[issued:]))


@dataclass
class GraphRun:
    """A graph's ledger, its place in the source, how far its step has come, and what its calls measured."""

    name: str
    graph: Graph
    schedule: Schedule
    ledger: Ledger
    positions: Iterator[int]
    """Rows of the source still to issue, in order."""
    num_tokens: np.ndarray
    """[source rows] tokens of each."""
    start: Cursor = Cursor()
    """Where its log began in the data."""
    step: int = 0
    """Steps that are over."""
    open: bool = False
    """Something was issued of a step that is not closed yet."""
    taken: Counter[str] = field(default_factory=Counter)
    """Groups that each update has claimed for the step under way."""
    trained: Counter[str] = field(default_factory=Counter)
    """Of these, those that it has finished."""
    issued: int = 0
    """Groups issued since the last step was over."""
    refills: int = 0
    due: dict[int, Mapping[str, int]] = field(default_factory=dict)
    """Evaluations that have not begun: the step that each is of -> the versions that groups must hold before."""
    rounds: dict[int, Round] = field(default_factory=dict)
    """Evaluations that are under way, by the step that each is of."""
    closed_at: int = -1
    """Latest step of which an evaluation was made."""
    metrics: list[Mapping[str, Metric]] = field(default_factory=list)
    generated: list[np.ndarray] = field(default_factory=list)
    """Tokens of the responses that were finished in this step,"""
    consumed: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """and of those that each update has trained on in it."""

    @property
    def evaluates(self) -> bool:
        """It is run when it is due, beside the training that is run to its end."""
        return self.name != "train"

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
        """Nodes that follow behind: they record samples."""
        return tuple(n for n in self.graph.nodes if n.operation.behind)

    def observes(self, node: Node) -> bool:
        """Whether nothing can come of a node that the run waits for: it writes no column, takes no row away, and updates nothing."""
        if node.operation.behind:
            return False
        return not node.writes and not node.operation.updates and node.operation.shape in (Shape.MAP, Shape.GROUP)

    @property
    def cursor(self) -> Cursor:
        """The place in the data from which a run goes on without its rows in flight."""
        return self.start.after(self.ledger.prompts_issued, self.ledger.positions_before(self.updates))

    def issue(self, number: int, round: int) -> None:
        chosen = list(itertools.islice(self.positions, number))
        self.ledger.issue(chosen, self.num_tokens[chosen].tolist(), round=round)
        self.open = True
        self.issued += len(chosen)

    def evaluate(self, step: int) -> None:
        """Begin the evaluation of a step: the source once, all of it."""
        self.rounds[step] = Round()
        self.issue(len(self.num_tokens), step)

    def close_round(self, step: int) -> dict[str, float]:
        """The evaluation of a step is over; returns its metrics. Where weights change while it is made, these say of which
        versions its tokens are."""
        ended = self.rounds.pop(step)
        self.closed_at = max(self.closed_at, step)
        found = {name: metric.value for name, metric in merge(ended.metrics).items()}
        if self.schedule.overlaps and ended.versions:
            found |= {"oldest_version": float(min(ended.versions)), "newest_version": float(max(ended.versions))}
        return {f"{self.name}/{name}": value for name, value in found.items()}

    def take(self, lease: Lease, measured: Mapping[str, Metric]) -> None:
        """Note what a call has measured on the rows of a lease."""
        (self.rounds[lease.round].metrics if self.evaluates else self.metrics).append(measured)

    def generates(self, lease: Lease, published: Published) -> None:
        """Note responses that are finished."""
        if not self.evaluates:
            self.generated.append(published.num_tokens)
        elif published.versions is not None and len(published.versions):
            self.rounds[lease.round].versions |= {int(published.versions.min()), published.newest}

    def close(self) -> None:
        """The step is over."""
        self.open = False
        self.refills = self.issued = 0
        self.taken.clear()
        self.trained.clear()
        self.step += 1

    def take_metrics(self) -> dict[str, float]:
        if self.schedule.overlaps and self.updates and self.generated:  # else both are the same rows
            trained = self.consumed[self.updates[-1].name]
            self.metrics.append(length_bias(np.array(trained), np.concatenate(self.generated)))
        merged = {name: metric.value for name, metric in merge(self.metrics).items()}
        merged |= {f"stale/{fate}": float(groups) for fate, groups in self.ledger.stale.items()}
        self.metrics = []
        self.generated.clear()
        self.consumed.clear()
        return merged
