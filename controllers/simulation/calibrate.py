"""Calibrate: the costs of a real run, fitted to its timeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...dataflow.buffer.run_files import CONFIG
from ...dataflow.buffer.run_tables import read_timeline
from ...dataflow.errors import UserError
from ...dataflow.metric_names import FUNCTIONS
from ...dataflow.safe_files import read_json
from .costs import CostModel, Generation, LinearCost


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
        *(table[c].to_pylist() for c in ("group", "node", "worker_s", "rows", "tokens")), last, strict=True
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
        raise UserError(f"{timeline} has no timeline: nothing was called yet, or it is not the directory of a run")
    return table


def _ranks(config: Path) -> dict[str, int]:
    """Ranks of each group of a run; in one process, one."""
    try:
        described = read_json(config)
        if described["backend"] == "Local()":
            return {}
        return {name: int(place["ranks"]) for name, place in described["placement"].items() if isinstance(place, dict)}
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
