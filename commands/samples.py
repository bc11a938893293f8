"""`weft samples`: recorded samples of a run."""

from __future__ import annotations

from typing import Annotated

from tyro.conf import arg

from ..dataflow.errors import UserError, nearest
from .command_line import Answer, RunName, StepNumber, find_run


def samples(
    run: RunName,
    *,
    sql: Annotated[str | None, arg(metavar="QUERY", help_behavior_hint="")] = None,
    step: StepNumber = None,
    graph: str = "train",
    limit: Annotated[int | None, arg(metavar="NUMBER", help_behavior_hint="")] = None,
) -> Answer:
    """Show a run's samples with their rewards, by default those of its last step, or query them
    with SQL.

    Args:
        sql: A SQL query of the table samples, such as 'select step, avg(reward) from samples group
            by step order by step'.
        step: Show samples of this step. Default: the last one with samples.
        graph: Show samples of this graph: train, or the name of an evaluation.
        limit: Show at most this many. Default: 5 samples, or 100 rows of a SQL answer.
    """
    from ..dataflow.runs.samples import recorded, tables

    folder, notes = find_run(run), list[str]()
    if sql is not None:
        from ..dataflow.buffer.queries import query

        return Answer.of_table(query(folder, sql, notes), 100 if limit is None else limit, notes)
    from ..controllers.reports.sample import sample_of

    files = recorded(folder, notes)
    if not files:
        none = f"{folder} has recorded no samples yet; Driver(record_every=...) chooses the steps that it records"
        raise UserError("\n".join([none, *notes]))
    graphs = dict.fromkeys(part.graph for part in files)
    if graph not in graphs:
        hint = nearest(graph, graphs) or f"; it has samples of {', '.join(graphs)}"
        raise UserError(f"{folder} has no samples of a graph {graph!r}{hint}")
    steps = sorted({part.step for part in files if part.graph == graph})
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        there = f"it has samples of steps {_ranges(steps)}"
        raise UserError(f"{folder} has no samples of step {chosen}; {there}")
    parts = [part for part in files if (part.graph, part.step) == (graph, chosen)]
    most = 5 if limit is None else limit
    batches = (b for table in tables(parts, notes) for b in table.slice(0, most).to_batches())
    rows = [batch.slice(at, 1) for batch in batches for at in range(len(batch))][:most]
    text = "\n\n".join(str(sample_of(row, chosen)) for row in rows)
    found = {"graph": graph, "step": chosen, "rows": [row.to_pylist()[0] for row in rows]}
    return Answer.partial(found, text, notes)


def _ranges(steps: list[int]) -> str:
    """
    >>> _ranges([1, 2, 3, 7])
    '1 to 3, 7'
    """
    runs: list[list[int]] = []
    for step in steps:
        if runs and runs[-1][-1] == step - 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
