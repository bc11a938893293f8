"""Bound: the time of a step that no schedule can beat."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...dataflow.batch import Batch
from ...dataflow.graph import Graph
from ...dataflow.metric_names import FUNCTIONS
from ...dataflow.node import SOURCE
from ...workers.training.microbatch_plan import OptimizerSteps
from ..cursor import positions
from ..placement import Placement, resolve
from ..ranks.row_io import num_tokens
from .costs import CostModel, Generation, LinearCost
from .draws import draw_key


@dataclass(frozen=True)
class Bound:
    """The time of the slowest pool alone."""

    seconds: float
    """Seconds of a step, on average."""
    pool: str
    """The slowest pool: its groups are busy all the time."""
    pools: Mapping[str, float]
    """Pool -> seconds a step for which its groups are busy at least."""


def bound(
    costs: CostModel,
    graph: Graph,
    placement: Placement | None = None,
    *,
    prompts_per_step: int,
    steps: int = 1,
    seed: int = 0,
    shuffle: bool = True,
) -> Bound:
    """Seconds a step that no schedule can beat in this placement: what the groups of each pool have to do, perfectly
    balanced, with generation always at its best batch, nobody waiting, and weights and the driver for nothing.

    Args:
        costs: of the calls; filters are taken to drop nothing.
        graph: that is run.
        placement: of its groups.
        prompts_per_step: as the schedule has it.
        steps: number of steps whose rows are counted, from the first.
        seed: of the driver, for the order of the prompts.
        shuffle: as the schedule has it.

    Returns:
        The time of the slowest pool.
    """
    places = resolve(placement, {**graph.handles, FUNCTIONS: None})
    busy: Counter[str] = Counter()
    rows, tokens = _load(costs, graph, prompts_per_step * steps, seed, shuffle)
    for node in graph.nodes:
        group = node.group or FUNCTIONS
        handle = graph.handles.get(group)
        replicas = places[group].ranks // costs.replica_ranks(group, handle.config if handle is not None else None)
        cost = costs.nodes.get(node.name, LinearCost())
        if isinstance(cost, Generation):
            assert node.makes_level is not None
            made = tokens[node.makes_level] - tokens[node.level] * rows[node.makes_level] / rows[node.level]
            best = float((cost.seconds_by_batch[1:] / np.arange(1, cost.max_num_seqs + 1)).min())
            seconds = (made * best + tokens[node.level] * cost.prefill_s) / replicas
        else:
            own = rows[node.level] / replicas, tokens[node.level] / replicas
            seconds = steps * cost.fixed_s + cost.least_s(*own, OptimizerSteps.of(node))
        busy[places[group].pool.name] += seconds / steps  # pyright: ignore[reportArgumentType]
    pool = max(busy, key=lambda name: busy[name])
    return Bound(float(busy[pool]), pool, dict(busy))


def _load(costs: CostModel, graph: Graph, groups: int, seed: int, shuffle: bool) -> tuple[Counter[int], Counter[int]]:
    """Rows of each level, and their tokens, in the first so many groups of a run."""
    batch = Batch.of_table(graph.source.table)
    lengths = num_tokens(batch)
    rows: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    makers = [n for n in graph.nodes if n.makes_level is not None]
    for number, position in enumerate(itertools.islice(positions(len(batch), seed, shuffle=shuffle), groups)):
        sizes: dict[int, list[tuple[list[int], int]]] = {SOURCE: [([], int(lengths[position]))]}
        for node in makers:
            n, cost = int(node.arguments.get("n", 1)), costs.nodes.get(node.name)
            made = sizes.setdefault(node.makes_level or SOURCE, [])
            for path, own in sizes[node.level]:
                key = draw_key(costs.seed, "train", position, number // len(batch), path)
                drawn = cost.lengths.draw(key, position, n) if isinstance(cost, Generation) else np.zeros(n, np.int64)
                made += [([*path, k], own + int(length)) for k, length in enumerate(drawn)]
        for level, own in sizes.items():
            rows[level] += len(own)
            tokens[level] += sum(size for _, size in own)
    return rows, tokens
