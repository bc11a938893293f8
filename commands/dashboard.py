"""`weft dashboard`: a local web page for runs, live and finished."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from ..dataflow.errors import UserError, nearest
from ..dataflow.untrusted_text import show
from .command import RUNS, Answer, Command, run_names


@dataclass(frozen=True, kw_only=True)
class Dashboard(Command):
    """Serve a web page for runs, live and finished: curves, graph, timeline, samples, buffer,
    workers. Ctrl-C ends it and does not affect the runs.
    """

    folder: Annotated[Positional[Path], arg(metavar="RUNS")] = RUNS
    """The folder of all runs, or one run: its directory, or its name under runs/."""
    host: str = "127.0.0.1"
    """Address to listen on. Any address but loopback shows the runs to anyone with the token."""
    port: int = 0
    """Port to listen on; 0 for a free one."""
    token: Annotated[str | None, arg(metavar="TOKEN", help_behavior_hint="")] = None
    """Token in the dashboard's address. Default: a new one. An empty token turns the check off, on
    loopback only."""
    export: Annotated[Path | None, arg(metavar="FILE.html", help_behavior_hint="")] = None
    """Write the run to this one file instead, which opens anywhere, and end."""

    def answer(self) -> Answer:
        if self.export is not None:
            return self._exported(self.export)
        from ..dashboard.server.serving import Serving

        folder = self._folder()
        serving = Serving.at(folder, self.host, self.port, self.token)
        show(f"dashboard of {folder}: {serving.address}", sys.stdout)
        serving.serve()
        return Answer({"address": serving.address, "folder": str(folder)})

    def _exported(self, file: Path) -> Answer:
        if not file.name or file.is_dir():
            raise UserError(f"--export {file}: this is a folder; name a new file, such as run.html")
        from ..dashboard.server.export import export_run

        found = export_run(self._folder(), file)
        left = found["of_groups"] - found["groups"]
        more = f"; {left} more groups of samples are left out" if left else ""
        return Answer(
            found,
            f"{file}: {found['bytes'] / 1e6:.1f} MB, with {found['groups']} groups of samples{more}",
        )

    def _folder(self) -> Path:
        for path in (self.folder, RUNS / self.folder):
            if path.is_dir():
                return path
        raise UserError(f"there is no folder {self.folder}{nearest(self.folder.name, run_names(RUNS))}")
