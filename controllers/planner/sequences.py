"""Groups of ranks for rows of uneven lengths in a plan: what is gained over groups of one size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..simulation.costs import CostModel, Generation, SequenceParallelCost
from .sizes import StepSizes


@dataclass(frozen=True)
class SequencePlan:
    """The groups of an update, for the rows of one step as they are drawn."""

    node: str
    degrees: tuple[int, ...]
    """Ranks of each group."""
    seconds: float
    """Of the slowest group."""
    gap: float
    """How far that is above a bound that no groups of powers of two beat, as a share of it."""
    equal_degree: int
    """The smallest size of groups that hold the longest row, if all have the same."""
    equal_s: float
    """Of the slowest of those."""


def sequence_plan(node: str, sizes: StepSizes, costs: CostModel | None) -> SequencePlan | None:
    """Choose the groups of an update for a step's rows; None: its cost is no `SequenceParallelCost`.

    Raises:
        UserError: the largest power of two of the ranks has no room for the longest row.
    """
    cost = costs.linear(node) if costs is not None else None
    if costs is None or not isinstance(cost, SequenceParallelCost):
        return None
    lengths = _lengths(sizes, costs)
    plan = cost.groups(lengths)
    needed = -(-int(lengths.max()) // cost.memory_tokens)
    equal = next(d for d in range(max(1, needed), cost.ranks + 1) if cost.ranks % d == 0)
    alike = cost.model_copy(update={"degree": equal}).groups(lengths)
    return SequencePlan(node, plan.degrees, plan.seconds, plan.gap, equal, alike.seconds)


def _lengths(sizes: StepSizes, costs: CostModel) -> np.ndarray:
    """Tokens of the rows of a step: drawn as a simulation draws them, or all of the expected length."""
    for cost in costs.nodes.values():
        if isinstance(cost, Generation):
            each = max(1, sizes.rows // max(1, sizes.prompts))
            drawn = [cost.lengths.draw((costs.seed, prompt), prompt, each) for prompt in range(sizes.prompts)]
            return np.concatenate(drawn) + round(sizes.prompt_tokens)
    return np.full(sizes.rows, max(1, round(sizes.tokens_a_row)))
