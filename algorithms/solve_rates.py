"""Solve rates: measures the outcome of each prompt's responses, for a curriculum.

Weft adds the node `solve_rates` to the training graph of a source with a curriculum, after the node
that writes the outcome and after a quorum. Filters such as `drop_zero_variance` hide no group from it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..dataflow.batch import Batch
from ..dataflow.column import EPISODE_ID, RESPONSE_MASK, REWARD, SOLVE_RATE
from ..dataflow.errors import UserError, nearest
from ..dataflow.graph import Graph, Node
from ..dataflow.metrics import GroupCounts, Metrics
from ..dataflow.operation import Shape, declaration_of, node
from ..dataflow.prompts.curriculum import Curriculum, curriculum_of
from .episodes import Episodes


@node(
    shape=Shape.GROUP,
    reads=lambda outcome: (outcome,),
    may_read=(EPISODE_ID, RESPONSE_MASK),
    writes=(SOLVE_RATE,),
)
def solve_rates(
    samples: Batch, *, outcome: str = str(REWARD), solved: float = 1.0
) -> tuple[Batch, Metrics]:
    """Add `solve_rate`, the share of a group's episodes with an outcome of at least `solved`.

    An episode counts once, however many rows it has. Rows that were lost, and episodes with no
    outcome (NaN) or without a trained token, have no vote. The metric `outcomes` has (solved, votes)
    for each group.

    >>> samples = Batch.of(group_id=[7, 7, 8], reward=[1.0, 0.0, 0.0])
    >>> rated, metrics = solve_rates(samples)
    >>> rated["solve_rate"].to_pylist(), metrics["outcomes"].counts
    ([0.5, 0.5, 0.0], {7: (1, 2), 8: (0, 1)})
    """
    episodes = Episodes.of(samples)
    values, (voting, index) = episodes.values(outcome).astype(np.float64), episodes.groups()
    has_vote = ~np.isnan(values)
    groups, of_row = samples.groups()
    place = np.searchsorted(groups, voting)[index]
    votes = np.bincount(place, weights=has_vote, minlength=len(groups))
    right = np.bincount(place, weights=has_vote & (values >= solved), minlength=len(groups))
    rates = np.where(votes > 0, right / np.maximum(votes, 1), np.nan).astype(np.float32)
    counts = zip(groups.tolist(), right.astype(int).tolist(), votes.astype(int).tolist(), strict=True)
    outcomes = GroupCounts({group: (one, all_votes) for group, one, all_votes in counts})
    return samples.with_columns(solve_rate=rates[of_row]), {"outcomes": outcomes}


def with_solve_rates(graph: Graph) -> Graph:
    """Add the node `solve_rates` to a graph whose source has a curriculum.

    Raises:
        UserError: no node writes the outcome, it is not clear which column is the outcome, or the
            curriculum does not fit the source.
    """
    if (curriculum := curriculum_of(graph.source)) is None:
        return graph
    curriculum.sources_of(graph.source.table, graph.source.name)
    outcome = curriculum.outcome or _outcome_of(graph)
    number = next((k for k, one in enumerate(graph.nodes) if outcome in one.writes), None)
    if number is None:
        written = [column for one in graph.nodes for column in one.writes]
        known = (
            nearest(outcome, written) or f"; they write {', '.join(dict.fromkeys(written)) or 'none'}"
        )
        raise UserError(
            f"Curriculum(outcome={outcome!r}): no node of graph {graph.name!r} writes this column{known}"
        )
    made = _node(graph, number, curriculum, outcome)
    before = 1 + max(k for k, one in enumerate(graph.nodes) if one.name in made.after)
    return replace(graph, nodes=(*graph.nodes[:before], made, *graph.nodes[before:]))


def _node(graph: Graph, number: int, curriculum: Curriculum, outcome: str) -> Node:
    writer, before = graph.nodes[number], graph.nodes[: number + 1]
    level = writer.level if writer.makes_level is None else writer.makes_level
    if taken := next((one.name for one in graph.nodes if str(SOLVE_RATE) in one.writes), None):
        raise UserError(
            f"node {taken!r} writes column {str(SOLVE_RATE)!r}, which a curriculum writes; rename it"
        )
    writers = {outcome: writer.name}
    for column in map(str, (EPISODE_ID, RESPONSE_MASK)):
        of_level = [one for one in before if column in one.writes and graph.level_of(one.name) == level]
        if of_level:
            writers[column] = of_level[-1].name
    arguments = {"outcome": outcome, "solved": curriculum.solved}
    declaration = declaration_of(solve_rates)
    assert declaration is not None
    # Wait for the filters that the outcome's rows have passed, so that they drop rows for this node as
    # well. Wait for a later quorum, so that it still cancels slow rows.
    waits = [*writers.values(), *(writer.after if writer.makes_level is None else ())]
    waits += [one.name for one in graph.nodes if one.operation.quorum and one.level == level]
    return Node(
        name=_unused(solve_rates.__name__, graph),
        group=None,
        operation=declaration.called_with(arguments),
        function=solve_rates,
        arguments=arguments,
        reads=tuple(writers),
        missing=(),
        writes=(str(SOLVE_RATE),),
        level=level,
        makes_level=None,
        writers=writers,
        after=tuple(dict.fromkeys(waits)),
    )


def _unused(name: str, graph: Graph) -> str:
    taken, number, candidate = {one.name for one in graph.nodes}, 2, name
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    return candidate


def _outcome_of(graph: Graph) -> str:
    """Return the column of outcomes: the only grader with verdicts, or the reward of a single
    function, an environment or a harness."""
    writer = next((one for one in graph.nodes if str(REWARD) in one.writes), None)
    if writer is None or writer.group is None:
        return str(REWARD)
    config: Any = graph.handles[writer.group].config
    verdict = getattr(config, "verdict", None)
    if verdict is None:
        return str(REWARD)
    titles = [one.title for one in config.rewards]
    if (found := verdict(str(REWARD))) is None and len(titles) > 1:
        raise UserError(
            f"node {writer.name!r} adds up {', '.join(titles)}, and a curriculum needs the outcome alone: name its column, such as "
            f"Curriculum(outcome='{REWARD}/{titles[0]}')"
        )
    return found or str(REWARD)
