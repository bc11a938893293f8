"""The dashboard of a run, on a socket that the run opened.

See `controllers/reports/dashboard_process.py`.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from ...controllers.reports.dashboard_process import TOKEN
from ...dataflow.runs.lock import Life, life_of
from .serving import Serving


def main(folder: Path, run: str, descriptor: int, idle_s: float) -> None:
    """Serve until the run is over and no request has come for `idle_s` seconds."""
    listening = socket.socket(fileno=descriptor)
    serving = Serving(listening, folder, os.environ.pop(TOKEN))
    serving.serve(idle_s, lambda: life_of(folder / run)[0] is Life.ALIVE)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
