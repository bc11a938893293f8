"""Schedules: when nodes run. A schedule is a value; the driver's one loop asks it how many prompts to issue, what a node may
claim now, and whether the step is over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import Field

from ..dataflow.config import Config
from ..dataflow.graph import Node
from .graph_run import GraphRun


@dataclass(frozen=True)
class Share:
    """What a node may claim now."""

    max_groups: int | None = None
    """Of a node that takes groups; None: all that are ready."""
    max_rows: int | None = None
    """Of a node that takes rows; None: all that are ready."""
    last: bool = True
    """An update has its whole batch with these."""


class Schedule(Protocol):
    """What the driver asks."""

    @property
    def max_staleness(self) -> int | None:
        """Updates that a row may lag the weights that it trains; None: nobody counts."""
        ...

    @property
    def overlaps(self) -> bool:
        """Generation goes on while weights are trained and passed on."""
        ...

    def admit(self, flow: GraphRun) -> int:
        """Groups that are wanted now; the buffer may have less room."""
        ...

    def share(self, flow: GraphRun, node: Node, version: int) -> Share | None:
        """What a node, whose worker group is at this policy version, may claim now; None: nothing."""
        ...

    def over(self, flow: GraphRun) -> bool:
        """Whether the step (or the evaluation) that was begun is done."""
        ...


class Stepwise(Config):
    """What all schedules of training have in common: steps of so many groups."""

    steps: int = Field(default=100, ge=1)
    """Updates to make."""
    prompts_per_step: int = Field(default=64, ge=1)
    """Groups in a training batch."""
    shuffle: bool = True
    """Draw the prompts of each epoch in a new order, from the run's seed."""
    max_refills: int = Field(default=10, ge=0)
    """How many times a step may issue more prompts because a filter dropped groups."""

    @property
    def overlaps(self) -> bool:
        return False

    def admit(self, flow: GraphRun) -> int:
        """A batch when the step is new, and later what filters took away from it."""
        if not flow.open:
            return self.prompts_per_step
        come = all(flow.ledger.settled(n) or flow.ledger.exhausted(n) for n in flow.updates)
        return self.lacks(flow) if come else 0

    def lacks(self, flow: GraphRun) -> int:
        """Groups that an update lacks to make up its batch of the step."""
        reached = (flow.ledger.ready_groups(n) + flow.taken[n.name] for n in flow.updates)
        return max(0, self.prompts_per_step - min(reached, default=self.prompts_per_step))

    def over(self, flow: GraphRun) -> bool:
        return flow.open and not flow.ledger.groups_at_work and not self.lacks(flow)

    def _when_settled(self, flow: GraphRun, node: Node) -> Share | None:
        """Everything of the step at once, and an update sees no half of a step."""
        return Share() if flow.ledger.settled(node) and not (node.operation.updates and self.lacks(flow)) else None

    def _when_ready(self, flow: GraphRun, node: Node, part: int, reserved: int = 0) -> Share | None:
        """What there is, but of an update at least `part` groups, or the rest of its batch; `reserved` places in the batch
        are kept for groups that are not ready."""
        if flow.observes(node):
            enough = flow.ledger.ready_groups(node) >= self.prompts_per_step or flow.ledger.settled(node)
            return Share() if enough else None
        if not node.operation.updates:
            return Share() if flow.ledger.ready(node) else None
        left = self.prompts_per_step - flow.taken[node.name]
        number = min(flow.ledger.ready_groups(node), left - reserved)
        whole = number == left > 0
        if whole or (node.operation.accumulates and number >= min(part, left)):
            return Share(number, last=whole) if number else None
        return None


class Synchronous(Stepwise):
    """Each step: generate all, score all, update. Exactly on-policy."""

    @property
    def max_staleness(self) -> int:
        return 0

    def share(self, flow: GraphRun, node: Node, version: int) -> Share | None:
        return self._when_settled(flow, node)


class Pipelined(Stepwise):
    """The updates of `Synchronous`, but every node begins with the first groups that are ready for it: rewards, references and
    advantages while others are still generated, and gradients are accumulated as groups come."""

    groups_per_part: int = Field(default=1, ge=1)
    """Groups that an update waits for before it accumulates their gradient; large models want full microbatches."""

    @property
    def max_staleness(self) -> int:
        return 0

    def share(self, flow: GraphRun, node: Node, version: int) -> Share | None:
        return self._when_ready(flow, node, self.groups_per_part)


class Asynchronous(Stepwise):
    """Generation never waits for training within the staleness bound: prompts are issued as far ahead as will be trained on in
    time (arXiv:2505.24298, section 4.1; arXiv:2507.01663), and new weights go in between two steps of generation."""

    max_staleness: int = Field(default=1, ge=0)
    """Updates that a row's oldest token may lag the weights that it trains; 0 is `Synchronous`."""
    partial_rollouts: Literal["continue", "finish", "requeue"] = "continue"
    """What becomes of responses that are unfinished when new weights come: they go on under these (every token knows its
    version); they are finished first, and the weights wait; or they are given up, and their prompts requeued."""
    groups_per_part: int = Field(default=1, ge=1)
    """See `Pipelined`."""

    @property
    def overlaps(self) -> bool:
        return self.max_staleness > 0

    def admit(self, flow: GraphRun) -> int:
        if not self.overlaps:
            return super().admit(flow)
        # As many as the rest of the run needs: the buffer's room says how many of them now.
        still = (flow.taken[n.name] + flow.ledger.unclaimed(n) for n in flow.updates)
        return max(0, (self.steps - flow.step) * self.prompts_per_step - min(still, default=0))

    def share(self, flow: GraphRun, node: Node, version: int) -> Share | None:
        if not self.overlaps:
            return self._when_settled(flow, node)
        reserved = 0
        if node.operation.updates:
            # Whatever is taken now, each later batch must have room for the groups that are due by then.
            for later in range(self.max_staleness + 1):
                due, ready = flow.ledger.groups_until(node, version - self.max_staleness + later)
                reserved = max(reserved, due - ready - later * self.prompts_per_step)
        return self._when_ready(flow, node, self.groups_per_part, reserved)

    def over(self, flow: GraphRun) -> bool:
        if not self.overlaps:
            return super().over(flow)
        return bool(flow.updates) and all(flow.trained[n.name] >= self.prompts_per_step for n in flow.updates)


Training = Synchronous | Pipelined | Asynchronous
"""How a training graph may run."""


class OnePass(Config):
    """The source once, all of it, as it stands: how an evaluation graph runs."""

    shuffle: bool = False
    overlaps: bool = False
    """Its rows take their place among those of training, and the evaluation of a step may begin before that of an earlier one
    is over. Otherwise training waits for it."""

    @property
    def max_staleness(self) -> None:
        return None

    def admit(self, flow: GraphRun) -> int:
        """Nothing: an evaluation issues its source when it begins."""
        return 0

    def share(self, flow: GraphRun, node: Node, version: int) -> Share | None:
        if not self.overlaps:
            return Share() if flow.ledger.settled(node) else None
        round, number = flow.ledger.ready_in_round(node)  # a call is of one evaluation, as its metrics are
        whole = not flow.observes(node) or not node.operation.takes_groups or number == flow.ledger.rounds[round]
        if not number or not whole:
            return None
        return Share(max_groups=number) if node.operation.takes_groups else Share(max_rows=number)

    def over(self, flow: GraphRun) -> bool:
        return any(not flow.ledger.rounds[step] for step in flow.rounds)
