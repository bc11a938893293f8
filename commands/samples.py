"""`weft samples`: recorded samples of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from ..dataflow.errors import UserError, nearest
from .command import Answer, Command, RunName, find_run

if TYPE_CHECKING:
    import pyarrow as pa

SAMPLES = 5
"""Samples to show by default."""
ROWS = 100
"""Rows of a SQL answer to show by default."""


@dataclass(frozen=True, kw_only=True)
class Samples(Command):
    """Show samples of a run with their rewards, by default of its last step; or query them with SQL."""

    run: RunName
    sql: Annotated[str | None, arg(metavar="QUERY", help_behavior_hint="")] = None
    """Query the table samples, such as 'select step, avg(reward) from samples group by step order
    by step'."""
    step: Annotated[int | None, arg(metavar="STEP", help_behavior_hint="")] = None
    """Show samples of this step. Default: the last one with samples."""
    graph: str = "train"
    """Show samples of this graph: train, or the name of an evaluation."""
    limit: Annotated[int | None, arg(metavar="NUMBER", help_behavior_hint="")] = None
    """Show at most this many. Default: 5 samples, or 100 rows of a SQL answer."""

    def answer(self) -> Answer:
        return self._asked(self.sql) if self.sql is not None else self._shown()

    def _asked(self, sql: str) -> Answer:
        from ..dataflow.buffer.queries import query
        from ..dataflow.runs.tables import render_table

        notes: list[str] = []
        table = query(find_run(self.run), sql, notes)
        limit = ROWS if self.limit is None else self.limit
        found = {"rows": table.slice(0, limit).to_pylist(), "number": len(table)}
        return Answer.partial(found, render_table(table, limit=limit), notes)

    def _shown(self) -> Answer:
        from ..controllers.reports.sample import sample_of
        from ..dataflow.runs.samples import recorded, tables

        run, notes = find_run(self.run), list[str]()
        files = recorded(run, notes)
        graphs = dict.fromkeys(part.graph for part in files)
        if not files:
            raise UserError(
                "\n".join(
                    [
                        f"{run} has recorded no samples yet; Driver(record_every=...) chooses the steps that it records",
                        *notes,
                    ]
                )
            )
        if self.graph not in graphs:
            hint = nearest(self.graph, graphs) or f"; it has samples of {', '.join(graphs)}"
            raise UserError(f"{run} has no samples of a graph {self.graph!r}{hint}")
        steps = sorted({part.step for part in files if part.graph == self.graph})
        step = steps[-1] if self.step is None else self.step
        if step not in steps:
            raise UserError(
                f"{run} has no samples of step {step}; it has samples of steps {_ranges(steps)}"
            )
        parts = [part for part in files if (part.graph, part.step) == (self.graph, step)]
        limit = SAMPLES if self.limit is None else self.limit
        rows = [row for table in tables(parts, notes) for row in _rows(table, limit)][:limit]
        text = "\n\n".join(str(sample_of(row, step)) for row in rows)
        found = {"graph": self.graph, "step": step, "rows": [row.to_pylist()[0] for row in rows]}
        return Answer.partial(found, text, notes)


def _rows(table: pa.Table, limit: int) -> list[Any]:
    batches = table.slice(0, limit).to_batches()
    return [batch.slice(at, 1) for batch in batches for at in range(len(batch))]


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
