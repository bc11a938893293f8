"""`weft samples`: recorded samples of a run."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from ..dataflow.errors import UserError, nearest
from .command_line import Answer, RunName, StepNumber, find_run

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ROWS = 4096
"""Maximum number of rows of an episode to show."""


def samples(
    run: RunName,
    *,
    sql: Annotated[str | None, arg(metavar="QUERY", help_behavior_hint="")] = None,
    step: StepNumber = None,
    graph: str = "train",
    episode: Annotated[int | None, arg(metavar="NUMBER", help_behavior_hint="")] = None,
    limit: Annotated[int | None, arg(metavar="NUMBER", help_behavior_hint="")] = None,
) -> Answer:
    """Show a run's samples with their rewards, by default those of its last step, or query them
    with SQL.

    Args:
        sql: A SQL query of the table samples, such as 'select step, avg(reward) from samples group
            by step order by step'.
        step: Show samples of this step. Default: the last one with samples.
        graph: Show samples of this graph: train, or the name of an evaluation.
        episode: Show the rows of this episode, of any step.
        limit: Show at most this many. Default: 5 samples, all rows of an episode, or 100 rows of a SQL
            answer.
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
    chosen = steps[-1] if step is None and episode is None else step
    if chosen is not None and chosen not in steps:
        there = f"it has samples of steps {_ranges(steps)}"
        raise UserError(f"{folder} has no samples of step {chosen}; {there}")
    parts = [part for part in files if part.graph == graph and chosen in (None, part.step)]
    most = limit if limit is not None else 5 if episode is None else MAX_ROWS
    found = (_of_episode(table, episode).slice(0, most) for table in tables(parts, notes))
    batches = (batch for table in found for batch in table.to_batches())
    rows = list(islice((batch.slice(at, 1) for batch in batches for at in range(len(batch))), most))
    if episode is not None and not rows:
        raise UserError(
            "\n".join([f"{folder} has no rows of episode {episode} of graph {graph!r}", *notes])
        )
    values = [row.to_pylist()[0] for row in rows]
    text = "\n\n".join(str(sample_of(row, own["step"])) for row, own in zip(rows, values, strict=True))
    chosen = values[0]["step"] if chosen is None else chosen
    return Answer.partial({"graph": graph, "step": chosen, "rows": values}, text, notes)


def _of_episode(table: pa.Table, episode: int | None) -> pa.Table:
    """Return the rows of an episode; all rows if `episode` is None."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from ..dataflow.column import EPISODE_ID

    if episode is None:
        return table
    if str(EPISODE_ID) not in table.column_names:
        return table.slice(0, 0)
    return table.filter(pc.field(str(EPISODE_ID)) == pa.scalar(episode, pa.int64()))


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
