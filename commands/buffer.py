"""`weft buffer`: the sample buffer of a run: its log, rows and samples, finished or running."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from ..dataflow.errors import RunError
from .command import Answer, Command, RunName, find_run, run_path

if TYPE_CHECKING:
    from ..dataflow.buffer.check import Report


@dataclass(frozen=True, kw_only=True)
class Check(Command):
    """Check in the log that no row was lost or used twice, and no group was split.

    Exit code 1 if the check fails."""

    run: RunName

    def answer(self) -> Answer:
        from ..dataflow.buffer.check import check_log
        from ..dataflow.buffer.queries import buffer_folder

        folder = buffer_folder(run_path(self.run))
        report = check_log(folder)
        lines = [_summary(report), *(f"note: {line}" for line in report.damage)]
        lines += [f"VIOLATION {violation}" for violation in report.violations]
        issued = sum(graph.issued for graph in report.graphs.values())
        if report.violations:
            broken = dict.fromkeys(violation.rule.value for violation in report.violations)
            lines += [f"broken rule: {rule}" for rule in broken]
            lines.append(f"NOT OK: {len(report.violations)} violations in {folder}")
        else:
            lines.append(f"OK: {report.records} records account for {issued} rows")
        found = {
            "sound": not report.violations,
            "rows": issued,
            "records": report.records,
            "graphs": {name: _counts(graph) for name, graph in report.graphs.items()},
            "violations": [str(violation) for violation in report.violations],
            "damage": list(report.damage),
        }
        return Answer(found, "\n".join(lines), exit_code=int(bool(report.violations)))


def _counts(graph: Any) -> dict[str, Any]:
    fates = ("issued", "waiting", "leased", "done")
    return {fate: getattr(graph, fate) for fate in fates} | {
        "dropped": dict(sorted(graph.dropped.items()))
    }


def _summary(report: Report) -> str:
    import pyarrow as pa

    from ..dataflow.runs.tables import render_table

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


@dataclass(frozen=True, kw_only=True)
class Why(Command):
    """Explain what a group waits for, or what happened to its rows."""

    run: RunName
    group: Annotated[Positional[int], arg(metavar="GROUP")]
    """The group_id of the group."""
    graph: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """Refuse groups of graphs other than this one, such as train."""

    def answer(self) -> Answer:
        from ..dataflow.buffer.queries import buffer_folder, why

        said = why(buffer_folder(run_path(self.run)), self.group, self.graph)
        return Answer({"group": self.group, "why": said.splitlines()}, said)


@dataclass(frozen=True, kw_only=True)
class Table(Command):
    """List all rows that the run has issued or made."""

    run: RunName
    state: Annotated[
        Literal["waiting", "leased", "done", "dropped"] | None,
        arg(metavar="{waiting,leased,done,dropped}", help_behavior_hint=""),
    ] = None
    """List only rows in this state."""
    limit: int = 20
    """List at most this many rows."""

    def answer(self) -> Answer:
        import pyarrow.compute as pc

        from ..dataflow.buffer.queries import buffer_folder, history
        from ..dataflow.runs.tables import render_table

        notes: list[str] = []
        table = history(buffer_folder(run_path(self.run)), notes)
        if self.state is not None:
            table = table.filter(pc.field("state") == self.state)
        found = {"rows": table.slice(0, self.limit).to_pylist(), "number": len(table)}
        return Answer.partial(found, render_table(table, limit=self.limit), notes)


@dataclass(frozen=True, kw_only=True)
class Sql(Command):
    """Query the tables rows, columns, samples, metrics and timeline with SQL."""

    run: RunName
    query: Annotated[Positional[str], arg(metavar="QUERY")]
    """A query, such as 'select state, count(*) from rows group by state'."""
    limit: int = 100
    """Show at most this many rows of the answer."""
    timeout: Annotated[float, arg(metavar="SECONDS")] = 60
    """Give up after this many seconds."""

    def answer(self) -> Answer:
        from ..dataflow.buffer.queries import query
        from ..dataflow.runs.tables import render_table

        notes: list[str] = []
        table = query(run_path(self.run), self.query, notes, timeout_s=self.timeout)
        found = {"rows": table.slice(0, self.limit).to_pylist(), "number": len(table)}
        return Answer.partial(found, render_table(table, limit=self.limit), notes)


@dataclass(frozen=True, kw_only=True)
class Archive(Command):
    """Write all samples of the run into one Parquet file, samples.parquet."""

    run: RunName

    def answer(self) -> Answer:
        from ..dataflow.runs.samples import archive

        run = find_run(self.run)
        try:
            path = archive(run)
        except OSError as error:
            raise RunError(f"{run} cannot be archived: {error}") from None
        return Answer({"file": str(path)}, str(path))
