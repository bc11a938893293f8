"""`weft merge`: the average of checkpoints, as one model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from ..dataflow.errors import RunError, UserError, nearest
from .command_line import Answer, Name, find_run
from .export import checkpoints_of, model_of, written


def merge(
    runs: Annotated[
        Positional[tuple[str, ...]], arg(metavar="RUN", help="Runs whose checkpoints are averaged.")
    ],
    *,
    out: Annotated[Path, arg(metavar="FOLDER")],
    last: Annotated[int | None, arg(metavar="NUMBER", help_behavior_hint="")] = None,
    by: Name = None,
    alpha: float = 1.0,
    group: Name = None,
) -> Answer:
    """Average the weights of checkpoints into one Hugging Face folder. The checkpoints need the same
    architecture. LoRA adapters become one adapter that equals the average of their changes exactly;
    its rank is the sum of theirs.

    Args:
        out: The folder to create.
        last: Use only this number of last checkpoints of each run. Default: all that were kept.
        by: Weight each checkpoint by a metric of its step, such as eval/pass@1. Default: equal
            weights.
        alpha: Exponent of the metric: 0 weighs all equally, more than 1 favours the best.
        group: Merge the models of this worker group. Default: actor, or the only group with a model.
    """
    from ..dataflow.runs.manifest import verify_manifest

    if out.exists():
        raise UserError(f"{out} exists already; name a new folder")
    if last is not None and last < 1:
        raise UserError(f"--last {last}: it must be at least 1")
    if not runs:
        raise UserError("name at least one run: weft merge RUN --out FOLDER")
    models: list[Path] = []
    values: list[float] = []
    for name in runs:
        run = find_run(name)
        chosen = sorted(checkpoints_of(run).items())[-(last or 0) :]
        for step, checkpoint in chosen:
            if damage := verify_manifest(checkpoint):
                raise RunError(f"{checkpoint} is damaged: {damage[0]}; move it away to merge the others")
            models.append(model_of(checkpoint, group))
            values.append(1.0 if by is None else _value(run, step, by))
    # Divide by the largest first, so that no power overflows.
    powers = [(value / max(values)) ** alpha for value in values]
    weights = [power / math.fsum(powers) for power in powers]
    from ..workers.training.safetensors_files import write_average

    with written(out) as partial:
        try:
            write_average(models, weights, partial)
        except ValueError as error:
            raise UserError(f"these checkpoints cannot be averaged: {error}") from error
        partial.rename(out)
    shares = [f"  {weight:.3f}  {model}" for weight, model in zip(weights, models, strict=True)]
    found = {"folder": str(out), "weights": dict(zip(map(str, models), weights, strict=True))}
    return Answer(found, "\n".join([f"{out}: the average of {len(models)} checkpoints", *shares]))


def _value(run: Path, step: int, metric: str) -> float:
    from ..dataflow.runs.tables import read_metrics

    table = read_metrics(run)
    rows = {} if table is None else {int(row["step"]): row for row in table.to_pylist()}
    value = rows.get(step, {}).get(metric)
    if value is None or not math.isfinite(value):
        known = sorted({name for name, one in rows.get(step, {}).items() if one is not None})
        raise UserError(
            f"{run} has no {metric!r} at step {step}, which has a checkpoint{nearest(metric, known)}; evaluate at the same steps, or "
            "leave --by out"
        )
    if value <= 0:
        raise UserError(
            f"{run}: {metric} is {value:g} at step {step}; weights need a metric above 0: leave --by out"
        )
    return float(value)
