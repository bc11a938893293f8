"""Bound: the time of a step that no schedule can beat."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...dataflow.batch import Batch
from ...dataflow.errors import UserError
from ...dataflow.graph import SOURCE, Graph
from ...dataflow.metric_names import FUNCTIONS
from ...dataflow.runs.files import CONFIG
from ...dataflow.runs.tables import read_timeline
from ...dataflow.safe_files import read_json
from ...dataflow.source import positions
from ...workers.training.microbatch_plan import OptimizerSteps
from ..placement import Placement, resolve
from ..ranks.row_io import num_tokens
from .simulated import draw_key
from .simulated_costs import CostModel, Generation, LinearCost


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
        replicas = places[group].ranks // costs.replica_ranks(
            group, handle.config if handle is not None else None
        )
        cost = costs.nodes.get(node.name, LinearCost())
        if isinstance(cost, Generation):
            assert node.makes_level is not None
            made = (
                tokens[node.makes_level] - tokens[node.level] * rows[node.makes_level] / rows[node.level]
            )
            best = float((cost.seconds_by_batch[1:] / np.arange(1, cost.max_num_seqs + 1)).min())
            seconds = (made * best + tokens[node.level] * cost.prefill_s) / replicas
        else:
            own = rows[node.level] / replicas, tokens[node.level] / replicas
            seconds = steps * cost.fixed_s + cost.least_s(*own, OptimizerSteps.of(node))
        busy[places[group].pool.name] += seconds / steps  # pyright: ignore[reportArgumentType]
    pool = max(busy, key=lambda name: busy[name])
    return Bound(float(busy[pool]), pool, dict(busy))


def _load(
    costs: CostModel, graph: Graph, groups: int, seed: int, shuffle: bool
) -> tuple[Counter[int], Counter[int]]:
    """Rows of each level, and their tokens, in the first so many groups of a run."""
    batch = Batch.of_table(graph.source.table)
    lengths = num_tokens(batch)
    rows: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    makers = [n for n in graph.nodes if n.makes_level is not None]
    for number, position in enumerate(
        itertools.islice(positions(len(batch), seed, shuffle=shuffle), groups)
    ):
        sizes: dict[int, list[tuple[list[int], int]]] = {SOURCE: [([], int(lengths[position]))]}
        for node in makers:
            n, cost = int(node.arguments.get("n", 1)), costs.nodes.get(node.name)
            made = sizes.setdefault(node.makes_level or SOURCE, [])
            for path, own in sizes[node.level]:
                key = draw_key(costs.seed, "train", position, number // len(batch), path)
                drawn = (
                    cost.lengths.draw(key, position, n)
                    if isinstance(cost, Generation)
                    else np.zeros(n, np.int64)
                )
                made += [([*path, k], own + int(length)) for k, length in enumerate(drawn)]
        for level, own in sizes.items():
            rows[level] += len(own)
            tokens[level] += sum(size for _, size in own)
    return rows, tokens


# Calibrate
#
# Calibrate: the costs of a real run, fitted to its timeline.


def calibrate(
    timeline: pa.Table | Path,
    *,
    replicas: Mapping[str, int] | None = None,
    nodes: Mapping[str, LinearCost | Generation] | None = None,
    **others: Any,
) -> CostModel:
    """The costs of a real run, fitted to its timeline by least squares with no cost below zero. Of lines that fit alike (all calls had
    as many rows, say) the one of the fewest terms is taken: tokens first, then the constant, then rows. Updates that came in parts have
    their constant with the last. Lengths of responses are not in a timeline: give the `Generation` of a node that generates.

    Args:
        timeline: the folder of a run, whose `config.json` says how many ranks each group had; or a `timeline.parquet`, or its table,
            with the columns group, node, worker_s, rows, tokens, and perhaps last.
        replicas: group -> replicas that shared the rows of a call; 1 where it is not mentioned.
        nodes: costs that are known and taken as they are.
        others: further settings of `CostModel`.

    Returns:
        Costs by node, those that are known among them.

    Raises:
        UserError: there is no timeline, it cannot be read, or it lacks a column; or the `config.json` of the run is damaged.
    """
    counts = _ranks(timeline / CONFIG) if isinstance(timeline, Path) and timeline.is_dir() else {}
    counts |= dict(replicas or {})
    table = _read(timeline) if isinstance(timeline, Path) else timeline
    for column in ("group", "node", "worker_s", "rows", "tokens"):
        if column not in table.column_names:
            raise UserError(
                f"the timeline has no column {column!r}; calibrate() needs group, node, worker_s, rows, tokens"
            )
    calls: dict[str, list[tuple[float, float, float, float]]] = {}
    last = table["last"].to_pylist() if "last" in table.column_names else [True] * len(table)
    for group, node, seconds, rows, tokens, whole in zip(
        *(table[c].to_pylist() for c in ("group", "node", "worker_s", "rows", "tokens")),
        last,
        strict=True,
    ):
        known = group == FUNCTIONS or node.startswith(f"{group}.")
        share = counts.get(group, 1)
        calls.setdefault(node if known else f"{group}.{node}", []).append(
            (seconds, rows / share, tokens / share, float(whole))
        )
    fitted = {name: _fit(np.array(own, float)) for name, own in calls.items()}
    return CostModel(nodes={**fitted, **(nodes or {})}, **others)


def _read(timeline: Path) -> pa.Table:
    try:
        table = read_timeline(timeline) if timeline.is_dir() else pq.read_table(timeline)
    except (OSError, ValueError) as error:  # pyarrow's errors are among them
        raise UserError(f"the timeline of {timeline} cannot be read: {error}") from None
    if table is None:
        raise UserError(
            f"{timeline} has no timeline: nothing was called yet, or it is not the directory of a run"
        )
    return table


def _ranks(config: Path) -> dict[str, int]:
    """Ranks of each group of a run; in one process, one."""
    try:
        described = read_json(config)
        if described["backend"] == "Local()":
            return {}
        return {
            name: int(place["ranks"])
            for name, place in described["placement"].items()
            if isinstance(place, dict)
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{config} does not say how many ranks each group had ({error!r}); give the run's timeline.parquet and replicas={{...}}"
        ) from None


def _fit(calls: np.ndarray) -> LinearCost:
    """[calls, (seconds, rows, tokens, constants)] -> the line with no slope below zero, of the fewest terms, that is closest."""
    seconds, terms = calls[:, 0], calls[:, [2, 1, 3]]
    found: tuple[float, np.ndarray] = float(seconds @ seconds), np.zeros(3)
    for chosen in ([0], [2], [1], [0, 2], [0, 1], [1, 2], [0, 1, 2]):
        if np.linalg.matrix_rank(terms[:, chosen]) < len(chosen):
            continue
        weights = np.linalg.lstsq(terms[:, chosen], seconds, rcond=None)[0]
        error = float(((terms[:, chosen] @ weights - seconds) ** 2).sum())
        if (weights >= 0).all() and error < found[0] * (1 - 1e-6) - 1e-12:
            line = np.zeros(3)
            line[chosen] = weights
            found = error, line
    per_token, per_row, fixed = found[1].tolist()
    return LinearCost(fixed_s=fixed, per_row_s=per_row, per_token_s=per_token)
