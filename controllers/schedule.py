"""Schedules: when nodes run. A schedule is a value with no loop of its own.

The loop of a run asks the schedule of its training graph three questions: how many groups to issue (`admit`), what a node may claim
now (`share`), and whether the step is over (`over`). An evaluation issues its source when it begins, so `OnePass` has a `share` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from ..dataflow.config import Config
from ..dataflow.graph import Node
from .graph_run import EvaluationRun, TrainingRun


@dataclass(frozen=True)
class Share:
    """What a node may claim now."""

    max_groups: int | None = None
    """Most groups, for a node that takes groups; None: all that are ready."""
    max_rows: int | None = None
    """Most rows, for a node that takes rows; None: all that are ready."""
    last: bool = True
    """The batch of an update is complete with these."""


MAX_REFILLS = 10
"""How many times a step may issue more prompts because a filter dropped groups. A filter that keeps one group in eleven costs eleven times
the generation of a step: the data or the filter is wrong then, and waiting longer does not help."""


class Stepwise(Config):
    """Settings that all training schedules share: the number of steps, and the groups in each."""

    steps: int = Field(default=100, ge=1)
    """[updates] How many the run makes. Raise it as long as the evaluation rises."""
    prompts_per_step: int = Field(default=64, ge=1, le=1_000_000)
    """[groups] How many a training batch has. Raise it where the gradient is noisy or devices are idle, lower it where steps take too
    long."""
    shuffle: bool = True
    """Draw the prompts of each epoch in a new order, from the run's seed. Set it to False for data that are in an order of their own,
    such as easy ones first."""

    short_steps: Literal["train", "stop"] = "train"
    """What to do when a step has issued more prompts 10 times and filters still leave it fewer than `prompts_per_step` groups: "train" on
    the groups that passed, with a warning, or "stop" the run. If no group passes, the run always stops. Set it to "stop" where small
    batches would do harm."""

    free_on_resume: ClassVar[frozenset[str]] = frozenset(("steps",))
    fixed_on_resume: ClassVar[frozenset[str]] = frozenset(("shuffle",))
    retired: ClassVar[Mapping[str, str]] = {
        "max_refills": f"a step issues more prompts {MAX_REFILLS} times at most"
    }

    @property
    def overlaps(self) -> bool:
        """Whether generation goes on while weights are trained and published."""
        return False

    def admit(self, train: TrainingRun) -> int:
        """Groups that are wanted now: a batch for a new step, later as many as filters dropped. The buffer may have less capacity."""
        if not train.open:
            return self.prompts_per_step
        arrived = all(
            train.ledger.readiness.settled(n) or train.ledger.readiness.exhausted(n)
            for n in train.updates
        )
        return self.lacks(train) if arrived else 0

    def lacks(self, train: TrainingRun) -> int:
        """Groups that an update lacks to complete its batch of the step."""
        return max(0, self.size(train) - self.passed(train)) if train.updates else 0

    def size(self, train: TrainingRun) -> int:
        """Groups in the batch of the step under way."""
        return self.prompts_per_step if train.short_size is None else train.short_size

    def passed(self, train: TrainingRun) -> int:
        """Groups of the step under way that have passed the filters of every update: claimed, or ready to be."""
        return min(self._reached(train), default=0)

    def _reached(self, train: TrainingRun) -> list[int]:
        return [train.taken[n.name] + train.ledger.readiness.ready_groups(n) for n in train.updates]

    def shorten(self, train: TrainingRun) -> int:
        """Let the step under way end with the groups that have passed the filters, or with the next one if updates have begun with all of
        them. Returns the groups of its batch, or 0 if none has passed."""
        passed = self.passed(train)
        train.short_size = max(passed, 1 + max(train.taken.values(), default=0)) if passed else None
        return passed and self.size(train)

    def over(self, train: TrainingRun) -> bool:
        """Whether the step that was begun is done."""
        return train.open and not train.ledger.live.groups_at_work and not self.lacks(train)

    def _when_settled(self, train: TrainingRun, node: Node) -> Share | None:
        """Everything of the step at once; an update waits until its batch is complete."""
        return (
            Share()
            if train.ledger.readiness.settled(node) and not (node.operation.updates and self.lacks(train))
            else None
        )

    def _when_ready(
        self, train: TrainingRun, node: Node, part: int, replicas: int, reserved: int = 0
    ) -> Share | None:
        """What is ready; an update takes at least `part` groups, and one for each replica, or the rest of its batch.

        Args:
            replicas: data-parallel replicas of an update's worker group, none of which is to be without rows.
            reserved: groups of the batch that are kept for rows which are not ready yet.
        """
        if train.observes(node):
            ready = train.ledger.readiness.ready_groups(node)
            enough = ready >= self.size(train) or train.ledger.readiness.settled(node)
            return Share() if enough else None
        if not node.operation.updates:
            return Share() if train.ledger.readiness.ready(node) else None
        left = self.size(train) - train.taken[node.name]
        number = min(train.ledger.readiness.ready_groups(node), left - reserved)
        if number == left > 0:
            return Share(number)
        number = min(number, left - replicas)  # the last part has rows for every replica, too
        return (
            Share(number, last=False)
            if node.operation.accumulates and number >= max(part, replicas)
            else None
        )


class Synchronous(Stepwise):
    """Each step: generate all, score all, update. Exactly on-policy."""

    @property
    def max_staleness(self) -> int:
        return 0

    def share(self, train: TrainingRun, node: Node, version: int, replicas: int = 1) -> Share | None:
        """What a node may claim now; None: nothing.

        Args:
            version: policy version of the node's worker group.
            replicas: data-parallel replicas of that group.
        """
        return self._when_settled(train, node)


class InParts(Stepwise):
    """Settings of the schedules whose updates accumulate gradients as groups come."""

    groups_per_part: int = Field(default=1, ge=1, le=1_000_000)
    """[groups] Number of finished groups that an update waits for before it accumulates their gradient. It is at least one for each
    data-parallel replica if the batch has enough groups. Raise it for large models, which need full microbatches."""


class Pipelined(InParts):
    """The updates of `Synchronous`, but every node begins with the first groups that are ready for it: rewards, references and
    advantages while others are still generated, and gradients are accumulated as groups come."""

    @property
    def max_staleness(self) -> int:
        return 0

    def share(self, train: TrainingRun, node: Node, version: int, replicas: int = 1) -> Share | None:
        return self._when_ready(train, node, self.groups_per_part, replicas)


class Asynchronous(InParts):
    """Generation never waits for training within the staleness bound: prompts are issued as far ahead as will be trained on in
    time (arXiv:2505.24298, section 4.1; arXiv:2507.01663), and new weights go in between two steps of generation."""

    max_staleness: int = Field(default=1, ge=0, le=1_000_000)
    """[updates] How far a row's oldest token may lag the weights that it trains; 0 is `Synchronous`. Raise it where generation still
    waits for training, lower it where training becomes unstable."""
    partial_rollouts: Literal["continue", "recompute", "finish", "requeue"] = "continue"
    """How unfinished responses are handled when new weights arrive. "continue": they continue with the new weights, and each token
    records its version; earlier tokens keep the keys and values of the old weights. "recompute": they continue, and the engine computes
    the keys and values of earlier tokens again with the new weights. "finish": the new weights wait until the responses are finished.
    "requeue": the responses are discarded and their prompts are sampled again. Choose "recompute" if `mean_logprob_gap` is large, and
    "finish" if all tokens of a response must be of one version."""

    @property
    def overlaps(self) -> bool:
        return self.max_staleness > 0

    def passed(self, train: TrainingRun) -> int:
        # An update that has claimed fewer groups than another gets the rest: no filter stands between updates, but other nodes may.
        return max(self._reached(train), default=0) if self.overlaps else super().passed(train)

    def admit(self, train: TrainingRun) -> int:
        if not self.overlaps:
            return super().admit(train)
        # As many as the rest of the run needs: the buffer's capacity says how many of them now.
        still = (train.taken[n.name] + train.ledger.readiness.unclaimed(n) for n in train.updates)
        return max(0, (self.steps - train.step) * self.prompts_per_step - min(still, default=0))

    def share(self, train: TrainingRun, node: Node, version: int, replicas: int = 1) -> Share | None:
        if not self.overlaps:
            return self._when_settled(train, node)
        reserved = 0
        if node.operation.updates and train.ledger.readiness.ready_groups(node):
            # Whatever is taken now, each later batch must have places left for the groups that are due by then.
            for began, due in train.ledger.readiness.not_offered_until(node):
                later = max(0, began + self.max_staleness - version)
                if later > self.max_staleness:
                    break
                reserved = max(reserved, due - later * self.prompts_per_step)
        return self._when_ready(train, node, self.groups_per_part, replicas, reserved)

    def over(self, train: TrainingRun) -> bool:
        if not self.overlaps:
            return super().over(train)
        return bool(train.updates) and all(
            train.trained[n.name] >= self.size(train) for n in train.updates
        )


Training = Synchronous | Pipelined | Asynchronous
"""How a training graph may run."""


@dataclass(frozen=True)
class OnePass:
    """How an evaluation graph runs: once over its complete source, as it stands."""

    overlaps: bool = False
    """Its rows take their place among those of training, and the evaluation of a step may begin before that of an earlier one
    is over. Otherwise each node has all rows of a step at once, when its group has nothing else to do."""

    def share(self, evaluation: EvaluationRun, node: Node) -> Share | None:
        """What a node may claim now; None: nothing. All rows of a call belong to the evaluation of one step."""
        if not self.overlaps:
            return Share() if evaluation.ledger.readiness.settled(node) else None
        step, number = evaluation.ledger.live.ready_in_step(node)
        takes_groups = node.operation.takes_groups
        partial = (
            evaluation.observes(node)
            and takes_groups
            and number != evaluation.ledger.live.groups_of_step[step]
        )
        if not number or partial:
            return None
        return Share(max_groups=number) if takes_groups else Share(max_rows=number)


# Evaluation rules
#
# EvaluationRules: what evaluations and training wait for of each other.


@dataclass(frozen=True)
class EvaluationRules:
    """What an evaluation and training wait for of each other. A run has one of three:

    BESIDE     `Synchronous` and `Pipelined`: it takes the groups that the next step leaves idle
    BETWEEN    the same with `Driver(stop=...)`, which decides by what was measured: no step begins before it is over
    AMONG      `Asynchronous`: its rows take their place among those of training
    """

    comes_first: bool
    """Its rows are claimed before those of training, as they become ready. Otherwise they come after them, and a node gets all rows of
    a step at once."""
    keeps_weights: bool
    """Groups keep the weights that it evaluates until it is over. The step after it ends no earlier, and neither does the evaluation of a
    later step begin, nor do weights that wait for it hold it back."""
    holds_training: bool
    """No step begins while one is due or under way, and it begins when nothing else is."""


BESIDE = EvaluationRules(comes_first=False, keeps_weights=True, holds_training=False)
BETWEEN = EvaluationRules(comes_first=False, keeps_weights=True, holds_training=True)
AMONG = EvaluationRules(comes_first=True, keeps_weights=False, holds_training=False)
