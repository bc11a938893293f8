"""Schedules: when nodes run. A schedule is a value; the driver's one loop asks it two questions."""

from __future__ import annotations

from pydantic import Field

from ..dataflow.config import Config
from ..dataflow.graph import Node
from ..dataflow.ledger import Ledger


class Synchronous(Config):
    """Each step: generate all, score all, update. Exactly on-policy."""

    steps: int = Field(default=100, ge=1)
    """Updates to make."""
    prompts_per_step: int = Field(default=64, ge=1)
    """Groups in a training batch."""
    shuffle: bool = True
    """Draw the prompts of each epoch in a new order, from the run's seed."""
    max_refills: int = Field(default=10, ge=0)
    """How many times a step may issue more prompts because a filter dropped groups."""

    @property
    def max_staleness(self) -> int:
        """Updates that a row may lag the weights that it trains."""
        return 0

    def admit(self, ledger: Ledger, step: int) -> int:
        """Groups to issue now: a batch when the step is new, and later what filters took away from it."""
        if ledger.round != step:
            return self.prompts_per_step
        updates = [n for n in ledger.graph.nodes if n.operation.updates]
        return self.lacks(ledger) if all(ledger.settled(n) or ledger.exhausted(n) for n in updates) else 0

    def lacks(self, ledger: Ledger) -> int:
        """Groups that an update lacks to make up its batch of the step."""
        updates = [n for n in ledger.graph.nodes if n.operation.updates]
        reached = (ledger.ready_groups(n) + ledger.claimed_groups(n) for n in updates)
        return max(0, self.prompts_per_step - min(reached, default=self.prompts_per_step))

    def claimable(self, ledger: Ledger, node: Node) -> bool:
        """Whether a node may start: everything of the step has come to it, and an update sees no half of a step."""
        return ledger.settled(node) and not (node.operation.updates and self.lacks(ledger))


class OnePass(Config):
    """The source once, all of it, as it stands: how an evaluation graph runs."""

    shuffle: bool = False

    @property
    def max_staleness(self) -> None:
        return None

    def lacks(self, ledger: Ledger) -> int:
        """An evaluation has as many groups as come through."""
        return 0

    def claimable(self, ledger: Ledger, node: Node) -> bool:
        return ledger.settled(node)
