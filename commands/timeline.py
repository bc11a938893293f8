"""`weft timeline`: how a run spent its time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from .command_line import Answer, RunName, run_path


def timeline(
    run: RunName,
    *,
    steps: str = ":",
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None,
    perfetto: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None,
) -> Answer:
    """Show how busy each worker group of a run was, and draw its timeline.

    Args:
        steps: Show only these steps: 10:20 (10 to 19), 10:, :20 or 10; ':' for all.
        out: Write the picture to this file. Default: RUN/timeline.png.
        perfetto: Also write a trace to this file (JSON), for https://ui.perfetto.dev or
            chrome://tracing.
    """
    from ..dashboard.pictures import draw_timeline
    from ..dashboard.timeline import load_timeline, node_times, summary, write_trace

    path = run_path(run)
    shown = load_timeline(path, steps)
    picture = draw_timeline(shown, out or path / "timeline.png", path.resolve().name)
    lanes = {
        lane.name: {"calls": len(lane.calls), "idle": lane.idle_share, "idle_s": lane.idle_s}
        for lane in shown.lanes
    }
    found = {
        "start_s": shown.start_s,
        "end_s": shown.end_s,
        "groups": lanes,
        "picture": str(picture),
        "nodes": node_times(shown),
    }
    text = f"{summary(shown)}\n\npicture: {picture}"
    if perfetto is not None:
        found["trace"] = str(write_trace(shown, perfetto))
        text += f"\ntrace: {found['trace']}"
    return Answer(found, text)
