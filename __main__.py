"""The command line: `weft buffer check | why | table | sql | archive RUN`, `weft timeline RUN`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what a command needs is imported when it runs: --help is quick
    from .dataflow.buffer.proof import Proof

RUNS = Path("runs")
"""Where the name of a run is looked for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0; 1 when a proof failed, or a run cannot be read; 2 when the user can mend it."""
    options = _parser().parse_args(arguments)
    from .dataflow.errors import UserError, WeftError

    try:
        return options.command(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except WeftError as error:
        print(f"{type(error).__name__}: {error.text}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader has seen enough: weft buffer table RUN | head
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="weft", description="Looks into the runs of Weft, also while they go on.")
    rooms = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    buffer = rooms.add_parser("buffer", help="the sample buffer of a run: its log, its rows, its samples")
    commands = buffer.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, command: object, help: str, to: Any = commands) -> argparse.ArgumentParser:
        added = to.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
        added.add_argument("run", metavar="RUN", help=f"the directory of a run, or its name under {RUNS}/")
        added.set_defaults(command=command)
        return added

    add("check", _check, "prove from the log that every row is accounted for; exit code 1 when it is not")
    why = add("why", _why, "say what a group waits for, or what became of it")
    why.add_argument("group", metavar="GROUP", type=int, help="its group_id")
    why.add_argument("--graph", help="the graph that it must be of, such as train")
    table = add("table", _table, "list rows: every one that was ever issued or made")
    table.add_argument("--state", choices=("waiting", "leased", "done", "dropped"), help="only rows in this state")
    table.add_argument("--limit", type=int, default=20, help="how many rows (20)")
    sql = add("sql", _sql, "ask DuckDB about the tables rows, columns, samples, metrics, timeline")
    sql.add_argument("query", metavar="QUERY", help="such as 'select state, count(*) from rows group by state'")
    sql.add_argument("--limit", type=int, default=100, help="how many rows are shown (100)")
    sql.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=60, help="give the question up after so long (60)"
    )
    add("archive", _archive, "write all samples into one Parquet file, samples.parquet")
    timeline = add(
        "timeline", _timeline, "say how busy each worker group of a run was, and draw what it did when", rooms
    )
    timeline.add_argument(
        "--steps", default=":", help="such as 10:20 (10 to 19), 10:, :20 or 10; all of them without it"
    )
    timeline.add_argument("--out", metavar="FILE", type=Path, help="the picture to write (RUN/timeline.png)")
    return parser


def _run(name: str) -> Path:
    """The directory of a run: a path, or a name under `runs/`."""
    return Path(name) if Path(name).is_dir() or len(Path(name).parts) > 1 else RUNS / name


def _check(options: argparse.Namespace) -> int:
    from .dataflow.buffer.inspection import buffer_folder
    from .dataflow.buffer.proof import prove

    folder = buffer_folder(_run(options.run))
    proof = prove(folder)
    print(_summary(proof))
    for line in proof.damage:
        print(f"note: {line}")
    for line in proof.violations:
        print(f"VIOLATION {line}")
    if proof.violations:
        print(f"NOT OK: {len(proof.violations)} violations in {folder}")
        return 1
    issued = sum(graph.issued for graph in proof.graphs.values())
    print(f"OK: {proof.records} records account for {issued} rows")
    return 0


def _summary(proof: Proof) -> str:
    import pyarrow as pa

    from .dataflow.buffer.inspection import as_text

    rows = [
        {
            "graph": name,
            "issued": g.issued,
            "waiting": g.waiting,
            "leased": g.leased,
            "done": g.done,
            "dropped": sum(g.dropped.values()),
            "why": ", ".join(f"{reason} {number}" for reason, number in sorted(g.dropped.items())),
        }
        for name, g in proof.graphs.items()
    ]
    nodes = [
        {"graph": name, "node": node, "rows consumed": number}
        for name, g in proof.graphs.items()
        for node, number in g.consumed.items()
    ]
    stale = [f"{n} groups too old at {name}: {fate}" for name, g in proof.graphs.items() for fate, n in g.stale.items()]
    leases = ", ".join(f"{number} {what}" for what, number in proof.leases.items())
    facts = f"{proof.restarts} restarts, {proof.segments} segments, {proof.checkpoints} checkpoints"
    tables = [as_text(pa.Table.from_pylist(t), limit=1000, width=100) for t in (rows, nodes) if t]
    return "\n\n".join([*tables, "\n".join([*stale, f"leases: {leases}; {facts}"])])


def _why(options: argparse.Namespace) -> int:
    from .dataflow.buffer.inspection import buffer_folder, why

    print(why(buffer_folder(_run(options.run)), options.group, options.graph))
    return 0


def _table(options: argparse.Namespace) -> int:
    import pyarrow.compute as pc

    from .dataflow.buffer.inspection import as_text, buffer_folder, history

    table = history(buffer_folder(_run(options.run)))
    if options.state is not None:
        table = table.filter(pc.field("state") == options.state)
    print(as_text(table, limit=options.limit))
    return 0


def _sql(options: argparse.Namespace) -> int:
    from .dataflow.buffer.inspection import as_text, query

    notes: list[str] = []
    answer = query(_run(options.run), options.query, notes, timeout_s=options.timeout)
    print(as_text(answer, limit=options.limit))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def _archive(options: argparse.Namespace) -> int:
    from .dataflow.buffer.samples import archive
    from .dataflow.errors import UserError, nearest

    run = _run(options.run)
    if not run.is_dir():
        others = [p.name for p in run.parent.iterdir() if p.is_dir()] if run.parent.is_dir() else []
        raise UserError(f"there is no run {run}{nearest(run.name, others)}")
    print(archive(run))
    return 0


def _timeline(options: argparse.Namespace) -> int:
    from .dashboard.timeline import draw_timeline, parse_steps, read_timeline, summary

    run = _run(options.run)
    timeline = read_timeline(run, parse_steps(options.steps))
    picture = draw_timeline(timeline, options.out or run / "timeline.png", run.resolve().name)
    print(f"{summary(timeline)}\n\npicture: {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
