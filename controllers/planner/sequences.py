"""Groups of ranks for rows of uneven lengths in a plan: what is gained over groups of one size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...workers.dispatch import balance
from ...workers.row_cost import RowCost
from ..simulation.costs import CostModel, Generation, SequenceParallelCost
from .sizes import StepSizes, UpdateSizes


@dataclass(frozen=True)
class SequencePlan:
    """The groups of an update, for the rows of one step as they are drawn."""

    node: str
    degrees: tuple[int, ...]
    """Ranks of each group, in the slowest optimizer step."""
    seconds: float
    """Of the slowest group of each optimizer step, together."""
    gap: float
    """How far that is above a bound that no groups of powers of two beat, as a share of it."""
    equal_degree: int
    """The smallest size of groups that hold the longest row, if all have the same."""
    equal_s: float
    """The seconds of such groups."""
    optimizer_steps: int
    """Whose groups are each chosen for their own rows."""


def sequence_plan(update: UpdateSizes, sizes: StepSizes, costs: CostModel | None, ranks: int) -> SequencePlan | None:
    """Choose the groups of an update for a step's rows, in each of its optimizer steps; None: its cost is no `SequenceParallelCost`.

    Args:
        update: which.
        sizes: of a step.
        costs: of its calls; None: they are not known.
        ranks: of the group; where they are several replicas, the plan is that of the one with the longest row.

    Raises:
        UserError: the largest power of two of the ranks has no room for the longest row.
    """
    cost = costs.linear(update.node) if costs is not None else None
    if costs is None or not isinstance(cost, SequenceParallelCost):
        return None
    lengths = _lengths(sizes, costs)
    lengths = lengths[balance(RowCost(cost.attention_length)(lengths), max(1, ranks // cost.ranks))[0]]
    cuts = update.steps.cut(np.arange(len(lengths)), (costs.seed, 0))
    needed = -(-int(lengths.max()) // cost.memory_tokens)
    equal = next(d for d in range(max(1, needed), cost.ranks + 1) if cost.ranks % d == 0)
    alike = cost.model_copy(update={"degree": equal})
    plans = [cost.groups(lengths[cut]) for cut in cuts]
    seconds, bound_s = sum(plan.seconds for plan in plans), sum(plan.bound_s for plan in plans)
    return SequencePlan(
        update.node,
        max(plans, key=lambda plan: plan.seconds).degrees,
        seconds,
        seconds / bound_s - 1 if bound_s else 0.0,
        equal,
        sum(alike.groups(lengths[cut]).seconds for cut in cuts),
        len(plans),
    )


def _lengths(sizes: StepSizes, costs: CostModel) -> np.ndarray:
    """Tokens of the rows of a step: drawn as a simulation draws them, or all of the expected length."""
    for cost in costs.nodes.values():
        if isinstance(cost, Generation):
            each = max(1, sizes.rows // max(1, sizes.prompts))
            drawn = [cost.lengths.draw((costs.seed, prompt), prompt, each) for prompt in range(sizes.prompts)]
            return np.concatenate(drawn) + round(sizes.prompt_tokens)
    return np.full(sizes.rows, max(1, round(sizes.tokens_a_row)))
