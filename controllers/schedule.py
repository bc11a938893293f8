"""Schedules: when each node of a graph may run.

The loop (`loop/run.py`) asks the training graph's schedule how many groups to issue (`admit`), how
much a node may claim (`share`), and whether the step is over (`over`). An evaluation issues its
whole source when it begins, so the loop only asks for shares (`share_of_evaluation`).

Evaluations and training wait for each other:

- If the schedule `overlaps`, evaluation rows are mixed with training rows and go first, because they
  are few.
- Otherwise an evaluation uses worker groups that the next step leaves idle. Until it is over, they
  keep the evaluated weights, the next step cannot end, and no later evaluation begins.
- If a `stop` function also reads the metrics (`RunSpec.evaluations_hold_training`), no step begins
  while an evaluation is due or running, and an evaluation begins only when nothing else runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from ..dataflow.buffer.staleness import VersionOf
from ..dataflow.config import Config
from ..dataflow.graph import Node
from .graph_run import EvaluationRun, TrainingRun


@dataclass(frozen=True)
class Share:
    """The rows or groups that a node may claim."""

    max_groups: int | None = None
    """Maximum for a node that takes groups; None allows all ready groups."""
    max_rows: int | None = None
    """Maximum for a node that takes rows; None allows all ready rows."""
    last: bool = True
    """Whether this share completes the batch of an update."""


MAX_REFILLS = 10
"""Maximum number of times that a step replaces groups that filters dropped. A step that needs more
has issued prompts eleven times, so its data or filter is probably wrong."""


class Stepwise(Config):
    """Settings of all training schedules: number of steps, batch size and prompt order."""

    steps: int = Field(default=100, ge=1)
    """[updates] Number of updates. Raise it if the evaluation still improves at the end."""
    prompts_per_step: int = Field(default=64, ge=1, le=1_000_000)
    """[groups] Number of groups in a training batch, one per prompt. Raise it if the gradient is
    noisy or devices are idle; lower it if steps take too long."""
    shuffle: bool = True
    """Shuffle the prompts in each epoch, by the run's seed. Set it to False if their order
    matters."""

    free_on_resume: ClassVar[frozenset[str]] = frozenset(("steps",))
    fixed_on_resume: ClassVar[frozenset[str]] = frozenset(("shuffle",))
    retired: ClassVar[Mapping[str, str]] = {
        "short_steps": 'Driver(stop_on=("no_signal", "short_step")) stops the run at one',
        "max_refills": f"a step issues more prompts {MAX_REFILLS} times at most",
    }

    @property
    def overlaps(self) -> bool:
        """Whether generation continues during training and weight transfers."""
        return False

    @property
    def longest_first(self) -> bool:
        """Whether a step starts the longest expected responses first, because it waits for all."""
        return False

    @property
    def migrates(self) -> bool:
        """Whether unfinished responses move from busy replicas to idle ones."""
        return False

    def admit(self, train: TrainingRun) -> int:
        """Return the number of groups to issue: a batch for a new step, then replacements for
        dropped groups. The buffer may allow fewer."""
        if not train.open:
            return self.prompts_per_step
        ready = train.ledger.readiness
        # Groups in flight may still pass the filters, so issue no replacements before they arrive.
        arrived = all(ready.settled(n) or ready.exhausted(n) for n in train.updates)
        return self.lacks(train) if arrived and train.outcomes_are_known else 0

    def lacks(self, train: TrainingRun) -> int:
        """Return how many groups an update still needs to complete its batch."""
        return max(0, self.size(train) - self.passed(train)) if train.updates else 0

    def size(self, train: TrainingRun) -> int:
        return self.prompts_per_step if train.short_size is None else train.short_size

    def passed(self, train: TrainingRun) -> int:
        """Return how many groups of the step have passed the filters before all updates, claimed or
        not."""
        return min(self._reached(train), default=0)

    def _reached(self, train: TrainingRun) -> list[int]:
        return [train.taken[n.name] + train.ledger.readiness.ready_groups(n) for n in train.updates]

    def shorten(self, train: TrainingRun) -> int:
        """Shorten the current step's batch to the groups that passed the filters. Return its new
        size, or 0 if no group passed."""
        passed = self.passed(train)
        # An update that has claimed every group so far needs one more to complete its batch.
        train.short_size = max(passed, 1 + max(train.taken.values(), default=0)) if passed else None
        return passed and self.size(train)

    def over(self, train: TrainingRun) -> bool:
        return train.open and not train.ledger.live.groups_at_work and not self.lacks(train)

    def _when_settled(self, train: TrainingRun, node: Node) -> Share | None:
        """Claim all rows of the step at once. An update waits until its batch is complete."""
        if not train.ledger.readiness.settled(node) or (node.operation.updates and self.lacks(train)):
            return None
        return Share()

    def _when_ready(
        self, train: TrainingRun, node: Node, part: int, replicas: int, reserved: int = 0
    ) -> Share | None:
        """Claim what is ready. An update claims at least `part` groups and one per replica, or the
        rest of its batch."""
        # An observer gets the whole batch at once, because its metrics describe a whole step.
        if train.observes(node):
            ready = train.ledger.readiness.ready_groups(node)
            enough = ready >= self.size(train) or train.ledger.readiness.settled(node)
            return Share() if enough else None
        if not node.operation.updates:
            return Share() if train.ledger.readiness.ready(node) else None
        left = self.size(train) - train.taken[node.name]
        number = min(train.ledger.readiness.ready_groups(node), left - reserved)
        # The rest of the batch completes the update, however small it is.
        if number == left > 0:
            return Share(number)
        number = min(number, left - replicas)  # leave rows for every replica in the last part
        enough = node.operation.accumulates and number >= max(part, replicas)
        return Share(number, last=False) if enough else None


class Synchronous(Stepwise):
    """Each step generates all responses, scores them, then updates the weights. Training is exactly
    on-policy. Replicas get shares of equal expected length, and start the longest expected responses
    first (`controllers/forecast.py`)."""

    rounds: int = Field(default=1, ge=1, le=1024)
    """[steps] Number of steps whose prompts are sorted by the expected length of their responses, so
    that long responses share a step and the others are short. Must divide `steps`. Training stays
    on-policy, but the responses of a step are of similar length. Raise it to 8 if a few long
    responses leave replicas idle and prompts repeat."""
    migrate: bool = False
    """Move unfinished responses from busy replicas to idle ones, which continue them. Equal runs may
    then sample different tokens. Set it to True if replicas wait long for the last one, and decoding
    takes longer for more responses, as on CPUs."""

    version_of: ClassVar[VersionOf] = "oldest_token"
    free_on_resume: ClassVar[frozenset[str]] = frozenset(("rounds", "migrate"))

    @model_validator(mode="after")
    def _rounds_are_whole(self) -> Synchronous:
        if self.steps % self.rounds:
            least = -(-self.steps // self.rounds) * self.rounds
            raise ValueError(
                f"rounds={self.rounds} does not divide steps={self.steps}, so the run would end before a long "
                f"step and train on too many short responses; take steps={least}"
            )
        return self

    @property
    def max_staleness(self) -> int:
        return 0

    @property
    def longest_first(self) -> bool:
        return True

    @property
    def migrates(self) -> bool:
        return self.migrate

    def share(self, train: TrainingRun, node: Node, version: int, replicas: int = 1) -> Share | None:
        """Return the rows or groups that a node may claim now, or None."""
        return self._when_settled(train, node)


class InParts(Stepwise):
    """Settings of schedules that accumulate an update's gradients while groups arrive."""

    groups_per_part: int = Field(default=1, ge=1, le=1_000_000)
    """[groups] Number of finished groups whose gradients an update accumulates at a time, at least
    one per data-parallel replica. The last part takes the rest of the batch. Raise it for large
    models, which need full microbatches."""


class Pipelined(InParts):
    """Makes the same updates as `Synchronous`, but each node starts as soon as groups are ready for
    it. Workers compute rewards, reference log-probabilities, advantages and gradients while other
    responses are still being generated. Only nodes that compare the rows of a step, such as
    `step_weights`, see other rows together."""

    version_of: ClassVar[VersionOf] = "oldest_token"

    @property
    def max_staleness(self) -> int:
        return 0

    def share(self, train: TrainingRun, node: Node, version: int, replicas: int = 1) -> Share | None:
        return self._when_ready(train, node, self.groups_per_part, replicas)


class Asynchronous(InParts):
    """Generation runs ahead of training, up to a limit on staleness. The driver issues as many
    prompts as can be trained on within that limit (arXiv:2505.24298, section 4.1;
    arXiv:2507.01663). Engines load new weights between two steps of generation."""

    max_staleness: int = Field(default=1, ge=0, le=1_000_000)
    """[updates] Maximum staleness: the number of updates between the weights that sampled an
    episode (`staleness_of`) and the weights that it trains. 0 behaves like `Synchronous`. Raise it
    if generation still waits for training; lower it if training becomes unstable."""
    staleness_of: Literal["oldest_token", "newest_turn", "share"] = "oldest_token"
    """The part of an episode whose staleness counts. "oldest_token": its oldest sampled token.
    "newest_turn": the oldest sampled token of its newest turn. "share": an episode is too stale if
    more than `stale_share` of its sampled tokens are. With the last two, updates do not wait for
    unfinished episodes, and `BufferConfig.on_stale` handles episodes that are too stale at their end.
    Choose "newest_turn" if training waits for long episodes of agents."""
    stale_share: float = Field(default=0.25, gt=0, lt=1)
    """[share] With `staleness_of="share"`, the largest share of an episode's sampled tokens that may
    be too stale. Lower it if training becomes unstable."""
    partial_rollouts: Literal["continue", "recompute", "finish", "requeue"] = "continue"
    """How to handle unfinished responses when new weights arrive. "continue" continues them with
    the new weights and the existing KV cache; each token records its version. "recompute" also
    continues them, but first recomputes their KV cache with the new weights. "finish" delays the
    new weights until the responses are finished. "requeue" discards the responses and samples their
    prompts again. Choose "recompute" if `mean_logprob_gap` is large, "finish" if all tokens of a
    response must have one version."""

    @property
    def overlaps(self) -> bool:
        return self.max_staleness > 0

    @property
    def longest_first(self) -> bool:
        return not self.overlaps

    @property
    def version_of(self) -> VersionOf:
        return self.stale_share if self.staleness_of == "share" else self.staleness_of

    def passed(self, train: TrainingRun) -> int:
        # Count the groups of the update that has the most; the others get the same groups, unless
        # nodes before them filter some.
        return max(self._reached(train), default=0) if self.overlaps else super().passed(train)

    def admit(self, train: TrainingRun) -> int:
        if not self.overlaps:
            return super().admit(train)
        # Request all groups for the rest of the run; the buffer's capacity is the limit.
        still = (train.taken[n.name] + train.ledger.readiness.unclaimed(n) for n in train.updates)
        return max(0, (self.steps - train.step) * self.prompts_per_step - min(still, default=0))

    def share(self, train: TrainingRun, node: Node, version: int, replicas: int = 1) -> Share | None:
        if not self.overlaps:
            return self._when_settled(train, node)
        reserved = 0
        if node.operation.updates and train.ledger.readiness.ready_groups(node):
            # Reserve room for unfinished groups, unless the later batches within their staleness
            # limit can hold all of them.
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


# Evaluations


def share_of_evaluation(evaluation: EvaluationRun, node: Node, *, overlaps: bool) -> Share | None:
    """Return the rows or groups that a node of an evaluation may claim now, or None.

    All rows of a call belong to the evaluation of one step. Unless the evaluation `overlaps`
    training and other evaluations, each node gets all rows of a step at once.
    """
    if not overlaps:
        return Share() if evaluation.ledger.readiness.settled(node) else None
    step, number = evaluation.ledger.live.ready_in_step(node)
    if not node.operation.takes_groups:
        return Share(max_rows=number) if number else None
    # An observer measures a whole evaluation in one call.
    partial = evaluation.observes(node) and number != evaluation.ledger.live.groups_of_step[step]
    return Share(max_groups=number) if number and not partial else None
