"""Lower bound on the time of a step, and costs fitted to a real run."""

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
    """A lower bound on the time of a step."""

    seconds: float
    """[s] Average time of a step, set by the slowest pool."""
    pool: str
    """The slowest pool, whose groups are always busy."""
    pools: Mapping[str, float]
    """Pool -> seconds per step that its groups are busy at least."""


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
    """Return a lower bound on the time of a step, for any schedule in this placement.

    It counts the work of each pool's groups, perfectly balanced: generation runs at its best batch
    size, no group waits, and weight transfers and the driver cost nothing.

    Args:
        costs: the costs of the calls. Filters are assumed to drop nothing.
        graph: the graph to run.
        placement: the placement of its groups.
        prompts_per_step: as in the schedule.
        steps: number of steps whose rows are counted, from the first.
        seed: the driver's seed, for the order of the prompts.
        shuffle: as in the schedule.
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
            # Tokens of a response row include its prompt, which is subtracted here.
            made = (
                tokens[node.makes_level] - tokens[node.level] * rows[node.makes_level] / rows[node.level]
            )
            # seconds per token at the most efficient batch size
            best = float((cost.seconds_by_batch[1:] / np.arange(1, cost.max_num_seqs + 1)).min())
            seconds = (made * best + tokens[node.level] * cost.prefill_s) / replicas
        else:
            own = rows[node.level] / replicas, tokens[node.level] / replicas
            seconds = steps * cost.fixed_s + cost.least_s(*own, OptimizerSteps.of_node(node))
        busy[places[group].pool.name] += seconds / steps  # pyright: ignore[reportArgumentType]
    pool = max(busy, key=lambda name: busy[name])
    return Bound(float(busy[pool]), pool, dict(busy))


def _load(
    costs: CostModel, graph: Graph, groups: int, seed: int, shuffle: bool
) -> tuple[Counter[int], Counter[int]]:
    """Return the rows and the tokens of each level, for the first `groups` groups of a run."""
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


# Costs of a real run, fitted to its timeline.


def calibrate(
    timeline: pa.Table | Path,
    *,
    replicas: Mapping[str, int] | None = None,
    nodes: Mapping[str, LinearCost | Generation] | None = None,
    **others: Any,
) -> CostModel:
    """Fit a cost model to the timeline of a real run, by least squares with nonnegative costs.

    If several lines fit equally well (for example because all calls had as many rows), the one with
    the fewest terms wins: tokens first, then the constant, then rows. For an update that came in
    parts, the last part carries the constant. A timeline has no response lengths, so give the
    `Generation` of a generating node in `nodes`.

    Args:
        timeline: the folder of a run, whose `config.json` has the ranks of each group; or a
            `timeline.parquet`, or its table, with the columns group, node, worker_s, rows, tokens,
            and perhaps last.
        replicas: group -> replicas that shared the rows of a call; 1 by default.
        nodes: known costs, which are kept as they are.
        others: further settings of `CostModel`.

    Returns:
        Costs by node, including the known ones.

    Raises:
        UserError: the timeline is missing, unreadable or lacks a column, or the `config.json` of
            the run is damaged.
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
    """Return the ranks of each group of a run, or nothing for a run in one process."""
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
            f"{config} lacks the ranks of each group ({error!r}); give the run's timeline.parquet and replicas={{...}}"
        ) from None


def _fit(calls: np.ndarray) -> LinearCost:
    """Return the closest line with nonnegative slopes and the fewest terms.

    `calls`: [calls, (seconds, rows, tokens, constants)].
    """
    seconds, terms = calls[:, 0], calls[:, [2, 1, 3]]
    found: tuple[float, np.ndarray] = float(seconds @ seconds), np.zeros(3)
    # Fewer terms come first: a later line has to fit clearly better.
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
