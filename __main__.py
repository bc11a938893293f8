"""The command line: `weft buffer check | why | table | sql | archive RUN`, `weft timeline RUN`, `weft doctor`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what a command needs is imported when it runs: --help is quick
    from .dataflow.buffer.check import Report

RUNS = Path("runs")
"""Where the name of a run is looked for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0; 1 when a log breaks a rule, or a run cannot be read; 2 when the user can mend it."""
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
    parser = argparse.ArgumentParser(
        prog="weft", description="Look into the runs of Weft, also while they go on, and try a machine."
    )
    folders = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    buffer = folders.add_parser("buffer", help="the sample buffer of a run: its log, its rows, its samples")
    commands = buffer.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, command: object, help: str, to: Any = commands) -> argparse.ArgumentParser:
        added = to.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
        added.add_argument("run", metavar="RUN", help=f"the directory of a run, or its name under {RUNS}/")
        added.set_defaults(command=command)
        return added

    add(
        "check",
        _check,
        "check with the log that the run kept the law of rows: no row lost, none used twice, no group torn; exit code 1 if not",
    )
    why = add("why", _why, "say what a group waits for, or what became of its rows")
    why.add_argument("group", metavar="GROUP", type=int, help="the group_id of the group")
    why.add_argument("--graph", help="refuse groups of other graphs than this one, such as train")
    table = add("table", _table, "list the rows that the run ever issued or made")
    table.add_argument("--state", choices=("waiting", "leased", "done", "dropped"), help="list only rows in this state")
    table.add_argument("--limit", type=int, default=20, help="list at most so many rows (default: 20)")
    sql = add("sql", _sql, "ask a question in SQL about the tables rows, columns, samples, metrics and timeline")
    sql.add_argument("query", metavar="QUERY", help="such as 'select state, count(*) from rows group by state'")
    sql.add_argument("--limit", type=int, default=100, help="show at most so many rows of the answer (default: 100)")
    sql.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=60, help="give up after so many seconds (default: 60)"
    )
    add("archive", _archive, "write all samples of the run into one Parquet file, samples.parquet")
    timeline = add(
        "timeline", _timeline, "say how busy each worker group of a run was, and draw when it did what", folders
    )
    timeline.add_argument(
        "--steps", default=":", help="show only these steps: 10:20 (10 to 19), 10:, :20 or 10 (default: all)"
    )
    timeline.add_argument(
        "--out", metavar="FILE", type=Path, help="write the picture to this file (default: RUN/timeline.png)"
    )
    doctor = folders.add_parser(
        "doctor",
        help="try on this machine what Weft does on it: attention, collectives, weights, a run",
        description="Try on this machine, with a random model, what Weft does on it; nothing is downloaded. "
        "Prints a table, and one line of JSON last; exit code 1 if a check failed.",
    )
    doctor.add_argument(
        "--gpu", action="store_true", help="use the GPUs (default: what a CPU allows, the rest is skipped)"
    )
    doctor.set_defaults(command=_doctor)
    return parser


def _run(name: str) -> Path:
    """The directory of a run: a path, or a name under `runs/`."""
    return Path(name) if Path(name).is_dir() or len(Path(name).parts) > 1 else RUNS / name


def _check(options: argparse.Namespace) -> int:
    from .dataflow.buffer.check import check_log
    from .dataflow.buffer.history import buffer_folder

    folder = buffer_folder(_run(options.run))
    report = check_log(folder)
    print(_summary(report))
    for line in report.damage:
        print(f"note: {line}")
    for violation in report.violations:
        print(f"VIOLATION {violation}")
    if report.violations:
        for rule in dict.fromkeys(violation.rule for violation in report.violations):
            print(f"broken rule: {rule.value}")
        print(f"NOT OK: {len(report.violations)} violations in {folder}")
        return 1
    issued = sum(graph.issued for graph in report.graphs.values())
    print(f"OK: {report.records} records account for {issued} rows")
    return 0


def _summary(report: Report) -> str:
    import pyarrow as pa

    from .dataflow.buffer.text_table import render_table

    rows = [
        {
            "graph": name,
            "issued": graph.issued,
            "waiting": graph.waiting,
            "leased": graph.leased,
            "done": graph.done,
            "dropped": graph.dropped.total(),
            "why": ", ".join(f"{reason} {number}" for reason, number in sorted(graph.dropped.items())),
        }
        for name, graph in report.graphs.items()
    ]
    nodes = [
        {"graph": name, "node": node, "rows consumed": number}
        for name, graph in report.graphs.items()
        for node, number in graph.consumed.items()
    ]
    stale = [
        f"{number} groups too old at {name}: {fate}"
        for name, graph in report.graphs.items()
        for fate, number in graph.stale.items()
    ]
    leases = ", ".join(f"{number} {what}" for what, number in report.leases.items())
    facts = f"{report.restarts} restarts, {report.segments} segments, {report.checkpoints} checkpoints"
    tables = [render_table(pa.Table.from_pylist(t), limit=1000, width=100) for t in (rows, nodes) if t]
    return "\n\n".join([*tables, "\n".join([*stale, f"leases: {leases}; {facts}"])])


def _why(options: argparse.Namespace) -> int:
    from .dataflow.buffer.history import buffer_folder, why

    print(why(buffer_folder(_run(options.run)), options.group, options.graph))
    return 0


def _table(options: argparse.Namespace) -> int:
    import pyarrow.compute as pc

    from .dataflow.buffer.history import buffer_folder, history
    from .dataflow.buffer.text_table import render_table

    table = history(buffer_folder(_run(options.run)))
    if options.state is not None:
        table = table.filter(pc.field("state") == options.state)
    print(render_table(table, limit=options.limit))
    return 0


def _sql(options: argparse.Namespace) -> int:
    from .dataflow.buffer.sql import query
    from .dataflow.buffer.text_table import render_table

    notes: list[str] = []
    answer = query(_run(options.run), options.query, notes, timeout_s=options.timeout)
    print(render_table(answer, limit=options.limit))
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
    from .dashboard.timeline import draw_timeline, load_timeline, parse_steps, summary

    run = _run(options.run)
    timeline = load_timeline(run, parse_steps(options.steps))
    picture = draw_timeline(timeline, options.out or run / "timeline.png", run.resolve().name)
    print(f"{summary(timeline)}\n\npicture: {picture}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from .controllers.doctor.doctor import examine

    return int(any(record.outcome == "failed" for record in examine(options.gpu)))


if __name__ == "__main__":
    sys.exit(main())
