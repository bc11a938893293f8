"""`weft timeline`: how a run spent its time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from .command import Answer, Command, RunName, run_path


@dataclass(frozen=True, kw_only=True)
class TimelineCommand(Command):
    """Show how busy each worker group of a run was, and draw its timeline."""

    run: RunName
    steps: str = ":"
    """Show only these steps: 10:20 (10 to 19), 10:, :20 or 10; ':' for all."""
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Write the picture to this file. Default: RUN/timeline.png."""
    perfetto: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Also write a trace to this file (JSON), for https://ui.perfetto.dev or chrome://tracing."""

    def answer(self) -> Answer:
        from ..dashboard.pictures import draw_timeline
        from ..dashboard.timeline import load_timeline, node_times, summary, write_trace

        run = run_path(self.run)
        timeline = load_timeline(run, self.steps)
        picture = draw_timeline(timeline, self.out or run / "timeline.png", run.resolve().name)
        lanes = {
            lane.name: {"calls": len(lane.calls), "idle": lane.idle_share, "idle_s": lane.idle_s}
            for lane in timeline.lanes
        }
        found = {
            "start_s": timeline.start_s,
            "end_s": timeline.end_s,
            "groups": lanes,
            "picture": str(picture),
            "nodes": node_times(timeline),
        }
        text = f"{summary(timeline)}\n\npicture: {picture}"
        if self.perfetto is not None:
            found["trace"] = str(write_trace(timeline, self.perfetto))
            text += f"\ntrace: {found['trace']}"
        return Answer(found, text)
