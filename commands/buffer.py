"""`weft buffer`: inspect the sample buffer of a run: its log, rows and samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from ..dataflow.errors import RunError
from .command_line import Answer, Name, RunName, find_run, run_path

if TYPE_CHECKING:
    from ..dataflow.buffer.check import Report


def check(run: RunName) -> Answer:
    """Check in the buffer's log that no row was lost or used twice, and no group was split.

    Exit code 1 if the check fails.
    """
    from ..dataflow.buffer.check import check_log
    from ..dataflow.buffer.queries import buffer_folder

    folder = buffer_folder(run_path(run))
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


def explain(
    run: RunName, group: Annotated[Positional[int], arg(metavar="GROUP")], *, graph: Name = None
) -> Answer:
    """Explain what a group waits for, or what happened to its rows.

    Args:
        group: The group_id of the group.
        graph: Fail if the group does not belong to this graph, such as train.
    """
    from ..dataflow.buffer.queries import buffer_folder, why

    said = why(buffer_folder(run_path(run)), group, graph)
    return Answer({"group": group, "why": said.splitlines()}, said)


State = Literal["waiting", "leased", "done", "dropped"]


def table(
    run: RunName,
    *,
    state: Annotated[
        State | None, arg(metavar="{waiting,leased,done,dropped}", help_behavior_hint="")
    ] = None,
    limit: int = 20,
) -> Answer:
    """List the rows of a run with their states.

    Args:
        state: List only rows in this state.
        limit: List at most this many rows.
    """
    import pyarrow.compute as pc

    from ..dataflow.buffer.queries import buffer_folder, history

    notes: list[str] = []
    rows = history(buffer_folder(run_path(run)), notes)
    return Answer.of_table(
        rows if state is None else rows.filter(pc.field("state") == state), limit, notes
    )


def sql(
    run: RunName,
    query: Annotated[Positional[str], arg(metavar="QUERY")],
    *,
    limit: int = 100,
    timeout: Annotated[float, arg(metavar="SECONDS")] = 60,
) -> Answer:
    """Query the tables rows, columns, samples, metrics and timeline with SQL.

    Args:
        query: A SQL query, such as 'select state, count(*) from rows group by state'.
        limit: Show at most this many rows of the answer.
        timeout: Give up after this many seconds.
    """
    from ..dataflow.buffer.queries import query as answer

    notes: list[str] = []
    return Answer.of_table(answer(run_path(run), query, notes, timeout_s=timeout), limit, notes)


def write_archive(run: RunName) -> Answer:
    """Write all samples of the run into one Parquet file, samples.parquet."""
    from ..dataflow.runs.samples import archive

    folder = find_run(run)
    try:
        path = archive(folder)
    except OSError as error:
        raise RunError(f"{folder} cannot be archived: {error}") from None
    return Answer({"file": str(path)}, str(path))
