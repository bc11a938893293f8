"""precompute: compute constant columns once, before training, and add them to the source."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from ..dataflow.batch import Batch
from ..dataflow.errors import UserError
from ..dataflow.graph import SOURCE, Graph, Node
from ..dataflow.operation import declaration_of, node
from ..dataflow.runs.directory import require_folder
from ..dataflow.source import TableSource, file_columns
from .backends.backend import Backend
from .backends.jobs import root_of
from .driver import Driver
from .placement import Placement
from .prechecks.checks import with_rows_that_fit
from .prechecks.dry_run import is_planning, note_pass
from .schedule import Synchronous

ROW_NUMBER = "row_number"
"""Temporary column: each row's position in the source."""


def precompute(
    graph: Graph,
    *,
    placement: Placement | None = None,
    backend: Backend | None = None,
    root: str | Path = "runs",
    name: str | None = None,
    rows_per_step: int = 4096,
    progress: bool = True,
) -> TableSource:
    """Run a graph once over its source. Return the source with the columns that the nodes write.

        known = weft.precompute(reference_of_pairs(pairs, reference=reference))
        training = dpo(known, actor=actor)    # any number of epochs, without a reference model

    The graph's groups run only during this call. The result is an Arrow table. To reuse it in other
    programs, write it to a file and read it: `TableSource(name, pyarrow.parquet.read_table(...))`.

    Args:
        graph: A graph whose nodes only add columns.
        placement: See `Driver`.
        backend: See `Driver`.
        root: Folder for the run directory; with several machines, on a shared file system.
        name: Run directory in `root`; by default the current time.
        rows_per_step: Maximum number of rows in the buffer.
        progress: Show progress on the terminal.

    Raises:
        UserError: The graph updates weights, adds no column to its source's rows, or drops rows.
    """
    if rows_per_step < 1:
        raise UserError(f"precompute(rows_per_step={rows_per_step}): it must be at least 1")
    graph = with_rows_that_fit(graph)
    writers, root = _writers(graph), root_of(root)
    table, number = graph.source.table, len(graph.source.table)
    # `weft plan` needs the columns, but not their values.
    if is_planning():
        note_pass(graph.name, number)
        return _with_written(graph, {column: pa.nulls(number) for column in writers})
    steps = max(1, math.ceil(number / rows_per_step))
    require_folder(Path(root), f"root {str(root)!r}")
    folder = Path(tempfile.mkdtemp(dir=root, prefix=".precompute-")).resolve()
    try:
        # Rows come back in any order.
        with_numbers = table.append_column(ROW_NUMBER, pa.array(np.arange(number)))
        numbered = TableSource(graph.source.name, with_numbers, file_columns(graph.source))
        nodes = (*graph.nodes, _writing(writers, folder))
        with Driver(
            replace(graph, source=numbered, nodes=nodes),
            schedule=Synchronous(
                steps=steps, prompts_per_step=max(1, math.ceil(number / steps)), shuffle=False
            ),
            placement=placement,
            backend=backend,
            root=root,
            name=name,
            record_every=0,
            progress=progress,
        ) as driver:
            driver.run()
        found = _in_order(graph, _read(folder))
    finally:
        # The columns are in memory now.
        shutil.rmtree(folder, ignore_errors=True)
    return _with_written(graph, {column: found[column] for column in writers})


def _with_written(graph: Graph, written: Mapping[str, pa.Array | pa.ChunkedArray]) -> TableSource:
    # pyarrow would keep both columns if a node overwrites one.
    table = graph.source.table.drop_columns([name for name in written if name in graph.source.columns])
    for name, values in written.items():
        table = table.append_column(name, values)
    return TableSource(graph.source.name, table, file_columns(graph.source) - {*written})


def _writers(graph: Graph) -> dict[str, str]:
    """Return column -> node that writes it, for columns of the source's rows."""
    updating = next((n.name for n in graph.nodes if n.operation.updates), None)
    if updating:
        raise UserError(
            f"precompute: node {updating!r} of graph {graph.name!r} updates weights, so its results are not constant; leave it out"
        )
    nodes = [n for n in graph.nodes if n.level == SOURCE and n.makes_level is None]
    writers = {column: n.name for n in nodes for column in n.writes}
    if not writers:
        raise UserError(
            f"precompute: no node of graph {graph.name!r} writes a column for the rows of {graph.source.name!r}"
        )
    if ROW_NUMBER in graph.source.columns:
        raise UserError(
            f"precompute: source {graph.source.name!r} has a column {ROW_NUMBER!r}; rename it"
        )
    return writers


def _in_order(graph: Graph, found: pa.Table) -> pa.Table:
    """Sort rows into the order of the source, and drop duplicates."""
    # The last step may run past the end of the source, so some rows come twice.
    places = dict(zip(found[ROW_NUMBER].to_pylist(), range(len(found)), strict=True))
    number = len(graph.source.table)
    if len(places) < number:
        lost = next(row for row in range(number) if row not in places)
        raise UserError(
            f"precompute: graph {graph.name!r} dropped {number - len(places)} of {number} rows, such as row {lost}; "
            "filter the source instead"
        )
    return found.take([places[row] for row in range(number)])


@node(reads=lambda columns: columns)
def write_columns(rows: Batch, *, columns: Sequence[str], folder: Path) -> None:
    kept = rows.select(columns).record
    with (
        # Calls have different rows, so the first sample's id makes the file name unique.
        pa.OSFile(str(folder / f"{rows['sample_id'][0].as_py()}.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, kept.schema) as writer,
    ):
        writer.write_batch(kept)


def _writing(writers: dict[str, str], folder: Path) -> Node:
    """Return a node that stores the columns of the other nodes."""
    columns = (ROW_NUMBER, *writers)
    declaration = declaration_of(write_columns)
    assert declaration is not None
    arguments = {"columns": columns, "folder": folder}
    return Node(
        name="weft.precompute",
        group=None,
        operation=declaration.called_with(arguments),
        function=write_columns,
        arguments=arguments,
        reads=columns,
        missing=(),
        writes=(),
        level=SOURCE,
        makes_level=None,
        writers={ROW_NUMBER: "", **writers},
        after=tuple(dict.fromkeys(writers.values())),
    )


def _read(folder: Path) -> pa.Table:
    parts = []
    for file in sorted(folder.iterdir()):
        with pa.OSFile(str(file), "rb") as source:
            parts.append(pa.ipc.open_file(source).read_all())
    return pa.concat_tables(parts)
