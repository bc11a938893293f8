"""Samples: the rows that a run recorded.

    runs/NAME/samples/train_000012.57.0.arrow     rows of graph train and step 12, written under lease 57 by rank 0

The recorder writes each file under a lease. If the run is killed meanwhile or restored to an
earlier point, the log does not show the lease as finished, and readers skip the file. Each row
therefore appears once. `weft buffer check` verifies the checksums in `checksums.RANK.txt`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import FormatError, UserError
from ..graph import Node
from ..safe_files import read_file
from .files import BUFFER, LOG, PARTIAL, SAMPLES, SAMPLES_ARCHIVE, replacing
from .log import LogReader, Position, damage_note, described_graph
from .manifest import describe

# Finished leases


class _FinishedLease(NamedTuple):
    graph: str
    node: str
    rows: int
    number: int
    step: int | None
    """Step of an update; None if the node is not an update."""


def finished_leases(
    log: Path, of: Callable[[Node], bool], *, end: Position | None = None, notes: list[str] | None = None
) -> list[_FinishedLease] | None:
    """Return the finished leases of nodes for which `of` is true, in the order of the log.

    Args:
        end: log position to stop at. Default: the end of the log's valid part.
        notes: list to which to add a line for each gap in the log.

    Returns:
        The leases; None if no graph of the run has such a node.

    Raises:
        FormatError: another version of Weft wrote the log.
    """
    nodes: set[tuple[str, str]] = set()
    open_leases: dict[tuple[str, int], tuple[str, int]] = {}
    finished: list[_FinishedLease] = []
    reader = LogReader(log)
    for record in reader:
        if end is not None and reader.end.offset > end.offset:
            break
        match record["do"]:
            case "graph":
                own = (node.name for node in described_graph(record).nodes if of(node))
                nodes |= {(record["graph"], name) for name in own}
            case "claim" if (record["graph"], record["node"]) in nodes:
                open_leases[record["graph"], record["lease"]] = record["node"], len(record["ids"])
            case "finish" if lease := open_leases.pop((record["graph"], record["lease"]), None):
                numbers = record["lease"], record.get("step")
                finished.append(_FinishedLease(record["graph"], *lease, *numbers))
            case _:
                pass
    if notes is not None:
        notes += damage_note(reader)
    return finished if nodes else None


def samples_by_step(log: Path, last: int, end: Position) -> list[dict[str, float]]:
    """Recover metrics of steps 0 to `last` from the log: one row per step, with the metric
    `samples` if it is known."""
    trained: dict[int, Counter[str]] = {}
    try:
        for lease in finished_leases(log, lambda node: node.operation.updates, end=end) or ():
            if lease.step is not None:
                trained.setdefault(lease.step, Counter())[lease.node] += lease.rows
    except (OSError, LookupError, TypeError, FormatError, UserError):  # return only step numbers
        pass
    rows: list[dict[str, float]] = []
    for step in range(last + 1):
        samples = {"samples": float(max(trained[step].values()))} if step in trained else {}
        rows.append({"step": float(step), **samples})
    return rows


# Samples

NAME = re.compile(r"(?P<graph>.+)_(?P<step>\d+)\.(?P<lease>\d+)\.(?P<rank>\d+)\.arrow")


def sample_file_name(graph: str, step: int, lease: int, rank: int) -> str:
    """Return the name of a sample file.

    >>> sample_file_name("train", 12, lease=57, rank=0)
    'train_000012.57.0.arrow'
    """
    return f"{graph}_{step:06d}.{lease}.{rank}.arrow"


CHECKSUMS = re.compile(r"checksums\.\d+\.txt")
"""Pattern of the checksum files: one file per rank, with one line per sample file."""
_CHECKSUM = re.compile(r"(?P<checksum>[0-9a-f]{1,16}) (?P<name>.+)")


def note_checksum(path: Path, written: Path, rank: int) -> None:
    """Record the checksum of the file `written`, before it moves to its final path, `path`."""
    line = f"\n{describe(written)['xxh3_64']} {path.name}\n"  # the previous line may be incomplete
    notes = path.with_name(f"checksums.{rank}.txt")
    with open(notes, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(line.encode())


def noted_checksums(run: Path) -> dict[str, str]:
    """Return the recorded checksums, keyed by file name."""
    found: dict[str, str] = {}
    for path in (run / SAMPLES).glob("checksums.*.txt"):
        if CHECKSUMS.fullmatch(path.name):
            with suppress(OSError, UserError):
                lines = read_file(path).decode(errors="replace").splitlines()
                matches = (_CHECKSUM.fullmatch(line) for line in lines)
                found |= {match["name"]: match["checksum"] for match in matches if match}
    return found


@dataclass(frozen=True)
class _SampleFile:
    path: Path
    graph: str
    step: int
    lease: int

    def rows(self) -> pa.Table:
        """Read the rows, with graph and step. Raises an OSError or ArrowException if damaged."""
        with pa.memory_map(str(self.path)) as file:
            table = pa.ipc.open_file(file).read_all()
        table.validate(full=True)  # a damaged file could cause reads out of bounds
        graph = pa.array([self.graph] * len(table), pa.string())
        step = pa.array([self.step] * len(table), pa.int64())
        return table.add_column(0, "graph", graph).add_column(1, "step", step)


def sample_files(run: Path) -> list[_SampleFile]:
    """Return all sample files, sorted by graph and step."""
    found: list[_SampleFile] = []
    for path in (run / SAMPLES).glob("*.arrow"):
        name = NAME.fullmatch(path.name)
        if name is not None and path.is_file():
            found.append(_SampleFile(path, name["graph"], int(name["step"]), int(name["lease"])))
    return sorted(found, key=lambda part: (part.graph, part.step, part.lease, part.path.name))


def files_by(found: Sequence[_SampleFile], *fields: str) -> dict[tuple[Any, ...], list[_SampleFile]]:
    """Group sample files by some of their fields, such as "graph" and "lease"."""
    groups: dict[tuple[Any, ...], list[_SampleFile]] = {}
    for file in found:
        groups.setdefault(tuple(getattr(file, name) for name in fields), []).append(file)
    return groups


def unfinished_files(run: Path) -> list[Path]:
    """Return incomplete sample files."""
    found = (run / SAMPLES).glob(f"*{PARTIAL}")
    return [path for path in found if NAME.fullmatch(path.name.removesuffix(PARTIAL)) and path.is_file()]


def recorded(run: Path, notes: list[str] | None = None) -> list[_SampleFile]:
    """Return the sample files of finished leases, or all files if the run has no log or no
    recorder. Adds a line to `notes` for each gap in the log, where samples may be missing. Raises a
    FormatError if another version of Weft wrote the log."""
    log = run / BUFFER / LOG
    everything = sample_files(run)
    # Without a log, the finished leases are unknown.
    if not everything or not log.is_file():
        return everything
    leases = finished_leases(log, lambda node: node.operation.behind, notes=notes)
    if leases is None:
        return everything
    finished = {(lease.graph, lease.number) for lease in leases}
    return [part for part in everything if (part.graph, part.lease) in finished]


def tables(found: Sequence[_SampleFile], notes: list[str]) -> Iterator[pa.Table]:
    """Yield the rows of each file. Skips unreadable files, with a line in `notes` for each."""
    for part in found:
        try:
            yield part.rows()
        except (pa.ArrowException, OSError) as error:
            notes.append(f"left out: {part.path}: {error}")


def samples(run: Path, notes: list[str] | None = None) -> pa.Table | None:
    """Return all recorded samples; None if there are none. Adds a line to `notes` for each gap in
    the log and each unreadable file."""
    notes = [] if notes is None else notes
    found = list(tables(recorded(run, notes), notes))
    return pa.concat_tables(found, promote_options="permissive") if found else None


def archive(run: Path) -> Path:
    """Write all samples of a run to `samples.parquet`, compressed with zstd. Return its path.
    Raises a UserError if there are no samples or some of them cannot be read."""
    path = run / SAMPLES_ARCHIVE
    wrong: list[str] = []
    found = recorded(run, wrong)
    # Read the files twice, so that only one file at a time is in memory.
    schemas = [table.schema for table in tables(found, wrong)]
    if wrong:
        raise UserError(f"the archive would be incomplete: {wrong[0]}")
    if not schemas:
        raise UserError(
            f"{run} has no samples ({SAMPLES}/*.arrow); Driver(record_every=...) records them"
        )
    schema = pa.unify_schemas(schemas, promote_options="permissive")
    with replacing(path) as partial, pq.ParquetWriter(partial, schema, compression="zstd") as writer:
        for table in tables(found, wrong):
            # Add missing columns as nulls.
            complete = pa.concat_tables([schema.empty_table(), table], promote_options="permissive")
            writer.write_table(complete.select(schema.names).cast(schema))
    return path
