"""`weft dashboard`: a local web page for runs, live and finished."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from ..dataflow.errors import UserError, nearest
from ..dataflow.untrusted_text import show
from .command_line import RUNS, Answer, run_names


def dashboard(
    folder: Annotated[Positional[Path], arg(metavar="RUNS")] = RUNS,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: Annotated[str | None, arg(metavar="TOKEN", help_behavior_hint="")] = None,
    export: Annotated[Path | None, arg(metavar="FILE.html", help_behavior_hint="")] = None,
) -> Answer:
    """Serve a web page for runs, live and finished: curves, graph, timeline, samples, buffer,
    workers. Ctrl-C stops the server, and does not affect the runs.

    Args:
        folder: The folder of all runs, or one run: its directory, or its name under runs/.
        host: Address to listen on. Any address but loopback shows the runs to anyone with the token.
        port: Port to listen on; 0 for a free one.
        token: Token in the dashboard's address. Default: a new one. An empty token, allowed only on
            loopback, disables the check.
        export: Write the run to this HTML file, which opens in any browser, instead of serving it.
    """
    if export is not None and (not export.name or export.is_dir()):
        raise UserError(f"--export {export}: this is a folder; name a new file, such as run.html")
    place = next((path for path in (folder, RUNS / folder) if path.is_dir()), None)
    if place is None:
        raise UserError(f"there is no folder {folder}{nearest(folder.name, run_names(RUNS))}")
    if export is not None:
        from ..dashboard.server.export import export_run

        found = export_run(place, export)
        left = found["of_groups"] - found["groups"]
        more = f"; {left} more groups of samples are left out" if left else ""
        size = f"{found['bytes'] / 1e6:.1f} MB"
        return Answer(found, f"{export}: {size}, with {found['groups']} groups of samples{more}")
    from ..dashboard.server.serving import Serving

    serving = Serving.at(place, host, port, token)
    show(f"dashboard of {place}: {serving.address}", sys.stdout)
    serving.serve()
    return Answer({"address": serving.address, "folder": str(place)})
