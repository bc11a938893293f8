"""`weft explain`: what limited the steps of a run."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from itertools import pairwise

from .command_line import Answer, RunName, run_path


def explain(run: RunName, *, steps: str = "1:") -> Answer:
    """Show what the steps of a run waited for: the calls on their critical paths, by cause. If a
    call on this list takes less time, steps are shorter; other calls cost no time.

    Args:
        steps: Explain only these steps: 10:20 (10 to 19), 10:, :20 or 10; ':' for all. Step 0 is
            the start of the run.
    """
    import pyarrow as pa

    from ..dashboard.critical_path import CAUSES, CriticalPaths
    from ..dashboard.reading.run_reader import read_graphs
    from ..dashboard.timeline import load_timeline, seconds_text
    from ..dataflow.runs.tables import render_table

    path = run_path(run)
    window = load_timeline(path, steps)
    limits = CriticalPaths(window.log, read_graphs(path)).limits(step for step, _ in window.steps)
    ends = [window.start_s, *(end for _, end in window.steps)]
    median_s = statistics.median(after - before for before, after in pairwise(ends))
    number, total_s = len(window.steps), sum(limit.seconds for limit in limits) or 1.0
    found = {
        "steps": [step for step, _ in window.steps],
        "seconds": window.seconds,
        "median_step_s": median_s,
        "limits": [{**asdict(limit), "share": limit.seconds / total_s} for limit in limits],
    }
    rows = [
        {
            "group": limit.group or "-",
            "call": limit.node + (f" of {limit.graph}" if limit.graph not in ("", "train") else "")
            or "-",
            "cause": limit.cause,
            "a step": seconds_text(limit.seconds / number).rjust(9),
            "share %": f"{100 * limit.seconds / total_s:.1f}".rjust(7),
        }
        for limit in limits
        if limit.seconds >= 0.001 * total_s
    ]
    causes = {limit.cause: CAUSES[limit.cause] for limit in limits}
    text = [
        f"{window.title}; a step takes {seconds_text(median_s)} (median)",
        "",
        render_table(pa.Table.from_pylist(rows), limit=1000, width=100) if rows else "no call took time",
        "",
        *(f"{cause}: {meaning}" for cause, meaning in causes.items()),
    ]
    return Answer(found, "\n".join(text))
