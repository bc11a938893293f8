"""Samples: the rows that a run recorded, in `samples/`.

    runs/NAME/samples/train_000012.57.0.arrow     rows of the graph train and of step 12, written under lease 57 by rank 0

A part is written under a lease of the recorder. The log says which leases were finished; a part of any other was being written when
the run was killed, or is of a future that was given up when the run went back, and no reader takes it. So each row is there once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import UserError
from .disk import PARTIAL, replacing
from .finished_leases import finished_leases
from .sample_buffer import BUFFER, LOG

FOLDER = "samples"
NAME = re.compile(r"(?P<graph>.+)_(?P<step>\d+)\.(?P<lease>\d+)\.(?P<rank>\d+)\.arrow")


def part_name(graph: str, step: int, lease: int, rank: int) -> str:
    """The name of a file of samples.

    >>> part_name("train", 12, lease=57, rank=0)
    'train_000012.57.0.arrow'
    """
    return f"{graph}_{step:06d}.{lease}.{rank}.arrow"


@dataclass(frozen=True)
class Part:
    """A file of samples."""

    path: Path
    graph: str
    step: int
    lease: int

    def read(self) -> pa.Table:
        """Its rows, with their graph and step.

        Raises:
            OSError, pyarrow.ArrowException: it is damaged.
        """
        with pa.memory_map(str(self.path)) as file:
            table = pa.ipc.open_file(file).read_all()
        table.validate(full=True)  # else whoever reads the values of a damaged one may go beyond them
        graph, step = pa.array([self.graph] * len(table), pa.string()), pa.array([self.step] * len(table), pa.int64())
        return table.add_column(0, "graph", graph).add_column(1, "step", step)


def parts(run: Path) -> list[Part]:
    """The files of samples of a run, whatever the log says of them; by graph and step."""
    found: list[Part] = []
    for path in (run / FOLDER).glob("*.arrow"):
        name = NAME.fullmatch(path.name)
        if name is not None and path.is_file():
            found.append(Part(path, name["graph"], int(name["step"]), int(name["lease"])))
    return sorted(found, key=lambda part: (part.graph, part.step, part.lease, part.path.name))


def unfinished_parts(run: Path) -> list[Path]:
    """Files of parts that are being written, or were when their writer ended."""
    found = (run / FOLDER).glob(f"*{PARTIAL}")
    return [path for path in found if NAME.fullmatch(path.name.removesuffix(PARTIAL)) and path.is_file()]


def recorded(run: Path) -> list[Part]:
    """The files of samples whose leases were finished; all of them where the run has no log any more, or no recorder.

    Raises:
        FormatError: another version of Weft wrote the log.
    """
    log = run / BUFFER / LOG
    everything = parts(run)
    if not everything or not log.is_file():
        return everything
    leases = finished_leases(log, lambda node: node.operation.behind)
    if leases is None:
        return everything
    finished = {(lease.graph, lease.number) for lease in leases}
    return [part for part in everything if (part.graph, part.lease) in finished]


def tables(found: Sequence[Part], notes: list[str]) -> Iterator[pa.Table]:
    """The rows of each part; one that cannot be read is left out with a note."""
    for part in found:
        try:
            yield part.read()
        except (pa.ArrowException, OSError) as error:
            notes.append(f"left out: {part.path}: {error}")


def samples(run: Path, notes: list[str] | None = None) -> pa.Table | None:
    """The samples that a run recorded, with the graph and step of each; None where it recorded none."""
    found = list(tables(recorded(run), [] if notes is None else notes))
    return pa.concat_tables(found, promote_options="permissive") if found else None


def archive(run: Path) -> Path:
    """All samples of a run as one Parquet file, compressed with zstd, beside their folder (which stays).

    Raises:
        UserError: when the run recorded none, or a part of them cannot be read.
    """
    path = run / "samples.parquet"
    wrong: list[str] = []
    found = recorded(run)
    schemas = [table.schema for table in tables(found, wrong)]
    if wrong:
        raise UserError(f"the archive would be incomplete: {wrong[0]}")
    if not schemas:
        raise UserError(f"{run} has no samples ({FOLDER}/*.arrow); Driver(record_every=...) records them")
    schema = pa.unify_schemas(schemas, promote_options="permissive")
    with replacing(path) as partial, pq.ParquetWriter(partial, schema, compression="zstd") as writer:
        for table in tables(found, wrong):
            whole = pa.concat_tables([schema.empty_table(), table], promote_options="permissive")
            writer.write_table(whole.select(schema.names).cast(schema))
    return path
