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

    def admit(self, ledger: Ledger, updates: list[Node]) -> int:
        """Groups to issue now: a batch when nothing is in flight, and what filters took away from a batch."""
        if ledger.groups_in_flight == 0:
            return self.prompts_per_step
        missing = [
            self.prompts_per_step - ledger.ready_groups(n) for n in updates if ledger.settled(n) or ledger.exhausted(n)
        ]
        return max(missing) if updates and len(missing) == len(updates) else 0

    def claimable(self, ledger: Ledger, node: Node) -> bool:
        """Whether a node may start: everything of the step has come to it."""
        if node.operation.updates and ledger.ready_groups(node) < self.prompts_per_step:
            return False
        return ledger.settled(node)


class OnePass(Config):
    """The source once, all of it, as it stands: how an evaluation graph runs."""

    @property
    def max_staleness(self) -> None:
        return None

    def claimable(self, ledger: Ledger, node: Node) -> bool:
        return ledger.settled(node)
